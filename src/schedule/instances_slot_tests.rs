//! The slot of a row that gets other times, after a run that was not that of its last tick.

use super::*;

#[test]
fn a_tick_that_has_ended_does_not_come_again() {
    let judge = Judge { lives: TimeDelta::seconds(60), ..OLD };
    for (from, last, slot) in [
        (every(60), "10:11:00", "10:12:00"),
        // The tick at 10:11 has ended before a trigger.
        (every(60), "10:11:10.000001", "10:12:00"),
        // Those at 10:10 and 10:11 were skipped.
        (every(60), "10:09:00", "10:12:00"),
        // The times before had no tick at 10:11.
        (every(120), "10:10:00", "10:11:00"),
        (every(120), "10:10:10.000001", "10:11:00"),
    ] {
        let case = Case { from: &from, slot: "10:12:00", last: Some(last), begun: false, now: "10:11:30" };
        assert_eq!(case.slot(&cron("* * * * *"), "10:09:30", judge), at(slot), "{from:?} at {last}");
    }
}

/// What is due when the jitter changes is run once, and by its own time if a smaller jitter would
/// make it late.
#[test]
fn another_jitter_repeats_no_tick_that_is_due() {
    let daily = Schedule::cron("k", "0 3 * * *");
    let (half, hours) = (TimeDelta::minutes(30), TimeDelta::hours(2));
    // The tick of 03:00 is due since 20 s, and comes at 03:30 now: not at both.
    assert_eq!(moved(at("03:00:00"), half, (None, at("03:00:20")), &daily), at("03:30:00"));
    // One of 05:00 does not become late at 04:00.
    assert_eq!(moved(at("05:00:00"), -hours, (None, at("04:00:00")), &daily), at("05:00:00"));
    assert_eq!(moved(at("05:00:00"), -hours, (None, at("02:00:00")), &daily), at("03:00:00"));
    // Nor does one come at or before the last run.
    let (often, last) = (Schedule::every("k", Duration::from_secs(60)), Some(at("12:04:00")));
    assert_eq!(moved(at("12:05:00"), -TimeDelta::minutes(2), (last, at("12:01:00")), &often), at("12:05:00"));
}

/// The tick of 03:00 is moved, and neither run again nor left out, whatever the jitter was and is,
/// and whether the tick of the day before is under way.
#[test]
fn another_jitter_moves_the_next_tick() {
    let daily = |name: &str, jitter: u64| {
        let daily = Schedule::cron(name, "0 3 * * *");
        if jitter == 0 { daily } else { daily.jitter(Duration::from_secs(jitter)) }
    };
    for (old, new) in [(0, 0), (0, 7_200), (7_200, 0), (600, 86_400), (86_400, 60)] {
        for name in ["report", "renamed", "another"] {
            let (old, new) = (daily("report", old), daily(name, new));
            let slot = old.next(at("12:00:00"));
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
                let slot_now = Declared::new(&new).slot_after(&row, OLD, &Word::default(), now);
                let next = slot - old.shift + TimeDelta::days(i64::from(begun));
                // A smaller jitter makes no tick late.
                let is_late = slot_now - new.shift != next && new.shift < old.shift;
                let kept = if begun { old.next(slot) } else { slot };
                let moved = ListedSchedule::unrun(new.times(), slot_now);
                assert!(!is_ahead(&new, &moved, now), "{name}: {slot} {slot_now} {begun}");
                let is_kept = is_late && slot_now == kept && next + new.shift <= now;
                assert!(is_kept || slot_now - new.shift == next, "{name}: {slot} {slot_now} {begun}");
            }
        }
    }
}
