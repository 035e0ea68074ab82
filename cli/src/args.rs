//! The command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use rowlock::{Database, Error, Key, LeaseLock, Rules};

use crate::{
    doctor::Doctor,
    exit::{OK, REFUSED},
    operators::{List, MinInterval, Release, Renew, Show, Watch},
    schedule::args::{Cron, Named, Runs, Schedules, Supervise, TickOf},
};

const EXITS: &str = "Exit codes: 0 done, 2 bad arguments, 69 database unreachable or failed, 70 tick given up, 73 output cannot be written, 74 claim lost, \
75 refused, 78 table missing or unusable; run: the command's own, 124 after --timeout, 128+n if signal n ended it, 126 not executable, 127 not found.";

const CRON: &str = "Example: rowlock cron /etc/rowlock/jobs.toml

A file with one job; each section is a job:

[nightly-report]
cron = \"30 2 * * *\"                           # or: every = \"30s\", after = \"10m\"
zone = \"Europe/Berlin\"                        # default: UTC
command = [\"/opt/app/report\", \"--full\"]       # no shell reads it
retry = 3                                      # default: 0
timeout = \"2h\"                                 # default: none
# Further keys: catch_up, max, grace, backoff, lease, exclusive_with";

/// Scheduled jobs and locks in the SQL database that an application already has: PostgreSQL, MySQL,
/// MariaDB or SQLite.
#[derive(Debug, Parser)]
#[command(name = "rowlock", version, after_help = EXITS, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(flatten)]
    pub source: SourceArguments,
    /// Print events on stderr; twice: all events
    #[arg(long, short, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// The process that stands before this one on a terminal
    #[arg(long, hide = true)]
    pub behind: Option<i32>,
    #[command(subcommand)]
    pub action: Action,
}

#[derive(Debug, Args)]
pub struct SourceArguments {
    /// The database: postgres://, mysql:// (MariaDB too), or sqlite:FILE
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true, global = true)]
    pub database_url: Option<String>,
    /// Use a file of your own, ~/.local/state/rowlock/locks.db: locks for this machine and user
    /// only
    #[arg(long, global = true)]
    pub local: bool,
    /// Go on at a server on which two holders can hold a key, such as TiDB
    #[arg(long, global = true)]
    pub any_server: bool,
    /// How long to wait for a connection
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration, global = true)]
    pub connect_timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub enum Action {
    /// Create the tables, or add what they lack
    #[command(after_help = "Example: DATABASE_URL=postgres://me@db/app rowlock migrate")]
    Migrate {
        /// Create the lock's functions too, or replace them: rowlock_try_acquire and others, for
        /// programs in other languages
        #[arg(long)]
        functions: bool,
    },
    /// Run a command while holding a key, or the tick of a schedule that is due
    #[command(
        after_help = "Examples: rowlock run nightly-report --min-interval 12h -- ./report.sh --all\n          rowlock run nightly-report --cron '30 2 * * *' --zone Europe/Berlin -- ./report.sh"
    )]
    Run(Run),
    /// Wait until this instance leads, run a command while it does, and stop it when it does not
    #[command(after_help = "Example: rowlock lead indexer --lease 10s -- ./indexer --follow")]
    Lead(Lead),
    /// Show which instance leads
    #[command(after_help = "Example: rowlock leader indexer --watch --json")]
    Leader(Leader),
    /// Take a key and print the claim as JSON; it holds until the lease ends, unless it is renewed
    #[command(after_help = "Example: rowlock acquire deploy --lease 10m | jq -r .holder")]
    Acquire(Acquire),
    /// Hold a key while stdin is open, and print the claim as JSON
    #[command(
        after_help = "Example: coproc rowlock hold deploy; read -r claim <&\"${COPROC[0]}\"    # the key is free when stdin closes"
    )]
    Hold(Hold),
    /// Set anew how long a claim holds, and print it as JSON
    #[command(after_help = "Example: rowlock renew deploy --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11 --lease 10m")]
    Renew(Renew),
    /// End a claim: with its holder's id, or by force
    #[command(
        after_help = "Examples: rowlock release deploy --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11 --status S\n          rowlock release deploy --force"
    )]
    Release(Release),
    /// List keys: who holds what, since when, until when
    #[command(after_help = "Example: rowlock list --held")]
    List(List),
    /// Show one key: its claim, how long it lasted, the permits or readers of that name, and the
    /// last runs of the schedule of that name
    #[command(after_help = "Example: rowlock show nightly-report --json")]
    Show(Show),
    /// Show the list, live
    #[command(after_help = "Example: rowlock watch --held")]
    Watch(Watch),
    /// Delete rows of keys that were not used for so long: never one that is held, failed, or
    /// within its minimum interval (the column `time`, an hour at least, and --min-interval); or
    /// old runs
    #[command(
        after_help = "Examples: rowlock forget --older-than 30d\n          rowlock forget --runs --older-than 90d"
    )]
    Forget {
        /// How long ago they were released, or the runs ended, at least
        #[arg(long, value_name = "D", value_parser = duration)]
        older_than: Duration,
        /// Delete the runs of schedules instead; the last success of each stays
        #[arg(long, conflicts_with = "min_interval")]
        runs: bool,
        #[command(flatten)]
        judged_by: MinInterval,
    },
    /// Run the jobs of a file at their times, each tick on one of the machines that do so
    #[command(after_help = CRON)]
    Cron(Cron),
    /// List schedules: their times, what runs, what is next
    #[command(after_help = "Example: rowlock schedules --json")]
    Schedules(Schedules),
    /// List the last runs of a schedule, or of all schedules
    #[command(
        after_help = "Examples: rowlock runs nightly-report --limit 100\n          rowlock runs --failed --since 24h"
    )]
    Runs(Runs),
    /// Pause a schedule: no run begins until it is resumed; one that is under way goes on
    #[command(after_help = "Example: rowlock pause nightly-report")]
    Pause(Named),
    /// Resume a schedule; its catch-up decides about the ticks since the pause
    #[command(after_help = "Example: rowlock resume nightly-report")]
    Resume(Named),
    /// Ask for a run of a schedule now, beside its ticks
    #[command(after_help = "Example: rowlock trigger nightly-report")]
    Trigger(Named),
    /// Examine the database: the connection, tables, rights, clock, pooler and notifications
    #[command(after_help = "Example: rowlock doctor --json")]
    Doctor(Doctor),
    /// Show locks, jobs and runs as a web page, and numbers for Prometheus at /metrics
    #[cfg(feature = "ui")]
    #[command(after_help = "Example: rowlock ui --listen 127.0.0.1:8080 --allow-changes")]
    Ui(crate::ui::args::Ui),
    /// Print completions for a shell
    #[command(after_help = "Example: rowlock completions bash > /etc/bash_completion.d/rowlock")]
    Completions { shell: Shell },
    /// Write the man pages into a folder, which is created if it does not exist
    #[command(after_help = "Example: rowlock man /usr/local/share/man/man1")]
    Man { folder: PathBuf },
    /// Become a command that dies with its parent
    #[command(hide = true)]
    Exec(Stub),
    /// Run one command of `cron` and stop it with all that it has started
    #[command(hide = true)]
    Supervise(Supervise),
}

