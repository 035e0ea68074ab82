//! `list`, `show` and `watch`: the table, for people and for programs.

use std::{io::IsTerminal as _, time::Duration};

use anstyle::{AnsiColor, Style};
use chrono::{DateTime, SecondsFormat, Utc};
use rowlock::{Database, Error, LeaseLock, ListOptions, LockInfo, ScheduleInfo, Schedules, State};
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr as _;

use crate::{
    exit::{self, Failure},
    operators::{List, Show, Watch},
    out::{self, printable},
    schedule,
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

/// Shows a key, and the schedule of that name with its last runs.
pub async fn one<DB: Database>(lock: &LeaseLock<DB>, schedules: &Schedules<DB>, show: &Show) -> Result<u8, Failure> {
    let key = show.key.as_str();
    let entry = lock.inspect(key).await?;
    let schedule = match schedules.inspect(key).await {
        Err(Error::ScheduleTablesMissing) => None,
        // Rights on the table of locks are enough for a key.
        Err(error) if entry.is_some() => {
            out::print_error(format_args!("{key}: whether a schedule has this name is not known: {error:?}"));
            None
        }
        found => found?,
    };
    if entry.is_none() && schedule.is_none() {
        let text =
            format_args!("{key:?} has no row: it was never taken, or was forgotten; and no schedule has this name");
        return Err(Failure::new(exit::REFUSED, text));
    }
    let runs = if schedule.is_some() { schedules.history(key, RUNS).await? } else { Vec::new() };
    if show.json {
        let mut shown = entry.as_ref().map_or_else(|| json!({ "key": key }), object);
        shown["schedule"] = schedule.as_ref().map_or(Value::Null, schedule::show::object);
        shown["runs"] = runs.iter().map(schedule::show::run_object).collect();
        out::say_json(&shown)?;
        return Ok(exit::OK);
    }
    let entry = entry.map(|entry| aligned(&lines(&entry)));
    let schedule = schedule.map(|schedule| about(&schedule));
    let runs = (!runs.is_empty()).then(|| schedule::show::table(&runs));
    out::say(entry.into_iter().chain(schedule).chain(runs).collect::<Vec<_>>().join("\n\n"))?;
    Ok(exit::OK)
}

/// How many runs of a schedule are shown with it.
const RUNS: u32 = 10;

/// Describes a key, one fact a line.
fn lines(entry: &LockInfo) -> Vec<(Style, [String; 2])> {
    let time = |time: Option<DateTime<Utc>>| time.map_or_else(|| "-".into(), clock);
    let status = match entry.status.as_str() {
        "S" => "succeeded",
        "F" => "failed",
        "P" if entry.state == State::Held => "in progress",
        "P" => "not ended",
        other => other,
    };
    let so_far = || (entry.now - entry.since?).to_std().ok().filter(|_| entry.state == State::Held);
    let took = match (duration(entry), so_far()) {
        (Some(took), _) => text(took),
        (None, Some(took)) => format!("{} so far", text(took)),
        (None, None) => "-".to_owned(),
    };
    let who = if entry.by.is_empty() { "-" } else { &entry.by };
    let line = |name: &str, value: &str| (Style::new(), [name.to_owned(), printable(value)]);
    let mut lines = vec![
        line("KEY", &entry.key),
        line("STATE", &entry.state.to_string()),
        line("STATUS", status),
        line("WHO", who),
        line("SINCE", &time(entry.since)),
        line("UNTIL", &time(entry.until)),
        line("ENDED", &time(entry.ended)),
        line("DURATION", &took),
        line("TOKEN", &entry.token.to_string()),
    ];
    lines[1].0 = style(entry.state);
    lines
}

fn about(schedule: &ScheduleInfo) -> String {
    let (times, next) = (schedule::show::times(schedule), clock(schedule.slot));
    let state = schedule::show::described(schedule);
    format!("schedule {}: {}, {state}, next at {next}", printable(&schedule.name), printable(&times))
}

/// Returns how long the last claim lasted, if it has ended.
fn duration(entry: &LockInfo) -> Option<Duration> {
    (entry.ended.filter(|_| entry.holder.is_none())? - entry.since?).to_std().ok()
}

/// Milliseconds are enough for a person.
fn text(duration: Duration) -> String {
    let millis = Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    humantime::format_duration(millis).to_string()
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
        "duration": duration(entry).map(|duration| duration.as_secs_f64()),
    })
}

pub fn clock(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

pub fn precise(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}
