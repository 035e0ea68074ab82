//! Small runs of the simulation, with what has to hold at every size.

#![allow(missing_docs)]

use std::time::Duration;

use rowlock_scale::{
    MILLISECOND, SECOND, Time,
    assumptions::{Conditions, Database, Fault, Loss},
    figures::{Figures, summary},
    run::{Report, Scenario, Setup, run},
};

const INSTANCES: usize = 200;
const FAULT: Time = 90 * SECOND;

fn postgres() -> Conditions {
    Conditions::new(Database::postgres(8, 5_000))
}

fn mysql() -> Conditions {
    Conditions::new(Database::mysql(8, 5_000))
}

fn with(conditions: Conditions, fault: Fault) -> Conditions {
    Conditions { fault: Some((fault, FAULT, FAULT + 30 * SECOND)), ..conditions }
}

fn setup(scenario: Scenario, keys: usize, conditions: Conditions) -> Setup {
    Setup { end: 240 * SECOND, ..Setup::new(scenario, INSTANCES, keys, conditions) }
}

/// Ten keys for each instance, held with a lease of a minute.
fn held(fault: Fault) -> Setup {
    Setup { lease: Duration::from_secs(60), ..setup(Scenario::Held, 10 * INSTANCES, with(postgres(), fault)) }
}

#[test]
fn a_seed_has_one_outcome() {
    for scenario in [Scenario::Held, Scenario::Waiting, Scenario::Election] {
        let figures = |seed| -> Figures {
            let conditions = with(postgres(), Fault::FailOver(Loss::Refused));
            run(Setup { instances: 50, seed, ..setup(scenario, 500, conditions) }).figures
        };
        let first = figures(7);
        assert!(first == figures(7), "{scenario:?}");
        assert!(first != figures(8), "{scenario:?}: the seed has no effect");
    }
}

/// A lease that outlasts a fail-over is not lost in it, and one that does not is.
#[test]
fn leases_survive_what_is_shorter_than_their_rest() {
    for loss in [Loss::Refused, Loss::Silent] {
        let survived = run(held(Fault::FailOver(loss))).figures;
        assert_eq!((survived.lost, survived.overlaps), (0, 0), "{loss:?}");
        assert!(survived.failed > INSTANCES, "{loss:?}: nothing failed");
        let lease = Duration::from_secs(30);
        let lost = run(Setup { lease, ..held(Fault::FailOver(loss)) }).figures;
        assert_eq!(lost.overlaps, 0, "{loss:?}");
        assert!(lost.lost > 5 * INSTANCES, "{loss:?}: {} lost", lost.lost);
        // Each is held again.
        assert_eq!(lost.granted, 10 * INSTANCES + lost.lost, "{loss:?}");
    }
    for fault in [Fault::BrownOut, Fault::SlowNetwork] {
        let figures = run(held(fault)).figures;
        assert_eq!((figures.lost, figures.overlaps), (0, 0), "{fault:?}");
    }
}

/// An instance sends one renewal for all of its leases, three to four times in a lease.
#[test]
fn renewals_share_a_statement() {
    let report = run(held(Fault::BrownOut));
    let (from, to) = report.steady();
    let rate = report.figures.rate(from, to) / INSTANCES as f64 * 60.0;
    assert!((3.0..4.05).contains(&rate), "{rate} statements of an instance in a lease");
}

/// The renewals of all instances return together, and leave each other afterwards. With equal
/// intervals the peak stays at ten times the mean.
#[test]
fn renewals_after_a_fail_over_spread() {
    let report = run(held(Fault::FailOver(Loss::Refused)));
    let (from, to) = report.later().unwrap();
    let (peak, mean) = (report.figures.peak_second(from, to), report.figures.rate(from, to));
    assert!(f64::from(peak) < 5.0 * mean, "{peak} in a second, {mean} on average");
}

fn succession(conditions: Conditions) -> Report {
    run(Setup { death: Some(FAULT), ..setup(Scenario::Election, 1, conditions) })
}

