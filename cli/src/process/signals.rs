//! The signals that ask the program to stop.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tokio::{
    signal::unix::{Signal as Signals, SignalKind, signal},
    time::timeout,
};

use crate::exit::{Failure, NOT_EXECUTABLE, SIGNAL};

/// How long the last request to the database may take after a signal.
pub const SOON: Duration = Duration::from_secs(1);

/// The signals that ask the program to stop. A signal that was ignored when the program began, as
/// under `nohup`, stays ignored, by the command too.
pub struct StopSignals {
    terminate: Option<Signals>,
    interrupt: Option<Signals>,
    hang_up: Option<Signals>,
    quit: Option<Signals>,
    /// When the command was last left to handle an interrupt by itself.
    interrupted: Option<Instant>,
    /// The last signal that was received, unless it was left to the command.
    received: Option<Signal>,
}

/// How much later than the command this program may receive a signal that is sent to both.
const SIGNAL_DELAY: Duration = Duration::from_millis(250);

impl StopSignals {
    pub fn listen() -> Result<Self, Failure> {
        // SIGCHLD is handled before any child begins, and permanently: the program may have been
        // started with that signal ignored.
        listen(SignalKind::child())?;
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
            quit: listen(SignalKind::quit())?,
            interrupted: None,
            received: None,
        })
    }

    /// Returns the next signal that asks a command to stop. On a terminal, a command handles the
    /// interrupt key by itself, and only a second one within `stop_timeout` asks it to stop.
    pub async fn for_command(&mut self, on_terminal: bool, stop_timeout: Duration) -> Signal {
        loop {
            match self.next().await {
                Signal::INT if on_terminal => {
                    if self.is_interrupted(stop_timeout) {
                        return Signal::TERM;
                    }
                    self.interrupted = Some(Instant::now());
                    self.received = None;
                }
                signal => return signal,
            }
        }
    }

    /// Returns whether a command that has failed may have done so because of a signal. On a
    /// terminal, the signals of its keys may reach the command first.
    pub async fn has_stopped_the_command(&mut self, stop_timeout: Duration) -> bool {
        self.is_interrupted(stop_timeout) || timeout(SIGNAL_DELAY, self.next()).await.is_ok()
    }

    fn is_interrupted(&self, stop_timeout: Duration) -> bool {
        self.interrupted.is_some_and(|at| at.elapsed() <= stop_timeout)
    }

    pub async fn next(&mut self) -> Signal {
        let signal = tokio::select! {
            () = received(&mut self.terminate) => Signal::TERM,
            () = received(&mut self.interrupt) => Signal::INT,
            () = received(&mut self.hang_up) => Signal::HUP,
            () = received(&mut self.quit) => Signal::QUIT,
        };
        self.received = Some(signal);
        signal
    }

    /// Returns the signal that asked the program to stop, if one has: for work that went on after
    /// it.
    pub fn asked(&self) -> Option<Signal> {
        self.received
    }

    /// Waits for a request to the database, which may be out of reach: for `limit` (at least one
    /// second), or for one second after another signal that asks the program to stop. The error
    /// states why the wait ended.
    pub async fn within<T>(&mut self, limit: Duration, request: impl Future<Output = T>) -> Result<T, String> {
        let limit = limit.max(SOON);
        let late = |_| format!("no reply within {limit:?}");
        let mut request = pin!(timeout(limit, request));
        tokio::select! {
            biased;
            reply = &mut request => return reply.map_err(late),
            _ = self.next() => {}
        }
        timeout(SOON, request).await.map_err(|_| "asked to stop before it was".to_owned())?.map_err(late)
    }
}

/// Listens for a signal, unless it was ignored when the program began. SIGCHLD is always handled,
/// since the program could not wait for a child otherwise.
pub fn listen(kind: SignalKind) -> Result<Option<Signals>, Failure> {
    let ignored = if kind == SignalKind::child() { 0 } else { ignored_signals() >> (kind.as_raw_value() - 1) & 1 };
    match ignored {
        0 => signal(kind).map(Some).map_err(|error| {
            Failure::new(NOT_EXECUTABLE, format_args!("the program could not listen for signals: {error}"))
        }),
        _ => Ok(None),
    }
}

pub async fn received(signals: &mut Option<Signals>) {
    match signals {
        Some(signals) => drop(signals.recv().await),
        None => std::future::pending().await,
    }
}

/// Returns the mask of ignored signals, one bit for each, where the system provides it; otherwise
/// zero.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// Returns the exit code of a program that a signal asked to stop.
pub fn exit_code(signal: Signal) -> u8 {
    SIGNAL + u8::try_from(signal.as_raw()).unwrap_or_default()
}
