//! The page of one job.

use chrono::{DateTime, TimeDelta, Utc};
use maud::{Markup, html};
use rowlock::admin::{RunInfo, RunStatus, ScheduleInfo};
use serde::Deserialize;

use crate::{
    format::{clock, precise},
    out::printable,
    schedule::{output::lines, state::has_next},
    ui::{
        changed::changes_of,
        jobs::{job_badge, outcome_badge},
        live::Page,
        locks::key_address,
        output::output_address,
        plot::{durations, scale},
        snapshot::{EACH, Part, Snapshot},
        text::{clocks, encoded, span, when},
    },
};

/// How many runs are listed.
const LISTED: usize = 50;

#[derive(Debug, Deserialize)]
pub struct OneJob {
    name: String,
    #[serde(default)]
    done: String,
}

impl Page for OneJob {
    const PATH: &'static str = "/job";
    const NEEDS: Part = Part::Schedules;

    fn title(&self) -> String {
        format!("{} · job", printable(&self.name))
    }

    fn head(&self) -> Markup {
        let done = match self.done.as_str() {
            "pause" => Some("The job is paused. A run that is under way goes on."),
            "resume" => Some("The job is resumed."),
            "trigger" => Some("A run was asked for. The next instance that polls runs it."),
            "skip" => Some("The next tick is skipped."),
            "stop" => Some(
                "The tick is stopped. Its instance notices this within 20 seconds. A command then has its --stop-timeout to end.",
            ),
            _ => None,
        };
        html! {
            p.path { a href="/jobs" { "Jobs" } }
            h1 { (printable(&self.name)) }
            @if let Some(done) = done { p.done role="status" { (done) } }
        }
    }

    fn live(&self, snapshot: &Snapshot, allows_changes: bool) -> Markup {
        let Some(job) = snapshot.job(&self.name) else {
            return html! { p.empty { "No job of this name is registered." } };
        };
        let runs: Vec<&RunInfo> = snapshot.runs.of(&job.name).take(LISTED).collect();
        html! {
            @if !job.description.is_empty() { p.about { (lines(job.description.as_bytes())) } }
            (facts(snapshot, job))
            @if allows_changes { (actions(job)) }
            @if snapshot.lock(&job.name).is_some() { p { a href=(key_address(&job.name)) { "The key of this name" } } }
            (next_ticks(snapshot, job))
            h2 { "Durations" }
            div.wide { (durations(snapshot.runs.of(&job.name), EACH as usize)) }
            h2 { "Runs" }
            @if runs.is_empty() { p.empty { (if snapshot.lacks(Part::Runs) { "Its runs are not known." } else { "It has not run so far." }) } } @else { (history(&runs)) }
            (changes_of(snapshot, &job.name))
        }
    }
}

fn facts(snapshot: &Snapshot, job: &ScheduleInfo) -> Markup {
    let success = snapshot.runs.last_success(&job.name);
    let at = |time: DateTime<Utc>| html! { (when(time, snapshot.now)) " " small { (clock(time)) } };
    html! {
        dl {
            div { dt { "State" } dd { (job_badge(job)) @if job.stopping { small { "an operator has stopped it" } } } }
            @if let Some(until) = job.paused_until { div { dt { "Paused until" } dd { (at(until)) } } }
            @if let Some(until) = job.skipped_until { div { dt { "Skipped until" } dd { (at(until)) } } }
            @if let Some(note) = &job.note { div { dt { "Note of the run" } dd { (printable(note)) } } }
            div { dt { "Schedule" } dd { (printable(&job.times)) } }
            div { dt { "Zone" } dd { (printable(&job.zone)) } }
            div { dt { "Next" } dd { @if job.is_removed() { "none" } @else if job.paused { "not while it is paused" } @else { (at(job.slot)) } } }
            @if job.attempt > 0 { div { dt { "Attempt" } dd { (job.attempt) } } }
            @if let Some(triggered) = job.triggered { div { dt { "Triggered" } dd { (when(triggered, snapshot.now)) } } }
            @if let Some(since) = job.since {
                div { dt { (if job.running { "Running" } else { "Last begun" }) } dd { (when(since, snapshot.now)) " by " (printable(&job.by)) } }
            }
            div { dt { "Last success" } dd { @if let Some(success) = success { (when(success, snapshot.now)) } @else if snapshot.lacks(Part::Runs) { "not known" } @else { "none known" } } }
            div { dt { "Missed in a week" } dd { (snapshot.missed_in_a_week(&job.name)) } }
            div { dt { "Token" } dd.number { (job.token) } }
            @if let Some(since) = job.times_since { div { dt { "In effect" } dd { (when(since, snapshot.now)) } } }
            @if let Some(gone) = job.gone_since { div { dt { "Gone" } dd { (when(gone, snapshot.now)) small { " no instance has had it since" } } } }
            div { dt { "Instances" } dd { a href="/instances" { (job.instances) } } }
            @if job.instances_with_other_times > 0 { div { dt { "With other times" } dd { (job.instances_with_other_times) } } }
        }
    }
}

