//! How times and durations are written on a page.

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use jiff::{Timestamp, tz::TimeZone};
use maud::{Markup, html};

use crate::{
    format::{clock, precise},
    out::printable,
};

/// Writes a duration with its two largest units: `3 h 5 min`, `42 s`, `1.5 s`, `80 ms`.
pub fn span(duration: TimeDelta) -> String {
    let millis = duration.num_milliseconds().max(0);
    let (seconds, rest) = (millis / 1000, millis % 1000);
    let two = |large: i64, unit: &str, small: i64, smaller: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {smaller}"),
    };
    match seconds {
        0 => format!("{millis} ms"),
        1..10 if rest >= 100 => format!("{seconds}.{} s", rest / 100),
        1..60 => format!("{seconds} s"),
        60..3_600 => two(seconds / 60, "min", seconds % 60, "s"),
        3_600..86_400 => two(seconds / 3_600, "h", seconds / 60 % 60, "min"),
        _ => two(seconds / 86_400, "d", seconds / 3_600 % 24, "h"),
    }
}

/// Shows how long ago a time was, or how far ahead it is. The time itself is the title.
pub fn when(time: DateTime<Utc>, now: DateTime<Utc>) -> Markup {
    let distance = now - time;
    let text = match distance >= TimeDelta::zero() {
        true => format!("{} ago", span(distance)),
        false => format!("in {}", span(-distance)),
    };
    html! { time datetime=(precise(time)) title=(clock(time)) { (text) } }
}

/// Shows what the clocks in a job's zone show, and those of the viewer: the script replaces UTC by
/// the browser's zone.
pub fn clocks(time: DateTime<Utc>, zone: &str) -> Markup {
    let there = TimeZone::get(zone).ok().filter(|_| !is_utc(zone)).map(|zone| local(time, &zone).format("%a %H:%M"));
    html! {
        small {
            @if let Some(there) = there { (there) " there, " }
            time.viewer datetime=(precise(time)) { (time.format("%a %H:%M")) " UTC" }
        }
    }
}

/// Returns what the clocks of a zone show.
pub fn local(time: DateTime<Utc>, zone: &TimeZone) -> NaiveDateTime {
    let offset = Timestamp::from_second(time.timestamp()).map_or(0, |at| zone.to_offset(at).seconds());
    time.naive_utc() + TimeDelta::seconds(offset.into())
}

/// Shows the zone of a job, if the job has one of its own.
pub fn zone(zone: &str) -> Markup {
    html! { @if !is_utc(zone) { small.zone { (printable(zone)) } } }
}

fn is_utc(zone: &str) -> bool {
    ["", "UTC"].contains(&zone)
}

/// Shows a duration. Its end is the title.
pub fn lasting(duration: TimeDelta, end: DateTime<Utc>) -> Markup {
    html! { time datetime=(precise(end)) title=(clock(end)) { (span(duration)) } }
}

/// Returns the number with a comma at every third digit.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let group = |(index, digit): (usize, char)| {
        let comma = index > 0 && (digits.len() - index).is_multiple_of(3);
        comma.then_some(',').into_iter().chain([digit]).collect::<Vec<_>>()
    };
    digits.chars().enumerate().flat_map(group).collect()
}

/// Returns the number with its noun, which takes an `s` in the plural.
pub fn counted(number: usize, noun: &str) -> String {
    format!("{} {noun}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// Encodes text as a part of a URL's query.
pub fn encoded(text: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(byte);
    text.bytes().map(|byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_two_units_at_most() {
        let texts = [
            (-5, "0 ms"),
            (80, "80 ms"),
            (1_000, "1 s"),
            (1_540, "1.5 s"),
            (42_900, "42 s"),
            (60_000, "1 min"),
            (185_000, "3 min 5 s"),
            (7_500_000, "2 h 5 min"),
            (90_000_000, "1 d 1 h"),
        ];
        for (millis, text) in texts {
            assert_eq!(span(TimeDelta::milliseconds(millis)), text);
        }
    }

    #[test]
    fn a_job_has_the_time_of_its_zone_and_that_of_its_viewer() {
        let time = "2026-11-28T01:30:00Z".parse().unwrap();
        let berlin = clocks(time, "Europe/Berlin").into_string();
        assert!(berlin.contains("Sat 02:30 there, ") && berlin.contains(">Sat 01:30 UTC</time>"), "{berlin}");
        for utc in ["UTC", ""] {
            assert!(!clocks(time, utc).into_string().contains("there"));
            assert_eq!(zone(utc).into_string(), "");
        }
    }

    #[test]
    fn numbers_have_groups_of_digits() {
        let texts = [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")];
        for (number, text) in texts {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn a_query_is_encoded_byte_by_byte() {
        assert_eq!(encoded("a/b &ä+"), "a%2Fb%20%26%C3%A4%2B");
    }
}
