//! Histories written by hand, with times in milliseconds and leases of a second: valid ones, and
//! invalid ones for each rule.

use std::time::Duration;

use libtest_mimic::Trial;

use crate::{
    checker::{Rule, Seen, Verdict, check},
    record::{Entry, History, Promised, Write},
};

macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        pub fn trials() -> Vec<Trial> {
            let trial = |name: &str, test: fn()| {
                Trial::test(format!("checker::{name}"), move || {
                    test();
                    Ok(())
                })
            };
            vec![$(trial(stringify!($name), $name)),+]
        }
    };
}

tests!(
    a_good_history_passes,
    a_row_that_is_deleted_under_its_holder_excuses_it,
    two_holders_at_a_time_are_caught,
    a_permit_too_many_is_caught,
    two_holders_of_a_permit_are_caught,
    a_holder_within_the_lock_delay_is_caught,
    a_crash_that_is_not_freed_after_the_lock_delay_is_caught,
    a_token_of_a_permit_that_falls_is_caught,
    a_loss_of_a_permit_that_is_told_too_late_is_caught,
    a_term_that_goes_on_beside_the_next_one_is_caught,
    a_token_that_falls_or_comes_twice_is_caught,
    a_write_below_the_highest_token_is_caught,
    a_lost_update_is_caught,
    a_crash_that_is_not_freed_is_caught,
    a_loss_that_is_told_too_late_is_caught,
    a_commit_that_is_told_wrongly_is_caught,
    a_release_that_is_told_wrongly_is_caught,
    a_claim_that_was_never_made_is_caught,
);

fn judged(lines: &str, writes: &[(i64, i64, usize, u64)]) -> Verdict {
    judged_by(Promised { most: 1, ..PROMISED }, lines, writes)
}

/// A semaphore of two permits, with a lock-delay.
const PROMISED: Promised = Promised { lease: Duration::from_secs(1), delay: Duration::ZERO, most: 2, shared: false };

pub fn judged_by(promised: Promised, lines: &str, writes: &[(i64, i64, usize, u64)]) -> Verdict {
    let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
    let entries: Vec<Entry> = lines.map(|line| Entry::parse(line, Duration::from_millis(1))).collect();
    let write = |&(number, token, process, op)| Write { key: "k".to_owned(), number, token, process, op, run: 0 };
    check(&History::new(promised, &entries, writes.iter().map(write).collect()))
}

#[track_caller]
fn holds(verdict: &Verdict) -> Seen {
    assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
    verdict.seen
}

#[track_caller]
fn breaks(rule: Rule, lines: &str, writes: &[(i64, i64, usize, u64)]) {
    let violations = judged(lines, writes).violations;
    let rules: Vec<Rule> = violations.iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, [rule], "{violations:?}");
}

const RELEASED: &str = "
    0 1 1 ask k Lease
    5 1 1 granted 10 950
    400 1 1 sure 900
    500 1 1 end Release
    510 1 1 done Done
";

/// One of each: released, committed, crashed, stopped, cut off, unknown.
fn a_good_history_passes() {
    let lines = format!(
        "{RELEASED}
        3 2 1 ask k Transaction
        515 2 1 granted 20 950
        515 2 1 working 20
        530 2 1 worked
        540 2 1 done Done
        600 1 2 ask k Lease
        605 1 2 granted 30 950
        610 3 1 ask k Lease
        700 1 0 killed
        1700 3 1 granted 40 950 30 1
        1750 2 2 ask k Lease
        1800 3 0 stopped
        2900 2 2 granted 50 950 40 3
        3000 3 0 continued
        3001 3 1 lost
        3002 3 1 end Release
        3003 3 1 done Lost
        3100 4 1 ask k Lease
        3850 2 2 lost
        3900 4 1 granted 60 950 50 2
        3950 4 1 end Release
        4000 4 1 done Unknown
        4010 5 1 ask k Lease
        4900 5 1 granted 70 950 60 4"
    );
    let seen = holds(&judged(&lines, &[(1, 20, 2, 1)]));
    assert_eq!((seen.operations, seen.grants, seen.writes, seen.crashes, seen.losses), (7, 7, 1, 1, 1));
    assert_eq!(seen.unknown, [0, 1]);
}

