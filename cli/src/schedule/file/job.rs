//! A job of a file.

use std::{ffi::OsString, time::Duration};

use rowlock::{Key, Schedule};

use crate::process::surroundings::Surroundings;

/// A job: its schedule, and the command of each tick.
#[derive(Clone, Debug)]
pub struct Job {
    pub schedule: Schedule,
    pub command: Vec<OsString>,
    /// The offset of the command in the text.
    pub command_at: usize,
    /// The longest a run may take.
    pub timeout: Option<Duration>,
    /// How often a tick whose command failed is run again.
    pub retries: u32,
    pub surroundings: Surroundings,
    pub hooks: Hooks,
    pub renamed_from: Vec<Key>,
    /// Why this machine cannot run the command, with the line, if it cannot.
    pub unable: Option<String>,
    /// What else is wrong with the job on this machine.
    pub warnings: Vec<String>,
}

/// The commands that follow the end of a tick; without words, none does.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    pub on_success: Vec<OsString>,
    pub on_failure: Vec<OsString>,
}
