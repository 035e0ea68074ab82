//! The rows of keys, for people and for programs.

use std::time::Duration;

use anstyle::{AnsiColor, Style};
use chrono::{DateTime, Utc};
use rowlock::admin::{LockInfo, LockState};
use serde_json::{Value, json};

use crate::{
    format::{clock, precise, tabular},
    keys::{
        names::is_claimed,
        queues::{Queues, text},
    },
    out::printable,
};

pub fn table(entries: &[LockInfo], queues: &Queues) -> String {
    const HEADER: [&str; 7] = ["KEY", "STATE", "SINCE", "UNTIL", "BY", "WAITING", "TOKEN"];
    let time = |time: Option<DateTime<Utc>>| time.map_or_else(|| "-".into(), clock);
    let row = |entry: &LockInfo| {
        let who = if entry.by.is_empty() { "-" } else { &entry.by };
        let (state, token) = (entry.state.to_string(), entry.token.to_string());
        let (key, who, waiting) = (printable(&entry.key), printable(who), text(queues.of(&entry.key)));
        (style(entry.state), [key, state, time(entry.since), time(entry.until), who, waiting, token])
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
