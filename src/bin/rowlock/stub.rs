//! The command's own beginning: it is to die with the program that started it.

use std::process::Command;

use crate::{
    args::Stub,
    exit::{self, Failure},
};

/// Becomes the command, on Linux with a signal for when its parent dies, however that happens.
pub fn become_command(stub: Stub) -> Failure {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{Signal, getppid, set_parent_process_death_signal};
        if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
            return Failure::new(exit::NOT_EXECUTABLE, error);
        }
        // It may have died before.
        if getppid().map(|parent| parent.as_raw_nonzero().get()) != Some(stub.parent) {
            return Failure::new(exit::LOST, "its parent is gone");
        }
    }
    let mut words = stub.command.into_iter();
    let name = words.next().unwrap_or_default();
    let mut command = Command::new(&stub.program);
    std::os::unix::process::CommandExt::arg0(&mut command, &name).args(words);
    let error = std::os::unix::process::CommandExt::exec(&mut command);
    Failure::new(exit::NOT_EXECUTABLE, format_args!("{}: {error}", stub.program.display()))
}
