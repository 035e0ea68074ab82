//! The wait for a key, and what a terminal shows of it.

use std::{convert::Infallible, io::IsTerminal as _, time::Duration};

use rowlock::{
    Database, LeaseLock,
    admin::{LockInfo, LockState},
};
use tokio::time::sleep;

use crate::{keys::rows::by_and_since, out};

/// The pause before the first look, so that a short wait shows nothing.
const FIRST: Duration = Duration::from_millis(500);
/// The interval between two looks for the holder.
const EVERY: Duration = Duration::from_secs(3);

/// Waits for a request for keys, any of which may be the one that is waited for. If stderr is a
/// terminal, a line tells what is waited for, and another one when that changes.
pub async fn show_during<DB: Database, T>(lock: &LeaseLock<DB>, keys: &[&str], request: impl Future<Output = T>) -> T {
    if !std::io::stderr().is_terminal() {
        return request.await;
    }
    tokio::select! {
        biased;
        reply = request => reply,
        never = tell(lock, keys) => match never {},
    }
}

async fn tell<DB: Database>(lock: &LeaseLock<DB>, keys: &[&str]) -> Infallible {
    let mut said = String::new();
    sleep(FIRST).await;
    loop {
        let text = match first_held(lock, keys).await {
            Some(row) => format!("{}: {}{}; waiting", row.key, row.state, by_and_since(&row)),
            None => format!("{}: waiting", keys.first().copied().unwrap_or_default()),
        };
        if text != said {
            out::print_info(&text);
            said = text;
        }
        sleep(EVERY).await;
    }
}

/// Returns the first key that is held. A database that does not reply shows no holder.
async fn first_held<DB: Database>(lock: &LeaseLock<DB>, keys: &[&str]) -> Option<LockInfo> {
    for key in keys {
        let row = lock.inspect(key).await.ok().flatten();
        if let Some(row) = row.filter(|row| row.state != LockState::Free) {
            return Some(row);
        }
    }
    None
}