fn a_row_that_is_deleted_under_its_holder_excuses_it() {
    let deleted = "
        0 1 1 ask k Lease
        5 1 1 granted 10 950
        100 9 0 deleting k
        110 9 0 deleted k
        105 2 1 ask k Lease
        120 2 1 granted 20 950";
    holds(&judged(deleted, &[]));
}

/// Two processes hold a permit each, and a third one asks.
const TWO: &str = "
    0 1 1 ask k Lease
    5 1 1 permit k#1
    5 1 1 granted 10 950
    0 2 1 ask k Lease
    5 2 1 permit k#2
    5 2 1 granted 10 950
    8 3 1 ask k Lease
";

#[track_caller]
pub fn breaks_as(promised: Promised, lines: &str, rule: Option<Rule>) {
    let violations = judged_by(promised, lines, &[]).violations;
    let rules: Vec<Rule> = violations.iter().map(|violation| violation.rule).collect();
    assert_eq!(rules, rule.into_iter().collect::<Vec<_>>(), "{violations:?}");
}

fn a_permit_too_many_is_caught() {
    breaks_as(PROMISED, TWO, None);
    let third = "
        90 3 1 permit k#3
        90 3 1 granted 10 950
    ";
    breaks_as(PROMISED, &format!("{TWO}{third}"), Some(Rule::NoOverlap));
    breaks_as(Promised { most: 3, ..PROMISED }, &format!("{TWO}{third}"), None);
}

fn two_holders_of_a_permit_are_caught() {
    let one = TWO.replace("k#2", "k#1").replace("2 1 granted 10", "2 1 granted 20");
    let told = "
        4 1 0 stopped
        900 1 0 continued
    ";
    breaks_as(PROMISED, &format!("{told}{one}"), Some(Rule::NoOverlap));
}

fn a_holder_within_the_lock_delay_is_caught() {
    let delayed = Promised { delay: Duration::from_millis(300), most: 1, ..PROMISED };
    let after = |end: &str, at: u64| {
        format!(
            "
            0 1 1 ask k Lease
            5 1 1 granted 10 950
            {end}
            50 2 1 ask k Lease
            {at} 2 1 granted 20 950 10 1"
        )
    };
    breaks_as(delayed, &after("100 1 0 killed", 1300), None);
    breaks_as(delayed, &after("100 1 0 killed", 1200), Some(Rule::NoOverlap));
    breaks_as(delayed, &after("100 1 1 end Drop", 420), None);
    breaks_as(delayed, &after("100 1 1 end Drop", 380), Some(Rule::NoOverlap));
    breaks_as(delayed, &after("100 1 1 end Abandon", 110), None);
}

fn a_crash_that_is_not_freed_after_the_lock_delay_is_caught() {
    let delayed = Promised { delay: Duration::from_millis(300), most: 1, ..PROMISED };
    let crashed = |granted: u32| {
        format!(
            "
            0 1 1 ask k Lease
            5 1 1 granted 10 950
            10 2 1 ask k Lease
            100 1 0 killed
            {granted} 2 1 granted 20 950 10 1"
        )
    };
    breaks_as(delayed, &crashed(2400), None);
    breaks_as(delayed, &crashed(2401), Some(Rule::CrashesAreFreed));
}

/// The tokens of different permits are independent.
fn a_token_of_a_permit_that_falls_is_caught() {
    let after = |permit: &str| {
        format!(
            "{TWO}
            100 2 1 end Release
            110 2 1 done Done
            120 4 1 ask k Lease
            130 4 1 permit {permit}
            130 4 1 granted 9 0"
        )
    };
    breaks_as(PROMISED, &after("k#2"), Some(Rule::TokensGrow));
    breaks_as(PROMISED, &after("k#3"), None);
}

