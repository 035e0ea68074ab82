//! The process that becomes the command. It ends with the program that started it.

use std::{fs::File, io::Write as _, os::unix::process::CommandExt as _, process::Command};

use crate::{
    args::claims::Stub,
    exit::{self, Failure},
    process::{descendants, parent::die_with},
};

/// Becomes the command. On Linux, the process is killed when its parent ends, for whatever reason.
pub fn become_command(stub: Stub) -> Failure {
    if let Err(failure) = die_with(stub.parent) {
        return failure;
    }
    let mut words = stub.command.into_iter();
    let name = words.next().unwrap_or_default();
    let error = Command::new(&stub.program).arg0(&name).args(words).exec();
    let failure = Failure::new(exit::NOT_EXECUTABLE, format_args!("{}: {error}", stub.program.display()));
    // The parent then ends the claim. The write end of its pipe is opened only here, so that the
    // command does not inherit it.
    let report = format!("/proc/{}/fd/{}", stub.parent, stub.report);
    let report = || File::options().write(true).open(report).and_then(|mut report| write!(report, "{failure}"));
    if descendants::proc_is_ours() && report().is_ok() { Failure::new(exit::NOT_EXECUTABLE, "") } else { failure }
}
