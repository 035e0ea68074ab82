//! The sizes that are checked, and the wrong designs that must be caught.

use std::time::Instant;

use libtest_mimic::{Failed, Trial};
use stateright::{Checker, Model};

use crate::{design::*, protocol::*, rules::Rules, state::*};

/// What is checked, the minimum number of states, and the events that must occur.
type Size = (fn() -> Design, usize, &'static [Event]);

pub fn trials() -> Vec<Trial> {
    let checked = |&(design, floor, events): &Size| {
        Trial::test(format!("model::holds::{}", design().name), move || holds(design(), floor, events))
    };
    let all = std::env::var_os("ROWLOCK_ALL").is_some_and(|all| !all.is_empty());
    let larger = LARGER.iter().map(checked).map(move |size| size.with_ignored_flag(!all));
    let sizes = SIZES.iter().map(checked).chain(larger);
    let mutants = MUTANTS.iter().map(|&(mutant, broken)| {
        Trial::test(format!("model::caught::{mutant:?}"), move || {
            broken.iter().try_for_each(|(design, property)| {
                keeps(&design(), property)?;
                breaks(&format!("{mutant:?}"), Design { mutant: Some(mutant), ..design() }, property)
            })
        })
    });
    let article = Trial::test("model::caught::RulesArticle", || {
        keeps(&crashes(), REPLACED)?;
        breaks("Rules::Article", crashes().rules(Rules::Article), REPLACED)
    });
    sizes.chain(mutants).chain([article]).chain(open()).collect()
}

/// The limits of the design, each with the property that breaks there.
fn open() -> Vec<Trial> {
    vec![
        // `confirms` counts for the claim: of two concurrent transactions under one claim, it does
        // not show which one committed.
        Trial::test("model::open::confirms_of_a_shared_claim", || {
            keeps(&lost_commits(), SAID)?;
            breaks("confirms_of_a_shared_claim", Design { shared_claim: true, ..lost_commits() }, SAID)
        }),
    ]
}

fn silence() -> Design {
    Design { ticks: 1, losses: 2, ..Design::new("silence") }
}

fn freed_by_another() -> Design {
    Design { ticks: 3, foreign_tries: 1, losses: 1, ..Design::new("freed_by_another") }
}

fn claims() -> Design {
    Design { losses: 2, ticks: 3, ..Design::new("claims") }
}

fn abandonments() -> Design {
    Design { losses: 2, ticks: 2, abandons: true, releases: false, ..Design::new("abandonments") }
}

/// The server carries a request out when its client has given it up, or has sent it again.
fn late_renewals() -> Design {
    Design { ticks: 3, losses: 1, patience: Some(1), abandons: true, releases: false, ..Design::new("late_renewals") }
}

/// The lease is too short to be renewed.
fn late_claims() -> Design {
    Design { name: "late_claims", abandons: false, releases: true, ..late_renewals() }.lease(1)
}

/// Both copies of a request are late.
fn late_copies() -> Design {
    Design { name: "late_copies", ticks: 2, losses: 2, ..late_claims() }
}

fn late_crashes() -> Design {
    Design { name: "late_crashes", ticks: 2, crashes: true, ..late_claims() }
}

/// One client, which sends its renewals and its endings late, twice, or both.
fn late_endings() -> Design {
    Design { name: "late_endings", clients: 1, losses: 2, releases: true, ..late_renewals() }
}

fn many_late_endings() -> Design {
    Design { name: "many_late_endings", ticks: 4, losses: 3, ..late_endings() }
}

fn many_late_crashes() -> Design {
    Design { name: "many_late_crashes", losses: 2, ..late_crashes() }
}

fn many_late_copies() -> Design {
    Design { name: "many_late_copies", abandons: true, ..late_copies() }.lease(2)
}

fn late_all() -> Design {
    Design { name: "late_all", releases: true, ..late_renewals() }
}

fn crashes() -> Design {
    Design { ticks: 4, pauses: true, crashes: true, ..Design::new("crashes") }
}

/// The lease is too short to be renewed, so the check ends quickly.
fn three_clients() -> Design {
    Design { ticks: 2, clients: 3, ..Design::new("three_clients") }.lease(1)
}

fn commits() -> Design {
    Design { ticks: 3, transactions: 1, pauses: true, crashes: true, releases: false, ..Design::new("commits") }
}

fn lost_commits() -> Design {
    Design { ticks: 2, transactions: 1, losses: 2, releases: false, ..Design::new("lost_commits") }.lease(1)
}

fn window() -> Design {
    Design { ticks: 4, tries: 2, failures: true, ..Design::new("window") }.min_interval(3)
}

fn operator() -> Design {
    Design { ticks: 3, force_releases: 1, deletions: 1, ..Design::new("operator") }
}

/// One client, overruled by an operator and by another program while it commits.
fn overruled() -> Design {
    Design {
        clients: 1,
        transactions: 1,
        losses: 1,
        force_releases: 1,
        foreign_tries: 1,
        ticks: 3,
        ..Design::new("overruled")
    }
}

fn foreign() -> Design {
    Design { ticks: 4, foreign_tries: 2, ..Design::new("foreign") }
}

fn article_clients() -> Design {
    Design { name: "article_clients", ..foreign() }.article_clients()
}

fn delayed() -> Design {
    Design { name: "delayed", delay: 1, ..crashes() }.lease(1)
}

fn clock_stepped_back() -> Design {
    Design { ticks: 2, tries: 2, step_back: 1, ..Design::new("clock_stepped_back") }
}

fn article_rules() -> Design {
    Design { name: "article_rules", failures: true, ..crashes() }.rules(Rules::Article)
}

const SIZES: &[Size] = &[
    (
        claims,
        200_000,
        &[Event::Acquired, Event::TakenOver, Event::SameAgain, Event::LateClaimGranted, Event::DoneByReading],
    ),
    (abandonments, 80_000, &[Event::AbandonedTakenOver, Event::LateRenewalRevived]),
    (
        late_claims,
        60_000,
        &[
            Event::LateClaimGranted,
            Event::TooLate,
            Event::SentTwice,
            Event::FirstReplyReadFirst,
            Event::UnsettledSetAside,
            Event::SameAgain,
        ],
    ),
    (late_copies, 200_000, &[Event::LateClaimGranted, Event::TooLate, Event::SentTwice, Event::DoneByReading]),
    (late_crashes, 40_000, &[Event::LateClaimGranted, Event::TooLate, Event::TakenOver]),
    (late_endings, 20_000, &[Event::LateRenewalRevived, Event::TooLate, Event::SentTwice, Event::EndedAgain]),
    (late_renewals, 200_000, &[Event::LateRenewalRevived, Event::TooLate, Event::SentTwice, Event::EndedAgain]),
    (crashes, 60_000, &[Event::TakenOver, Event::ToldLost, Event::RenewalLost]),
    (three_clients, 20_000, &[Event::TakenOver]),
    (commits, 60_000, &[Event::Committed, Event::CommittedExpired, Event::ConfirmLost, Event::RenewalSkipped]),
    (lost_commits, 40_000, &[Event::SaidCommitted, Event::SaidNotCommitted, Event::SaidUnknown]),
    (silence, 20_000, &[Event::DoneByReading]),
    (freed_by_another, 150_000, &[Event::DoneByReading]),
    (window, 40_000, &[Event::WithinMinInterval]),
    (operator, 70_000, &[Event::ForceReleased, Event::RowDeleted, Event::RenewalLost]),
    (
        overruled,
        60_000,
        &[Event::Trampled, Event::ForceReleased, Event::ConfirmLost, Event::Committed, Event::SaidUnknown],
    ),
    (foreign, 80_000, &[Event::Trampled, Event::ForeignLockSeen]),
    (article_clients, 100_000, &[Event::ForeignTakenOver]),
    (delayed, 20_000, &[Event::TakenOver, Event::ToldLost]),
    (clock_stepped_back, 40_000, &[Event::TakenOver]),
    (article_rules, 50_000, &[Event::TimedOutUnfinished, Event::LastRunFailed]),
];

/// They are checked if `ROWLOCK_ALL` is set.
const LARGER: &[Size] = &[
    (late_all, 300_000, &[Event::LateClaimGranted, Event::LateRenewalRevived, Event::EndedAgain]),
    (many_late_copies, 1_000_000, &[Event::LateClaimGranted, Event::LateRenewalRevived, Event::SentTwice]),
    (many_late_crashes, 300_000, &[Event::LateClaimGranted, Event::TooLate, Event::TakenOver]),
    (many_late_endings, 200_000, &[Event::LateRenewalRevived, Event::TooLate, Event::EndedAgain]),
];

/// A mutant, and the properties that it breaks.
type Caught = (Mutant, &'static [(fn() -> Design, &'static str)]);

