//! The page of runs: a timeline with a row for each job, a bar for each run, and the ticks to come.

use chrono::TimeDelta;
use jiff::tz::TimeZone;
use maud::{Markup, html};
use rowlock::admin::ScheduleInfo;
use serde::Deserialize;

use crate::{
    out::printable,
    ui::{
        jobs::{is_failing, job_address},
        layout::Shown,
        live::Page,
        plot::{Window, bars, marks, ticks},
        snapshot::{Part, Snapshot, WEEK},
        text::{counted, encoded, grouped},
    },
};

/// How many jobs a page has.
const ROWS: usize = 100;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Runs {
    /// A part of the name.
    q: String,
    /// Whether only those are shown whose last run failed or was lost.
    failing: bool,
    window: Length,
    /// From 1.
    page: usize,
    /// The viewer's, which the script sends.
    zone: String,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
enum Length {
    #[serde(rename = "6h")]
    Hours,
    #[default]
    #[serde(rename = "24h")]
    Day,
    #[serde(rename = "7d")]
    Week,
}

impl Length {
    const ALL: [(Self, &'static str, &'static str); 3] =
        [(Self::Hours, "6h", "6 hours"), (Self::Day, "24h", "24 hours"), (Self::Week, "7d", "7 days")];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|length| length.0 == self).map_or("24h", |length| length.1)
    }

    /// Returns how much time is shown, and how many hours are between marks.
    fn time(self) -> (TimeDelta, u32) {
        match self {
            Self::Hours => (TimeDelta::hours(6), 1),
            Self::Day => (TimeDelta::days(1), 4),
            Self::Week => (WEEK, 24),
        }
    }
}

impl Runs {
    fn is_wanted(&self, snapshot: &Snapshot, job: &ScheduleInfo) -> bool {
        job.name.to_lowercase().contains(&self.q.to_lowercase()) && (!self.failing || is_failing(snapshot, job))
    }

    fn address(&self, page: usize) -> String {
        format!("/runs?q={}&failing={}&window={}&page={page}", encoded(&self.q), self.failing, self.window.name())
    }
}

impl Page for Runs {
    const PATH: &'static str = "/runs";
    const NEEDS: Part = Part::Schedules;

    fn title(&self) -> String {
        "Runs".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Runs" }
            form.search action="/runs" role="search" {
                label { span { "Job" } input type="search" name="q" value=(self.q) autocomplete="off"; }
                label {
                    span { "Time" }
                    select name="window" {
                        @for (length, name, text) in Length::ALL { option value=(name) selected[length == self.window] { (text) } }
                    }
                }
                label.tick { input type="checkbox" name="failing" value="true" checked[self.failing]; " Failing only" }
                button { "Show" }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let (length, hours) = self.window.time();
        let now = snapshot.now;
        let zone = TimeZone::get(&self.zone).unwrap_or(TimeZone::UTC);
        let window = Window { from: now - length, now, to: now + length / 6, zone };
        let jobs: Vec<&ScheduleInfo> = snapshot.jobs.iter().filter(|job| self.is_wanted(snapshot, job)).collect();
        let shown = Shown::new(&jobs, self.page, ROWS);
        html! {
            p.summary {
                strong { (counted(jobs.len(), "job")) }
                @if jobs.len() < snapshot.jobs.len() { " of " (grouped(snapshot.jobs.len())) }
                ". Times are those of " (window.zone.iana_name().unwrap_or("UTC")) "."
            }
            (legend())
            @if jobs.is_empty() {
                p.empty { (if snapshot.jobs.is_empty() { "No job is registered." } else { "No job matches." }) }
            } @else {
                div.timeline {
                    (axis(&window, hours))
                    ul { @for job in shown.rows { li { (row(snapshot, job, &window)) } } }
                }
            }
            (shown.links(|page| self.address(page)))
        }
    }
}

/// Says what the colours mean.
fn legend() -> Markup {
    let outcomes = ["succeeded", "failed", "lost", "missed", "running"].map(|name| (name, name));
    html! {
        ul.legend {
            @for (class, text) in outcomes.into_iter().chain([("tick", "to come")]) {
                li { svg width="12" height="12" aria-hidden="true" { rect class=(class) x="1" y="1" width="10" height="10" {} } (text) }
            }
        }
    }
}

/// Places are in percent and sizes of text in pixels, so that it fits any width.
fn percent(part: f64) -> String {
    format!("{part:.2}%")
}

/// Draws the marks, which stay while the page is scrolled, and a line at each of them and at now.
fn axis(window: &Window, hours: u32) -> Markup {
    let marks = marks(window, hours);
    let line = |class: &str, x: f64| html! { line class=(class) x1=(percent(x)) x2=(percent(x)) y1="0" y2="100%" {} };
    html! {
        svg.marks aria-hidden="true" { @for (x, text) in &marks { text x=(percent(*x)) y="15" text-anchor=(anchor(*x)) { (text) } } }
        svg.lines aria-hidden="true" { @for (x, _) in &marks { (line("mark", *x)) } (line("now", window.percent(window.now))) }
    }
}

/// A mark near an edge stays within the picture.
fn anchor(x: f64) -> &'static str {
    match x {
        ..5.0 => "start",
        95.0.. => "end",
        _ => "middle",
    }
}

/// A link to the job that has its name, its runs, and its ticks.
fn row(snapshot: &Snapshot, job: &ScheduleInfo, window: &Window) -> Markup {
    let bars = bars(snapshot.runs.of(&job.name), job, window);
    let (runs, failed) = bars.iter().fold((0, 0), |(runs, failed), bar| (runs + bar.runs, failed + bar.failed));
    let name = printable(&job.name);
    html! {
        a href=(job_address(&job.name)) {
            span title=(name) { bdi { (name) } }
            svg role="img" aria-label={ (counted(runs, "run")) ", " (failed) " failed" } {
                @for bar in &bars {
                    rect class=(bar.class) x=(percent(bar.x)) width=(percent(bar.width)) { title { (name) ", " (bar.title) } }
                }
                @for (x, title) in ticks(job, window) { rect.tick x=(percent(x)) width="4" { title { (name) ", " (title) } } }
            }
        }
    }
}
