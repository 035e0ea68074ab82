//! Pictures of runs as SVG: the durations of one job, and a timeline of all.

use std::fmt::Display;

use chrono::{DateTime, TimeDelta, Timelike as _, Utc};
use jiff::tz::TimeZone;
use maud::{Markup, html};
use rowlock::admin::{RunInfo, RunStatus, ScheduleInfo};

use crate::{
    out::printable,
    schedule::{show::outcome, state::has_next},
    ui::text::{counted, local, span},
};

const BAR: usize = 5;
const HEIGHT: f64 = 26.0;

/// Draws the durations of the last runs, the latest at the right. `runs` begins with the latest.
pub fn durations<'a>(runs: impl Iterator<Item = &'a RunInfo>, most: usize) -> Markup {
    let runs: Vec<&RunInfo> = runs.filter(|run| run.status != RunStatus::Missed).take(most).collect();
    let longest = runs.iter().map(|run| seconds(run.ended - run.began)).fold(0.001, f64::max);
    let width = most * BAR;
    html! {
        @if runs.is_empty() { "–" } @else {
            svg.durations width=(width) height=(HEIGHT) role="img"
                aria-label={ "Durations of the last " (counted(runs.len(), "run")) ", at most " (span(TimeDelta::milliseconds((longest * 1000.0) as i64))) } {
                @for (index, run) in runs.iter().enumerate() {
                    @let height = (seconds(run.ended - run.began) / longest * (HEIGHT - 2.0)).max(2.0);
                    rect class=(outcome(run.status)) x=(width - (index + 1) * BAR) y=(format!("{:.1}", HEIGHT - height))
                        width=(BAR - 1) height=(format!("{height:.1}")) { title { (about(run, &TimeZone::UTC)) } }
                }
            }
        }
    }
}

/// Draws the duration of a run as a part of the longest one.
pub fn scale(run: &RunInfo, longest: TimeDelta) -> Markup {
    let part = seconds(run.ended - run.began) / seconds(longest).max(0.001) * 100.0;
    html! { svg.scale aria-hidden="true" { rect class=(outcome(run.status)) width=(format!("{part:.1}%")) height="100%" {} } }
}

fn seconds(duration: TimeDelta) -> f64 {
    duration.as_seconds_f64().max(0.0)
}

/// Describes a run in a line.
fn about(run: &RunInfo, zone: &TimeZone) -> String {
    let began = clock(run.began, zone);
    match run.status {
        RunStatus::Missed => format!("{began}: {} skipped", counted(run.missed.max(1) as usize, "tick")),
        status => format!("{began}: {}, {}", outcome(status), span(run.ended - run.began)),
    }
}

fn clock(time: DateTime<Utc>, zone: &TimeZone) -> impl Display {
    local(time, zone).format("%a %H:%M:%S")
}

/// The time that a timeline shows, and whose clocks.
#[derive(Clone, Debug)]
pub struct Window {
    pub from: DateTime<Utc>,
    pub now: DateTime<Utc>,
    pub to: DateTime<Utc>,
    pub zone: TimeZone,
}

impl Window {
    /// Returns where a time is, in percent of the width.
    pub fn percent(&self, time: DateTime<Utc>) -> f64 {
        (seconds(time - self.from) / seconds(self.to - self.from).max(1.0) * 100.0).clamp(0.0, 100.0)
    }

    /// Returns where a bar begins, which is as wide as it has to be seen.
    fn begin(&self, time: DateTime<Utc>) -> f64 {
        self.percent(time).min(100.0 - LEAST)
    }
}

/// A part of a job's row: one run, or several that are too close to be distinguished.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    pub x: f64,
    pub width: f64,
    pub class: &'static str,
    pub title: String,
    pub runs: usize,
    pub failed: usize,
}

/// The least width of a bar, in percent.
const LEAST: f64 = 0.5;
/// The least distance of two ticks to come, in percent.
const APART: f64 = 1.5;

/// The run of a job that has no recorded end: it goes on, or is lost.
fn open(job: &ScheduleInfo, window: &Window) -> Option<Bar> {
    let since = job.since?;
    let (class, end, text) = match job.lost_since {
        Some(end) if end < window.from => return None,
        Some(end) => ("lost", end, format!("lost, lease over since {}", clock(end, &window.zone))),
        None if job.running => ("running", window.now, format!("running for {}", span(window.now - since))),
        None => return None,
    };
    let x = window.begin(since);
    let title = format!("{}: {text}", clock(since, &window.zone));
    Some(Bar { x, width: (window.percent(end) - x).max(LEAST), class, title, runs: 1, failed: 0 })
}

/// Lays out the runs of a job, the earliest first. Runs that would cover each other become one bar.
pub fn bars<'a>(runs: impl Iterator<Item = &'a RunInfo>, job: &ScheduleInfo, window: &Window) -> Vec<Bar> {
    let mut runs: Vec<&RunInfo> = runs.filter(|run| run.ended >= window.from && run.began <= window.now).collect();
    runs.sort_by_key(|run| run.began);
    let open = open(job, window);
    let (mut bars, mut rest) = (Vec::new(), runs.as_slice());
    while let Some(first) = rest.first() {
        let x = window.begin(first.began);
        let (group, after) = rest.split_at(rest.partition_point(|run| window.begin(run.began) < x + LEAST));
        let next = after.first().map(|run| window.begin(run.began)).or(open.as_ref().map(|bar| bar.x));
        bars.push(of_group(group, x, next.filter(|next| *next > x).unwrap_or(100.0), window));
        rest = after;
    }
    bars.extend(open);
    bars
}

