//! The process that becomes the command. It ends with the program that started it.

use std::{fs::File, io::Write as _, os::fd::AsFd as _, os::unix::process::CommandExt as _, process::Command};

use nix::unistd::{Uid, User, setgid, setuid};
use rustix::{
    fs::{self, Mode},
    process::umask,
};

use crate::{
    args::process::{Beginning, Stub},
    exit::{self, Failure},
    process::{child::die_with_parent, descendants, surroundings::user_of_commands},
};

/// Becomes the command. On Linux, the process is killed when its parent ends, for whatever reason.
pub fn become_command(stub: Stub) -> Failure {
    if let Err(failure) = die_with_parent(stub.parent) {
        return failure;
    }
    // The write end of the parent's pipe is opened only here, so that the command does not inherit
    // it, and before the user changes, who may not open it.
    let report = format!("/proc/{}/fd/{}", stub.parent, stub.report);
    let report = descendants::proc_is_ours().then(|| File::options().write(true).open(report).ok()).flatten();
    let mut words = stub.command.into_iter();
    let name = words.next().unwrap_or_default();
    let mut command = Command::new(&stub.program);
    command.arg0(&name).args(words);
    let why = match begin(&stub.beginning, &mut command) {
        // The kernel forgets the signal when the user changes.
        Ok(()) => match die_with_parent(stub.parent) {
            Ok(()) => format!("{}: {}", stub.program.display(), command.exec()),
            Err(failure) => return failure,
        },
        Err(why) => why,
    };
    // The parent then ends the claim.
    let failure = Failure::new(exit::NOT_EXECUTABLE, why);
    match report.map(|mut report| write!(report, "{failure}")) {
        Some(Ok(())) => Failure::silent(exit::NOT_EXECUTABLE),
        _ => failure,
    }
}

/// Gives this process the user, the folder and the permissions that the command is to have.
fn begin(beginning: &Beginning, command: &mut Command) -> Result<(), String> {
    if let Some(mask) = beginning.umask {
        umask(Mode::from_raw_mode(mask));
    }
    if let Some(name) = &beginning.user {
        let user = user_of_commands(name)?;
        if user.uid != Uid::effective() {
            become_user(&user).map_err(|error| format!("the command could not become user {name}: {error}"))?;
        }
        let home = user.dir.as_os_str();
        for (variable, value) in [("HOME", home), ("USER", name.as_ref()), ("LOGNAME", name.as_ref())] {
            if std::env::var_os(variable).is_none() {
                command.env(variable, value);
            }
        }
    }
    // After the change of user, who may have a folder that root cannot enter.
    let Some(folder) = &beginning.cwd else { return Ok(()) };
    std::env::set_current_dir(folder).map_err(|error| format!("cwd: {}: {error}", folder.display()))
}

/// Gives up all rights of this process's user. The order matters: the last step forbids the others.
fn become_user(user: &User) -> nix::Result<()> {
    // A command may open its own output by name, as /dev/stderr.
    for output in [std::io::stdout().as_fd(), std::io::stderr().as_fd()] {
        let (uid, gid) = (fs::Uid::from_raw(user.uid.as_raw()), fs::Gid::from_raw(user.gid.as_raw()));
        let _ = fs::fchown(output, Some(uid), Some(gid));
    }
    #[cfg(not(target_vendor = "apple"))]
    nix::unistd::initgroups(&std::ffi::CString::new(user.name.as_str()).map_err(|_| nix::Error::EINVAL)?, user.gid)?;
    setgid(user.gid)?;
    setuid(user.uid)
}
