//! The process above one command of `rowlock cron`.
//!
//! It is the reaper of the command's descendants, so that they are stopped with the command. Other
//! commands of the same program are not its descendants. If it is killed, the command is killed
//! too, and `rowlock cron` kills the rest. If `rowlock cron` is killed, all of them are.

use std::{path::Path, time::Duration};

use rustix::process::{Pid, setpgid, setsid};
use tokio::time::sleep;

use crate::{
    args::process::Supervise,
    exit::Failure,
    process::{
        child::{check_parent, code, parent_has_ended},
        descendants::Process,
        find::find_in,
        signals::StopSignals,
        work::Work,
    },
};

/// The interval at which the process looks for its parent.
const ORPHAN_INTERVAL: Duration = Duration::from_millis(200);
/// The exit code if the command was stopped: one that no command is known to use. A command that
/// had ended by itself keeps its own.
pub const STOPPED: u8 = 209;

/// Runs the command to its end, or stops it at a signal. The exit code is the command's, or
/// [`STOPPED`].
pub async fn supervise(run: Supervise) -> Result<u8, Failure> {
    let mut stop = StopSignals::listen()?;
    check_parent(run.parent)?;
    begin_session(run.parent);
    let folder = run.beginning.cwd.as_deref().unwrap_or(Path::new("."));
    let program = find_in(&run.command, std::env::var_os("PATH").as_deref(), folder)?;
    // `rowlock cron` begins each line with the name of the job.
    let key = "";
    let mut work = Work::start(key, run.stop_timeout, program, &run.command, &[], &run.beginning, None)?;
    tokio::select! {
        biased;
        () = orphaned(run.parent) => {}
        ended = to_its_end(&mut work, &mut stop) => return ended,
    }
    // No process renews the lease of the run any more.
    work.kill().await.map(code)
}

/// Begins a session, by which `rowlock cron` knows the processes of the command.
fn begin_session(parent: i32) {
    // The leader of a group cannot begin a session, and leaves its group first. Without a group to
    // go to, the variables of the command have to do.
    let Some(group) = Pid::from_raw(parent).and_then(Process::read).and_then(|parent| parent.group) else { return };
    if let Err(error) = setpgid(None, Some(group)).and_then(|()| setsid()) {
        let _ = setpgid(None, None);
        tracing::debug!(%error, "no session of its own");
    }
}

/// Waits until `rowlock cron` has ended. It looks, because a signal may be blocked or ignored.
async fn orphaned(parent: i32) {
    while !parent_has_ended(parent) {
        sleep(ORPHAN_INTERVAL).await;
    }
}

async fn to_its_end(work: &mut Work, stop: &mut StopSignals) -> Result<u8, Failure> {
    let status = tokio::select! {
        biased;
        status = work.wait() => status?,
        signal = stop.next() => {
            work.forward(signal);
            return work.wait_or_kill(stop).await.map(|_| STOPPED);
        }
    };
    match work.failure() {
        Some(failure) => Err(failure),
        None => {
            work.wait_or_stop_leftovers(stop, std::future::pending()).await;
            Ok(code(status))
        }
    }
}
