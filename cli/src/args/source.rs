//! The arguments that choose the database, and those of `migrate`.

use std::{ffi::OsString, time::Duration};

use chrono::FixedOffset;
use clap::{Args, error::ErrorKind};

use crate::args::values::{duration, offset};

#[derive(Debug, Args)]
pub struct SourceArguments {
    /// The database: postgres://, mysql:// (MariaDB too), or sqlite:FILE
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true, global = true)]
    pub database_url: Option<String>,
    /// A file whose only line is the database's URL; it is read again while the program runs, so
    /// that a new password is used
    #[arg(long, value_name = "FILE", env = "DATABASE_URL_FILE", global = true)]
    pub database_url_file: Option<OsString>,
    /// Use a file of your own, ~/.local/state/rowlock/locks.db: locks for this machine and user
    /// only
    #[arg(long, global = true)]
    pub local: bool,
    /// Go on at a server on which two holders can hold a key, such as TiDB
    #[arg(long, global = true)]
    pub any_server: bool,
    /// Programs that know only the article's columns use the table, and write their times at this
    /// offset from UTC, such as +08:00
    #[arg(long, value_name = "OFFSET", allow_hyphen_values = true, value_parser = offset, global = true)]
    pub article_clients: Option<FixedOffset>,
    /// How long to wait for a connection
    #[arg(long, value_name = "D", default_value = "10s", value_parser = duration, global = true)]
    pub connect_timeout: Duration,
}

impl SourceArguments {
    /// Lets an argument go before a variable. `is_given` tells of a name whether it is that of an
    /// argument on the command line.
    pub fn settle(&mut self, is_given: impl Fn(&str) -> bool) -> Result<(), clap::Error> {
        let (url, file) = (is_given("database_url"), is_given("database_url_file"));
        if url && !file {
            self.database_url_file = None;
        }
        match self.local && (url || file) {
            true => {
                let text = "--local names a database of its own: leave out --database-url and --database-url-file";
                Err(clap::Error::raw(ErrorKind::ArgumentConflict, text))
            }
            false => Ok(()),
        }
    }
}

#[derive(Debug, Args)]
pub struct Migrate {
    /// Create the lock's functions too, or replace older ones: rowlock_try_acquire and others, for
    /// programs in other languages
    #[arg(long, conflicts_with = "undo")]
    pub functions: bool,
    /// Print the statements, and send none
    #[arg(long)]
    pub dry_run: bool,
    /// Print the statements that take the columns, tables and functions of rowlock away, and leave
    /// the article's table with its rows; send them with --yes
    #[arg(long)]
    pub undo: bool,
    /// Carry --undo out
    #[arg(long, requires = "undo", conflicts_with = "dry_run")]
    pub yes: bool,
}
