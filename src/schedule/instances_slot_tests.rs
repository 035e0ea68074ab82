//! The slot of a row that gets other times, after a run that was not that of its last tick.

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::Key,
    schedule::{
        declarations::Word,
        instances::{Decision, Declared, Judge, is_ahead, moved},
        spec::Schedule,
    },
    store::schedule::{ListedSchedule, Times},
};

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::days(20_000) + TimeDelta::seconds(seconds)
}

/// Returns the slot, in seconds, of a row whose slot was at 120, once a pattern of every minute
/// takes the place of this one at 90 s. The instance has declared it since -30 s.
fn slot_at_90(spec: &str, last_run: DateTime<Utc>) -> i64 {
    let name = Key::new("report").unwrap();
    let times = Times { name, spec: spec.to_owned(), zone: "UTC".to_owned() };
    let row = ListedSchedule { run_slot: Some(last_run), now: at(90), ..ListedSchedule::unrun(times, at(120)) };
    let schedule = Schedule::cron("report", "* * * * *");
    let declared = Declared::new(&schedule);
    let mut word = Word::default();
    word.add(&declared.times, true, true, at(-30));
    let judge = Judge { judges: true, calls: false, lives: TimeDelta::seconds(60) };
    let change = declared.change(Decision::Apply, Some(&row), judge, &word, at(90)).unwrap();
    (change.slot - at(0)).num_seconds()
}

/// What is due when the jitter changes is run once, and by its own time if a smaller jitter would
/// make it late.
#[test]
fn another_jitter_repeats_no_tick_that_is_due() {
    let day = |hour: i64, minute: i64| at(0) + TimeDelta::hours(hour) + TimeDelta::minutes(minute);
    let schedule = Schedule::cron("report", "0 3 * * *");
    let (half, hours) = (TimeDelta::minutes(30), TimeDelta::hours(2));
    // The tick of 03:00 is due since 20 s, and comes at 03:30 now: not at both.
    assert_eq!(moved(day(3, 0), half, (None, day(3, 0) + TimeDelta::seconds(20)), &schedule), day(3, 30));
    // One of 05:00 does not become late at 04:00.
    assert_eq!(moved(day(5, 0), -hours, (None, day(4, 0)), &schedule), day(5, 0));
    assert_eq!(moved(day(5, 0), -hours, (None, day(2, 0)), &schedule), day(3, 0));
    // Nor does one come at or before the last run.
    let often = Schedule::every("often", std::time::Duration::from_secs(60));
    let last = Some(day(12, 4));
    assert_eq!(moved(day(12, 5), -TimeDelta::minutes(2), (last, day(12, 1)), &often), day(12, 5));
}

/// The tick of 03:00 is moved, and neither run again nor left out, whatever the jitter was and is,
/// and whether the tick of the day before is under way.
#[test]
fn another_jitter_moves_the_next_tick() {
    let at = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
    let cron = |name: &str, jitter: u64| {
        let cron = Schedule::cron(name, "0 3 * * *");
        if jitter == 0 { cron } else { cron.jitter(std::time::Duration::from_secs(jitter)) }
    };
    for (old, new) in [(0, 0), (0, 7_200), (7_200, 0), (600, 86_400), (86_400, 60)] {
        for name in ["report", "renamed", "another"] {
            let (old, new) = (cron("report", old), cron(name, new));
            let before = at("2026-01-05T12:00:00Z");
            let slot = old.next(before);
            let plain = |slot: DateTime<Utc>, of: &Schedule| slot - of.later_than(&cron("report", 0)).unwrap();
            for begun in [false, true] {
                let run_slot = if begun { Some(slot) } else { Some(old.next(slot - TimeDelta::days(2))) };
                let now = slot + if begun { TimeDelta::seconds(5) } else { -TimeDelta::minutes(1) };
                let row = ListedSchedule {
                    run_slot,
                    running: begun,
                    attempt: u32::from(begun),
                    due_at: if begun { now + TimeDelta::minutes(1) } else { slot },
                    now,
                    ..ListedSchedule::unrun(old.times(), slot)
                };
                let judge = Judge { judges: true, calls: false, lives: TimeDelta::seconds(60) };
                let slot_now = Declared::new(&new).slot_after(&row, judge, &Word::default(), now);
                let next = plain(slot, &old) + TimeDelta::days(i64::from(begun));
                // A smaller jitter makes no tick late.
                let is_late = plain(slot_now, &new) != next && new.later_than(&old).unwrap() < TimeDelta::zero();
                let kept = if begun { old.next(slot) } else { slot };
                let moved = ListedSchedule { running: false, ..ListedSchedule::unrun(new.times(), slot_now) };
                assert!(!is_ahead(&new, &moved, now), "{name}: {slot} {slot_now} {begun}");
                let is_kept = is_late && slot_now == kept && next + new.later_than(&cron("report", 0)).unwrap() <= now;
                assert!(is_kept || plain(slot_now, &new) == next, "{name}: {slot} {slot_now} {begun}");
            }
        }
    }
}

#[test]
fn a_tick_that_has_ended_does_not_come_again() {
    assert_eq!(slot_at_90("every 60s", at(60)), 120);
    // The tick at 60 has ended before a trigger.
    assert_eq!(slot_at_90("every 60s", at(70) + TimeDelta::microseconds(1)), 120);
    // Those at 0 and 60 were passed over.
    assert_eq!(slot_at_90("every 60s", at(-60)), 120);
    // The times before had no tick at 60.
    assert_eq!(slot_at_90("every 120s", at(0)), 60);
    assert_eq!(slot_at_90("every 120s", at(10) + TimeDelta::microseconds(1)), 60);
}
