//! The command's own beginning: it is to die with the program that started it.

use std::{fs::File, io::Write as _, os::unix::process::CommandExt as _, process::Command};

use crate::{
    args::Stub,
    descendants,
    exit::{self, Failure},
};

/// Becomes the command, on Linux with a signal for when its parent dies, however that happens.
pub fn become_command(stub: Stub) -> Failure {
    if let Err(failure) = die_with(stub.parent) {
        return failure;
    }
    let mut words = stub.command.into_iter();
    let name = words.next().unwrap_or_default();
    let error = Command::new(&stub.program).arg0(&name).args(words).exec();
    let failure = Failure::new(exit::NOT_EXECUTABLE, format_args!("{}: {error}", stub.program.display()));
    // The parent puts the key back then. This end of its pipe is opened only here: the command inherits nothing of it.
    let report = format!("/proc/{}/fd/{}", stub.parent, stub.report);
    let report = || File::options().write(true).open(report).and_then(|mut report| write!(report, "{failure}"));
    if descendants::proc_is_ours() && report().is_ok() { Failure::new(exit::NOT_EXECUTABLE, "") } else { failure }
}

/// Linux: this process is killed when its parent ends, however that happens.
pub fn die_with(parent: i32) -> Result<(), Failure> {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| Failure::new(exit::NOT_EXECUTABLE, error))?;
        // It may have ended before.
        if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent) {
            return Err(Failure::new(exit::LOST, "its parent is gone"));
        }
    }
    Ok(())
}
