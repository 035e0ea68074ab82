//! The page of all jobs: the schedules of the database.

use maud::{Markup, html};
use rowlock::admin::{RunStatus, ScheduleInfo};
use serde::Deserialize;

use crate::{
    out::printable,
    schedule::{
        show::outcome,
        state::{has_next, is_late, states, versions, words},
    },
    ui::{
        layout::Shown,
        live::Page,
        plot::durations,
        snapshot::{Part, Snapshot},
        text::{clocks, counted, encoded, span, when, zone},
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
    /// The name of a [`Sign`], or nothing for all.
    sign: String,
    sort: Order,
    /// From 1.
    page: usize,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// What needs attention first, and each group by its names.
    #[default]
    Sign,
    Name,
    Next,
}

/// What is counted, and may be selected.
struct Sign {
    name: &'static str,
    text: &'static str,
    holds: fn(&Snapshot, &ScheduleInfo) -> bool,
}

/// Those that need attention come first.
const SIGNS: [Sign; 7] = [
    Sign { name: "failing", text: "failing", holds: is_failing },
    Sign { name: "lost", text: "lost", holds: |_, job| job.lost_since.is_some() },
    Sign { name: "late", text: "late", holds: |_, job| is_late(job) },
    Sign { name: "no_instance", text: "without an instance", holds: |_, job| states(job).contains(&"no_instance") },
    Sign { name: "running", text: "running", holds: |_, job| job.running },
    Sign { name: "paused", text: "paused", holds: |_, job| job.paused },
    Sign { name: "removed", text: "removed", holds: |_, job| job.is_removed() },
];
/// How many signs need attention.
const ATTENTION: usize = 4;

/// Returns whether the last run failed or was lost, of a job that was not removed.
pub fn is_failing(snapshot: &Snapshot, job: &ScheduleInfo) -> bool {
    snapshot.runs.last_failed(&job.name) && !job.is_removed()
}

impl Jobs {
    /// Returns the jobs that are wanted, in their order.
    fn select<'a>(&self, snapshot: &'a Snapshot) -> Vec<&'a ScheduleInfo> {
        let q = self.q.to_lowercase();
        let sign = SIGNS.iter().find(|sign| sign.name == self.sign);
        let wanted = |job: &&ScheduleInfo| {
            job.name.to_lowercase().contains(&q) && sign.is_none_or(|sign| (sign.holds)(snapshot, job))
        };
        // They are in the order of their names, which a sort keeps among equals.
        let mut jobs: Vec<&ScheduleInfo> = snapshot.jobs.iter().filter(wanted).collect();
        match self.sort {
            Order::Name => {}
            Order::Sign => jobs.sort_by_cached_key(|job| {
                SIGNS[..ATTENTION].iter().position(|sign| (sign.holds)(snapshot, job)).unwrap_or(ATTENTION)
            }),
            Order::Next => jobs.sort_by_key(|job| (!has_next(job), job.slot)),
        }
        jobs
    }

    fn address(&self, sort: Order, page: usize) -> String {
        let sort = match sort {
            Order::Sign => "sign",
            Order::Name => "name",
            Order::Next => "next",
        };
        format!("/jobs?q={}&sign={}&sort={sort}&page={page}", encoded(&self.q), encoded(&self.sign))
    }

    fn header(&self) -> Markup {
        let sorts = |name: &str, order: Order| {
            let is_sorted = self.sort == order;
            html! { th scope="col" aria-sort=[is_sorted.then_some("ascending")] { a href=(self.address(order, 1)) { (name) } } }
        };
        html! {
            tr {
                (sorts("Job", Order::Name)) (sorts("State", Order::Sign)) (sorts("Next", Order::Next))
                th scope="col" { "Last run" }
                @for name in ["Schedule", "Durations", "Missed in a week"] { th.more scope="col" { (name) } }
            }
        }
    }
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
    let missed = snapshot.missed_in_a_week(&job.name);
    html! {
        tr {
            th scope="row" { a href=(job_address(&job.name)) { (printable(&job.name)) } }
            td data-label="State" { (job_badge(job)) }
            td data-label="Next" {
                @if has_next(job) { (when(job.slot, snapshot.now)) (clocks(job.slot, &job.zone)) } @else { "–" }
            }
            td data-label="Last run" {
                @match snapshot.runs.last(&job.name) {
                    Some(run) => { (outcome_badge(run.status)) " " (when(run.ended, snapshot.now)) small { " took " (span(run.ended - run.began)) } }
                    None => { "–" }
                }
            }
            td.more data-label="Schedule" { span.times { (printable(&job.times)) } (zone(&job.zone)) }
            td.more data-label="Durations" { (durations(snapshot.runs.of(&job.name), PLOTTED)) }
            td.number.more data-label="Missed in a week" { @if missed > 0 { (missed) } @else { "–" } }
        }
    }
}

impl Page for Jobs {
    const PATH: &'static str = "/jobs";
    const NEEDS: Part = Part::Schedules;

    fn title(&self) -> String {
        "Jobs".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Jobs" }
            form.search action="/jobs" role="search" {
                label { span { "Name" } input type="search" name="q" value=(self.q) autocomplete="off"; }
                label {
                    span { "State" }
                    select name="sign" {
                        option value="" { "all" }
                        @for sign in SIGNS { option value=(sign.name) selected[sign.name == self.sign] { (sign.text) } }
                    }
                }
                button { "Search" }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let found = self.select(snapshot);
        let shown = Shown::new(&found, self.page, ROWS);
        let counts = SIGNS.map(|sign| {
            let count = snapshot.jobs.iter().filter(|job| (sign.holds)(snapshot, job)).count();
            (sign, count)
        });
        // The first ones are counted though there is none: that is what a visitor wants to know.
        let counts = counts.into_iter().enumerate().filter(|(index, (_, count))| *index < ATTENTION || *count > 0);
        html! {
            p.summary {
                a href="/jobs" { strong { (counted(snapshot.jobs.len(), "job")) } }
                @for (_, (sign, count)) in counts { ", " a href={ "/jobs?sign=" (sign.name) } { (count) " " (sign.text) } }
                @if found.len() < snapshot.jobs.len() { ". " (counted(found.len(), "job")) " shown." }
            }
            @if found.is_empty() {
                p.empty { (if snapshot.jobs.is_empty() { "No job is registered." } else { "No job matches." }) }
            } @else {
                table.cards.jobs {
                    thead.sorts { (self.header()) }
                    tbody { @for job in shown.rows { (row(snapshot, job)) } }
                }
            }
            (shown.links(|page| self.address(self.sort, page)))
        }
    }
}