#[derive(Debug, Args)]
pub struct Stub {
    pub parent: i32,
    /// The parent's descriptor of a pipe, for why the command did not begin
    pub report: i32,
    pub program: PathBuf,
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

/// How a key is taken.
#[derive(Debug, Args)]
pub struct Terms {
    /// How long the claim outlives its last renewal
    #[arg(long, value_name = "D", default_value = "30s", value_parser = duration)]
    pub lease: Duration,
    /// Refuse if the key was taken less than this ago: about half of the job's period
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub min_interval: Duration,
    /// Wait for the key, for so long at most, or `forever`; with --min-interval, `run` and `hold`
    /// accept only a shorter time than that
    #[arg(long, value_name = "D", default_value = "0s", value_parser = wait)]
    pub wait: Duration,
    /// Serve those that wait with --fair in order of arrival, on all machines
    #[arg(long)]
    pub fair: bool,
    /// What to do after failures and crashes
    #[arg(long, value_enum, default_value_t = RuleSet::Recover)]
    pub rules: RuleSet,
    /// A failed run may be repeated within its minimum interval
    #[arg(long)]
    pub retry_failed: bool,
    /// The exit code of a refusal
    #[arg(long, short = 'E', value_name = "CODE", default_value_t = REFUSED)]
    pub refused_exit_code: u8,
    /// The name of the holder that operators see [default: host/process id]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
}

impl Terms {
    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        let rules = match self.rules {
            RuleSet::Recover => Rules::Recover,
            RuleSet::Article => Rules::Article,
        };
        let lock = labelled(pool, self.label.as_deref())?.lease(self.lease)?;
        let lock = lock.min_interval(self.min_interval)?.rules(rules).fair(self.fair);
        Ok(if self.retry_failed { lock.retry_failed_at_once() } else { lock })
    }
}

