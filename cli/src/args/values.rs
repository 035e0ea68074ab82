//! The values of arguments.

use std::{ops::RangeInclusive, time::Duration};

use rowlock::Key;

pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 30s, 5m or 1h"))
}

/// The longest a command may run.
pub fn timeout(text: &str) -> Result<Duration, String> {
    let most = Duration::from_secs(366 * 24 * 60 * 60);
    within(duration(text)?, Duration::from_millis(1)..=most, "it has to be from 1ms to 366days")
}

pub fn within(time: Duration, possible: RangeInclusive<Duration>, why: &str) -> Result<Duration, String> {
    possible.contains(&time).then_some(time).ok_or_else(|| why.to_owned())
}

/// How long to wait for a key.
pub fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" { Ok(Duration::MAX) } else { duration(text) }
}

/// Without one, `watch` would keep the database busy.
pub fn pause(text: &str) -> Result<Duration, String> {
    within(duration(text)?, Duration::from_millis(10)..=Duration::MAX, "it has to be at least 10ms")
}

pub fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}
