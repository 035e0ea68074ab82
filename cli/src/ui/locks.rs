//! The page of all keys: searched, sorted and paged within the last look.

use std::cmp::Ordering;

use chrono::{DateTime, Utc};
use maud::{Markup, html};
use rowlock::admin::{LockInfo, LockState};
use serde::Deserialize;

use crate::{
    keys::names::{Kind, is_claimed, kind},
    out::printable,
    ui::{
        layout::Shown,
        live::Page,
        snapshot::{InUse, Part, Snapshot},
        text::{counted, encoded, grouped, lasting, when},
    },
};

/// How many keys a page has.
const ROWS: usize = 50;

/// Which keys are shown, and in which order.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Locks {
    /// A part of the key or of its holder.
    q: String,
    /// The name of a state, [`WAITING`], or nothing for all.
    state: String,
    sort: Column,
    desc: bool,
    /// From 1.
    page: usize,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Column {
    #[default]
    Key,
    Kind,
    State,
    Holder,
    Since,
    Left,
    Token,
    Waiting,
}

const COLUMNS: [(Column, &str, &str); 8] = [
    (Column::Key, "key", "Key"),
    (Column::Kind, "kind", "Kind"),
    (Column::State, "state", "State"),
    (Column::Holder, "holder", "Holder"),
    (Column::Since, "since", "Since"),
    (Column::Left, "left", "Time left"),
    (Column::Token, "token", "Token"),
    (Column::Waiting, "waiting", "Waiting"),
];

pub const STATES: [LockState; 6] = [
    LockState::Held,
    LockState::Expired,
    LockState::HeldByAnotherProgram,
    LockState::Failed,
    LockState::WithinMinInterval,
    LockState::Free,
];

/// In place of a state: the keys that are waited for.
const WAITING: &str = "waiting";

impl Locks {
    /// Returns the keys that are wanted, in their order.
    fn select<'a>(&self, snapshot: &'a Snapshot) -> Vec<&'a LockInfo> {
        let q = self.q.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&q);
        let wanted = |lock: &&LockInfo| {
            (self.state.is_empty() || self.has_state(snapshot, lock))
                && (q.is_empty() || has(&lock.key) || has(&lock.by))
        };
        let mut rows: Vec<&LockInfo> = snapshot.locks.iter().filter(wanted).collect();
        // They are in the order of their keys, which the sort keeps among equals.
        if self.sort != Column::Key {
            rows.sort_by(|one, other| self.order(snapshot, one, other));
        } else if self.desc {
            rows.reverse();
        }
        rows
    }

    fn has_state(&self, snapshot: &Snapshot, lock: &LockInfo) -> bool {
        if self.state == WAITING { snapshot.waiting(&lock.key) > Some(0) } else { lock.state.name() == self.state }
    }

    fn order(&self, snapshot: &Snapshot, one: &LockInfo, other: &LockInfo) -> Ordering {
        let order = match self.sort {
            Column::Key => one.key.cmp(&other.key),
            Column::Kind => kind(&one.key).name().cmp(kind(&other.key).name()),
            Column::State => place(one.state).cmp(&place(other.state)),
            Column::Holder => one.by.cmp(&other.by),
            Column::Since => one.since.cmp(&other.since),
            Column::Left => left(one).cmp(&left(other)),
            Column::Token => one.token.cmp(&other.token),
            Column::Waiting => snapshot.waiting(&one.key).cmp(&snapshot.waiting(&other.key)),
        };
        if self.desc { order.reverse() } else { order }
    }

    /// Returns the address of this page with another order or number.
    fn address(&self, sort: Column, desc: bool, page: usize) -> String {
        let name = COLUMNS.iter().find(|column| column.0 == sort).map_or("key", |column| column.1);
        format!("/?q={}&state={}&sort={name}&desc={desc}&page={page}", encoded(&self.q), encoded(&self.state))
    }

    fn header(&self) -> Markup {
        html! {
            tr {
                @for (column, _, name) in COLUMNS {
                    @let is_sorted = column == self.sort;
                    @let sorted = if self.desc { "descending" } else { "ascending" };
                    th scope="col" aria-sort=[is_sorted.then_some(sorted)] {
                        a href=(self.address(column, is_sorted && !self.desc, 1)) { (name) }
                    }
                }
            }
        }
    }
}

/// The order of states: what needs attention comes first.
fn place(state: LockState) -> usize {
    STATES.iter().position(|one| *one == state).unwrap_or(STATES.len())
}

