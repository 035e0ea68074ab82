//! Schedules: jobs whose every tick runs on one of several instances.
//!
//! `plan.rs` decides, from the row that was claimed and the schedule that the instance knows.
//! `store/schedule.rs` sends the statements. Between them, `runner.rs` claims, and `run.rs` runs a
//! tick, whose end `end.rs` records.

pub mod admin;
mod core;
mod cron;
mod end;
mod keeper;
mod pacing;
mod plan;
mod registration;
mod run;
pub mod runner;
pub mod schedules;
pub mod selection;
pub mod spec;
pub mod tick;
mod transaction;
pub mod try_tick;
mod zones;
