//! The values of arguments.

use std::time::Duration;

use rowlock::Key;

pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 30s, 5m or 1h"))
}

/// How long to wait for a key.
pub fn wait(text: &str) -> Result<Duration, String> {
    if text == "forever" { Ok(Duration::MAX) } else { duration(text) }
}

/// Without one, `watch` would keep the database busy.
pub fn pause(text: &str) -> Result<Duration, String> {
    let least = Duration::from_millis(10);
    duration(text).and_then(|pause| if pause < least { Err("it has to be at least 10ms".into()) } else { Ok(pause) })
}

pub fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|error| error.to_string())
}
