//! The arguments of the commands for schedules.

#[cfg(feature = "ui")]
use std::net::SocketAddr;
use std::{path::PathBuf, time::Duration};

use chrono::{DateTime, Utc};
use clap::{Args, ValueEnum};
use rowlock::{Key, Schedule, jobs::CatchUp};
use uuid::Uuid;

use crate::args::values::{coming, duration, instant, key};

#[derive(Debug, Args)]
pub struct Cron {
    /// The jobs, in TOML; SIGHUP reads it again
    pub file: PathBuf,
    /// How long a command that is to stop may take before it is killed
    #[arg(long, value_name = "D", default_value = "20s", value_parser = duration)]
    pub stop_timeout: Duration,
    /// How long runs may go on after SIGTERM or SIGINT; a second signal ends it [default: as
    /// --stop-timeout]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub drain: Option<Duration>,
    /// The name of this instance that operators see [default: host/process id]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// The version or the commit of what this instance runs, for operators
    #[arg(long, value_name = "TEXT")]
    pub build: Option<String>,
    /// How many commands this instance runs at the same time [default: max_concurrent_runs in the
    /// file, or 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub max_concurrent_runs: Option<u32>,
    /// Serve /metrics and /healthz at this address and port
    #[cfg(feature = "ui")]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<SocketAddr>,
    /// A file with the token with which a program may read /metrics
    #[cfg(feature = "ui")]
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub metrics_token_file: Option<PathBuf>,
    /// Read the file, print every error in it, and end; exit with 2 if there is one
    #[arg(long)]
    pub check: bool,
    /// Print a file of jobs for FILE, which is the crontab of a user or of a system, where the name
    /// of a user stands before each command, and end; what has no equal is a comment
    #[arg(long, value_name = "WHOSE", value_enum, conflicts_with_all = ["check", "next"])]
    pub from_crontab: Option<Crontab>,
    /// Check the file, and print the next N ticks of each job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub next: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Crontab {
    User,
    System,
}

impl Cron {
    /// Returns whether no job is run.
    pub fn only_reads(&self) -> bool {
        self.check || self.next.is_some() || self.from_crontab.is_some()
    }
}

#[derive(Debug, Args)]
pub struct Next {
    /// The cron pattern
    pub pattern: String,
    /// The time zone of the pattern
    #[arg(long, default_value = "UTC")]
    pub zone: String,
    /// How many ticks
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// The ticks after this time, such as 2026-10-25T00:00:00Z [default: now]
    #[arg(long, value_name = "TIME", value_parser = instant)]
    pub after: Option<DateTime<Utc>>,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

/// The schedule of `rowlock run`.
#[derive(Debug, Args)]
pub struct TickOf {
    /// Run the tick of this cron pattern that is due, or finish it if its runner dies; exit with 75
    /// if it is done
    #[arg(long, value_name = "PATTERN", conflicts_with_all = ["min_interval", "wait", "fair", "rules", "retry_failed"])]
    pub cron: Option<String>,
    /// The time zone of the pattern [default: UTC, with a warning if this machine has another one]
    #[arg(long, requires = "cron")]
    pub zone: Option<String>,
    /// What happens with ticks that nothing ran at their time [default: once]
    #[arg(long, requires = "cron", value_enum)]
    pub catch_up: Option<CatchUpWith>,
}

impl TickOf {
    pub fn schedule(&self, name: &Key) -> Schedule {
        let schedule = Schedule::cron(name.as_str(), self.cron.as_deref().unwrap_or_default());
        let schedule = match &self.zone {
            Some(zone) => schedule.zone(zone),
            None => schedule,
        };
        schedule.catch_up(self.catch_up.map(|with| with.at_most(DEFAULT_MAX)).unwrap_or_default())
    }

    pub fn catches_up_on_all(&self) -> bool {
        self.catch_up == Some(CatchUpWith::All)
    }
}

/// How many ticks are caught up on, unless a file says so.
pub const DEFAULT_MAX: u32 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CatchUpWith {
    /// A tick that is more than five minutes late is skipped
    Skip,
    /// One run stands for all
    Once,
    /// Each tick is run, one after another, the last hundred
    All,
}

impl CatchUpWith {
    pub fn at_most(self, most: u32) -> CatchUp {
        match self {
            Self::Skip => CatchUp::Skip,
            Self::Once => CatchUp::Once,
            Self::All => CatchUp::All(most),
        }
    }
}

#[derive(Debug, Args)]
pub struct Runs {
    /// The schedule [default: all schedules]
    #[arg(value_parser = key)]
    pub name: Option<Key>,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Only runs that have not succeeded: failed, lost and missed ones
    #[arg(long)]
    pub unsuccessful: bool,
    /// Only runs that ended at most this long ago
    #[arg(long, value_name = "D", value_parser = duration)]
    pub since: Option<Duration>,
    /// Print what runs now instead: where, since when, and under which token
    #[arg(long, conflicts_with_all = ["limit", "unsuccessful", "since"])]
    pub running: bool,
    /// Print for each day how many runs succeeded, and how long they took, of the last 30 days or
    /// --since
    #[arg(long, requires = "name", conflicts_with_all = ["limit", "unsuccessful", "running"])]
    pub stats: bool,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Named {
    /// The schedule
    #[arg(value_parser = key)]
    pub name: Key,
    /// Print the schedule as one JSON object
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Until {
    #[command(flatten)]
    pub named: Named,
    /// Until when, such as 2026-10-25T00:00:00Z, or for how long, such as 8h
    #[arg(long, value_name = "TIME", value_parser = coming)]
    pub until: Option<DateTime<Utc>>,
}

#[derive(Debug, Args)]
pub struct Output {
    /// The schedule
    #[arg(value_parser = key)]
    pub name: Key,
    /// The tick, such as 2026-10-25T00:00:00Z [default: the last one]
    #[arg(long, value_name = "TIME", value_parser = instant)]
    pub slot: Option<DateTime<Utc>>,
    /// The number of the attempt [default: the last one]
    #[arg(long, value_name = "N")]
    pub attempt: Option<u32>,
}

#[derive(Debug, Args)]
pub struct Trigger {
    #[command(flatten)]
    pub named: Named,
    /// Ask although no instance that is alive declares the schedule: the next one that does runs it
    #[arg(long)]
    pub anyway: bool,
}

#[derive(Debug, Args)]
pub struct Instances {
    /// Print one JSON array, with all that each instance declares
    #[arg(long)]
    pub json: bool,
    /// Remove this instance at once, for example after its machine was shut down; one that is alive
    /// announces itself again
    #[arg(long, value_name = "ID", conflicts_with = "json")]
    pub forget: Option<Uuid>,
}
