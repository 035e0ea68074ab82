//! What is left of a command whose supervisor was killed.
//!
//! On Linux, `rowlock cron` is the reaper of its descendants, so that the orphans of all its
//! commands become its children. A mark tells those of one command from those of the others.

use rustix::process::{Pid, Signal};
use tokio::time::sleep;

use crate::process::{
    descendants::{self, Process},
    work::CHECK_INTERVAL,
};

/// What the processes of one command have in common.
#[derive(Clone, Debug)]
pub struct Mark {
    /// The session that the supervisor has begun. A process may have left it.
    session: Option<Pid>,
    /// The variables of the command, as `NAME=VALUE`. A process may have changed its own.
    variables: Vec<String>,
}

impl Mark {
    pub fn new(session: Option<Pid>, variables: Vec<String>) -> Self {
        Self { session, variables }
    }

    /// Kills until no process of the command is left.
    pub async fn kill(&self) {
        // The check is made twice: it takes time, and a process whose parent ends during the check
        // may be missing from the tree.
        while self.kill_those_found() || self.kill_those_found() {
            sleep(CHECK_INTERVAL).await;
        }
    }

    /// Returns whether any was found.
    fn kill_those_found(&self) -> bool {
        let found = descendants::alive_with(|process| self.is_on(process)).unwrap_or_default();
        found.iter().for_each(|process| process.send(Signal::KILL));
        !found.is_empty()
    }

    fn is_on(&self, process: &Process) -> bool {
        self.session.is_some_and(|session| process.is_in(session)) || process.has(&self.variables)
    }
}
