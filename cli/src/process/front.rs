//! The program on a terminal consists of two processes.
//!
//! The process that the shell has started, the front, stays in the shell's job. The command runs in
//! the same group: it may read the terminal, and the terminal's keys reach it as if there were no
//! lock. The second process holds the claim and is the command's parent. It is in a group of its
//! own, which no key suspends, so that the lease is renewed while the job is suspended.

use std::fs::File;

use rustix::process::kill_process;
use tokio::{process::Command, signal::unix::SignalKind};

use crate::{
    exit::{Failure, NOT_EXECUTABLE},
    process::{
        child::{self, code, wait_failed},
        descendants,
        find::this_program,
        signals::{StopSignals, listen, received},
    },
};

/// Returns whether this process has a controlling terminal, regardless of its stdin and of the job
/// in the foreground. The command could not be in a group that has no number here.
pub fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok() && descendants::has_group()
}

/// Starts the program again as the second process, passes on the signals that ask it to stop, and
/// ends with its exit code.
pub async fn run_in_front() -> Result<u8, Failure> {
    let cannot = |error: std::io::Error| {
        Failure::new(NOT_EXECUTABLE, format_args!("the program could not start its second process: {error}"))
    };
    let mut stop = StopSignals::listen()?;
    let mut children = listen(SignalKind::child())?;
    let mut command = Command::new(this_program()?);
    command.arg0("rowlock").arg(format!("--behind={}", std::process::id())).args(std::env::args_os().skip(1));
    let mut behind = command.process_group(0).kill_on_drop(true).spawn().map_err(cannot)?;
    let pid = child::pid(&behind);
    loop {
        tokio::select! {
            status = behind.wait() => return status.map(code).map_err(wait_failed),
            signal = stop.next() => drop(pid.map(|pid| kill_process(pid, signal))),
            // As the first process of a container, this process has to wait for orphans.
            () = received(&mut children) => descendants::reap(|child| Some(child) == pid),
        }
    }
}
