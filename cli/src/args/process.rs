//! The arguments of the program's own processes, which no user types.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::Args;

use crate::args::values::{duration, umask};

/// How a command begins.
#[derive(Args, Clone, Debug, Default)]
pub struct Beginning {
    /// The user that the command runs as
    #[arg(long, require_equals = true)]
    pub user: Option<String>,
    /// The permissions that its new files do not have, in octal
    #[arg(long, require_equals = true, value_parser = umask)]
    pub umask: Option<u32>,
    /// Its folder
    #[arg(long, require_equals = true)]
    pub cwd: Option<PathBuf>,
}

impl Beginning {
    /// Returns the words that say the same to another process of the program.
    pub fn words(&self) -> impl Iterator<Item = OsString> {
        let word = |name: &str, value: OsString| {
            let mut word = OsString::from(format!("--{name}="));
            word.push(value);
            word
        };
        let user = self.user.as_ref().map(|user| word("user", user.into()));
        let umask = self.umask.map(|umask| word("umask", format!("{umask:o}").into()));
        let cwd = self.cwd.as_ref().map(|cwd| word("cwd", cwd.into()));
        [user, umask, cwd].into_iter().flatten()
    }
}

#[derive(Debug, Args)]
pub struct Stub {
    pub parent: i32,
    /// The parent's descriptor of a pipe, for why the command did not begin
    pub report: i32,
    pub program: PathBuf,
    #[command(flatten)]
    pub beginning: Beginning,
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub struct Supervise {
    pub parent: i32,
    /// The job, for those who list processes. Any text can follow the sign, also `--help`.
    #[arg(long, require_equals = true)]
    pub job: String,
    /// How long the command may take to stop
    #[arg(value_parser = duration)]
    pub stop_timeout: Duration,
    #[command(flatten)]
    pub beginning: Beginning,
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}
