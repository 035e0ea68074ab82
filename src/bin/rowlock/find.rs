//! Whether the command can be run: looked for before the key is taken.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read as _,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND};

pub fn find(command: &[impl AsRef<OsStr>]) -> Result<PathBuf, Failure> {
    let name = command.first().map(AsRef::as_ref).unwrap_or_default();
    let program = which::which(name).map_err(|_| {
        let there = name.as_encoded_bytes().contains(&b'/') && Path::new(name).exists();
        let (code, why) = if there { (NOT_EXECUTABLE, "cannot be run") } else { (NOT_FOUND, "command not found") };
        Failure::new(code, format_args!("{}: {why}", name.display()))
    })?;
    match interpreter(&program) {
        // A path without a slash is looked for in this folder, not along PATH.
        Some(interpreter) if which::which(Path::new(".").join(&interpreter)).is_err() => Err(Failure::new(
            NOT_EXECUTABLE,
            format_args!("{}: its interpreter {} cannot be run", name.display(), interpreter.display()),
        )),
        _ => Ok(program),
    }
}

/// What stands behind `#!` in a script's first line; none for a script that may be run and not read.
fn interpreter(program: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(program).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let path = line.trim_ascii_start().split(|byte| b" \t".contains(byte)).next()?;
    (!path.is_empty()).then(|| OsStr::from_bytes(path).into())
}