fn a_loss_of_a_permit_that_is_told_too_late_is_caught() {
    let told = |lost: u32| {
        format!(
            "{TWO}
            {lost} 1 1 lost
            1000 3 1 permit k#1
            1000 3 1 granted 20 950"
        )
    };
    breaks_as(PROMISED, &told(1000), None);
    breaks_as(PROMISED, &told(1001), Some(Rule::LossIsToldFirst));
}

/// The work of a leader is dropped, which is recorded as its loss. It was not told more of its
/// time.
fn a_term_that_goes_on_beside_the_next_one_is_caught() {
    let terms = |dropped: u32| {
        format!(
            "
            0 1 1 ask k Lease
            5 1 1 permit k
            5 1 1 granted 10 950
            900 1 1 sure 50
            {dropped} 1 1 lost
            {dropped} 1 2 ask k Lease
            10 2 1 ask k Lease
            1000 2 1 permit k
            1000 2 1 granted 20 950 10 1"
        )
    };
    let one = Promised { most: 1, ..PROMISED };
    breaks_as(one, &terms(990), None);
    breaks_as(one, &terms(1010), Some(Rule::LossIsToldFirst));
    let renewed = terms(1700).replace("900 1 1 sure 50", "4 1 0 stopped\n1690 1 0 continued\n900 1 1 sure 700");
    breaks_as(one, &renewed, Some(Rule::NoOverlap));
}

fn two_holders_at_a_time_are_caught() {
    // The process was stalled, so it need not have been notified. The time of its lease counts all
    // the same.
    let lease = format!(
        "{RELEASED}
        250 1 0 held-up 200
        100 2 1 ask k Lease
        240 2 1 granted 20 100
        260 2 1 end Release"
    );
    breaks(Rule::NoOverlap, &lease, &[]);
    let renewed = format!(
        "{RELEASED}
        2000 2 2 ask k Transaction
        2010 2 2 granted 30 950
        2010 2 2 working 30
        2900 2 2 worked
        2910 2 2 done Done
        2020 3 1 ask k Lease
        2500 3 1 granted 40 950
        2600 3 1 end Abandon"
    );
    breaks(Rule::NoOverlap, &renewed, &[(1, 30, 2, 2)]);
}

fn a_token_that_falls_or_comes_twice_is_caught() {
    for token in [9, 10] {
        let later = format!(
            "{RELEASED}
            300 2 1 ask k Lease
            600 2 1 granted {token} 950
            700 2 1 end Release"
        );
        let violations = judged(&later, &[]).violations;
        let by_rule = violations.iter().all(|violation| violation.rule == Rule::TokensGrow);
        assert!(!violations.is_empty() && by_rule, "{violations:?}");
    }
    // The lease had no time left when the grant arrived. It is only known that the first grant had
    // arrived before the other process asked.
    let unheld = format!(
        "{RELEASED}
        600 2 1 ask k Lease
        700 2 1 granted 9 0"
    );
    breaks(Rule::TokensGrow, &unheld, &[]);
}

const TWO_WRITERS: &str = "
    0 1 1 ask k Transaction
    5 1 1 granted 10 950
    5 1 1 working 10
    10 1 1 worked
    12 1 1 done Done
    20 2 1 ask k Transaction
    25 2 1 granted 20 950
    25 2 1 working 20
    30 2 1 worked
    32 2 1 done Done
";

fn a_write_below_the_highest_token_is_caught() {
    holds(&judged(TWO_WRITERS, &[(1, 10, 1, 1), (2, 20, 2, 1)]));
    breaks(Rule::FencedWrites, TWO_WRITERS, &[(1, 20, 2, 1), (2, 10, 1, 1)]);
}

