//! The page of what operators have changed.

use chrono::{DateTime, Utc};
use maud::{Markup, html};
use rowlock::admin::ChangeInfo;
use serde::Deserialize;

use crate::{
    format::clock,
    out::printable,
    ui::{
        jobs::job_address,
        live::Page,
        locks::key_address,
        snapshot::{CHANGES, Part, Snapshot},
        text::{counted, when},
    },
};

/// How many changes of one name are listed with its key or job.
const OF_ONE: usize = 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Changed {
    /// A part of the name.
    q: String,
}

/// Lists the last changes of a key or a job.
pub fn changes_of(snapshot: &Snapshot, name: &str) -> Markup {
    let changes: Vec<_> = snapshot.changes.iter().filter(|change| change.name == name).take(OF_ONE).collect();
    html! {
        @if !changes.is_empty() {
            h2 { "Changes" }
            (table(&changes, snapshot.now))
        }
    }
}

fn address(change: &ChangeInfo) -> String {
    match change.what.as_str() {
        "released" => key_address(&change.name),
        // The name is a label.
        "drained" => "/instances".to_owned(),
        _ => job_address(&change.name),
    }
}

fn table(changes: &[&ChangeInfo], now: DateTime<Utc>) -> Markup {
    html! {
        table.cards {
            thead { tr { @for name in ["When", "What", "Name", "Who", "Detail"] { th scope="col" { (name) } } } }
            tbody {
                @for change in changes {
                    tr {
                        th scope="row" { (clock(change.at)) small { (when(change.at, now)) } }
                        td data-label="What" { (printable(&change.what)) }
                        td data-label="Name" { a href=(address(change)) { (printable(&change.name)) } }
                        td data-label="Who" { (printable(&change.who)) }
                        td.detail data-label="Detail" { @if change.detail.is_empty() { "–" } @else { (printable(&change.detail)) } }
                    }
                }
            }
        }
    }
}

impl Page for Changed {
    const PATH: &'static str = "/changes";
    const NEEDS: Part = Part::Changes;

    fn title(&self) -> String {
        "Changes".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Changes" }
            p { "The last " (CHANGES) " changes that operators have made." }
            form.search action=(Self::PATH) role="search" {
                label { span { "Name" } input type="search" name="q" value=(self.q) autocomplete="off"; }
                button { "Search" }
            }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let q = self.q.to_lowercase();
        let found: Vec<_> = snapshot.changes.iter().filter(|change| change.name.to_lowercase().contains(&q)).collect();
        html! {
            p.summary { strong { (counted(found.len(), "change")) } }
            @if !found.is_empty() {
                (table(&found, snapshot.now))
            } @else {
                p.empty { (if snapshot.changes.is_empty() { "No operator has changed anything." } else { "No change matches." }) }
            }
        }
    }
}
