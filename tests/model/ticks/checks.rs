//! The sizes that are checked, and the wrong designs that must be caught.

use std::time::Instant;

use libtest_mimic::{Failed, Trial};
use stateright::{Checker, Model};

use crate::{
    schedule::terms::CatchUp,
    ticks::{
        design::{Design, Event, Mutant},
        protocol::*,
        state::*,
    },
};

/// What is checked, the minimum number of states, and the events that must occur.
type Size = (fn() -> Design, usize, &'static [Event]);

pub fn trials() -> Vec<Trial> {
    let sizes = SIZES.iter().map(|&(design, floor, events)| {
        Trial::test(format!("model::ticks::holds::{}", design().name), move || holds(design(), floor, events))
    });
    let mutants = MUTANTS.iter().map(|&(mutant, design, property)| {
        Trial::test(format!("model::ticks::caught::{mutant:?}"), move || {
            breaks(&format!("{mutant:?}"), Design { mutant: Some(mutant), ..design() }, property)
        })
    });
    sizes.chain(mutants).collect()
}

fn triggers() -> Design {
    Design { ticks: 3, tries: 1, triggers: 2, crashes: true, ..Design::new("triggers") }.catch_up(CatchUp::Once)
}

fn ticks() -> Design {
    Design { ticks: 2, failures: true, ..Design::new("ticks") }
}

fn crashes() -> Design {
    Design { ticks: 2, crashes: true, pauses: true, ..Design::new("crashes") }
}

fn losses() -> Design {
    Design { ticks: 1, losses: 2, ..Design::new("losses") }
}

/// A lease is long enough to be renewed.
fn renewals() -> Design {
    Design { ticks: 1, losses: 1, lease: 2 * TICK, ..Design::new("renewals") }
}

fn once() -> Design {
    Design { ticks: 2, crashes: true, ..Design::new("once") }.catch_up(CatchUp::Once)
}

fn skip() -> Design {
    Design { ticks: 2, step: TICK / 2, crashes: true, ..Design::new("skip") }.catch_up(CatchUp::Skip)
}

fn trigger() -> Design {
    Design { ticks: 1, triggers: 1, crashes: true, ..Design::new("trigger") }
}

fn stops() -> Design {
    Design { ticks: 1, losses: 1, stops: true, ..Design::new("stops") }
}

fn forgotten() -> Design {
    Design { ticks: 1, losses: 1, forgets: 1, ..Design::new("forgotten") }
}

fn clock_stepped_back() -> Design {
    Design { ticks: 2, step_back: TICK, ..Design::new("clock_stepped_back") }
}

const SIZES: &[Size] = &[
    (ticks, 50_000, &[Event::Claimed, Event::TakenOver, Event::ClaimMissed, Event::Retried, Event::EndedLate]),
    (crashes, 60_000, &[Event::TakenOver, Event::ToldLost, Event::RenewalLost, Event::EndRefused, Event::Renewed]),
    (losses, 90_000, &[Event::LateClaimTaken, Event::PutBack, Event::FoundInHistory]),
    (renewals, 14_000, &[Event::Renewed, Event::LateClaimTaken]),
    (once, 20_000, &[Event::Moved, Event::TakenOver]),
    (skip, 120_000, &[Event::Moved, Event::Skipped, Event::TakenOver]),
    (triggers, 1_000, &[Event::TriggeredRun, Event::TriggeredDuringRun, Event::TakenOver]),
    (trigger, 25_000, &[Event::TriggeredRun, Event::TriggeredDuringRun]),
    (stops, 80_000, &[Event::HandedBack, Event::TakenOver]),
    (forgotten, 35_000, &[Event::EndRefused]),
    (clock_stepped_back, 28_000, &[Event::TakenOver]),
];

/// A mutant, and a property that it breaks in a size that keeps it otherwise.
type Caught = (Mutant, fn() -> Design, &'static str);

const MUTANTS: &[Caught] = &[
    (Mutant::AdvanceAtClaim, crashes, LOST),
    (Mutant::CompareTokenAlone, ticks, TWICE),
    (Mutant::EndWithoutHolder, forgotten, TWICE),
    (Mutant::RenewalRevives, renewals, SUPERSEDED),
    (Mutant::HistoryOptional, losses, HISTORY),
    (Mutant::TriggerByRow, triggers, TRIGGERS),
];

fn holds(design: Design, floor: usize, events: &[Event]) -> Result<(), Failed> {
    let begun = Instant::now();

    let checker = design.checker().spawn_bfs().join();
    let design = checker.model();
    let states = checker.unique_state_count();
    let met: Vec<String> = events.iter().map(|&event| format!("{event:?} {}", design.met(event))).collect();
    println!("{}: {states} states, {:.1} s; {}", design.name, begun.elapsed().as_secs_f64(), met.join(", "));
    let mut discoveries = checker.discoveries();
    if discoveries.remove(DONE).is_none() {
        return Err(format!("never: {DONE}").into());
    }
    if let Some((property, path)) = discoveries.into_iter().next() {
        return Err(format!("{property}: {}", tell(path.into_vec())).into());
    }
    if let Some(missed) = events.iter().find(|&&event| design.met(event) == 0) {
        return Err(format!("{missed:?} was never met").into());
    }
    if states < floor { Err(format!("only {states} states").into()) } else { Ok(()) }
}

/// Prints the shortest path that breaks the property.
fn breaks(what: &str, design: Design, property: &'static str) -> Result<(), Failed> {
    let checker = Design { only: Some(property), ..design }.checker().spawn_bfs().join();
    let path = checker.discovery(property).ok_or_else(|| format!("{what} keeps: {property}"))?;
    println!("{what} breaks \"{property}\" after {} states: {}", checker.unique_state_count(), tell(path.into_vec()));
    Ok(())
}

/// A short form of a path: its actions, with the statement that runs.
fn tell(path: Vec<(State, Option<Action>)>) -> String {
    let steps = path.into_iter().filter_map(|(state, action)| {
        let (id, late) = match action? {
            Action::Run(id) => (id, false),
            Action::RunLate(id) => (id, true),
            action => return Some(format!("{action:?}")),
        };
        let client = &state.clients[id];
        let statement = if late { client.late } else { client.call }?.statement;
        let text = format!("{statement:?}");
        let name = text.split([' ', '(']).next().unwrap_or_default();
        Some(format!("{}({id}: {name})", if late { "RunLate" } else { "Run" }))
    });
    steps.collect::<Vec<_>>().join(", ")
}
