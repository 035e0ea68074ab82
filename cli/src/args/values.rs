//! The values of arguments.

use std::{ops::RangeInclusive, time::Duration};

use chrono::{DateTime, FixedOffset, TimeDelta, Utc};
use rowlock::Key;

pub fn duration(text: &str) -> Result<Duration, String> {
    if has_unit(text, &["M", "month", "months"]) {
        let minutes = text.replace('M', "m");
        let wrong = match text.contains('M') {
            true => format!("M is a month and not a minute: write {minutes} for minutes"),
            false => "months differ in length".to_owned(),
        };
        return Err(format!("{wrong}, or write days, such as 30d"));
    }
    use humantime::DurationError::{Empty, InvalidCharacter, NumberExpected};
    let wrong = |error| match error {
        // They have only the place in the text.
        Empty | InvalidCharacter(_) | NumberExpected(_) => format!("{text:?} is no duration"),
        error => error.to_string(),
    };
    humantime::parse_duration(text).map_err(|error| format!("{}; write it like 30s, 5m or 1h", wrong(error)))
}

/// The time between the ticks of a job. The calendar's units are a pattern's.
pub fn period(text: &str) -> Result<Duration, String> {
    if has_unit(text, &["month", "months", "y", "yr", "year", "years"]) {
        let patterns = "cron = \"0 0 1 * *\" for each month, and cron = \"0 0 1 1 *\" for each year";
        return Err(format!("months and years differ in length: write {patterns}"));
    }
    duration(text)
}

/// Returns whether a duration has one of these units.
fn has_unit(text: &str, units: &[&str]) -> bool {
    text.split(|c: char| !c.is_alphabetic()).any(|word| units.contains(&word))
}

/// A point in time.
pub fn instant(text: &str) -> Result<DateTime<Utc>, String> {
    text.parse().map_err(|error| format!("{error}; write it like 2026-10-25T00:00:00Z"))
}

/// A time, or a duration from now on.
pub fn coming(text: &str) -> Result<DateTime<Utc>, String> {
    let wrong = |_| "write a time like 2026-10-25T00:00:00Z, or a duration like 8h".to_owned();
    match duration(text) {
        Ok(time) => {
            let then = TimeDelta::from_std(time).ok().and_then(|time| Utc::now().checked_add_signed(time));
            then.ok_or_else(|| "it is too far ahead".to_owned())
        }
        Err(_) => text.parse().map_err(wrong),
    }
}

/// The longest a command may run.
pub fn timeout(text: &str) -> Result<Duration, String> {
    let most = Duration::from_secs(366 * 24 * 60 * 60);
    within(duration(text)?, Duration::from_millis(1)..=most, "it has to be from 1ms to 366days")
}

pub fn within(time: Duration, possible: RangeInclusive<Duration>, why: &str) -> Result<Duration, String> {
    possible.contains(&time).then_some(time).ok_or_else(|| why.to_owned())
}

/// The permissions that new files do not have, as octal digits.
pub fn umask(text: &str) -> Result<u32, String> {
    let digits = (1..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mask = digits.then(|| u32::from_str_radix(text, 8).ok()).flatten().filter(|mask| *mask <= 0o777);
    mask.ok_or_else(|| "it has to be octal digits in quotes, like \"027\"".to_owned())
}

/// How long to wait for a key.
pub fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" { Ok(Duration::MAX) } else { duration(text) }
}

/// Without one, `watch` would keep the database busy.
pub fn pause(text: &str) -> Result<Duration, String> {
    within(duration(text)?, Duration::from_millis(10)..=Duration::MAX, "it has to be at least 10ms")
}

pub fn offset(text: &str) -> Result<FixedOffset, String> {
    text.parse().map_err(|_| "write it like +08:00 or -05:30".to_owned())
}

pub fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}

/// The name of a host. Requests are compared with it without their port.
pub fn host(text: &str) -> Result<String, String> {
    let is_name = !text.is_empty() && !text.contains(['/', ':', '@']);
    is_name.then(|| text.to_owned()).ok_or_else(|| "write the name alone, without https:// and port".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_alone() {
        for text in ["locks.example.com:443", "https://locks.example.com", ""] {
            assert!(host(text).is_err(), "{text}");
        }
        assert_eq!(host("locks.example.com").as_deref(), Ok("locks.example.com"));
    }

    #[test]
    fn a_month_is_no_duration() {
        for (text, says) in [
            ("5M", "M is a month and not a minute: write 5m for minutes"),
            ("1h 30M", "write 1h 30m for minutes"),
            ("1 month", "write days, such as 30d"),
            ("2months", "write days, such as 30d"),
            ("5", "write it like 30s, 5m or 1h"),
            ("soon", "\"soon\" is no duration; write it"),
        ] {
            let wrong = duration(text).unwrap_err();
            assert!(wrong.contains(says), "{text}: {wrong}");
        }
        for text in ["5m", "5min", "5 minutes", "30ms", "1h 30m", "1w", "1y"] {
            duration(text).unwrap();
        }
    }

    #[test]
    fn a_time_to_come_has_to_be_one_of_the_calendar() {
        for text in ["300000y", "500000000000y"] {
            assert_eq!(coming(text), Err("it is too far ahead".to_owned()));
        }
        assert!(coming("8h").unwrap() > Utc::now());
    }

    #[test]
    fn a_period_has_no_unit_of_the_calendar() {
        for text in ["1 month", "1y", "1 year"] {
            let wrong = period(text).unwrap_err();
            assert!(wrong.contains("cron = \"0 0 1 * *\" for each month"), "{text}: {wrong}");
        }
        assert!(period("5M").unwrap_err().contains("write 5m for minutes"));
        assert_eq!(period("36h"), Ok(Duration::from_secs(36 * 3600)));
    }
}
