//! What can be asked for, and how.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use rowlock::{Database, Error, Holder, Key, LeaseLock, Rules, Status};

const EXITS: &str = "Exit codes: 0 done, 2 bad arguments, 69 database out of reach or failing, 74 claim lost, 75 refused, 78 table missing or unfit; \
run: the command's own, 128+n if signal n ended it, 126 not executable, 127 not found.";

/// Locks in the SQL database that you already have: PostgreSQL, MySQL, MariaDB, SQLite.
#[derive(Debug, Parser)]
#[command(name = "rowlock", version, after_help = EXITS, disable_help_subcommand = true)]
pub struct Arguments {
    #[command(flatten)]
    pub source: SourceArguments,
    /// Tell on stderr what is done; twice: everything
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
    /// How long to wait for a connection
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration, global = true)]
    pub connect_timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub enum Action {
    /// Create the table t_resource_lock, or add what it lacks
    #[command(after_help = "Example: DATABASE_URL=postgres://me@db/app rowlock migrate")]
    Migrate,
    /// Run a command while holding a key
    #[command(after_help = "Example: rowlock run nightly-report --min-interval 12h -- ./report.sh --all")]
    Run(Run),
    /// Take a key, print the claim as JSON, and leave it to run out or to be renewed
    #[command(after_help = "Example: rowlock acquire deploy --lease 10m | jq -r .holder")]
    Acquire(Acquire),
    /// Say anew how long a claim holds, and print it as JSON
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
    /// Look at one key
    #[command(after_help = "Example: rowlock show nightly-report --json")]
    Show(Show),
    /// The list, live
    #[command(after_help = "Example: rowlock watch --held")]
    Watch(Watch),
    /// Delete rows that were not used for so long: never one that is held, failed, or within its
    /// minimum interval (the column `time`, an hour at least, and --min-interval)
    #[command(after_help = "Example: rowlock forget --older-than 30d")]
    Forget {
        /// How long ago they were released at least
        #[arg(long, value_name = "D", value_parser = duration)]
        older_than: Duration,
        #[command(flatten)]
        window: Window,
    },
    /// Print completions for a shell
    #[command(after_help = "Example: rowlock completions bash > /etc/bash_completion.d/rowlock")]
    Completions { shell: Shell },
    /// Write the man pages into a folder
    #[command(after_help = "Example: rowlock man /usr/local/share/man/man1")]
    Man { folder: PathBuf },
    /// Become a command that dies with its parent
    #[command(hide = true)]
    Exec(Stub),
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
    /// How long the claim outlives its holder's last sign of life
    #[arg(long, value_name = "D", default_value = "30s", value_parser = duration)]
    pub lease: Duration,
    /// Refuse if the key was taken less than this ago: about half of the job's period
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub min_interval: Duration,
    /// Wait for the key, for so long at most
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub wait: Duration,
    /// What to do after failures and crashes
    #[arg(long, value_enum, default_value_t = RuleSet::Recover)]
    pub rules: RuleSet,
    /// A failed run may be repeated within its window
    #[arg(long)]
    pub retry_failed: bool,
    /// Who takes the key, for people [default: host/process id]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
}

impl Terms {
    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        let mut lock =
            LeaseLock::new(pool).lease(self.lease)?.min_interval(self.min_interval)?.rules(match self.rules {
                RuleSet::Recover => Rules::Recover,
                RuleSet::Article => Rules::Article,
            });
        if self.retry_failed {
            lock = lock.retry_failed_at_once();
        }
        match &self.label {
            Some(label) => lock.label(label),
            None => Ok(lock),
        }
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
    /// How long a command that is to stop may take before it is killed, and how long to try to
    /// record its end; after a loss, another holder may be at work in that time
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration)]
    pub grace: Duration,
    /// Exit with 0 when refused
    #[arg(long)]
    pub skip_ok: bool,
    /// The command; it sees ROWLOCK_KEY, ROWLOCK_TOKEN and ROWLOCK_HOLDER
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Acquire {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    #[command(flatten)]
    pub terms: Terms,
}

#[derive(Debug, Args)]
pub struct Renew {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    /// The holder's id, as `acquire` printed it
    #[arg(long, value_name = "UUID", value_parser = Holder::parse)]
    pub holder: Holder,
    /// How long the claim holds from now: longer or shorter than it did
    #[arg(long, value_name = "D", default_value = "30s", value_parser = duration)]
    pub lease: Duration,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("who").required(true).args(["holder", "force"]))]
pub struct Release {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    /// The holder's id, as `acquire` printed it
    #[arg(long, value_name = "UUID", value_parser = Holder::parse)]
    pub holder: Option<Holder>,
    /// Free the key, even if it is held
    #[arg(long)]
    pub force: bool,
    /// What the row says of the work
    #[arg(long, value_enum, default_value_t = Ending::S)]
    pub status: Ending,
}

/// How the work ended.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "UPPER")]
pub enum Ending {
    /// It succeeded
    S,
    /// It failed
    F,
}

impl From<Ending> for Status {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::S => Self::Succeeded,
            Ending::F => Self::Failed,
        }
    }
}

/// What decides whether a free key is within its window.
#[derive(Debug, Args)]
pub struct Window {
    /// The minimum interval that the keys are judged by: the one that `run` is given, as the table
    /// does not record it
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub min_interval: Duration,
}

impl Window {
    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        LeaseLock::new(pool).min_interval(self.min_interval)
    }
}

#[derive(Debug, Args)]
pub struct List {
    /// Only keys that are held
    #[arg(long)]
    pub held: bool,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub window: Window,
}

#[derive(Debug, Args)]
pub struct Show {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub window: Window,
}

#[derive(Debug, Args)]
pub struct Watch {
    /// Only keys that are held
    #[arg(long)]
    pub held: bool,
    /// How often to look
    #[arg(long, value_name = "D", default_value = "1s", value_parser = pause)]
    pub every: Duration,
    #[command(flatten)]
    pub window: Window,
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 30s, 5m or 1h"))
}

/// Without one, `watch` would keep the database busy.
fn pause(text: &str) -> Result<Duration, String> {
    let least = Duration::from_millis(10);
    duration(text).and_then(|pause| if pause < least { Err("it has to be at least 10ms".into()) } else { Ok(pause) })
}

fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}
