//! Histories of readers and writers written by hand, with times in milliseconds and leases of a
//! second: valid ones, and invalid ones for each rule.

use std::time::Duration;

use libtest_mimic::Trial;

use crate::{checker::Rule, checker_tests::breaks_as, record::Promised};

macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        pub fn trials() -> Vec<Trial> {
            let trial = |name: &str, test: fn()| {
                Trial::test(format!("sharing::{name}"), move || {
                    test();
                    Ok(())
                })
            };
            vec![$(trial(stringify!($name), $name)),+]
        }
    };
}

tests!(
    readers_beside_each_other_pass,
    a_reader_beside_a_writer_is_caught,
    a_second_writer_is_caught,
    a_loss_that_is_told_too_late_is_caught_on_both_sides,
    a_writer_that_waits_too_long_is_caught,
    a_fence_that_does_not_grow_is_caught,
    a_released_claim_that_is_taken_over_is_caught,
    a_deleted_name_excuses_only_who_enters,
    a_name_that_is_deleted_under_a_waiting_writer_excuses_later_readers,
);

const PROMISED: Promised = Promised { lease: Duration::from_secs(1), delay: Duration::ZERO, most: 1, shared: true };

#[track_caller]
fn judged(lines: &str, rule: impl Into<Option<Rule>>) {
    breaks_as(PROMISED, lines, rule.into());
}

/// Process 1 stood still until the given time, so that it need not be told of its loss.
fn stopped(until: u32) -> String {
    format!("4 1 0 stopped\n{until} 1 0 continued\n")
}

fn readers_beside_each_other_pass() {
    judged(
        "
        0 1 1 ask k Read
        5 1 1 permit k#r1
        5 1 1 granted 10 950
        0 2 1 ask k Read
        6 2 1 permit k#r2
        6 2 1 granted 10 950",
        None,
    );
}

/// The first holder and the second one, of these rows.
fn beside(one: &str, other: &str, at: u32) -> String {
    format!(
        "
        0 1 1 ask k Try
        5 1 1 permit {one}
        5 1 1 granted 10 950
        20 2 1 ask k Try
        {at} 2 1 permit {other}
        {at} 2 1 granted 20 950"
    )
}

fn a_reader_beside_a_writer_is_caught() {
    for (one, other) in [("k", "k#r1"), ("k#r1", "k")] {
        judged(&(stopped(2000) + &beside(one, other, 100)), Rule::NoOverlap);
        judged(&(stopped(2000) + &beside(one, other, 956)), None);
    }
}

fn a_second_writer_is_caught() {
    // As writers, and as holders of one row.
    let violations = stopped(2000) + &beside("k", "k", 100);
    let verdict = crate::checker_tests::judged_by(PROMISED, &violations, &[]);
    assert!(verdict.violations.iter().all(|violation| violation.rule == Rule::NoOverlap));
    assert_eq!(verdict.violations.len(), 2, "{:?}", verdict.violations);
}

fn a_loss_that_is_told_too_late_is_caught_on_both_sides() {
    for (one, other) in [("k", "k#r1"), ("k#r1", "k"), ("k", "k"), ("k#r1", "k#r1")] {
        let lines = beside(one, other, 1000);
        judged(&format!("{lines}\n1000 1 1 lost"), None);
        judged(&format!("{lines}\n1001 1 1 lost"), Rule::LossIsToldFirst);
    }
    judged(&format!("{}\n1001 1 1 lost", beside("k#r1", "k#r2", 1000)), None);
}

