//! `list`, `show` and `watch`: the table, for people and for programs.

use std::io::IsTerminal as _;

use anstyle::{AnsiColor, Style};
use chrono::{DateTime, SecondsFormat, Utc};
use rowlock::{Database, LeaseLock, ListOptions, LockInfo, State};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr as _;

use crate::{
    args::{List, Show, Watch},
    exit::{self, Failure},
    out::{self, printable},
};

pub async fn list<DB: Database>(lock: &LeaseLock<DB>, list: &List) -> Result<u8, Failure> {
    let entries = all(lock, list.held).await?;
    if list.json {
        out::say_json(&Value::Array(entries.iter().map(object).collect()))?;
    } else {
        out::say(table(&entries))?;
    }
    Ok(exit::OK)
}

pub async fn one<DB: Database>(lock: &LeaseLock<DB>, show: &Show) -> Result<u8, Failure> {
    let Some(entry) = lock.inspect(show.key.as_str()).await? else {
        return Err(Failure::new(
            exit::REFUSED,
            format_args!("{:?} has no row: it was never taken, or was forgotten", show.key.as_str()),
        ));
    };
    match show.json {
        true => out::say_json(&object(&entry))?,
        false => out::say(table(&[entry]))?,
    }
    Ok(exit::OK)
}

pub async fn watch<DB: Database>(lock: &LeaseLock<DB>, watch: &Watch) -> Result<u8, Failure> {
    // The screen is cleared together with the output of the table, to avoid flicker.
    let (top, rest) = if std::io::stdout().is_terminal() { ("\x1b[H\x1b[2J", "") } else { ("", "\n") };
    loop {
        let entries = all(lock, watch.held).await?;
        out::say(format_args!("{top}{}  {} keys\n{}{rest}", clock(Utc::now()), entries.len(), table(&entries)))?;
        tokio::time::sleep(watch.every).await;
    }
}

async fn all<DB: Database>(lock: &LeaseLock<DB>, held: bool) -> Result<Vec<LockInfo>, Failure> {
    const PAGE: u32 = 1000;
    let filter = if held { ListOptions::default().held() } else { ListOptions::default() };
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

fn table(entries: &[LockInfo]) -> String {
    const HEADER: [&str; 6] = ["KEY", "STATE", "SINCE", "UNTIL", "WHO", "TOKEN"];
    let time = |time: Option<DateTime<Utc>>| time.map_or_else(|| "-".into(), clock);
    let rows: Vec<(Style, [String; 6])> = std::iter::once((Style::new().bold(), HEADER.map(str::to_owned)))
        .chain(entries.iter().map(|entry| {
            let who = if entry.by.is_empty() { "-" } else { &entry.by };
            let (state, token) = (entry.state.to_string(), entry.token.to_string());
            let cells = [printable(&entry.key), state, time(entry.since), time(entry.until), printable(who), token];
            (style(entry.state), cells)
        }))
        .collect();
    let width = |column: usize| rows.iter().map(|(_, cells)| cells[column].width()).max().unwrap_or_default();
    let widths = [0, 1, 2, 3, 4].map(width);
    let line = |(style, cells): &(Style, [String; 6])| {
        let padded =
            cells.iter().zip(widths).map(|(cell, width)| format!("{cell}{}  ", " ".repeat(width - cell.width())));
        format!("{style}{}{}{style:#}", padded.collect::<String>(), cells[5])
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn style(state: State) -> Style {
    let colour = match state {
        State::Held => AnsiColor::Green,
        State::Expired | State::WithinWindow => AnsiColor::Yellow,
        State::Failed => AnsiColor::Red,
        State::HeldByAnotherProgram => AnsiColor::Cyan,
        _ => return Style::new(),
    };
    Style::new().fg_color(Some(colour.into()))
}

fn object(entry: &LockInfo) -> Value {
    json!({
        "key": entry.key,
        "state": entry.state.name(),
        "status": entry.status,
        "since": entry.since.map(precise),
        "until": entry.until.map(precise),
        "ended": entry.ended.map(precise),
        "by": entry.by,
        "token": entry.token.get(),
        "holder": entry.holder.map(|holder| holder.to_string()),
    })
}

fn clock(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

pub fn precise(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}
