//! `list` and `watch`: the rows of keys, and how many wait for them, for people and for programs.

use std::{collections::HashMap, fmt::Display, io::IsTerminal as _, time::Duration};

use anstyle::{AnsiColor, Style};
use chrono::Utc;
use rowlock::{
    Database, Error, LeaseLock,
    admin::{ListOptions, LockInfo, LockState},
};
use serde_json::{Value, json};

use crate::{
    args::keys::{List, Watch},
    exit::Failure,
    format::{clock, clock_or_dash, or_dash, precise, tabular},
    keys::names::{is_claimed, pages, queue},
    out::{self, printable},
};

pub async fn list<DB: Database>(lock: &LeaseLock<DB>, list: &List) -> Result<u8, Failure> {
    let entries = all(lock, list.claimed).await?;
    let queues = Queues::if_possible(lock).await;
    if list.json {
        out::say_json(&Value::Array(objects(&entries, &queues)))
    } else {
        out::say(table(&entries, &queues))
    }
}

pub async fn watch<DB: Database>(lock: &LeaseLock<DB>, watch: &Watch) -> Result<u8, Failure> {
    // The screen is cleared together with the output of the table, to avoid flicker.
    let (top, rest) = if std::io::stdout().is_terminal() { ("\x1b[H\x1b[2J", "") } else { ("", "\n") };
    loop {
        let (entries, queues) = (all(lock, watch.claimed).await?, Queues::read(lock).await.unwrap_or_default());
        let table = table(&entries, &queues);
        out::say(format_args!("{top}{}  {} keys\n{table}{rest}", clock(Utc::now()), entries.len()))?;
        tokio::time::sleep(watch.every).await;
    }
}

async fn all<DB: Database>(lock: &LeaseLock<DB>, claimed: bool) -> Result<Vec<LockInfo>, Error> {
    pages(lock, &if claimed { ListOptions::default().claimed() } else { ListOptions::default() }).await
}

pub fn table(entries: &[LockInfo], queues: &Queues) -> String {
    const HEADER: [&str; 7] = ["KEY", "STATE", "SINCE", "UNTIL", "BY", "WAITING", "TOKEN"];
    let row = |entry: &LockInfo| {
        let (state, token) = (entry.state.to_string(), entry.token.to_string());
        let (key, who, waiting) =
            (printable(&entry.key), printable(or_dash(&entry.by)), waiters(queues.of(&entry.key)));
        let (since, until) = (clock_or_dash(entry.since), clock_or_dash(entry.until));
        (style(entry.state), [key, state, since, until, who, waiting, token])
    };
    tabular(HEADER, entries.iter().map(row))
}

/// Describes the claim of a row: its state, by whom, and since when.
pub fn claim(row: &LockInfo) -> String {
    let verb = if is_claimed(row.state) { "" } else { ", last taken" };
    format!("{}{verb}{}", row.state, by_and_since(row))
}

pub fn by_and_since(row: &LockInfo) -> String {
    let by = if row.by.is_empty() { String::new() } else { format!(" by {}", row.by) };
    let since = row.since.map(|since| format!(" since {}", clock(since))).unwrap_or_default();
    format!("{by}{since}")
}

pub fn style(state: LockState) -> Style {
    let colour = match state {
        LockState::Held => AnsiColor::Green,
        LockState::Expired | LockState::WithinMinInterval => AnsiColor::Yellow,
        LockState::Failed => AnsiColor::Red,
        LockState::HeldByAnotherProgram => AnsiColor::Cyan,
        _ => return Style::new(),
    };
    colour.on_default()
}

pub fn objects(entries: &[LockInfo], queues: &Queues) -> Vec<Value> {
    entries.iter().map(|entry| object(entry, queues.of(&entry.key))).collect()
}

pub fn object(entry: &LockInfo, waiting: Option<u64>) -> Value {
    json!({
        "key": entry.key,
        "state": entry.state.name(),
        "status": entry.status,
        "since": entry.since.map(precise),
        "until": entry.until.map(precise),
        "ended": entry.ended.map(precise),
        "by": entry.by,
        "waiting": waiting,
        "token": entry.token.get(),
        "holder": entry.holder.map(|holder| holder.to_string()),
        "duration": duration(entry).map(|duration| duration.as_secs_f64()),
    })
}

/// Describes the status of the work under the last claim.
pub fn work_status(entry: &LockInfo) -> &str {
    match entry.status.as_str() {
        "S" => "succeeded",
        "F" => "failed",
        "P" if matches!(entry.state, LockState::Held | LockState::HeldByAnotherProgram) => "in progress",
        "P" => "not ended",
        other => other,
    }
}

/// Returns how long the last claim lasted, if it has ended.
pub fn duration(entry: &LockInfo) -> Option<Duration> {
    (entry.ended.filter(|_| entry.holder.is_none())? - entry.since?).to_std().ok()
}

/// How many tickets each queue has, if that is known.
#[derive(Default)]
pub struct Queues(Option<HashMap<String, u64>>);

impl Queues {
    pub async fn read<DB: Database>(lock: &LeaseLock<DB>) -> Result<Self, Error> {
        Ok(Self(Some(lock.queue_lengths().await?.into_iter().collect())))
    }

    /// Reads the queues, or says why they are not known.
    pub async fn if_possible<DB: Database>(lock: &LeaseLock<DB>) -> Self {
        or_unknown(Self::read(lock).await, "how many wait")
    }

    /// Returns how many wait for a key, or for a permit of a name.
    pub fn of(&self, key: &str) -> Option<u64> {
        self.0.as_ref().map(|lengths| lengths.get(&*queue(key)).copied().unwrap_or_default())
    }

    /// Returns how many wait for a name and for its permits.
    pub fn of_name(&self, name: &str) -> Option<u64> {
        Some(self.of(name)? + self.of(&format!("{name}#"))?)
    }
}

/// Returns what was read beside a key, or says why it is not known: rights on the table of locks
/// are enough for a key.
pub fn or_unknown<T: Default>(read: Result<T, Error>, what: impl Display) -> T {
    read.unwrap_or_else(|error| {
        out::print_warning(format_args!("{what} is not known: {error:?}"));
        T::default()
    })
}

/// Writes for people how many wait.
pub fn waiters(waiting: Option<u64>) -> String {
    match waiting {
        None => "?".to_owned(),
        Some(0) => "-".to_owned(),
        Some(number) => number.to_string(),
    }
}