fn a_writer_that_waits_too_long_is_caught() {
    let waits = |granted: u32, more: &str| {
        format!(
            "
            0 1 1 ask k Read
            5 1 1 permit k#r1
            5 1 1 granted 10 950
            500 1 1 end Release
            510 1 1 done Done
            100 2 1 ask k Write
            {granted} 2 1 permit k
            {granted} 2 1 granted 20 950
            {more}"
        )
    };
    // The longest reader, a lease, and a second.
    judged(&waits(2595, ""), None);
    judged(&waits(2596, ""), Rule::WritersGetIn);
    judged(&waits(2596, "200 3 1 ask k Write\n2700 3 1 done Refused"), None);
    // From the end of another writer on.
    judged(&waits(2795, "150 3 1 ask k Write\n300 3 1 done Refused"), None);
    judged(&waits(2796, "150 3 1 ask k Write\n300 3 1 done Refused"), Rule::WritersGetIn);
    judged(&waits(2596, "200 3 1 ask k Read\n2700 3 1 done Refused"), Rule::WritersGetIn);
    judged(&waits(2596, "200 2 0 cut-off\n400 2 0 reached"), None);
    judged(&waits(2596, "200 3 0 cut-off\n400 3 0 reached"), Rule::WritersGetIn);
    judged(&waits(2596, "200 2 0 stopped\n700 2 0 continued"), None);
    judged(&waits(2596, "700 999 0 held-up 200"), None);
    judged(&waits(2596, "699 999 0 held-up 200"), Rule::WritersGetIn);
    // It gave up.
    let gave_up = waits(2596, "").replace("2596 2 1 permit k\n", "").replace("granted 20 950", "done Refused");
    judged(&gave_up, Rule::WritersGetIn);
}

fn a_fence_that_does_not_grow_is_caught() {
    let fenced = |fence: u32, later: u32| {
        format!(
            "
            0 1 1 ask k Write
            5 1 1 permit k
            5 1 1 granted 10 950
            20 1 1 end Release
            30 1 1 done Done
            40 2 1 ask k Read
            50 2 1 permit k#r1
            50 2 1 granted 7 950
            50 2 1 fence {fence}
            60 2 1 end Release
            70 2 1 done Done
            80 3 1 ask k Write
            90 3 1 permit k
            90 3 1 granted {later} 950"
        )
    };
    judged(&fenced(10, 11), None);
    judged(&fenced(9, 11), Rule::TokensGrow);
    judged(&fenced(11, 11), Rule::TokensGrow);
}

fn a_released_claim_that_is_taken_over_is_caught() {
    let taken = |outcome: &str| {
        format!(
            "
            0 1 1 ask k Write
            5 1 1 permit k
            5 1 1 granted 10 950
            20 1 1 end Release
            30 1 1 done {outcome}
            40 2 1 ask k Read
            50 2 1 permit k#r1
            50 2 1 granted 7 950 10 1
            50 2 1 fence 20"
        )
    };
    judged(&taken("Unknown"), None);
    judged(&taken("Done"), Rule::OutcomesAreTrue);
}

fn a_deleted_name_excuses_only_who_enters() {
    let deleted = |asked: u32, granted: u32| {
        stopped(2000)
            + &format!(
                "
                {asked} 1 1 ask k Read
                {granted} 1 1 permit k#r1
                {granted} 1 1 granted 10 950
                100 9 0 deleting k
                110 9 0 deleted k
                112 2 1 ask k Write
                130 2 1 permit k
                130 2 1 granted 20 950"
            )
    };
    judged(&deleted(90, 120), None);
    judged(&deleted(80, 90), Rule::NoOverlap);
}

fn a_name_that_is_deleted_under_a_waiting_writer_excuses_later_readers() {
    let deleted = |by: u32, granted: u32| {
        format!(
            "
            80 1 1 ask k Write
            100 9 0 deleting k
            {by} 9 0 deleted k
            112 2 1 ask k Read
            120 2 1 permit k#r1
            120 2 1 granted 20 950
            {granted} 1 1 permit k
            {granted} 1 1 granted 10 950"
        )
    };
    judged(&deleted(110, 130), None);
    // The reader was in before the row was deleted.
    judged(&deleted(110, 130).replace("112 2 1", "82 2 1").replace("120 2 1", "90 2 1"), Rule::LossIsToldFirst);
}
