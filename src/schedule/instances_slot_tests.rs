//! The slot of a row that gets other times, after a run that was not that of its last tick.

use chrono::{DateTime, TimeDelta, Utc};

use crate::{
    key::Key,
    schedule::{
        instances::{Decision, Declared, Judge, Word},
        spec::Schedule,
    },
    store::{
        instances::Past,
        schedule::{ListedSchedule, Times},
    },
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
    let schedule = Schedule::cron("report", "* * * * *").unwrap();
    let declared = Declared::new(&schedule);
    let mut word = Word::default();
    word.add(&declared.times, true, true, at(-30));
    let judge = Judge { judges: true, calls: false, lives: TimeDelta::seconds(60) };
    let past = Past::default();
    let change = declared.change(Decision::Apply, Some((&row, &past)), judge, &word, at(90)).unwrap();
    (change.slot - at(0)).num_seconds()
}

/// The tick of 03:00 is moved, and neither run again nor left out, whatever the jitter was and is,
/// and whether the tick of the day before is under way.
#[test]
fn another_jitter_moves_the_next_tick() {
    let at = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
    let cron = |name: &str, jitter: u64| {
        let cron = Schedule::cron(name, "0 3 * * *").unwrap();
        if jitter == 0 { cron } else { cron.jitter(std::time::Duration::from_secs(jitter)).unwrap() }
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
                let moved = Declared::new(&new).slot_after(&row, judge, &Word::default(), now);
                let day = TimeDelta::days(i64::from(begun));
                assert_eq!(plain(moved, &new), plain(slot, &old) + day, "{name}: {slot} {moved} {begun}");
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
