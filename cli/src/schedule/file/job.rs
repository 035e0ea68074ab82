//! A job of a file.

use std::{ffi::OsString, time::Duration};

use chrono::{DateTime, Utc};
use rowlock::{Key, Schedule};

use crate::{args::process::Beginning, format::brief, process::surroundings::Surroundings, secrets::masked};

/// A job: its schedule, and the command of each tick.
#[derive(Clone, Debug)]
pub struct Job {
    pub schedule: Schedule,
    pub description: String,
    pub command: Vec<OsString>,
    /// The offset of the command in the text.
    pub command_at: usize,
    pub terms: Terms,
    pub renamed_from: Vec<Key>,
    /// Why this machine cannot run the command, with the line, if it cannot.
    pub unable: Option<String>,
    /// What else is wrong with the job on this machine.
    pub warnings: Vec<String>,
}

/// What all jobs of a file may have in common, beside their schedules.
#[derive(Clone, Debug)]
pub struct Terms {
    pub lease: Duration,
    /// The longest a run may take.
    pub timeout: Option<Duration>,
    /// How often a tick whose command failed is run again.
    pub retries: u32,
    /// How many bytes of what the command prints are kept.
    pub keep_output: usize,
    pub surroundings: Surroundings,
    pub hooks: Hooks,
}

impl Job {
    /// Returns what is to be known of a lease that is longer than the time between two ticks.
    pub fn note(&self, now: DateTime<Utc>) -> Option<String> {
        let mut ticks = self.schedule.upcoming(now).ok()?;
        let apart = (ticks.next()? - ticks.next()?).abs().to_std().ok()?;
        let (name, lease) = (self.schedule.name(), brief(self.terms.lease));
        (self.terms.lease > apart).then(|| {
            format!("{name}: note: its lease of {lease} is longer than the {} between two ticks: after a kill the job stands still for up to its lease", brief(apart))
        })
    }

    /// Returns what operators see of the job: its description, its command, and its settings.
    pub fn about(&self) -> String {
        let words: Vec<_> = self.command.iter().map(|word| word.to_string_lossy()).collect();
        let Terms { timeout, retries, surroundings, .. } = &self.terms;
        let Beginning { user, umask, cwd } = &surroundings.beginning;
        let settings = [
            timeout.map(|timeout| format!("timeout {}", brief(timeout))),
            (*retries > 0).then(|| format!("retries {retries}")),
            user.as_ref().map(|user| format!("user {user}")),
            cwd.as_ref().map(|cwd| format!("folder {}", cwd.display())),
            umask.map(|umask| format!("umask {umask:03o}")),
        ];
        let settings = settings.into_iter().flatten().collect::<Vec<_>>().join(", ");
        let command = format!("runs: {}", words.join(" "));
        let lines = [self.description.as_str(), &command, &settings];
        let lines = lines.into_iter().filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
        masked(&lines).into_owned()
    }
}

/// The commands that follow the end of a tick; without words, none does.
#[derive(Clone, Debug, Default)]
pub struct Hooks {
    pub on_success: Vec<OsString>,
    pub on_failure: Vec<OsString>,
}
