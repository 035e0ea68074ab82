//! Every cell of the decisions.

use std::time::Duration;

use super::*;

fn at(time: &str) -> DateTime<Utc> {
    format!("2026-01-05T{time}Z").parse().unwrap()
}

const MINUTE: Duration = Duration::from_secs(60);

/// The same ticks, each minute, in both forms.
fn minutely(catch_up: CatchUp) -> [Schedule; 2] {
    [Schedule::cron("k", "* * * * *"), Schedule::every("k", MINUTE)]
        .map(|schedule| schedule.catch_up(catch_up).grace(Duration::from_secs(30)))
}

fn row(slot: &str) -> Row {
    Row { slot: at(slot), own: true, attempt: 1, missed: 0, spent: 0, lost_since: None, skip: None, stopped: false }
}

fn moved(to: &str, missed: u32, skipped: u32) -> Start {
    Start::Move { to: at(to), missed, skipped }
}

fn skip(next: &str, skipped: u32) -> Start {
    Start::Skip { next: at(next), skipped }
}

/// Every 30 seconds has become every minute.
#[test]
fn a_slot_of_other_times_is_followed_by_ticks_of_the_present_ones() {
    let every = Schedule::every("k", MINUTE);
    for (catch_up, expected) in [
        (CatchUp::Once, moved("10:05:00", 5, 0)),
        (CatchUp::All(2), moved("10:04:00", 4, 0)),
        (CatchUp::All(6), Start::Run),
        (CatchUp::Skip, moved("10:05:00", 0, 5)),
    ] {
        let schedule = every.clone().catch_up(catch_up).grace(Duration::from_secs(20));
        assert_eq!(start(&schedule, &row("10:00:30"), at("10:05:10")), expected, "{catch_up:?}");
    }
    assert_eq!(start(&every, &row("10:00:30"), at("10:00:59")), Start::Run);
}

#[test]
fn what_a_fresh_claim_runs() {
    let cells = [
        // On time, and late within the grace or without a later tick.
        (CatchUp::Skip, "10:00:00", Start::Run),
        (CatchUp::Once, "10:00:00", Start::Run),
        (CatchUp::All(3), "10:00:00", Start::Run),
        (CatchUp::Skip, "10:00:30", Start::Run),
        (CatchUp::Once, "10:00:59", Start::Run),
        (CatchUp::All(3), "10:00:59", Start::Run),
        // Late, beyond the grace.
        (CatchUp::Skip, "10:00:31", skip("10:01:00", 1)),
        // Eleven ticks are pending, the last one within the grace.
        (CatchUp::Skip, "10:10:30", moved("10:10:00", 0, 10)),
        (CatchUp::Once, "10:10:30", moved("10:10:00", 10, 0)),
        (CatchUp::All(3), "10:10:30", moved("10:08:00", 8, 0)),
        (CatchUp::All(10), "10:10:30", moved("10:01:00", 1, 0)),
        (CatchUp::All(11), "10:10:30", Start::Run),
        (CatchUp::All(100), "10:10:30", Start::Run),
        // The same, beyond the grace.
        (CatchUp::Skip, "10:10:31", skip("10:11:00", 11)),
        (CatchUp::Once, "10:10:31", moved("10:10:00", 10, 0)),
        (CatchUp::All(1), "10:10:31", moved("10:10:00", 10, 0)),
        // A trigger, or a clock that was set back, made the row due before its slot.
        (CatchUp::Skip, "09:59:00", Start::Run),
        (CatchUp::Once, "09:59:00", Start::Run),
    ];
    for (catch_up, now, expected) in cells {
        for schedule in minutely(catch_up) {
            assert_eq!(start(&schedule, &row("10:00:00"), at(now)), expected, "{catch_up:?} at {now}");
        }
    }
}

#[test]
fn a_fixed_delay_misses_nothing() {
    for catch_up in [CatchUp::Skip, CatchUp::Once, CatchUp::All(3)] {
        let after = Schedule::after("k", MINUTE).catch_up(catch_up);
        assert_eq!(start(&after, &row("10:00:00"), at("12:00:00")), Start::Run);
    }
}

#[test]
fn a_tick_is_not_late_at_the_poll_that_finds_it() {
    let prompt = Schedule::every("k", MINUTE).catch_up(CatchUp::Skip).grace(Duration::ZERO);
    let start = |now| start(&prompt, &row("10:00:00"), at(now));
    assert_eq!(start("10:00:01"), Start::Run);
    assert_eq!(start("10:00:02"), skip("10:01:00", 1));
}

#[test]
fn a_tick_that_was_begun_is_finished_however_late() {
    for schedule in [CatchUp::Skip, CatchUp::Once, CatchUp::All(2)].into_iter().flat_map(minutely) {
        for (what, own, attempt, lost_at) in [
            ("after a failure", true, 2, None),
            ("after a crash", true, 2, Some("10:00:00")),
            ("after another crash", true, 3, Some("10:50:00")),
            ("triggered", false, 1, None),
            ("of replaced times", false, 2, Some("10:30:00")),
        ] {
            let row = Row { own, attempt, lost_since: lost_at.map(at), ..row("10:00:00") };
            assert_eq!(start(&schedule, &row, at("11:00:00")), Start::Run, "{what}");
        }
    }
}

