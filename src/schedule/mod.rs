//! Schedules: jobs whose every tick runs on one of several instances.
//!
//! `plan.rs` decides, from the row that was claimed and the schedule that the instance knows.
//! `store/schedule.rs` sends the statements. Between them, `runner.rs` claims, and `run.rs` runs a
//! tick, whose end `end.rs` records. `instances.rs` decides which times apply if instances declare
//! different ones, and `presence.rs` carries that out.

pub mod admin;
mod core;
mod cron;
pub mod declared;
#[cfg(test)]
mod deploys_tests;
mod end;
mod for_test;
mod hash;
pub mod info;
mod instances;
mod keeper;
pub mod orders;
mod pacing;
mod plan;
mod presence;
mod run;
pub mod runner;
pub mod schedules;
pub mod selection;
pub mod spec;
mod steps;
pub mod terms;
pub mod tick;
mod transaction;
pub mod try_tick;
mod view;
mod zones;