fn a_lost_update_is_caught() {
    breaks(Rule::FencedWrites, TWO_WRITERS, &[(1, 10, 1, 1), (1, 20, 2, 1)]);
}

fn a_crash_that_is_not_freed_is_caught() {
    let crashed = |granted: u32| {
        format!(
            "0 1 1 ask k Lease
            5 1 1 granted 10 950
            10 2 1 ask k Lease
            100 1 0 killed
            {granted} 2 1 granted 20 950 10 1"
        )
    };
    assert_eq!(holds(&judged(&crashed(2100), &[])).crashes, 1);
    breaks(Rule::CrashesAreFreed, &crashed(2101), &[]);
    // No process asked during the whole time, or the only one was stopped for half of the second.
    assert_eq!(holds(&judged(&format!("{}\n500 2 0 stopped\n1000 2 0 continued", crashed(2101)), &[])).crashes, 0);
    // The database was slow for half of the second, or for less.
    assert_eq!(holds(&judged(&format!("{}\n1000 999 0 held-up 500", crashed(2101)), &[])).crashes, 0);
    breaks(Rule::CrashesAreFreed, &format!("{}\n999 999 0 held-up 500", crashed(2101)), &[]);
}

fn a_loss_that_is_told_too_late_is_caught() {
    let told = |lost: u32| {
        format!(
            "0 1 1 ask k Lease
            5 1 1 granted 10 950
            {lost} 1 1 lost
            10 2 1 ask k Lease
            1000 2 1 granted 20 950 10 1"
        )
    };
    assert_eq!(holds(&judged(&told(1000), &[])).losses, 1);
    breaks(Rule::LossIsToldFirst, &told(1001), &[]);
    holds(&judged(&format!("{}\n990 1 0 held-up 900", told(1001)), &[]));
}

fn a_commit_that_is_told_wrongly_is_caught() {
    let ends = |outcome: &str| TWO_WRITERS.replace("32 2 1 done Done", &format!("32 2 1 done {outcome}"));
    let (once, twice) = ([(1, 10, 1, 1), (2, 20, 2, 1)], [(1, 10, 1, 1), (2, 20, 2, 1), (3, 20, 2, 1)]);
    assert_eq!(holds(&judged(&ends("Unknown"), &once)).unknown, [1, 0]);
    assert_eq!(holds(&judged(&ends("Unknown"), &once[..1])).unknown, [0, 1]);
    breaks(Rule::OutcomesAreTrue, &ends("Done"), &once[..1]);
    breaks(Rule::OutcomesAreTrue, &ends("Nothing"), &once);
    breaks(Rule::OutcomesAreTrue, &ends("Unknown"), &twice);
}

fn a_release_that_is_told_wrongly_is_caught() {
    let taken = |prior: &str| format!("{RELEASED}\n600 2 1 ask k Lease\n700 2 1 granted 20 950 {prior}");
    holds(&judged(&taken(""), &[]));
    breaks(Rule::OutcomesAreTrue, &taken("10 1"), &[]);
    holds(&judged(&taken("10 1").replace("510 1 1 done Done", "510 1 1 done Unknown"), &[]));
}

fn a_claim_that_was_never_made_is_caught() {
    let taken = |outcome: &str| {
        format!(
            "0 1 1 ask k Lease
            10 1 1 done {outcome}
            20 2 1 ask k Lease
            1100 2 1 granted 20 950 15 1"
        )
    };
    assert_eq!(holds(&judged(&taken("Unknown"), &[])).unknown, [1, 0]);
    breaks(Rule::OutcomesAreTrue, &taken("Refused"), &[]);
    breaks(Rule::OutcomesAreTrue, &taken("Nothing"), &[]);
    let again = "2200 3 1 ask k Lease\n2300 3 1 granted 30 950 15 1\n2090 2 1 lost";
    breaks(Rule::OutcomesAreTrue, &format!("{}\n{again}", taken("Unknown")), &[]);
}