/// The process died between its claim and the move of the slot.
#[test]
fn a_slot_that_was_not_moved_in_time_is_moved_by_the_takeover() {
    let lost = Row { attempt: 2, lost_since: Some(at("10:10:30")), ..row("10:00:00") };
    for (catch_up, expected) in [
        (CatchUp::Skip, moved("10:12:00", 0, 12)),
        (CatchUp::Once, moved("10:12:00", 12, 0)),
        (CatchUp::All(3), moved("10:10:00", 10, 0)),
    ] {
        for schedule in minutely(catch_up) {
            assert_eq!(start(&schedule, &lost, at("10:12:10")), expected, "{catch_up:?}");
        }
    }
    // It died after the move: the slot stands for others, and no later one was due then.
    let moved = Row { missed: 10, ..Row { slot: at("10:10:00"), ..lost } };
    for schedule in [CatchUp::Skip, CatchUp::Once].into_iter().flat_map(minutely) {
        assert_eq!(start(&schedule, &moved, at("10:12:10")), Start::Run);
    }
}

#[test]
fn a_tick_that_kills_its_processes_is_given_up() {
    for times in [0, 3] {
        let schedule = Schedule::every("k", MINUTE).retry(times, Duration::ZERO);
        let lost = |spent| Row { attempt: 40, spent, lost_since: Some(at("10:00:00")), ..row("10:00:00") };
        assert_eq!(start(&schedule, &lost(10 + times), at("10:00:10")), Start::Run, "others were handed back");
        assert_eq!(start(&schedule, &lost(11 + times), at("10:00:10")), Start::GiveUp);
        let triggered = Row { own: false, ..lost(11 + times) };
        assert_eq!(start(&schedule, &triggered, at("10:00:10")), Start::GiveUp);
    }
}

#[test]
fn what_follows_from_the_end_of_a_run() {
    let again = |minutes| Then::Again(TimeDelta::minutes(minutes));
    let next = Then::Next(at("10:01:00"));
    for schedule in minutely(CatchUp::Once) {
        let retried = schedule.clone().retry(2, MINUTE..3 * MINUTE);
        for (schedule, attempt, status, expected) in [
            (&schedule, 1, Status::Succeeded, next),
            (&schedule, 1, Status::Failed, next),
            (&schedule, 2, Status::Failed, next),
            (&retried, 1, Status::Succeeded, next),
            (&retried, 1, Status::Failed, again(1)),
            (&retried, 2, Status::Failed, again(2)),
            (&retried, 3, Status::Failed, next),
            (&retried, 3, Status::Succeeded, next),
        ] {
            let row = Row { attempt, ..row("10:00:00") };
            for now in ["10:00:01", "10:30:00", "09:00:00"] {
                assert_eq!(end(schedule, &row, status, at(now)), expected, "attempt {attempt}, {status:?}, {now}");
            }
        }
    }
    let after = Schedule::after("k", MINUTE);
    assert_eq!(end(&after, &row("10:00:00"), Status::Failed, at("10:30:00")), Then::Next(at("10:31:00")));
    assert_eq!(end(&after, &row("10:00:00"), Status::Succeeded, at("09:00:00")), Then::Next(at("10:01:00")));
}

/// A schedule of seconds that was down for a year has more ticks than are counted.
#[test]
fn very_many_ticks_are_counted_up_to_a_number() {
    let now = at("10:00:00.5");
    for (catch_up, first) in
        [(CatchUp::Once, "10:00:00"), (CatchUp::All(3), "09:59:58"), (CatchUp::All(1000), "09:43:21")]
    {
        let row = Row { slot: now - TimeDelta::days(365) - TimeDelta::milliseconds(500), ..row("10:00:00") };
        let cron = Schedule::cron("k", "* * * * * *").catch_up(catch_up);
        let Start::Move { to, missed, skipped: 0 } = start(&cron, &row, now) else { panic!("not moved") };
        assert_eq!(to, at(first), "{catch_up:?}");
        assert!(missed >= COUNTED, "{missed}");
        let every = Schedule::every("k", Duration::from_secs(1)).catch_up(catch_up);
        let Start::Move { to, missed, skipped: 0 } = start(&every, &row, now) else { panic!("not moved") };
        assert_eq!(to, at(first), "{catch_up:?}");
        assert!(missed >= 365 * 86400 - 1000, "{missed}");
    }
}

/// The last hour has ticks that are among those that were counted from the slot on.
#[test]
fn no_tick_is_counted_twice() {
    let now = at("10:00:00.5");
    let row = Row { slot: now - TimeDelta::milliseconds(10_001_500), ..row("10:00:00") };
    for schedule in [Schedule::cron("k", "* * * * * *"), Schedule::every("k", Duration::from_secs(1))] {
        let started = start(&schedule.catch_up(CatchUp::All(1_000)), &row, now);
        assert!(matches!(started, Start::Move { missed: 9_002, skipped: 0, .. }), "{started:?}");
    }
}

