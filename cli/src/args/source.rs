//! The arguments that choose the database, and those of the command that examines it.

use std::time::Duration;

use clap::Args;

use crate::args::values::duration;

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

#[derive(Debug, Args)]
pub struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
