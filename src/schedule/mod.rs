//! Schedules: jobs whose every tick runs on one of several instances.

pub mod admin;
mod busy;
mod core;
mod cron;
mod declarations;
mod declared;
#[cfg(test)]
mod deploys_tests;
pub mod end;
mod exclusive;
mod for_test;
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
pub mod spec;
mod steps;
pub mod terms;
pub mod tick;
mod times;
mod transaction;
pub mod try_tick;
mod view;
mod zones;
