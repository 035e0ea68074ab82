//! Schedules: jobs whose every tick runs on one of several instances.
//!
//! - The path of a tick: `schedules.rs` starts an instance, `runner.rs` polls, `core.rs` sends the
//!   claim, `run.rs` runs a tick, `keeper.rs` renews it, `tick.rs` is what the work receives, and
//!   `end.rs` records the end, or `transaction.rs` within a transaction of the work.
//! - Decisions, which are pure: `plan.rs` from the row that was claimed and the schedule that the
//!   instance knows, `pacing.rs` when to poll, `cron.rs` and `zones.rs` when a tick is due.
//! - A schedule: `spec.rs` has its settings, `times.rs` its times, and `terms.rs` what happens with
//!   ticks that are late or fail.
//! - Several instances: `declarations.rs` has what they declare, `instances.rs` decides which times
//!   apply if they declare different ones, `view.rs` what follows for each schedule, `steps.rs`
//!   carries that out, and `presence.rs` announces the instance and beats.
//! - Operators: `admin.rs`, `orders.rs`, `declared.rs`, `info.rs`.
//! - One tick without a loop: `try_tick.rs`, and `for_test.rs` for the tests of applications.
//!
//! `store/schedule.rs` and `store/instances.rs` have the statements.

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
