//! The signals that ask the program to stop.

use std::{pin::pin, time::Duration};

use rustix::process::Signal;
use tokio::{
    signal::unix::{Signal as Signals, SignalKind, signal},
    time::timeout,
};

use crate::exit::{Failure, NOT_EXECUTABLE};

/// How long the last request to the database may take after a signal.
pub const SOON: Duration = Duration::from_secs(1);

/// The signals that ask the program to stop. A signal that was ignored when the program began, as
/// under `nohup`, stays ignored, by the command too.
pub struct Asked {
    terminate: Option<Signals>,
    interrupt: Option<Signals>,
    hang_up: Option<Signals>,
    quit: Option<Signals>,
}

impl Asked {
    pub fn listen() -> Result<Self, Failure> {
        // SIGCHLD is handled before any child begins, and permanently: the program may have been
        // started with that signal ignored.
        listen(SignalKind::child())?;
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hang_up: listen(SignalKind::hangup())?,
            quit: listen(SignalKind::quit())?,
        })
    }

    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            () = came(&mut self.terminate) => Signal::TERM,
            () = came(&mut self.interrupt) => Signal::INT,
            () = came(&mut self.hang_up) => Signal::HUP,
            () = came(&mut self.quit) => Signal::QUIT,
        }
    }

    /// Waits for a request to the database, which may be out of reach: for `limit` (at least one
    /// second), or for one second after another signal that asks the program to stop. The error
    /// states why the wait ended.
    pub async fn within<T>(&mut self, limit: Duration, told: impl Future<Output = T>) -> Result<T, String> {
        let limit = limit.max(SOON);
        let late = |_| format!("no answer within {limit:?}");
        let mut told = pin!(timeout(limit, told));
        tokio::select! {
            biased;
            told = &mut told => return told.map_err(late),
            _ = self.next() => {}
        }
        timeout(SOON, told).await.map_err(|_| "asked to stop before it was".to_owned())?.map_err(late)
    }
}

/// Listens for a signal, unless it was ignored when the program began. SIGCHLD is always handled,
/// since the program could not wait for a child otherwise.
pub fn listen(kind: SignalKind) -> Result<Option<Signals>, Failure> {
    let ignored = if kind == SignalKind::child() { 0 } else { ignored_signals() >> (kind.as_raw_value() - 1) & 1 };
    match ignored {
        0 => signal(kind).map(Some).map_err(|error| Failure::new(NOT_EXECUTABLE, error)),
        _ => Ok(None),
    }
}

pub async fn came(signals: &mut Option<Signals>) {
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

pub fn number(signal: Signal) -> u8 {
    u8::try_from(signal.as_raw()).unwrap_or_default()
}
