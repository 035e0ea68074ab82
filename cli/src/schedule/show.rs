//! `schedules` and `runs`.

use std::time::Duration;

use anstyle::{AnsiColor, Style};
use rowlock::{
    Database, Schedules,
    admin::{RunInfo, RunOptions, RunStatus, ScheduleInfo},
};
use serde_json::{Value, json};

use crate::{
    args::schedules,
    exit::{self, Failure},
    format::{clock, clock_or_dash, or_dash, precise, tabular},
    out::{self, printable},
    schedule::{
        state::{described, state, states},
        stats,
    },
};

pub async fn list<DB: Database>(schedules: &Schedules<DB>, json: bool) -> Result<u8, Failure> {
    const HEADER: [&str; 6] = ["NAME", "TIMES", "STATE", "NEXT", "BY", "TOKEN"];
    let all = schedules.list().await?;
    if json {
        return out::say_json(&all.iter().map(object).collect());
    }
    let row = |info: &ScheduleInfo| {
        let (times, token) = (times(info), info.token.to_string());
        let cells = [info.name.as_str(), &times, &described(info), &next(info), or_dash(&info.by), &token];
        (style(state(info)), cells.map(printable))
    };
    out::say(tabular(HEADER, all.iter().map(row)))
}

pub async fn runs<DB: Database>(schedules: &Schedules<DB>, runs: &schedules::Runs) -> Result<u8, Failure> {
    match &runs.name {
        _ if runs.running => return running(schedules, runs).await,
        Some(name) if runs.stats => return statistics(schedules, name.as_str(), runs).await,
        _ => {}
    }
    let mut options = RunOptions::default().limit(runs.limit);
    if runs.unsuccessful {
        options = options.unsuccessful();
    }
    if let Some(since) = runs.since {
        options = options.within(since);
    }
    let history = match &runs.name {
        Some(name) if !runs.unsuccessful && runs.since.is_none() => {
            schedules.history(name.as_str(), runs.limit).await?
        }
        Some(name) => schedules.runs(&options.of(name.as_str())).await?,
        None => schedules.runs(&options).await?,
    };
    if let Some(name) = runs.name.as_ref().filter(|_| history.is_empty()) {
        // A schedule without runs is not one that does not exist.
        find(schedules, name.as_str()).await?;
    }
    if runs.json {
        return out::say_json(&history.iter().map(run_object).collect());
    }
    // The history has a run once it has ended, or was taken over.
    let known = match &runs.name {
        Some(name) => {
            out::say(table(&history))?;
            schedules.inspect(name.as_str()).await?.into_iter().collect()
        }
        None => {
            out::say(table_of_all(&history))?;
            schedules.list().await?
        }
    };
    known.iter().for_each(tell_lost);
    Ok(exit::OK)
}

/// Prints what runs now.
async fn running<DB: Database>(schedules: &Schedules<DB>, runs: &schedules::Runs) -> Result<u8, Failure> {
    const HEADER: [&str; 8] = ["NAME", "SLOT", "ATTEMPT", "BY", "SINCE", "TOKEN", "LEASE UNTIL", "NOTE"];
    let mut all = match &runs.name {
        Some(name) => vec![find(schedules, name.as_str()).await?],
        None => schedules.list().await?,
    };
    if !runs.json {
        all.iter().for_each(tell_lost);
    }
    all.retain(|info| info.running);
    if runs.json {
        return out::say_json(&all.iter().map(object).collect());
    }
    let row = |info: &ScheduleInfo| {
        let (slot, since, until) = (clock_or_dash(info.run_slot), clock_or_dash(info.since), clock(info.due));
        let (attempt, token) = (info.attempt.to_string(), info.token.to_string());
        let note = info.note.as_deref().unwrap_or("-");
        let cells = [info.name.as_str(), &slot, &attempt, info.by.as_str(), &since, &token, &until, note];
        (style("running"), cells.map(printable))
    };
    out::say(tabular(HEADER, all.iter().map(row)))
}

/// The runs of which statistics are made, and for how long back.
const MOST: u32 = 100_000;
const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);

async fn statistics<DB: Database>(
    schedules: &Schedules<DB>,
    name: &str,
    runs: &schedules::Runs,
) -> Result<u8, Failure> {
    let options = RunOptions::default().of(name).within(runs.since.unwrap_or(MONTH)).limit(MOST);
    let history = schedules.runs(&options).await?;
    if history.is_empty() {
        find(schedules, name).await?;
    }
    if history.len() >= MOST as usize {
        out::print_warning(format_args!("{name}: only the last {MOST} runs count: --since shows fewer days"));
    }
    let days = stats::days(&history);
    if runs.json { out::say_json(&stats::objects(&days)) } else { out::say(stats::table(&days)) }
}

