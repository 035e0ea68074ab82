//! The arguments of the commands that claim keys.

use std::{ffi::OsString, time::Duration};

use clap::{Args, ValueEnum};
use rowlock::{Database, Error, Key, LeaseLock, Rules};
use rustix::process::{Pid, getppid};

use crate::{
    args::{
        schedules::TickOf,
        values::{duration, key, timeout, wait},
    },
    database,
    exit::{Failure, OK, REFUSED, USAGE},
};

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
        let lock = database::lock(pool, self.label.as_deref())?.lease(self.lease);
        let lock = lock.min_interval(self.min_interval).rules(rules).fair(self.fair);
        Ok(if self.retry_failed { lock.retry_failed_at_once() } else { lock })
    }

    /// Returns how long work waits that is to run once in each minimum interval. A wait that is not
    /// shorter could outlast the interval.
    pub fn wait_of_work(&self) -> Result<Duration, Failure> {
        let Self { wait, min_interval, .. } = *self;
        if min_interval.is_zero() || wait < min_interval {
            return Ok(wait);
        }
        let text = "a --wait has to be shorter than the minimum interval, or the same tick runs again after that";
        Err(Failure::new(USAGE, text))
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum RuleSet {
    /// The next one takes over when the lease ends; a failure delays no other run
    Recover,
    /// Failures and crashes wait for an operator: rowlock release KEY --force --status S
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
    /// Run alone, and wait for commands with --shared too. Without this option, a command is
    /// refused while one of them runs
    #[arg(long, conflicts_with_all = ["cron", "permits"])]
    pub exclusive: bool,
    /// Keep the key closed for this long after a program that crashed had to stop its command
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration, conflicts_with = "cron")]
    pub lock_delay: Duration,
    /// How long a command that is to stop may take before it is killed, and how long to try to
    /// record its end; after a loss, another holder may be at work in that time
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration)]
    pub stop_timeout: Duration,
    /// Take this key too, all of them or none; may be given several times
    #[arg(long, value_name = "KEY", value_parser = key, conflicts_with_all = ["cron", "permits", "shared", "exclusive", "min_interval"])]
    pub also: Vec<Key>,
    /// Stop COMMAND after this long; it has failed then, and the exit code is 124
    #[arg(long, value_name = "D", value_parser = timeout)]
    pub timeout: Option<Duration>,
    /// Exit with 0 when refused, and say why only on a terminal
    #[arg(long, conflicts_with = "refused_exit_code")]
    pub refused_ok: bool,
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
        if self.refused_ok { OK } else { self.terms.refused_exit_code }
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
    /// Keep the key closed for this long after a leader that crashed had to stop [default:
    /// --stop-timeout]
    #[arg(long, value_name = "D", value_parser = duration)]
    pub lock_delay: Option<Duration>,
    /// The name of the instance that operators see [default: host/process id]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// How long a command that is to stop may take before it is killed; after a loss, another
    /// leader may be at work in that time if --lock-delay is shorter
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration)]
    pub stop_timeout: Duration,
    /// The command; it sees ROWLOCK_KEY, ROWLOCK_HOLDER and, as ROWLOCK_TOKEN, the number of the
    /// term. When it ends by itself, the leader resigns, and its exit code is returned
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

impl Lead {
    pub fn lock_delay(&self) -> Duration {
        self.lock_delay.unwrap_or(self.stop_timeout)
    }

    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        let lock = database::lock(pool, self.label.as_deref())?;
        Ok(lock.lease(self.lease).lock_delay(self.lock_delay()))
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
    /// The process that started this one. It may end while the database is opened.
    #[arg(skip = getppid())]
    pub parent: Option<Pid>,
}
