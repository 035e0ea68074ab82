//! The arguments of `rowlock ui`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args;

use crate::args::keys::MinInterval;

#[derive(Debug, Args)]
pub struct Ui {
    /// The address and port to listen on; port 0 is any free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// Let operators release keys by force, and pause, resume, skip, stop and trigger
    /// schedules
    #[arg(long)]
    pub allow_changes: bool,
    /// A file with a line NAME:PASSWORD for each operator, who is asked for both; an address that
    /// is not this machine's own needs it
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// A file with a token, with which a program may read /metrics instead of a name and a password
    #[arg(long, value_name = "FILE")]
    pub metrics_token_file: Option<PathBuf>,
    /// A name under which browsers reach the page, beside localhost and IP addresses; may be given
    /// several times
    #[arg(long, value_name = "NAME")]
    pub host: Vec<String>,
    #[command(flatten)]
    pub judged_by: MinInterval,
}
