//! The arguments of the commands that change and show claims which exist.

use std::time::Duration;

use clap::{Args, ValueEnum};
use rowlock::{Database, Error, Key, LeaseLock, Status, leases::Holder};

use crate::{
    args::values::{duration, host, key, pause},
    database,
};

#[derive(Debug, Args)]
pub struct Renew {
    /// The key
    #[arg(value_parser = key)]
    pub key: Key,
    /// The holder's id, as `acquire` printed it
    #[arg(long, value_name = "UUID", value_parser = Holder::parse)]
    pub holder: Holder,
    /// How long the claim holds from now at least: as long as it does already, if that is longer
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
    /// The status that the row records for the work [default: S, and F with --force]; under the
    /// rules of the article, F keeps the key closed
    #[arg(long, value_enum)]
    pub status: Option<Ending>,
}

impl Release {
    /// Returns the status to record. Work whose key is taken from it has not succeeded.
    pub fn ending(&self) -> Ending {
        self.status.unwrap_or(if self.force { Ending::F } else { Ending::S })
    }
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

/// What decides whether a free key is within its minimum interval.
#[derive(Clone, Copy, Debug, Args)]
pub struct MinInterval {
    /// The minimum interval that the keys are judged by: the one that `run` is given, as the table
    /// does not record it
    #[arg(long, value_name = "D", default_value = "0s", value_parser = duration)]
    pub min_interval: Duration,
}

impl MinInterval {
    pub fn lock<DB: Database>(&self, pool: sqlx::Pool<DB>) -> Result<LeaseLock<DB>, Error> {
        Ok(database::lock(pool, None)?.min_interval(self.min_interval))
    }
}

#[derive(Debug, Args)]
pub struct List {
    /// Only keys that are claimed: held, expired, or held by another program. An expired claim was
    /// neither ended nor taken over
    #[arg(long)]
    pub claimed: bool,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub judged_by: MinInterval,
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
    pub judged_by: MinInterval,
}

#[derive(Debug, Args)]
pub struct Watch {
    /// Only keys that are claimed: held, expired, or held by another program. An expired claim was
    /// neither ended nor taken over
    #[arg(long)]
    pub claimed: bool,
    /// The interval between two reads
    #[arg(long, value_name = "D", default_value = "1s", value_parser = pause)]
    pub every: Duration,
    #[command(flatten)]
    pub judged_by: MinInterval,
}

#[derive(Debug, Args)]
pub struct Changes {
    /// A key, a schedule, or the label of an instance [default: all]
    pub name: Option<String>,
    /// How many at most
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Print one JSON array
    #[arg(long)]
    pub json: bool,
}

#[cfg(feature = "ui")]
#[derive(Debug, Args)]
pub struct Ui {
    /// The address and port to listen on; port 0 is any free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: std::net::SocketAddr,
    /// Let operators release keys by force, and pause, resume, skip, stop and trigger
    /// schedules
    #[arg(long)]
    pub allow_changes: bool,
    /// A file with a line NAME:PASSWORD for each operator, who is asked for both; an address that
    /// is not this machine's own needs it
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<std::path::PathBuf>,
    /// A file with a token, with which a program may read /metrics instead of a name and a password
    #[arg(long, value_name = "FILE")]
    pub metrics_token_file: Option<std::path::PathBuf>,
    /// A name under which browsers reach the page, beside localhost and IP addresses; may be given
    /// several times
    #[arg(long, value_name = "NAME", value_parser = host)]
    pub host: Vec<String>,
    #[command(flatten)]
    pub judged_by: MinInterval,
}
