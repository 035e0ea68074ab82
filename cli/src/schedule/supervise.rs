//! The process above one command of `rowlock cron`.
//!
//! It is the reaper of the command's descendants, so that they are stopped with the command. Other
//! commands of the same program are not its descendants. If it is killed, the command is killed
//! too. If `rowlock cron` is killed, all of them are.

use std::time::Duration;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    exit::{self, Failure},
    find::find,
    schedule::args::Supervise,
    signals::StopSignals,
    stub,
    work::{Work, code},
};

/// Runs the command to its end, or stops it at a signal. The exit code is the command's.
pub async fn supervise(run: Supervise) -> Result<u8, Failure> {
    let mut stop = StopSignals::listen()?;
    let cannot = |error| Failure::new(exit::NOT_EXECUTABLE, error);
    let mut orphaned = signal(SignalKind::user_defined1()).map_err(cannot)?;
    stub::when_parent_ends(run.parent, Signal::USR1)?;
    let mut work = Work::start(find(&run.command)?, &run.command, &[], None)?;
    tokio::select! {
        biased;
        _ = orphaned.recv() => {}
        ended = to_its_end(&mut work, &mut stop, run.grace) => return ended,
    }
    // No process renews the lease of the run any more.
    work.killed().await.map(code)
}

async fn to_its_end(work: &mut Work, stop: &mut StopSignals, grace: Duration) -> Result<u8, Failure> {
    // `rowlock cron` begins each line with the name of the job.
    let key = "";
    tokio::select! {
        biased;
        status = work.ended(key, grace) => {
            let code = code(status?);
            work.failure().map_or(Ok(code), Err)
        }
        signal = stop.next() => {
            work.forward(signal);
            work.stopped(key, stop, grace).await.map(code)
        }
    }
}
