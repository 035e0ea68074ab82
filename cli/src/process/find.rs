//! The search for the command, which is made before the key is claimed.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read as _,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND};

/// Looks for the command along the `PATH` of this process, from its folder.
pub fn find(command: &[impl AsRef<OsStr>]) -> Result<PathBuf, Failure> {
    find_in(command, std::env::var_os("PATH").as_deref(), Path::new("."))
}

pub fn find_in(command: &[impl AsRef<OsStr>], path: Option<&OsStr>, folder: &Path) -> Result<PathBuf, Failure> {
    let name = command.first().map(AsRef::as_ref).unwrap_or_default();
    let which = |name: &OsStr| which::which_in(name, path, std::path::absolute(folder).unwrap_or_default());
    let program = which(name).map_err(|_| {
        let there = name.as_encoded_bytes().contains(&b'/') && folder.join(name).exists();
        let (code, why) = if there { (NOT_EXECUTABLE, "cannot be run") } else { (NOT_FOUND, "command not found") };
        Failure::new(code, format_args!("{}: {why}", name.display()))
    })?;
    match interpreter(&program) {
        // An interpreter path without a slash is resolved in the command's folder, not along PATH.
        Some(interpreter) if which(Path::new(".").join(&interpreter).as_os_str()).is_err() => Err(Failure::new(
            NOT_EXECUTABLE,
            format_args!("{}: its interpreter {} cannot be run", name.display(), interpreter.display()),
        )),
        _ => Ok(program),
    }
}

/// Returns the path after `#!` in a script's first line; `None` for a script that may be executed
/// but not read.
fn interpreter(program: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(program).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let path = line.trim_ascii_start().split(|byte| b" \t".contains(byte)).next()?;
    (!path.is_empty()).then(|| OsStr::from_bytes(path).into())
}

/// Returns the path of this program, also if its file was replaced while it waited for the key.
pub fn this_program() -> Result<PathBuf, Failure> {
    if cfg!(target_os = "linux") {
        return Ok("/proc/self/exe".into());
    }
    std::env::current_exe()
        .map_err(|error| Failure::new(NOT_EXECUTABLE, format_args!("the program could not find its own file: {error}")))
}
