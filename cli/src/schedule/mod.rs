//! Schedules: `cron`, `run --cron`, and the commands for operators.
//!
//! `file` reads the jobs, `crontab.rs` makes such a file, and `preview.rs` shows their times.
//! `cron.rs` runs them, `job.rs` one run of them, and `command.rs` its command. Each command has a
//! process of its own above it, `supervise.rs`, which stops the command with all that it has
//! started, and nothing else. `show.rs`, `state.rs`, `stats.rs`, `why.rs` and `instances.rs` tell
//! operators what there is, and `change.rs` does what they ask for.

pub mod change;
mod command;
pub mod cron;
mod crontab;
mod file;
pub mod instances;
mod job;
pub mod output;
pub mod preview;
pub mod show;
pub mod state;
mod stats;
pub mod supervise;
pub mod tick;
pub mod why;

use rowlock::{Database, Tick};

use crate::format::precise;

/// The variables of a command that runs a tick.
pub fn environment<DB: Database>(tick: &Tick<DB>) -> [(&'static str, String); 5] {
    [
        ("ROWLOCK_JOB", tick.name().to_owned()),
        ("ROWLOCK_SLOT", precise(tick.slot())),
        ("ROWLOCK_ATTEMPT", tick.attempt().to_string()),
        ("ROWLOCK_MISSED", tick.missed().to_string()),
        ("ROWLOCK_TOKEN", tick.token().to_string()),
    ]
}