const MUTANTS: &[Caught] = &[
    (Mutant::RenewByUpsert, &[(crashes, COEXIST), (crashes, SUPERSEDED)]),
    (Mutant::ReleaseByDelete, &[(clock_stepped_back, TOKENS), (window, WINDOW)]),
    (Mutant::ClockBeforeRowLock, &[(operator, TOKENS)]),
    (Mutant::ConfirmWithoutRow, &[(commits, COMMIT)]),
    (Mutant::CounterAsToken, &[(operator, TOKENS)]),
    (Mutant::ClaimedAtIgnored, &[(foreign, SUPERSEDED), (foreign, FOREIGN), (overruled, COMMIT)]),
    (Mutant::DeadlineFromReply, &[(crashes, STANDS)]),
    (Mutant::ConfirmsReadWithoutWaiting, &[(lost_commits, SAID)]),
    (Mutant::LostAfterSilence, &[(silence, LOST)]),
    (Mutant::DoneByAnother, &[(freed_by_another, DONE)]),
    (Mutant::DelayIgnored, &[(delayed, DELAYED)]),
    (Mutant::ForgottenAhead, &[(operator, TOKENS)]),
    (Mutant::NotAfterIgnored, &[(late_claims, OVER), (late_endings, OVER), (late_crashes, VOID)]),
    (Mutant::AbandonedOnce, &[(late_endings, OVER)]),
    (Mutant::AbandonedAgainTooSoon, &[(late_endings, OVER)]),
    (Mutant::AbandonedAgainUnlessVoid, &[(late_endings, OVER)]),
    (Mutant::RenewalForgottenByReply, &[(late_endings, OVER)]),
    (Mutant::ClaimKeptFromNow, &[(late_claims, OVER)]),
    (Mutant::ClaimForgottenByReply, &[(late_claims, OVER)]),
    (Mutant::ClaimForgottenByEnding, &[(late_endings, OVER)]),
    (Mutant::UnsettledCounts, &[(late_claims, OVER), (late_claims, LOST)]),
    (Mutant::OtherCopyForgotten, &[(late_claims, OVER), (late_endings, OVER), (late_claims, LOST)]),
    (Mutant::DeadlineFromSecondCopy, &[(late_claims, STANDS), (late_renewals, STANDS)]),
];