/// Returns the end of a claim.
fn left(lock: &LockInfo) -> Option<DateTime<Utc>> {
    lock.until.filter(|_| is_claimed(lock.state))
}

/// Shows a state in words, with a colour.
pub fn badge(state: LockState) -> Markup {
    html! { span class={ "badge " (state.name()) } { (state) } }
}

pub fn holder(lock: &LockInfo) -> String {
    if lock.by.is_empty() { "–".to_owned() } else { printable(&lock.by) }
}

pub fn key_address(key: &str) -> String {
    format!("/key?key={}", encoded(key))
}

/// Shows how long the claim still stands, or since when it does not.
pub fn time_left(lock: &LockInfo) -> Markup {
    match left(lock) {
        Some(end) if lock.now < end => lasting(end - lock.now, end),
        Some(end) => html! { "ended " (when(end, lock.now)) },
        None => html! { "–" },
    }
}

/// `waiting` is `None` if the queues are not known.
fn row(lock: &LockInfo, waiting: Option<u64>, used: InUse) -> Markup {
    html! {
        tr {
            th scope="row" { a href=(key_address(&lock.key)) { (printable(&lock.key)) } }
            td data-label="Kind" {
                (kind(&lock.key).name())
                @match kind(&lock.key) {
                    Kind::Permit { .. } => { small { " " (used.permits) " in use" } }
                    Kind::Lock | Kind::Reader { .. } if used.readers > 0 => { small { " " (counted(used.readers, "reader")) } }
                    _ => {}
                }
            }
            td data-label="State" { (badge(lock.state)) }
            td data-label="Holder" { (holder(lock)) }
            td data-label="Since" { @if let Some(since) = lock.since.filter(|since| *since > DateTime::UNIX_EPOCH) { (when(since, lock.now)) } @else { "–" } }
            td data-label="Time left" { (time_left(lock)) }
            td.number data-label="Token" { (lock.token) }
            td.number data-label="Waiting" { @match waiting { Some(0) => { "–" } Some(waiting) => { (waiting) } None => { "?" } } }
        }
    }
}

impl Page for Locks {
    const PATH: &'static str = "/";
    const NEEDS: Part = Part::Locks;

    fn title(&self) -> String {
        "Locks".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Locks" }
            form.search action="/" role="search" {
                label { span { "Key or holder" } input type="search" name="q" value=(self.q) autocomplete="off"; }
                label {
                    span { "State" }
                    select name="state" {
                        option value="" { "all" }
                        @for state in STATES { option value=(state.name()) selected[state.name() == self.state] { (state) } }
                        option value=(WAITING) selected[self.state == WAITING] { "waited for" }
                    }
                }
                button { "Search" }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let found = self.select(snapshot);
        let shown = Shown::new(&found, self.page, ROWS);
        let used = snapshot.in_use();
        let of = |lock: &LockInfo| match kind(&lock.key) {
            Kind::Permit { of } | Kind::Reader { of } => used.get(of).copied().unwrap_or_default(),
            Kind::Lock => used.get(lock.key.as_str()).copied().unwrap_or_default(),
        };
        let in_state = |state| snapshot.locks.iter().filter(|lock| lock.state == state).count();
        // What needs attention is counted if there is any.
        let counts = STATES.iter().filter(|state| !matches!(state, LockState::WithinMinInterval | LockState::Free));
        let counts = counts.map(|state| (*state, in_state(*state)));
        let counts = counts.filter(|(state, count)| *state == LockState::Held || *count > 0);
        let waiting: u64 = snapshot.waiting.values().sum();
        html! {
            p.summary {
                a href="/" { strong { (counted(snapshot.locks.len(), "key")) } }
                @for (state, count) in counts { ", " a href={ "/?state=" (state.name()) } { (grouped(count)) " " (state) } }
                @if !snapshot.lacks(Part::Queues) { ", " a href={ "/?state=" (WAITING) } { (waiting) " waiting" } }
                @if found.len() < snapshot.locks.len() { ". " (grouped(found.len())) " match." }
            }
            @if found.is_empty() {
                p.empty { (if snapshot.locks.is_empty() { "No key was ever taken." } else { "No key matches." }) }
            } @else {
                table.cards {
                    thead.sorts { (self.header()) }
                    tbody { @for lock in shown.rows { (row(lock, snapshot.waiting(&lock.key), of(lock))) } }
                }
            }
            (shown.links(|page| self.address(self.sort, self.desc, page)))
        }
    }
}