fn labelled<DB: Database>(pool: sqlx::Pool<DB>, label: Option<&str>) -> Result<LeaseLock<DB>, Error> {
    let builder = LeaseLock::builder(pool);
    match label {
        Some(label) => builder.label(label).build(),
        None => builder.build(),
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum RuleSet {
    /// The next one takes over when the lease ends; a failure delays no other run
    Recover,
    /// Failures and crashes wait for an operator: rowlock release KEY --force
    Article,
}

#[derive(Debug, Args)]
pub struct Run {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    #[command(flatten)]
    pub terms: Terms,
    #[command(flatten)]
    pub tick: TickOf,
    /// Let so many commands run at a time, each under a permit of its own: the keys KEY#1 to KEY#N
    #[arg(long, value_name = "N", conflicts_with = "cron")]
    pub permits: Option<u32>,
    /// Run beside other commands with --shared, and not beside one with --exclusive: under one of
    /// the keys KEY#r1 to KEY#r1024
    #[arg(long, conflicts_with_all = ["cron", "permits", "exclusive"])]
    pub shared: bool,
    /// Run alone: neither beside a command with --shared nor beside any other. Without this option,
    /// a command keeps new readers out, and does not wait for those that run
    #[arg(long, conflicts_with_all = ["cron", "permits"])]
    pub exclusive: bool,
    /// Keep the key closed for this long after a program that crashed had to stop its command
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration, conflicts_with = "cron")]
    pub lock_delay: Duration,
    /// How long a command that is to stop may take before it is killed, and how long to try to
    /// record its end; after a loss, another holder may be at work in that time
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// Take this key too, all of them or none; may be given several times
    #[arg(long, value_name = "KEY", value_parser = key, conflicts_with_all = ["cron", "permits", "shared", "exclusive", "min_interval"])]
    pub also: Vec<Key>,
    /// Stop COMMAND after this long; it has failed then, and the exit code is 124
    #[arg(long, value_name = "D", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Exit with 0 when refused, and say why only on a terminal
    #[arg(long, conflicts_with = "refused_exit_code")]
    pub skip_ok: bool,
    /// Run this text with `sh -c`, in place of COMMAND
    #[arg(long, short = 'c', value_name = "TEXT", conflicts_with = "command")]
    pub shell: Option<OsString>,
    /// The command; it sees ROWLOCK_KEY, ROWLOCK_TOKEN and ROWLOCK_HOLDER, with --permits also
    /// ROWLOCK_PERMIT, with --shared also ROWLOCK_WRITER_TOKEN, with --also ROWLOCK_TOKENS, or with
    /// --cron ROWLOCK_JOB, ROWLOCK_SLOT, ROWLOCK_ATTEMPT, ROWLOCK_MISSED and ROWLOCK_TOKEN
    #[arg(last = true, required_unless_present = "shell")]
    pub command: Vec<OsString>,
}

impl Run {
    /// Returns the words of the command.
    pub fn words(&self) -> Vec<OsString> {
        match &self.shell {
            Some(text) => vec!["sh".into(), "-c".into(), text.clone()],
            None => self.command.clone(),
        }
    }

    /// Returns the exit code of a refusal.
    pub fn refused(&self) -> u8 {
        if self.skip_ok { OK } else { self.terms.refused_exit_code }
    }
}

#[derive(Debug, Args)]
pub struct Lead {
    /// The name of the election: the key that the leader holds
    #[arg(value_parser = key)]
    pub key: Key,
    /// How long the leadership outlives its last renewal
    #[arg(long, value_name = "D", default_value = "30s", value_parser = duration)]
    pub lease: Duration,
    /// Keep the key closed for this long after a leader that crashed had to stop [default: --grace]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub lock_delay: Option<Duration>,
    /// The name of the instance that operators see [default: host/process id]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// How long a command that is to stop may take before it is killed; after a loss, another
    /// leader may be at work in that time if --lock-delay is shorter
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// The command; it sees ROWLOCK_KEY, ROWLOCK_HOLDER and, as ROWLOCK_TOKEN, the number of the
    /// term. When it ends by itself, the leader resigns, and its exit code is returned
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

impl Lead {
    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        labelled(pool, self.label.as_deref())?.lease(self.lease)?.lock_delay(self.lock_delay.unwrap_or(self.grace))
    }
}

#[derive(Debug, Args)]
pub struct Leader {
    /// The name of the election
    #[arg(value_parser = key)]
    pub key: Key,
    /// Print each leader that follows too, one a line
    #[arg(long)]
    pub watch: bool,
    /// Print one JSON object for each leader
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Hold {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    #[command(flatten)]
    pub terms: Terms,
    /// Keep the key closed for this long after a program that crashed had to stop its work
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub lock_delay: Duration,
}

#[derive(Debug, Args)]
pub struct Acquire {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    #[command(flatten)]
    pub terms: Terms,
}

pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 30s, 5m or 1h"))
}

/// How long to wait for a key.
fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" { Ok(Duration::MAX) } else { duration(text) }
}

/// Without one, `watch` would keep the database busy.
pub fn pause(text: &str) -> Result<Duration, String> {
    let least = Duration::from_millis(10);
    duration(text).and_then(|pause| if pause < least { Err("it has to be at least 10ms".into()) } else { Ok(pause) })
}

pub fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}
