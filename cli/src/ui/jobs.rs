//! The page of all jobs: the schedules of the database.

use maud::{Markup, html};
use rowlock::{RunStatus, ScheduleInfo};
use serde::Deserialize;

use crate::{
    out::printable,
    schedule::{
        show::outcome,
        state::{has_next, states, versions, words},
    },
    ui::{
        live::Page,
        locks::pages,
        plot::durations,
        snapshot::{Part, Snapshot},
        text::{counted, encoded, span, when},
    },
};

/// How many jobs a page has.
const ROWS: usize = 100;
/// How many runs the small plot shows.
const PLOTTED: usize = 20;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Jobs {
    /// A part of the name.
    q: String,
    /// From 1.
    page: usize,
}

pub fn job_address(name: &str) -> String {
    format!("/job?name={}", encoded(name))
}

/// Shows the states of a schedule. One that runs, or whose run is lost, may be paused too.
pub fn job_badge(job: &ScheduleInfo) -> Markup {
    html! {
        @for state in states(job) { span class={ "badge " (state) } { (words(state)) } " " }
        @if let Some(lost) = job.lost_since { small { " lease ended " (when(lost, job.now)) } }
        @if let Some(versions) = versions(job) { small { a href="/instances" { (versions) } } }
    }
}

/// Shows the outcome of a run.
pub fn outcome_badge(status: RunStatus) -> Markup {
    html! { span class={ "badge " (outcome(status)) } { (outcome(status)) } }
}

fn row(snapshot: &Snapshot, job: &ScheduleInfo) -> Markup {
    let last = snapshot.runs.of(&job.name).find(|run| run.status != RunStatus::Missed);
    let missed = snapshot.missed_in_a_week(&job.name);
    html! {
        tr {
            th scope="row" { a href=(job_address(&job.name)) { (printable(&job.name)) } }
            td data-label="Schedule" { (printable(&job.times)) }
            td data-label="Zone" { (printable(&job.zone)) }
            td data-label="State" { (job_badge(job)) }
            td data-label="Next" { @if has_next(job) { (when(job.slot, snapshot.now)) } @else { "–" } }
            td data-label="Last run" {
                @match last {
                    Some(run) => { (outcome_badge(run.status)) " " (when(run.ended, snapshot.now)) small { " took " (span(run.ended - run.began)) } }
                    None => { "–" }
                }
            }
            td data-label="Durations" { (durations(snapshot.runs.of(&job.name), PLOTTED)) }
            td.number data-label="Missed in a week" { @if missed > 0 { (missed) } @else { "–" } }
        }
    }
}

impl Page for Jobs {
    const PATH: &'static str = "/jobs";
    const EVENTS: &'static str = "/events/jobs";
    const NEEDS: Part = Part::Schedules;

    fn title(&self) -> String {
        "Jobs".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Jobs" }
            form.search action="/jobs" role="search" {
                label { span { "Name" } input type="search" name="q" value=(self.q) autocomplete="off"; }
                button { "Search" }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let q = self.q.to_lowercase();
        let found: Vec<&ScheduleInfo> =
            snapshot.jobs.iter().filter(|job| job.name.to_lowercase().contains(&q)).collect();
        let last = found.len().div_ceil(ROWS).max(1);
        let page = self.page.clamp(1, last);
        let count = |wanted: fn(&ScheduleInfo) -> bool| snapshot.jobs.iter().filter(|job| wanted(job)).count();
        html! {
            p.summary {
                strong { (counted(snapshot.jobs.len(), "job")) } ", " (count(|job| job.running)) " running, "
                @if count(|job| job.lost_since.is_some()) > 0 { (count(|job| job.lost_since.is_some())) " lost, " }
                (count(|job| job.paused)) " paused"
                @if count(ScheduleInfo::is_removed) > 0 { ", " (count(ScheduleInfo::is_removed)) " removed" }
                @if count(|job| states(job).contains(&"no_instance")) > 0 {
                    ", " (count(|job| states(job).contains(&"no_instance"))) " without an " a href="/instances" { "instance" }
                }
            }
            @if found.is_empty() {
                p.empty { (if snapshot.jobs.is_empty() { "No job is registered." } else { "No job matches." }) }
            } @else {
                table.cards {
                    thead {
                        tr {
                            @for name in ["Job", "Schedule", "Zone", "State", "Next", "Last run", "Durations", "Missed in a week"] {
                                th scope="col" { (name) }
                            }
                        }
                    }
                    tbody { @for job in found.iter().skip((page - 1) * ROWS).take(ROWS) { (row(snapshot, job)) } }
                }
            }
            (pages(page, last, |page| format!("/jobs?q={}&page={page}", encoded(&self.q))))
        }
    }
}
