//! `list` and `watch`: the table, for people and for programs.

use std::{io::IsTerminal as _, time::Duration};

use anstyle::{AnsiColor, Style};
use chrono::{DateTime, SecondsFormat, Utc};
use rowlock::{Database, Error, LeaseLock, ListOptions, LockInfo, State};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr as _;

use crate::{
    exit::{self, Failure},
    operators::{List, Watch},
    out::{self, printable},
    queues::{Queues, text},
};

pub async fn list<DB: Database>(lock: &LeaseLock<DB>, list: &List) -> Result<u8, Failure> {
    let entries = all(lock, list.held).await?;
    let queues = Queues::if_possible(lock).await;
    if list.json {
        out::say_json(&Value::Array(objects(&entries, &queues)))?;
    } else {
        out::say(table(&entries, &queues))?;
    }
    Ok(exit::OK)
}

/// Returns how long the last claim lasted, if it has ended.
pub fn duration(entry: &LockInfo) -> Option<Duration> {
    (entry.ended.filter(|_| entry.holder.is_none())? - entry.since?).to_std().ok()
}

pub async fn watch<DB: Database>(lock: &LeaseLock<DB>, watch: &Watch) -> Result<u8, Failure> {
    // The screen is cleared together with the output of the table, to avoid flicker.
    let (top, rest) = if std::io::stdout().is_terminal() { ("\x1b[H\x1b[2J", "") } else { ("", "\n") };
    loop {
        let (entries, queues) = (all(lock, watch.held).await?, Queues::read(lock).await.unwrap_or_default());
        let table = table(&entries, &queues);
        out::say(format_args!("{top}{}  {} keys\n{table}{rest}", clock(Utc::now()), entries.len()))?;
        tokio::time::sleep(watch.every).await;
    }
}

async fn all<DB: Database>(lock: &LeaseLock<DB>, held: bool) -> Result<Vec<LockInfo>, Error> {
    pages(lock, &if held { ListOptions::default().held() } else { ListOptions::default() }).await
}

/// Returns all rows that are selected, page by page.
pub async fn pages<DB: Database>(lock: &LeaseLock<DB>, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
    const PAGE: u32 = 1000;
    let mut entries: Vec<LockInfo> = Vec::new();
    loop {
        let after = entries.last().map(|entry| entry.key.clone()).unwrap_or_default();
        let page = lock.list(&filter.clone().after(&after).limit(PAGE)).await?;
        let last = page.len() < PAGE as usize;
        entries.extend(page);
        if last {
            return Ok(entries);
        }
    }
}

pub fn table(entries: &[LockInfo], queues: &Queues) -> String {
    const HEADER: [&str; 7] = ["KEY", "STATE", "SINCE", "UNTIL", "WHO", "WAITING", "TOKEN"];
    let time = |time: Option<DateTime<Utc>>| time.map_or_else(|| "-".into(), clock);
    let rows: Vec<(Style, [String; 7])> = std::iter::once((Style::new().bold(), HEADER.map(str::to_owned)))
        .chain(entries.iter().map(|entry| {
            let who = if entry.by.is_empty() { "-" } else { &entry.by };
            let (state, token) = (entry.state.to_string(), entry.token.to_string());
            let (key, who, waiting) = (printable(&entry.key), printable(who), text(queues.of(&entry.key)));
            (style(entry.state), [key, state, time(entry.since), time(entry.until), who, waiting, token])
        }))
        .collect();
    aligned(&rows)
}

/// Aligns the columns of a table. The last one is not padded.
pub fn aligned<const N: usize>(rows: &[(Style, [String; N])]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| match column + 1 < N {
        true => rows.iter().map(|(_, cells)| cells[column].width()).max().unwrap_or_default() + 2,
        false => 0,
    });
    let line = |(style, cells): &(Style, [String; N])| {
        let padded = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell}{}", " ".repeat(width.saturating_sub(cell.width()))));
        format!("{style}{}{style:#}", padded.collect::<String>().trim_end())
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Describes the claim of a row: its state, by whom, and since when.
pub fn claim(row: &LockInfo) -> String {
    let by = if row.by.is_empty() { String::new() } else { format!(" by {}", row.by) };
    let since = row.since.map(|since| format!(" since {}", clock(since))).unwrap_or_default();
    let verb = if is_claimed(row.state) { "" } else { ", last taken" };
    format!("{}{verb}{by}{since}", row.state)
}

pub fn is_claimed(state: State) -> bool {
    matches!(state, State::Held | State::Expired | State::HeldByAnotherProgram)
}

pub fn style(state: State) -> Style {
    let colour = match state {
        State::Held => AnsiColor::Green,
        State::Expired | State::WithinWindow => AnsiColor::Yellow,
        State::Failed => AnsiColor::Red,
        State::HeldByAnotherProgram => AnsiColor::Cyan,
        _ => return Style::new(),
    };
    Style::new().fg_color(Some(colour.into()))
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

pub fn clock(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

pub fn precise(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}
