//! What the program says: on one line where it is one thing, and never with a panic, whoever has stopped reading.

use std::{
    fmt::Display,
    io::{ErrorKind, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    process::getpgrp,
    termios::{LocalModes, tcgetattr, tcgetpgrp},
};

use serde_json::Value;

use crate::exit::{Failure, IO, SIGNAL};

const SIGPIPE: u8 = 13;

/// What was asked for, on stdout.
pub fn say(text: impl Display) -> Result<(), Failure> {
    let mut out = anstream::stdout().lock();
    let said = writeln!(out, "{text}").and_then(|()| out.flush());
    said.map_err(|error| match error.kind() {
        // It has read enough: `rowlock list | head -1`. The shell is told as by any other program.
        ErrorKind::BrokenPipe => Failure::new(SIGNAL + SIGPIPE, ""),
        _ => Failure::new(IO, format_args!("stdout: {error}")),
    })
}

/// For programs. Control characters that JSON would let stand are escaped, so that a terminal may show it.
pub fn say_json(value: &Value) -> Result<(), Failure> {
    let escape = |c: char| if c.is_control() { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    say(value.to_string().chars().map(escape).collect::<String>())
}

/// What went wrong, on stderr. Where nobody can be told, the work goes on.
pub fn complain(text: impl Display) {
    let line = format!("rowlock: {}\n", printable(&text.to_string()));
    // In one piece: the command writes to the same stderr.
    let _ = stderr().write_all(line.as_bytes());
}

static NEVER_STOP: AtomicBool = AtomicBool::new(false);

/// For a process that renews a lease: a terminal with `stty tostop` suspends those that write to it from the background.
pub fn never_stop() {
    NEVER_STOP.store(true, Ordering::Relaxed);
}

/// Where nothing is written that would suspend the process.
pub fn stderr() -> Box<dyn Write> {
    let err = std::io::stderr();
    let stops = || {
        tcgetattr(&err).is_ok_and(|terminal| terminal.local_modes.contains(LocalModes::TOSTOP))
            && tcgetpgrp(&err).is_ok_and(|foreground| foreground != getpgrp())
    };
    match NEVER_STOP.load(Ordering::Relaxed) && stops() {
        true => Box::new(std::io::sink()),
        false => Box::new(anstream::AutoStream::auto(err)),
    }
}

/// What others wrote into the table moves no cursor here, and turns no text around.
pub fn printable(text: &str) -> String {
    let moves = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if moves(c) { '?' } else { c }).collect()
}
