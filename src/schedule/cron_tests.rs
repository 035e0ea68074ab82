//! Every minute of a year, in zones whose clocks change in every way, against a search that looks
//! at each minute.

use std::collections::HashSet;

use chrono::{Datelike as _, NaiveDateTime, Timelike as _};
use chrono_tz::{Africa, America, Asia, Australia, Europe};

use super::*;

const ZONES: [Tz; 9] = [
    Europe::Berlin,
    Europe::London,
    America::New_York,
    America::Santiago,
    Australia::Lord_Howe,
    Africa::Cairo,
    Africa::Casablanca,
    Asia::Kolkata,
    Tz::UTC,
];

/// A pattern, whether it matches every hour, and the same as a condition on the wall clock.
type Case = (&'static str, bool, fn(&NaiveDateTime) -> bool);

const CASES: [Case; 13] = [
    ("*/30 * * * *", true, |t| t.minute().is_multiple_of(30)),
    ("0 * * * *", true, |t| t.minute() == 0),
    ("17 0-23 * * *", true, |t| t.minute() == 17),
    ("30 2 * * *", false, |t| (t.hour(), t.minute()) == (2, 30)),
    ("30 1 * * *", false, |t| (t.hour(), t.minute()) == (1, 30)),
    ("0 0 * * *", false, |t| (t.hour(), t.minute()) == (0, 0)),
    ("0 2 * * *", false, |t| (t.hour(), t.minute()) == (2, 0)),
    ("15 3 * * *", false, |t| (t.hour(), t.minute()) == (3, 15)),
    ("0 */2 * * *", false, |t| t.hour().is_multiple_of(2) && t.minute() == 0),
    ("*/15 0-3 * * *", false, |t| t.hour() < 4 && t.minute().is_multiple_of(15)),
    ("30 2 * * SUN", false, |t| (t.hour(), t.minute()) == (2, 30) && t.weekday() == chrono::Weekday::Sun),
    ("0 12 1 * *", false, |t| (t.day(), t.hour(), t.minute()) == (1, 12, 0)),
    ("5 2 13 3,10 FRI", false, |t| {
        let day = t.day() == 13 || t.weekday() == chrono::Weekday::Fri;
        [3, 10].contains(&t.month()) && day && (t.hour(), t.minute()) == (2, 5)
    }),
];

fn utc(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

/// The minutes of the year 2026 and, for each, what the wall clock shows.
fn minutes(zone: Tz) -> Vec<(DateTime<Utc>, NaiveDateTime)> {
    let begin = utc("2026-01-01T00:00:00Z");
    let minutes = (0..365 * 24 * 60).map(|minute| begin + TimeDelta::minutes(minute));
    minutes.map(|at| (at, at.with_timezone(&zone).naive_local())).collect()
}

/// The slots of the year, by looking at each minute and at each minute that a gap leaves out.
fn by_looking(
    minutes: &[(DateTime<Utc>, NaiveDateTime)],
    hourly: bool,
    matches: fn(&NaiveDateTime) -> bool,
) -> Vec<DateTime<Utc>> {
    let mut slots = Vec::new();
    let mut shown = HashSet::new();
    let mut expected = minutes[0].1;
    for (at, local) in minutes {
        let mut skipped = std::iter::successors(Some(expected), |time| Some(*time + TimeDelta::minutes(1)));
        let left_out = !hourly && skipped.by_ref().take_while(|time| time < local).any(|time| matches(&time));
        let due = matches(local) && (hourly || shown.insert(*local));
        if left_out || due {
            slots.push(*at);
        }
        expected = *local + TimeDelta::minutes(1);
    }
    slots
}

#[test]
fn a_year_is_the_same_minute_by_minute() {
    let mut count = 0;
    for zone in ZONES {
        let minutes = minutes(zone);
        for (text, hourly, matches) in CASES {
            let pattern = Pattern::parse(text).unwrap();
            assert_eq!(pattern.hourly, hourly, "{text}");
            let mut last = minutes[0].0 - SECOND;
            for slot in by_looking(&minutes, hourly, matches) {
                let next = pattern.next(zone, last).unwrap();
                assert_eq!(next, slot, "{zone} [{text}] after {last}");
                last = next;
                count += 1;
            }
            assert!(pattern.next(zone, last).unwrap() > minutes[minutes.len() - 1].0, "{zone} [{text}] after {last}");
        }
    }
    assert!(count > 300_000, "{count}");
}

/// A search may begin anywhere: at the registration of a schedule, or after ticks that are passed
/// over.
#[test]
fn a_search_from_any_instant_finds_the_same_slots() {
    for zone in ZONES {
        let minutes = minutes(zone);
        for (text, hourly, matches) in CASES {
            let pattern = Pattern::parse(text).unwrap();
            let slots = by_looking(&minutes, hourly, matches);
            for after in begins(&minutes) {
                let Some(expected) = slots.get(slots.partition_point(|slot| *slot <= after)) else { break };
                assert_eq!(pattern.next(zone, after), Some(*expected), "{zone} [{text}] after {after}");
            }
        }
    }
}

/// Instants around each change of the clock, and some in between.
fn begins(minutes: &[(DateTime<Utc>, NaiveDateTime)]) -> Vec<DateTime<Utc>> {
    let changes = minutes.windows(2).filter(|pair| pair[1].1 - pair[0].1 != TimeDelta::minutes(1));
    let around = changes.flat_map(|pair| (-90..30).map(|number| pair[1].0 + TimeDelta::minutes(20 * number)));
    let between = (0..200).map(|number| minutes[0].0 + TimeDelta::minutes(2600 * number));
    let mut begins: Vec<_> = around.chain(between).map(|at| at + TimeDelta::milliseconds(7_077)).collect();
    begins.sort_unstable();
    begins
}

#[test]
fn a_slot_is_strictly_later_than_the_one_before() {
    for text in ["* * * * * *", "*/7 * 2 * * *", "59 59 23 * * *"] {
        let pattern = Pattern::parse(text).unwrap();
        for zone in ZONES {
            for begin in
                ["2026-10-25T00:30:00Z", "2026-03-29T00:30:00Z", "2026-04-04T14:20:00Z", "2026-10-03T15:00:00Z"]
            {
                let mut last = utc(begin) + TimeDelta::microseconds(999_999);
                for _ in 0..200 {
                    let next = pattern.next(zone, last).unwrap();
                    assert!(next > last, "{zone} [{text}] {last} {next}");
                    last = next;
                }
            }
        }
    }
}

#[test]
fn a_day_that_a_zone_leaves_out_has_its_slot_at_the_change() {
    // Samoa left out the 30th of December 2011.
    let pattern = Pattern::parse("0 12 * * *").unwrap();
    let mut last = utc("2011-12-29T00:00:00Z");
    let mut slots = Vec::new();
    while last < utc("2012-01-01T00:00:00Z") {
        last = pattern.next(chrono_tz::Pacific::Apia, last).unwrap();
        slots.push(last.to_rfc3339());
    }
    let expected = ["2011-12-29T22:00:00+00:00", "2011-12-30T10:00:00+00:00", "2011-12-30T22:00:00+00:00"];
    assert_eq!(slots[..3], expected);
}

#[test]
fn a_pattern_that_no_time_matches_is_refused() {
    let invalid = ["", "x", "* * * *", "61 * * * *", "0 0 30 2 *", "0 0 0 1 1 * 2030", "0 25 * * *", "@reboot"];
    // The parser reads a name as a number in any field.
    let misplaced = [
        "MON * * * *",
        "0 JAN * * *",
        "0 0 FRI * *",
        "MON 0 0 * * *",
        "0 0 1-MAR * *",
        "0 9 * MON-FRI *",
        "0 9 * * JAN",
    ];
    for text in invalid.into_iter().chain(misplaced) {
        assert!(Pattern::parse(text).is_err(), "{text}");
    }
    let special = ["0 0 L * *", "0 0 15W * *", "0 0 * JAN,feb MON", "0 0 * * FRI#2", "0 0 * * FRI#L"];
    for text in ["0 0 29 2 *", "@daily", "0 9 * * MON-FRI", "*/10 * * * * *"].into_iter().chain(special) {
        assert!(Pattern::parse(text).is_ok(), "{text}");
    }
}
