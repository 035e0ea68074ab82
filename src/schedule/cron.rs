//! The slots of a cron pattern in a time zone, across changes of the clock.
//!
//! The parser's own search is right under one fixed offset from UTC and wrong across changes of
//! it. The search here therefore asks it for one offset at a time.
//!
//! A pattern that names hours follows the clock on the wall: it has one slot in a repeated hour,
//! the first, and a slot at the end of a gap if the gap left its time out. A pattern that matches
//! every hour follows elapsed time: it has its slots in both passes of a repeated hour and none for
//! a gap.

use chrono::{DateTime, FixedOffset, LocalResult, Offset, SubsecRound, TimeDelta, TimeZone, Utc};
use chrono_tz::Tz;
use croner::{
    Cron,
    parser::{CronParser, Seconds, Year},
};

/// The step at which a change of the offset is looked for. No zone changes its offset and returns
/// to it within a day.
const STEP: TimeDelta = TimeDelta::days(1);
const SECOND: TimeDelta = TimeDelta::seconds(1);

/// A cron pattern of five fields, or of six with seconds.
#[derive(Clone, Debug)]
pub struct Pattern {
    cron: Cron,
    /// Every hour matches: the pattern follows elapsed time.
    hourly: bool,
}

impl Pattern {
    /// Parses a pattern. The error says what is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Optional).build();
        let fields = text.split_whitespace().count();
        if !text.starts_with('@') && !(5..=6).contains(&fields) {
            return Err(format!("it needs five fields, or six with seconds in front, and has {fields}"));
        }
        if let Some(wrong) = misplaced_name(text) {
            return Err(wrong);
        }
        let cron = parser.parse(text).map_err(|error| wrong_field(&parser, text).unwrap_or(error.to_string()))?;
        let hourly = (0..24).all(|hour| cron.pattern.hour_match(hour).unwrap_or(false));
        let pattern = Self { cron, hourly };
        match pattern.next(Tz::UTC, DateTime::UNIX_EPOCH) {
            Some(_) => Ok(pattern),
            None => Err("no time matches it".to_owned()),
        }
    }

    /// Returns the first slot after `after`, which is strictly later. There is none if the search
    /// leaves the calendar.
    pub fn next(&self, zone: Tz, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        // The search has whole seconds: a slot after the second is after its fractions too.
        let mut from = after.trunc_subsecs(0);
        let mut offset = offset(zone, from);
        // Where the offset begins to be in force: `from`, or the change that lies just behind it.
        let mut since = from;
        loop {
            let slot = self.under(offset, from)?;
            let Some(change) = first_change(zone, offset, since, slot) else {
                if self.hourly || !is_repeated(zone, slot) {
                    return Some(slot).filter(|slot| *slot > after);
                }
                (from, since) = (slot, slot);
                continue;
            };
            let new = self::offset(zone, change);
            let gap = TimeDelta::seconds(i64::from(new.local_minus_utc() - offset.local_minus_utc()));
            if !self.hourly && slot < change + gap {
                return Some(change).filter(|slot| *slot > after);
            }
            (from, since, offset) = (change - SECOND, change, new);
        }
    }

    /// Returns the next match if the offset never changed.
    fn under(&self, offset: FixedOffset, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let found = self.cron.find_next_occurrence(&after.with_timezone(&offset), false).ok()?;
        Some(found.with_timezone(&Utc)).filter(|found| *found > after)
    }
}

const FIELDS: [&str; 6] = ["second", "minute", "hour", "day of the month", "month", "day of the week"];

const MONTHS: [&str; 12] = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"];
const DAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];

/// Returns what is wrong with a name in another field than its own. The parser would read it as a
/// number there.
fn misplaced_name(text: &str) -> Option<String> {
    if text.starts_with('@') {
        return None;
    }
    let values: Vec<&str> = text.split_whitespace().collect();
    let fields = &FIELDS[FIELDS.len().checked_sub(values.len())?..];
    let names = |field: &str| match field {
        "month" => MONTHS.as_slice(),
        "day of the week" => DAYS.as_slice(),
        _ => &[],
    };
    let (field, value) = fields.iter().zip(values).find(|(field, value)| {
        // `L` and `W` are no names.
        let mut words = value.split(|c: char| !c.is_ascii_alphabetic()).filter(|word| word.len() > 1);
        words.any(|word| !names(field).contains(&word.to_ascii_uppercase().as_str()))
    })?;
    Some(format!("the {field} {value:?}: names are JAN to DEC for months, and SUN to SAT for days of the week"))
}

/// Returns what is wrong with the first field that is wrong by itself.
fn wrong_field(parser: &CronParser, text: &str) -> Option<String> {
    if text.starts_with('@') {
        return Some("the short forms are @yearly, @monthly, @weekly, @daily and @hourly".to_owned());
    }
    let values: Vec<&str> = text.split_whitespace().collect();
    let first = FIELDS.len().checked_sub(values.len())?;
    values.iter().enumerate().find_map(|(place, value)| {
        let mut fields = ["*"; 6];
        *fields.get_mut(first + place)? = value;
        let error = parser.parse(&fields.join(" ")).err()?;
        Some(format!("the {} {value:?}: {error}", FIELDS[first + place]))
    })
}

fn offset(zone: Tz, at: DateTime<Utc>) -> FixedOffset {
    zone.offset_from_utc_datetime(&at.naive_utc()).fix()
}

/// Returns whether the wall clock showed the same time at an earlier instant.
fn is_repeated(zone: Tz, at: DateTime<Utc>) -> bool {
    let local = at.with_timezone(&zone).naive_local();
    matches!(zone.from_local_datetime(&local), LocalResult::Ambiguous(first, _) if first < at)
}

/// Returns the first second after `from`, up to `until`, at which another offset is in force.
fn first_change(zone: Tz, known: FixedOffset, from: DateTime<Utc>, until: DateTime<Utc>) -> Option<DateTime<Utc>> {
    let (mut before, mut at) = (from, from);
    while offset(zone, at) == known {
        if at >= until {
            return None;
        }
        (before, at) = (at, (at + STEP).min(until));
    }
    while at - before > SECOND {
        let middle = before + TimeDelta::seconds((at - before).num_seconds() / 2);
        if offset(zone, middle) == known { before = middle } else { at = middle }
    }
    Some(at)
}

#[cfg(test)]
#[path = "cron_tests.rs"]
mod tests;
