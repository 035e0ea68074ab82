//! A child process and its parent: what each does about the end of the other.

use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

use rustix::process::{Pid, getppid};
use tokio::process::Child;

use crate::exit::{self, Failure};

/// Returns the number of a child; `None` once its end was waited for.
pub fn pid(child: &Child) -> Option<Pid> {
    child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw)
}

/// Returns the exit code of a process in the form that a shell reports.
pub fn code(status: ExitStatus) -> u8 {
    let number = |code: i32| u8::try_from(code).unwrap_or(u8::MAX);
    let signal = || status.signal().map(|signal| exit::SIGNAL.saturating_add(number(signal)));
    status.code().map(number).or_else(signal).unwrap_or(u8::MAX)
}

pub fn wait_failed(error: std::io::Error) -> Failure {
    Failure::new(exit::NOT_EXECUTABLE, format_args!("the command's end was not seen: {error}"))
}

/// Returns whether the parent has ended, so that this process has another one.
pub fn parent_has_ended(parent: i32) -> bool {
    getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent)
}

/// Fails if the parent has ended already.
pub fn check_parent(parent: i32) -> Result<(), Failure> {
    if parent_has_ended(parent) {
        let text = "the command was not started: the rowlock process that started it has ended";
        return Err(Failure::new(exit::LOST, text));
    }
    Ok(())
}

/// On Linux, has this process killed when its parent ends, for whatever reason.
pub fn die_with_parent(parent: i32) -> Result<(), Failure> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(|error| {
            let text = format_args!("the program could not tie the command to its parent: {error}");
            Failure::new(exit::NOT_EXECUTABLE, text)
        })?;
        // The parent may have ended before the call.
        check_parent(parent)?;
    }
    Ok(())
}
