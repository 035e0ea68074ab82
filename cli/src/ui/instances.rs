//! The page of the instances that run schedules.

use maud::{Markup, html};
use rowlock::admin::InstanceInfo;
use serde::Deserialize;

use crate::{
    out::printable,
    schedule::instances::{declares, state},
    ui::{
        live::Page,
        snapshot::{Part, Snapshot},
        text::{counted, when},
    },
};

#[derive(Debug, Deserialize)]
pub struct Instances {}

fn row(instance: &InstanceInfo) -> Markup {
    html! {
        tr {
            th scope="row" { (printable(&instance.label)) small { (instance.id) } }
            td data-label="Build" { @if instance.build.is_empty() { "–" } @else { (printable(&instance.build)) } }
            td data-label="Since" { (when(instance.since, instance.now)) }
            td data-label="Last beat" { (when(instance.beat, instance.now)) }
            td data-label="State" { span.badge.alive[instance.alive].silent[!instance.alive] { (state(instance)) } }
            td data-label="Declares" {
                details {
                    summary id=(instance.id) { (declares(instance)) }
                    ul { @for one in &instance.declares { li { (printable(&one.name)) ": " (printable(&one.times)) " " (printable(&one.zone)) } } }
                }
            }
        }
    }
}

impl Page for Instances {
    const PATH: &'static str = "/instances";
    const NEEDS: Part = Part::Instances;

    fn title(&self) -> String {
        "Instances".to_owned()
    }

    fn head(&self) -> Markup {
        html! {
            h1 { "Instances" }
            p { "What runs jobs. Instances that declare the same have the same mark in brackets." }
        }
    }

    fn live(&self, snapshot: &Snapshot, _: bool) -> Markup {
        let alive = snapshot.instances.iter().filter(|instance| instance.alive).count();
        html! {
            p.summary { strong { (counted(snapshot.instances.len(), "instance")) } ", " (alive) " alive" }
            @if snapshot.instances.is_empty() {
                p.empty { "No instance runs jobs." }
            } @else {
                table.cards {
                    thead {
                        tr { @for name in ["Instance", "Build", "Since", "Last beat", "State", "Declares"] { th scope="col" { (name) } } }
                    }
                    tbody { @for instance in &snapshot.instances { (row(instance)) } }
                }
            }
        }
    }
}