/// A dead leader is replaced when its lease ends, and its successor is not found by all candidates
/// in the same tenth of a second: each of them sent 2.9 statements in it before pauses had a part
/// that is drawn.
#[test]
fn candidates_replace_a_dead_leader_without_a_herd() {
    for conditions in [postgres(), mysql()] {
        let report = succession(conditions);
        let [takeover] = report.figures.takeovers[..] else { panic!("{:?}", report.figures.takeovers) };
        assert!((18 * SECOND..30 * SECOND + 500 * MILLISECOND).contains(&takeover), "{takeover} µs");
        assert_eq!(report.figures.overlaps, 0);
        let (from, to) = report.herd().unwrap();
        let (tenth, second) =
            (report.figures.peak_tenth(from, to) as usize, report.figures.peak_second(from, to) as usize);
        assert!(tenth < INSTANCES, "{tenth} in 0.1 s");
        assert!(second < 4 * INSTANCES, "{second} in a second");
    }
}

/// A leader whose lease ends in a fail-over stops to trust it before another leads.
#[test]
fn no_two_lead_after_a_fail_over() {
    for loss in [Loss::Refused, Loss::Silent] {
        for conditions in [postgres(), mysql()] {
            let conditions = with(conditions, Fault::FailOver(loss));
            let figures = run(setup(Scenario::Election, 1, conditions)).figures;
            assert_eq!((figures.lost, figures.granted, figures.overlaps), (1, 2, 0), "{loss:?}");
        }
    }
}

/// Each of many waiters is served, with notifications and without, and through all faults.
#[test]
fn waiters_for_hot_keys_are_served() {
    let faults = [Fault::FailOver(Loss::Refused), Fault::FailOver(Loss::Silent), Fault::BrownOut, Fault::SlowNetwork];
    for fault in faults {
        for conditions in [with(postgres(), fault), with(mysql(), fault)] {
            let report = run(setup(Scenario::Waiting, INSTANCES / 10, conditions));
            let (figures, (from, to)) = (&report.figures, report.steady());
            assert_eq!(figures.overlaps, 0, "{fault:?}");
            // Of ten waiters each rests a tenth of the time at least, and holds for two seconds.
            assert!(figures.granted > INSTANCES * 6, "{fault:?}: {} served", figures.granted);
            let rate = figures.rate(from, to) / INSTANCES as f64;
            assert!(rate < 2.5, "{fault:?}: {rate} statements a second of each");
            let hand_over = summary(&figures.hand_overs).half;
            assert!(hand_over < 100 * MILLISECOND, "{fault:?}: {hand_over} µs");
        }
    }
}

/// Waiters of fair handles wait about equally long, where the longest waits of others are tens of
/// times as long as half of them.
#[test]
fn fair_waiters_wait_equally_long() {
    for conditions in [postgres(), mysql()] {
        let figures = run(Setup { fair: true, ..setup(Scenario::Waiting, INSTANCES / 10, conditions) }).figures;
        let waits = summary(&figures.waits);
        assert_eq!(figures.overlaps, 0);
        assert!(waits.longest < waits.half * 3 / 2, "{waits}");
        assert!(figures.granted > INSTANCES * 6, "{} served", figures.granted);
    }
}

/// The rates in `docs/scale.md`, which follows changes of the code by hand.
#[test]
#[ignore = "1,000 instances, for a release build"]
fn a_thousand_instances_send_what_the_document_says() {
    for (scenario, keys, conditions, documented) in [
        (Scenario::Held, 100_000, postgres(), 114.0),
        (Scenario::Waiting, 100, postgres(), 2_195.0),
        (Scenario::Waiting, 100, mysql(), 2_225.0),
        (Scenario::Election, 1, postgres(), 1_330.0),
    ] {
        let report = run(Setup::new(scenario, 1_000, keys, conditions));
        let (from, to) = report.steady();
        let rate = report.figures.rate(from, to);
        assert!((rate / documented - 1.0).abs() < 0.1, "{scenario:?}: {rate}, documented {documented}");
        assert_eq!(report.figures.overlaps, 0);
    }
}