/// Says that no instance has taken over a run that was lost or handed back.
fn tell_lost(info: &ScheduleInfo) {
    if let (Some(lost), Some(since)) = (info.lost_since, info.since) {
        let (began, lost) = (clock(since), clock(lost));
        out::print_warning(format_args!(
            "{}: the run that {} began at {began} is lost or handed back: its lease is over since {lost}, and no instance has taken it over",
            info.name, info.by
        ));
    }
}

const RUN: [&str; 9] = ["NAME", "SLOT", "ATTEMPT", "STATUS", "BEGAN", "ENDED", "MISSED", "BY", "ERROR"];

/// Returns runs of one schedule as a table, without its name.
pub fn table(history: &[RunInfo]) -> String {
    let [_, header @ ..] = RUN;
    let rows = history.iter().map(|run| {
        let (style, [_, cells @ ..]) = row(run);
        (style, cells)
    });
    tabular(header, rows)
}

/// Returns runs of all schedules as a table.
fn table_of_all(history: &[RunInfo]) -> String {
    tabular(RUN, history.iter().map(row))
}

fn row(run: &RunInfo) -> (Style, [String; 9]) {
    let outcome = outcome(run.status);
    let (attempt, missed) = (run.attempt.to_string(), missed(run.missed));
    let error = run.error.as_deref().unwrap_or_default();
    let (slot, began, ended) = (clock(run.slot), clock(run.began), clock(run.ended));
    let cells = [&run.name, &slot, &attempt, outcome, &began, &ended, &missed, &run.by, error];
    (style(outcome), cells.map(printable))
}

/// Returns the next tick of a schedule. One that was removed has none.
pub fn next(info: &ScheduleInfo) -> String {
    if info.is_removed() { "-".to_owned() } else { clock(info.slot) }
}

/// Returns the times of a schedule, with their zone.
pub fn times(info: &ScheduleInfo) -> String {
    if info.zone == "UTC" { info.times.clone() } else { format!("{} {}", info.times, info.zone) }
}

/// Returns the row of one schedule.
pub async fn find<DB: Database>(schedules: &Schedules<DB>, name: &str) -> Result<ScheduleInfo, Failure> {
    schedules.inspect(name).await?.ok_or_else(|| Failure::no_schedule(name))
}

/// So many ticks of a pattern are not counted one by one.
pub fn missed(ticks: u32) -> String {
    if ticks < 10_000 { ticks.to_string() } else { format!("{ticks}+") }
}

/// Returns the outcome of a run as a name, which the page uses for its style too.
pub fn outcome(status: RunStatus) -> &'static str {
    match status {
        RunStatus::Succeeded => "succeeded",
        RunStatus::Lost => "lost",
        RunStatus::Missed => "missed",
        _ => "failed",
    }
}

fn style(state: &str) -> Style {
    let colour = match state {
        "running" | "succeeded" => AnsiColor::Green,
        "paused" | "retrying" | "lost" | "missed" | "no_instance" | "clock_was_ahead" => AnsiColor::Yellow,
        "failed" => AnsiColor::Red,
        _ => return Style::new(),
    };
    colour.on_default()
}

pub fn object(info: &ScheduleInfo) -> Value {
    json!({
        "name": info.name,
        "description": info.description,
        "times": info.times,
        "zone": info.zone,
        "state": state(info),
        "states": states(info),
        "slot": precise(info.slot),
        "due": precise(info.due),
        "paused": info.paused,
        "paused_until": info.paused_until.map(precise),
        "skipped_until": info.skipped_until.map(precise),
        "stopping": info.stopping,
        "note": info.note,
        "triggered": info.triggered.map(precise),
        "running": info.running,
        "lost_since": info.lost_since.map(precise),
        "run_slot": info.run_slot.map(precise),
        "attempt": info.attempt,
        "missed": info.missed,
        "by": info.by,
        "since": info.since.map(precise),
        "token": info.token.get(),
        "times_since": info.times_since.map(precise),
        "removed": info.is_removed(),
        "gone_since": info.gone_since.map(precise),
        "clock_was_ahead": info.clock_was_ahead,
        "instances": info.instances,
        "instances_with_other_times": info.instances_with_other_times,
    })
}

pub fn run_object(run: &RunInfo) -> Value {
    json!({
        "name": run.name,
        "slot": precise(run.slot),
        "attempt": run.attempt,
        "status": outcome(run.status),
        "missed": run.missed,
        "error": run.error,
        "by": run.by,
        "began": precise(run.began),
        "ended": precise(run.ended),
        "token": run.token.get(),
    })
}
