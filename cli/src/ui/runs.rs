//! The page of runs: a timeline with a row for each job, and a bar for each run.

use chrono::TimeDelta;
use maud::{Markup, html};
use rowlock::ScheduleInfo;
use serde::Deserialize;

use crate::{
    out::printable,
    ui::{
        jobs::job_address,
        live::Page,
        locks::pages,
        plot::{Bar, Open, Window, bars, marks},
        snapshot::{Part, Snapshot, WEEK},
    },
};

/// How many jobs a page has.
const ROWS: usize = 50;
/// The height of a row, of the axis, and where the bars are in a row.
const ROW: usize = 46;
const AXIS: usize = 24;
const BAR: usize = 22;
const BAR_HEIGHT: usize = 14;

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Runs {
    zoom: Zoom,
    /// From 1.
    page: usize,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Zoom {
    Hour,
    #[default]
    Day,
    Week,
}

impl Zoom {
    const ALL: [(Self, &'static str, &'static str); 3] =
        [(Self::Hour, "hour", "Hour"), (Self::Day, "day", "Day"), (Self::Week, "week", "Week")];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|zoom| zoom.0 == self).map_or("day", |zoom| zoom.1)
    }

    /// Returns how much time is shown, and between which marks.
    fn span(self) -> (TimeDelta, TimeDelta, &'static str) {
        match self {
            Self::Hour => (TimeDelta::hours(1), TimeDelta::minutes(15), "%H:%M"),
            Self::Day => (TimeDelta::days(1), TimeDelta::hours(6), "%H:%M"),
            Self::Week => (WEEK, TimeDelta::days(2), "%a %d"),
        }
    }
}

impl Page for Runs {
    const PATH: &'static str = "/runs";
    const EVENTS: &'static str = "/events/runs";
    const NEEDS: Part = Part::Schedules;

    fn title(&self) -> String {
        "Runs".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Runs" }
            nav.zoom aria-label="Zoom" {
                @for (zoom, name, text) in Zoom::ALL {
                    a href={ "/runs?zoom=" (name) } aria-current=[(zoom == self.zoom).then_some("true")] { (text) }
                }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let (length, step, format) = self.zoom.span();
        let window = Window { from: snapshot.now - length, to: snapshot.now };
        let last = snapshot.jobs.len().div_ceil(ROWS).max(1);
        let page = self.page.clamp(1, last);
        let jobs: Vec<&ScheduleInfo> = snapshot.jobs.iter().skip((page - 1) * ROWS).take(ROWS).collect();
        let rows: Vec<(&str, Vec<Bar>)> = jobs
            .into_iter()
            .map(|job| {
                let open = job.since.filter(|_| job.running || job.lost_since.is_some());
                let open = open.map(|since| Open { since, lost: job.lost_since });
                (job.name.as_str(), bars(snapshot.runs.of(&job.name), open, window))
            })
            .collect();
        html! {
            (legend())
            @if rows.is_empty() { p.empty { "No job is registered." } } @else { (timeline(&rows, &marks(window, step, format))) }
            (pages(page, last, |page| format!("/runs?zoom={}&page={page}", self.zoom.name())))
        }
    }
}

/// Says what the colours mean.
fn legend() -> Markup {
    html! {
        ul.legend {
            @for class in ["succeeded", "failed", "lost", "missed", "running"] {
                li { svg width="12" height="12" aria-hidden="true" { rect class=(class) width="12" height="12" rx="2" {} } (class) }
            }
        }
    }
}

/// Draws the rows. Places are in percent and sizes of text in pixels, so that it fits any width.
fn timeline(rows: &[(&str, Vec<Bar>)], marks: &[(f64, String)]) -> Markup {
    let height = AXIS + rows.len() * ROW;
    let percent = |part: f64| format!("{part:.2}%");
    html! {
        svg.timeline width="100%" height=(height) role="group" aria-label="Timeline of runs" {
            @for (x, text) in marks {
                line.mark x1=(percent(*x)) x2=(percent(*x)) y1=(AXIS) y2=(height) {}
                text.mark x=(percent(*x)) y="14" text-anchor=(anchor(*x)) { (text) }
            }
            @for (index, (name, bars)) in rows.iter().enumerate() {
                @let top = AXIS + index * ROW;
                line.row x1="0" x2="100%" y1=(top) y2=(top) {}
                a href=(job_address(name)) { text.job x="0" y=(top + 15) { (printable(name)) } }
                rect.track x="0" width="100%" y=(top + BAR) height=(BAR_HEIGHT) rx="2" {}
                @for bar in bars {
                    // The name is the link that the keyboard reaches.
                    a href=(job_address(name)) tabindex="-1" {
                        rect class=(bar.class) x=(percent(bar.x)) width=(percent(bar.width)) y=(top + BAR) height=(BAR_HEIGHT) rx="1.5" {
                            title { (printable(name)) ", " (bar.title) }
                        }
                    }
                }
            }
        }
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
