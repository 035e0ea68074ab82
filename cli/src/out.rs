//! The program's output. A message is one line, and a reader that has closed the stream causes no
//! panic. Messages, and the lines of the commands of `rowlock cron`, have writers of their own, so
//! that a reader that has stopped reading stops nothing else.

use std::{
    fmt::Display,
    io::{ErrorKind, IsTerminal as _, Write},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use chrono::Utc;
use rustix::{
    process::Signal,
    termios::{LocalModes, tcgetattr, tcgetpgrp},
};
use serde_json::{Value, json};

use crate::{
    exit::{Failure, IO, OK},
    format::precise,
    process::{descendants, signals::exit_code},
    secrets::masked,
    writer::Writer,
};

/// How long the end of the program waits for a reader.
const LAST: Duration = Duration::from_secs(2);

pub static STDERR: Writer = Writer::new(|| unless_it_stops(std::io::stderr()), |lines| dropped("stderr", lines));
pub static STDOUT: Writer = Writer::new(|| unless_it_stops(std::io::stdout()), |lines| dropped("stdout", lines));

/// Says that lines are missing. The caller is a writer's thread, which waits for none.
fn dropped(stream: &str, lines: u64) {
    STDERR.add_note(&line(
        "WARN",
        &format!("{stream} was not read, or could not be written: {lines} lines were dropped"),
    ));
}

/// Writes the requested output to stdout. Returns the exit code of a command that has said all.
pub fn say(text: impl Display) -> Result<u8, Failure> {
    let mut out = anstream::stdout().lock();
    written(writeln!(out, "{text}").and_then(|()| out.flush()))
}

/// Writes bytes to stdout as they are.
pub fn say_bytes(bytes: &[u8]) -> Result<u8, Failure> {
    let mut out = std::io::stdout().lock();
    written(out.write_all(bytes).and_then(|()| out.flush()))
}

fn written(said: std::io::Result<()>) -> Result<u8, Failure> {
    said.map(|()| OK).map_err(|error| match error.kind() {
        // The reader has closed the pipe, as in `rowlock list | head -1`. The exit code is that of
        // a process that SIGPIPE ended.
        ErrorKind::BrokenPipe => Failure::silent(exit_code(Signal::PIPE)),
        _ => Failure::new(IO, format_args!("stdout: {error}")),
    })
}

/// Writes JSON for programs.
pub fn say_json(value: &Value) -> Result<u8, Failure> {
    say(escaped(value))
}

/// Returns JSON. Control characters that JSON permits are escaped, so that it may be shown on a
/// terminal.
pub fn escaped(value: &Value) -> String {
    let escape = |c: char| if c.is_control() { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    value.to_string().chars().map(escape).collect()
}

/// Writes JSON while the caller goes on with other work: leases are renewed, signals are handled.
pub async fn say_json_aside(value: Value) -> Result<u8, Failure> {
    let said = tokio::task::spawn_blocking(move || say_json(&value)).await;
    said.unwrap_or_else(|error| Err(Failure::new(IO, format_args!("stdout: {error}"))))
}

/// Writes an error to stderr. If stderr cannot be written, the work continues.
pub fn print_error(text: impl Display) {
    print("ERROR", text);
}

/// Writes to stderr what is wrong, but no failure of the program's command.
pub fn print_warning(text: impl Display) {
    print("WARN", text);
}

/// Writes to stderr what the program does.
pub fn print_info(text: impl Display) {
    print("INFO", text);
}

fn print(level: &str, text: impl Display) {
    // The line is written in one call, since the command writes to the same stderr.
    STDERR.write(&line(level, &masked(&text.to_string())));
}

fn line(level: &str, text: &str) -> Vec<u8> {
    match is_json() {
        true => object(level, json!({ "message": text })),
        false => format!("rowlock: {}\n", printable(text)).into_bytes(),
    }
}

static JSON: AtomicBool = AtomicBool::new(false);

/// From now on, each line of the log is an object.
pub fn write_objects() {
    JSON.store(true, Ordering::Relaxed);
}

pub fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Returns a line of the log, in the form of those of events.
pub fn object(level: &str, mut line: Value) -> Vec<u8> {
    line["timestamp"] = precise(Utc::now()).into();
    line["level"] = level.into();
    format!("{line}\n").into_bytes()
}

/// What a notice begins with. No command prints it by accident.
pub const NOTICE: &[u8] = b"\x1erowlock\x1e";

/// Writes what the process above a command has done. `rowlock cron` tells it by its beginning from
/// what the command writes to the same stderr.
pub fn print_notice(text: impl Display) {
    let line = format!("rowlock: {}\n", printable(&text.to_string()));
    STDERR.write(&[NOTICE, line.as_bytes()].concat());
}

/// Writes why nothing was run. If that counts as success, cron would mail a line for each tick of
/// each machine: only a terminal shows it then.
pub fn print_refusal(why: impl Display, exit_code: u8) {
    if exit_code != OK || std::io::stderr().is_terminal() {
        print_error(format_args!("refused: {why}"));
    }
}

/// Waits for the last messages at the end of the program.
pub fn flush() {
    STDERR.flush(LAST);
    STDOUT.flush(LAST);
}

/// Stderr for those that format into a writer. One call writes one message.
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        STDERR.write(masked(&String::from_utf8_lossy(line)).as_bytes());
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static NEVER_STOP: AtomicBool = AtomicBool::new(false);

/// Marks a process that renews a lease and must not be suspended. A terminal with `stty tostop`
/// suspends background processes that write to it.
pub fn never_stop() {
    NEVER_STOP.store(true, Ordering::Relaxed);
}

/// Returns a stream, or a sink if a write to it would suspend the process.
fn unless_it_stops(stream: impl Write + AsFd + 'static) -> Box<dyn Write> {
    let stops = || {
        tcgetattr(&stream).is_ok_and(|terminal| terminal.local_modes.contains(LocalModes::TOSTOP))
            && tcgetpgrp(&stream).is_ok_and(|foreground| !descendants::is_own_group(foreground))
    };
    match NEVER_STOP.load(Ordering::Relaxed) && stops() {
        true => Box::new(std::io::sink()),
        false => Box::new(stream),
    }
}

/// Replaces control characters, line separators and bidirectional marks with `?`, so that text from
/// the table neither moves the cursor nor reverses the output.
pub fn printable(text: &str) -> String {
    let moves = |c: char| {
        c.is_control()
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().map(|c| if moves(c) { '?' } else { c }).collect()
}