/// A bar that ends where the next one begins, and shows the worst of its outcomes.
fn of_group(group: &[&RunInfo], x: f64, next: f64, window: &Window) -> Bar {
    const WORST: [RunStatus; 4] = [RunStatus::Failed, RunStatus::Lost, RunStatus::Missed, RunStatus::Succeeded];
    let end = group.iter().map(|run| run.ended).max().unwrap_or(window.now);
    let count = |status| group.iter().filter(|run| run.status == status).count();
    let worst = WORST.into_iter().find(|status| count(*status) > 0).unwrap_or(RunStatus::Failed);
    let failed = count(RunStatus::Failed);
    let title = match group {
        [run] => about(run, &window.zone),
        _ => {
            let begin = clock(group[0].began, &window.zone);
            let others = [RunStatus::Lost, RunStatus::Missed].map(|status| (count(status), outcome(status)));
            let others = others.iter().filter(|(count, _)| *count > 0).map(|(count, name)| format!(", {count} {name}"));
            let others: String = others.collect();
            format!("{begin} to {}: {}, {failed} failed{others}", clock(end, &window.zone), counted(group.len(), "run"))
        }
    };
    let width = (window.percent(end) - x).max(LEAST).min(next - x);
    Bar { x, width, class: outcome(worst), title, runs: group.len(), failed }
}

/// Returns the ticks to come, and where they are. One that is too close to another is left out.
pub fn ticks(job: &ScheduleInfo, window: &Window) -> Vec<(f64, String)> {
    let schedule = job.schedule();
    let after = |time| schedule.as_ref().and_then(|schedule| schedule.upcoming(time).ok()?.next());
    let apart = (window.to - window.from).num_milliseconds() as f64 * APART / 100.0;
    let first = Some(job.slot).filter(|slot| *slot > window.now).or_else(|| after(window.now));
    // A slot may be so late that nothing can be added to it.
    let first = first.filter(|tick| has_next(job) && *tick <= window.to);
    std::iter::successors(first, |tick| after(*tick + TimeDelta::milliseconds(apart as i64)))
        .take_while(|tick| *tick <= window.to)
        .map(|tick| {
            (window.percent(tick), format!("{}: to come, {}", clock(tick, &window.zone), printable(&job.times)))
        })
        .collect()
}

/// Marks of the time axis: where, and what they say. At midnight that is the date.
pub fn marks(window: &Window, hours: u32) -> Vec<(f64, String)> {
    // The offset of each zone is a multiple of this.
    const QUARTER: i64 = 15 * 60;
    let quarters = window.from.timestamp().div_euclid(QUARTER) + 1..=window.to.timestamp().div_euclid(QUARTER);
    let times = quarters.filter_map(|number| DateTime::from_timestamp(number * QUARTER, 0));
    let times = times.map(|time| (window.percent(time), local(time, &window.zone)));
    let whole = times.filter(|(_, time)| time.minute() == 0 && time.hour().is_multiple_of(hours));
    whole.map(|(x, time)| (x, time.format(if time.hour() == 0 { "%a %d" } else { "%H:%M" }).to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From 13:46:40 UTC on, of which a sixth is to come.
    fn window(hours: i64, zone: &str) -> Window {
        let from = DateTime::from_timestamp(1_000_000, 0).unwrap();
        let now = from + TimeDelta::hours(hours);
        Window { from, now, to: now + TimeDelta::minutes(hours * 10), zone: TimeZone::get(zone).unwrap() }
    }

    #[test]
    fn a_place_is_in_percent_of_the_window() {
        let at = |minutes| window(6, "UTC").percent(window(6, "UTC").from + TimeDelta::minutes(minutes));
        assert_eq!([at(-5), at(0), at(105), at(420), at(900)], [0.0, 0.0, 25.0, 100.0, 100.0]);
    }

    #[test]
    fn marks_are_at_whole_hours_of_the_zone_and_dates_at_midnight() {
        let texts =
            |hours, zone, step| marks(&window(hours, zone), step).into_iter().map(|mark| mark.1).collect::<Vec<_>>();
        assert_eq!(texts(6, "UTC", 2), ["14:00", "16:00", "18:00", "20:00"]);
        assert_eq!(texts(6, "Asia/Kathmandu", 2), ["20:00", "22:00", "Tue 13", "02:00"]);
        assert_eq!(texts(72, "Asia/Kathmandu", 24), ["Tue 13", "Wed 14", "Thu 15", "Fri 16"]);
        let first = marks(&window(6, "Asia/Kathmandu"), 2).remove(0).0;
        assert!((first - (43.0 + 20.0 / 60.0) / 420.0 * 100.0).abs() < 1e-9, "20:00 there is 14:30: {first}");
    }
}
