//! The process above one command of `rowlock cron`.
//!
//! It is the reaper of the command's descendants, so that they are stopped with the command. Other
//! commands of the same program are not its descendants. If it is killed, the command is killed
//! too.

use crate::{
    exit::Failure,
    find::find,
    schedule::args::Supervise,
    signals::StopSignals,
    stub,
    work::{Work, code},
};

/// Runs the command to its end, or stops it at a signal. The exit code is the command's.
pub async fn supervise(run: Supervise) -> Result<u8, Failure> {
    let mut stop = StopSignals::listen()?;
    stub::die_with(run.parent)?;
    // `rowlock cron` begins each line with the name of the job.
    let key = "";
    let mut work = Work::start(find(&run.command)?, &run.command, &[], None)?;
    tokio::select! {
        biased;
        status = work.ended(key, run.grace) => {
            let code = code(status?);
            work.failure().map_or(Ok(code), Err)
        }
        signal = stop.next() => {
            work.forward(signal);
            let status = work.stopped(key, &mut stop, run.grace).await?;
            Ok(code(status))
        }
    }
}
