//! What is left of a command whose supervisor was killed.
//!
//! On Linux, `rowlock cron` is the reaper of its descendants, so that the orphans of all its
//! commands become its children. A mark tells those of one command from those of the others.

use std::time::Instant;

use rustix::process::{Pid, Signal};
use tokio::time::sleep;

use crate::{
    out,
    process::{
        descendants::{self, Process},
        work::check_interval,
    },
};

/// What the processes of one command have in common.
#[derive(Clone, Debug)]
pub struct Mark {
    job: String,
    /// The session that the supervisor has begun. A process may have left it.
    session: Option<Pid>,
    /// The variables of the command, as `NAME=VALUE`. A process may have changed its own.
    variables: Vec<String>,
}

impl Mark {
    pub fn new(job: &str, session: Option<Pid>, variables: Vec<String>) -> Self {
        Self { job: job.to_owned(), session, variables }
    }

    /// Kills until no process of the command is left. Those that may not be signalled are waited
    /// for.
    pub async fn kill(&self) {
        let (began, mut is_told) = (Instant::now(), false);
        loop {
            // The check is made twice: it takes time, and a process whose parent ends during the
            // check may be missing from the tree.
            let Some(found) = self.found().or_else(|| self.found()) else { return };
            let refused = descendants::send(&found, Signal::KILL);
            if let Some(pid) = refused.filter(|_| !is_told) {
                is_told = true;
                out::print_error(format_args!("{}: {}", self.job, descendants::not_permitted(pid)));
            }
            sleep(check_interval(refused, began)).await;
        }
    }

    /// Returns the processes of the command, if there are any.
    fn found(&self) -> Option<Vec<Process>> {
        descendants::alive_with(|process| self.is_on(process)).filter(|found| !found.is_empty())
    }

    fn is_on(&self, process: &Process) -> bool {
        self.session.is_some() && process.session == self.session || process.has(&self.variables)
    }
}
