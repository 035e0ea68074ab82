//! The page of one key.

use maud::{Markup, html};
use rowlock::admin::LockInfo;
use serde::Deserialize;

use crate::{
    keys::{
        names::{Kind, is_claimed, kind},
        rows::work_status,
    },
    out::printable,
    ui::{
        changed::changes_of,
        live::Page,
        locks::{badge, holder, key_address, time_left},
        snapshot::{Part, Snapshot},
        text::{counted, encoded, span, when},
    },
};

/// How many permits or readers of the same name are listed.
const RELATED: usize = 50;

#[derive(Debug, Deserialize)]
pub struct OneKey {
    key: String,
    #[serde(default)]
    done: String,
}

impl Page for OneKey {
    const PATH: &'static str = "/key";
    const NEEDS: Part = Part::Locks;

    fn title(&self) -> String {
        format!("{} · key", printable(&self.key))
    }

    fn head(&self) -> Markup {
        html! {
            p.path { a href="/" { "Locks" } }
            h1 { (printable(&self.key)) }
            @if self.done == "release" {
                p.done role="status" { "The key was released by force. Its holder notices at the next renewal and stops then." }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, allows_changes: bool) -> Markup {
        let lock = snapshot.lock(&self.key);
        html! {
            @match lock {
                Some(lock) => { (facts(lock, snapshot.waiting(&self.key))) }
                None => { p.empty { "This key has no row: it was never taken, or it was forgotten." } }
            }
            @if snapshot.job(&self.key).is_some() {
                p { a href={ "/job?name=" (encoded(&self.key)) } { "The job of this name" } }
            }
            @if let Some(lock) = lock.filter(|lock| allows_changes && is_claimed(lock.state)) {
                p.actions { a.button.danger href={ "/release?key=" (encoded(&lock.key)) } { "Release by force…" } }
            }
            (related(snapshot, &self.key))
            (changes_of(snapshot, &self.key))
        }
    }
}

fn facts(lock: &LockInfo, waiting: Option<u64>) -> Markup {
    let lasted = lock.ended.filter(|_| lock.holder.is_none()).zip(lock.since);
    html! {
        dl {
            div { dt { "State" } dd { (badge(lock.state)) } }
            div { dt { "Kind" } dd { (kind(&lock.key).name()) } }
            div { dt { (if is_claimed(lock.state) { "Holder" } else { "Last holder" }) } dd { (holder(lock)) } }
            div { dt { "Status of the work" } dd { (printable(work_status(lock))) } }
            div { dt { "Taken" } dd { @if let Some(since) = lock.since { (when(since, lock.now)) } @else { "–" } } }
            @if let Some(since) = lock.since.filter(|_| is_claimed(lock.state)) {
                div { dt { "Lasts" } dd { (span(lock.now - since)) " so far" } }
            }
            div { dt { "Time left" } dd { (time_left(lock)) } }
            @if let Some((ended, since)) = lasted {
                div { dt { "Released" } dd { (when(ended, lock.now)) ", after " (span(ended - since)) } }
            }
            div { dt { "Waiting" } dd { @match waiting { Some(0) => { "none in the queue" } Some(waiting) => { (waiting) " in the queue" } None => { "not known" } } } }
            div { dt { "Token" } dd.number { (lock.token) } }
            @if let Some(holder) = lock.holder { div { dt { "Claim" } dd { code { (holder) } } } }
        }
    }
}

/// Lists the claimed permits or readers of the same name.
fn related(snapshot: &Snapshot, key: &str) -> Markup {
    let name = match kind(key) {
        Kind::Permit { of } | Kind::Reader { of } => of,
        Kind::Lock => key,
    };
    let of_name = |lock: &&LockInfo| match kind(&lock.key) {
        Kind::Permit { of } | Kind::Reader { of } => of == name && is_claimed(lock.state),
        Kind::Lock => false,
    };
    let locks: Vec<&LockInfo> = snapshot.locks.iter().filter(of_name).collect();
    html! {
        @if !locks.is_empty() {
            h2 { "Permits and readers of " (printable(name)) }
            p.summary { (counted(locks.len(), "claim")) }
            ul.plain {
                @for lock in locks.iter().take(RELATED) {
                    li { a href=(key_address(&lock.key)) { (printable(&lock.key)) } " " (badge(lock.state)) " by " (holder(lock)) }
                }
            }
        }
    }
}
