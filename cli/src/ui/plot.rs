//! Pictures of runs as SVG: the durations of one job, and a timeline of all.

use chrono::{DateTime, TimeDelta, Utc};
use maud::{Markup, html};
use rowlock::{RunInfo, RunStatus};

use crate::{
    schedule::show::outcome,
    ui::text::{counted, span},
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
                        width=(BAR - 1) height=(format!("{height:.1}")) { title { (about(run)) } }
                }
            }
        }
    }
}

fn seconds(duration: TimeDelta) -> f64 {
    duration.as_seconds_f64().max(0.0)
}

/// Describes a run in a line.
pub fn about(run: &RunInfo) -> String {
    let began = run.began.format("%a %H:%M:%S");
    match run.status {
        RunStatus::Missed => format!("{began}: {} passed over", counted(run.missed.max(1) as usize, "tick")),
        status => format!("{began}: {}, {}", outcome(status), span(run.ended - run.began)),
    }
}

/// The time that a timeline shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub from: DateTime<Utc>,
    pub to: DateTime<Utc>,
}

impl Window {
    /// Returns where a time is, in percent of the width.
    fn percent(self, time: DateTime<Utc>) -> f64 {
        (seconds(time - self.from) / seconds(self.to - self.from).max(1.0) * 100.0).clamp(0.0, 100.0)
    }
}

/// A part of a job's row: one run, or several that are too close to be told apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    pub x: f64,
    pub width: f64,
    pub class: &'static str,
    pub title: String,
    runs: usize,
}

/// The least width of a bar, in percent.
const LEAST: f64 = 0.5;

/// A run that has no recorded end.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    pub since: DateTime<Utc>,
    /// When its lease ended, if it is lost.
    pub lost: Option<DateTime<Utc>>,
}

impl Open {
    fn bar(self, window: Window) -> Bar {
        let (class, end, text) = match self.lost {
            None => ("running", window.to, format!("running for {}", span(window.to - self.since))),
            Some(end) => ("lost", end, format!("lost, lease over since {}", end.format("%a %H:%M:%S"))),
        };
        let x = window.percent(self.since).min(100.0 - LEAST);
        let title = format!("{}: {text}", self.since.format("%a %H:%M:%S"));
        Bar { x, width: (window.percent(end) - x).max(LEAST), class, title, runs: 1 }
    }
}

/// Lays out the runs of a job, the earliest first. Runs that would cover each other become one bar,
/// which shows the worst of their outcomes.
pub fn bars<'a>(runs: impl Iterator<Item = &'a RunInfo>, open: Option<Open>, window: Window) -> Vec<Bar> {
    let mut runs: Vec<&RunInfo> = runs.filter(|run| run.ended >= window.from && run.began <= window.to).collect();
    runs.sort_by_key(|run| run.began);
    let mut bars: Vec<Bar> = Vec::new();
    for run in runs {
        let x = window.percent(run.began).min(100.0 - LEAST);
        let width = (window.percent(run.ended) - x).max(LEAST);
        let bar = Bar { x, width, class: outcome(run.status), title: about(run), runs: 1 };
        match bars.last_mut() {
            Some(last) if bar.x < last.x + LEAST => last.merge(&bar),
            _ => bars.push(bar),
        }
    }
    bars.extend(open.filter(|run| run.lost.is_none_or(|lost| lost >= window.from)).map(|run| run.bar(window)));
    bars
}

impl Bar {
    fn merge(&mut self, other: &Self) {
        const ORDER: [&str; 4] = ["succeeded", "missed", "lost", "failed"];
        let rank = |class: &str| ORDER.iter().position(|one| *one == class);
        if rank(other.class) > rank(self.class) {
            self.class = other.class;
        }
        self.runs += other.runs;
        self.width = self.width.max(other.x + other.width - self.x);
        let end = other.title.split(": ").nth(1).unwrap_or_default();
        let begin = self.title.split(": ").next().unwrap_or_default();
        self.title = format!("{begin}: {} close together, the last {end}", counted(self.runs, "run"));
    }
}

/// Marks of the time axis: where, and what they say.
pub fn marks(window: Window, step: TimeDelta, format: &str) -> Vec<(f64, String)> {
    let step = step.num_seconds().max(1);
    let first = window.from.timestamp().div_euclid(step) + 1;
    let times = (first..).map(|number| number * step).take_while(|time| *time <= window.to.timestamp());
    let times = times.filter_map(|time| DateTime::from_timestamp(time, 0));
    times.map(|time| (window.percent(time), time.format(format).to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window() -> Window {
        let from = DateTime::from_timestamp(1_000_000, 0).unwrap();
        Window { from, to: from + TimeDelta::seconds(1_000) }
    }

    #[test]
    fn a_place_is_in_percent_of_the_window() {
        let at = |seconds| window().percent(window().from + TimeDelta::seconds(seconds));
        assert_eq!([at(-5), at(0), at(250), at(1_000), at(2_000)], [0.0, 0.0, 25.0, 100.0, 100.0]);
    }

    #[test]
    fn bars_that_are_too_close_become_one_of_the_worst_outcome() {
        let bar = |x, class| Bar { x, width: LEAST, class, title: format!("Mon 10:00:00: {class}, 1 s"), runs: 1 };
        let mut first = bar(10.0, "succeeded");
        first.merge(&bar(10.2, "failed"));
        first.merge(&bar(10.4, "lost"));
        assert_eq!((first.class, first.runs), ("failed", 3));
        assert!((first.width - 0.9).abs() < 1e-9, "{first:?}");
        assert_eq!(first.title, "Mon 10:00:00: 3 runs close together, the last lost, 1 s");
    }

    #[test]
    fn marks_are_at_whole_steps() {
        let marks = marks(window(), TimeDelta::minutes(5), "%H:%M");
        assert_eq!(marks.iter().map(|mark| mark.1.as_str()).collect::<Vec<_>>(), ["13:50", "13:55", "14:00"]);
        assert_eq!(marks[0].0, 20.0);
    }
}
