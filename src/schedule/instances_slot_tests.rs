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