/// How many ticks to come are listed.
const TICKS: usize = 5;

fn next_ticks(snapshot: &Snapshot, job: &ScheduleInfo) -> Markup {
    let ticks = if has_next(job) { upcoming(job) } else { Vec::new() };
    html! {
        @if !ticks.is_empty() {
            h2 { "Next ticks" }
            ul.plain {
                @for tick in ticks { li { (when(tick, snapshot.now)) (clocks(tick, &job.zone)) } }
            }
        }
    }
}

/// Returns the next ticks that are not skipped, from the one that the row has.
fn upcoming(job: &ScheduleInfo) -> Vec<DateTime<Utc>> {
    let before = job.skipped_until.unwrap_or(job.slot - TimeDelta::milliseconds(1));
    let schedule = job.schedule();
    schedule.iter().flat_map(|schedule| schedule.upcoming(before).into_iter().flatten()).take(TICKS).collect()
}

fn actions(job: &ScheduleInfo) -> Markup {
    let name = encoded(&job.name);
    html! {
        p.actions {
            a.button href={ "/trigger?name=" (name) } { "Run now…" }
            @if job.paused || job.skipped_until.is_some() { a.button href={ "/resume?name=" (name) } { "Resume…" } }
            @if !job.paused { a.button href={ "/pause?name=" (name) } { "Pause…" } }
            @if job.attempt > 0 { a.button.danger href={ "/stop?name=" (name) } { "Stop…" } }
            @else if has_next(job) && job.skipped_until.is_none() { a.button href={ "/skip?name=" (name) } { "Skip the next…" } }
        }
    }
}

/// Shows when a run began: the time alone on the day of its tick.
fn start(run: &RunInfo) -> Markup {
    let is_same_day = run.began.date_naive() == run.slot.date_naive();
    html! {
        time datetime=(precise(run.began)) {
            @if is_same_day { (run.began.format("%H:%M:%SZ")) } @else { (clock(run.began)) }
        }
    }
}

fn history(runs: &[&RunInfo]) -> Markup {
    let longest = runs.iter().map(|run| run.ended - run.began).max().unwrap_or_default();
    html! {
        p.summary { "A whole bar is " (span(longest)) "." }
        table.cards {
            thead {
                tr { @for name in ["Tick", "Start", "Outcome", "Attempt", "Duration", "Missed", "By", "Output", "Error"] { th scope="col" { (name) } } }
            }
            tbody {
                @for run in runs {
                    tr {
                        th scope="row" { (clock(run.slot)) }
                        td data-label="Start" { @if run.status == RunStatus::Missed { "–" } @else { (start(run)) } }
                        td data-label="Outcome" { (outcome_badge(run.status)) }
                        td.number data-label="Attempt" { (run.attempt) }
                        td data-label="Duration" { @if run.status == RunStatus::Missed { "–" } @else { (span(run.ended - run.began)) (scale(run, longest)) } }
                        td.number data-label="Missed" { @if run.missed > 0 { (run.missed) } @else { "–" } }
                        td data-label="By" { (printable(&run.by)) }
                        td data-label="Output" { @if run.status == RunStatus::Missed { "–" } @else { a href=(output_address(run)) { "show" } } }
                        td.error data-label="Error" { @if let Some(error) = &run.error { (printable(error)) } @else { "–" } }
                    }
                }
            }
        }
    }
}