fn holds(design: Design, floor: usize, events: &[Event]) -> Result<(), Failed> {
    let begun = Instant::now();
    let checker = design.checker().spawn_bfs().join();
    let design = checker.model();
    let states = checker.unique_state_count();
    let met: Vec<String> = events.iter().map(|&event| format!("{event:?} {}", design.met(event))).collect();
    println!("{}: {states} states, {:.1} s; {}", design.name, begun.elapsed().as_secs_f64(), met.join(", "));
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        return Err(format!("{property}: {}", tell(path.into_vec())).into());
    }
    if let Some(missed) = events.iter().find(|&&event| design.met(event) == 0) {
        return Err(format!("{missed:?} was never met").into());
    }
    if states < floor { Err(format!("only {states} states").into()) } else { Ok(()) }
}

/// Checks that some size checks the property for the design without the mutant.
fn keeps(design: &Design, property: &str) -> Result<(), Failed> {
    let known = SIZES.iter().any(|(size, ..)| size().name == design.name);
    let checked = design.properties().iter().any(|checked| checked.name == property);
    if known && checked { Ok(()) } else { Err("no check covers it without the mutant".into()) }
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
        let (name, id, call) = match action? {
            Action::Run(id) => ("Run", id, state.clients[id].call?),
            Action::RunFirst(id) => ("RunFirst", id, state.clients[id].first?),
            Action::RunLate(id, index) => ("RunLate", id, state.clients[id].late[index]),
            action => return Some(format!("{action:?}")),
        };
        let statement = match call.statement {
            Statement::Change(_, change) => format!("{change:?}"),
            statement => format!("{statement:?}").split([' ', '(']).next().unwrap_or_default().to_owned(),
        };
        Some(format!("{name}({id}: {statement})"))
    });
    steps.collect::<Vec<_>>().join(", ")
}