/// From Monday at 07:00, the last ten thousand ticks begin on Sunday, within a time that holds
/// more.
#[test]
fn the_last_ticks_are_the_last_ones_however_many_there_are() {
    let time = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
    let (slot, now) = (time("2026-01-02T09:00:00Z"), time("2026-01-05T07:00:00Z"));
    let schedule = Schedule::cron("k", "* * 9-17 * * *");
    for (most, first) in [(1, "2026-01-04T17:59:59Z"), (1_000, "2026-01-04T17:43:20Z")] {
        let found = pending(&schedule, slot, now, most);
        assert_eq!((found.first, found.last), (time(first), time("2026-01-04T17:59:59Z")), "{most}");
    }
}

#[test]
fn skipped_ticks_are_left_out_and_those_after_them_run() {
    let skipped = |until: &str| Row { skip: Some((at("09:00:00"), at(until))), missed: 2, ..row("10:00:00") };
    for catch_up in [CatchUp::Skip, CatchUp::Once, CatchUp::All(3)] {
        let schedule = Schedule::every("k", MINUTE).catch_up(catch_up).grace(Duration::from_secs(3600));
        let start = |until, now| start(&schedule, &skipped(until), at(now));
        assert_eq!(start("10:00:00", "10:00:30"), skip("10:01:00", 1), "{catch_up:?}");
        assert_eq!(start("12:00:00", "10:00:30"), skip("10:01:00", 1), "each when it is due");
        assert_eq!(start("12:00:00", "10:02:30"), skip("10:03:00", 3));
        assert_eq!(start("10:01:30", "10:01:45"), skip("10:02:00", 2));
        assert_eq!(start("10:01:00", "10:02:30"), moved("10:02:00", 2, 2), "{catch_up:?}");
        let rest = match catch_up {
            CatchUp::Skip => moved("10:04:00", 0, 4),
            CatchUp::Once => moved("10:04:00", 4, 2),
            CatchUp::All(_) => moved("10:02:00", 2, 2),
        };
        assert_eq!(start("10:01:00", "10:04:30"), rest, "{catch_up:?}");
        assert_eq!(start("10:00:00", "10:01:00"), moved("10:01:00", 2, 1), "it is due just now");
        assert_eq!(start("09:59:59", "10:00:30"), Start::Run, "it was for an earlier one");
        // One that was ordered while the tick was run is for those after it, also if the run dies.
        let during = Row { skip: Some((at("10:00:01"), at("12:00:00"))), ..row("10:00:00") };
        let died = Row { attempt: 2, lost_since: Some(at("10:00:05")), ..during.clone() };
        assert_eq!(super::start(&schedule, &during, at("10:00:30")), Start::Run);
        assert_eq!(super::start(&schedule, &during, at("10:03:30")), Start::Run, "it stands for none of those");
        assert_eq!(super::start(&schedule, &died, at("10:00:30")), Start::Run);
    }
    let late = Schedule::every("k", MINUTE).catch_up(CatchUp::Skip).grace(Duration::from_secs(20));
    assert_eq!(
        start(&late, &skipped("10:00:00"), at("10:03:30")),
        skip("10:04:00", 4),
        "those after them are too late"
    );
    for (catch_up, expected, of_two) in [
        (CatchUp::Once, moved("10:04:00", 4, 0), moved("10:04:00", 4, 0)),
        (CatchUp::All(2), moved("10:04:00", 4, 0), moved("10:03:00", 3, 0)),
        (CatchUp::Skip, moved("10:04:00", 0, 4), skip("10:05:00", 5)),
    ] {
        let schedule = Schedule::every("k", MINUTE).catch_up(catch_up).grace(Duration::from_secs(90));
        let one = Row { skip: Some((at("10:05:00"), at("10:05:00"))), ..row("10:00:00") };
        assert_eq!(super::start(&schedule, &one, at("10:05:20")), expected, "{catch_up:?}");
        let two = Row { skip: Some((at("10:05:00"), at("10:06:00"))), ..one };
        assert_eq!(super::start(&schedule, &two, at("10:06:20")), of_two, "{catch_up:?}");
    }
    let schedule = Schedule::every("k", MINUTE);
    let triggered = Row { own: false, ..skipped("10:00:00") };
    assert_eq!(start(&schedule, &triggered, at("10:00:30")), Start::Run);
    let again = Row { attempt: 2, ..skipped("10:00:00") };
    assert_eq!(start(&schedule, &again, at("10:00:30")), Start::Run, "it was begun before");
    let after = Schedule::after("k", Duration::from_secs(60));
    assert_eq!(start(&after, &skipped("10:00:00"), at("10:00:30")), skip("10:01:30", 1));
}

#[test]
fn a_tick_that_was_stopped_ends_without_another_attempt() {
    let schedule = Schedule::every("k", MINUTE).retry(3, Duration::ZERO);
    let stopped = Row { stopped: true, ..row("10:00:00") };
    assert_eq!(start(&schedule, &stopped, at("10:00:30")), Start::Stop);
    assert_eq!(end(&schedule, &stopped, Status::Failed, at("10:00:30")), Then::Next(at("10:01:00")));
}
