//! A child process: its number, and how it ended.

use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

use rustix::process::Pid;
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
