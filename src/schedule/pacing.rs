//! When an instance polls for ticks: pure, so that `tests/scale` can run it in simulated time.

use std::time::Duration;

use crate::pacing::Backoff;

/// The most schedules that one poll claims.
pub const MAX_CLAIMS: u32 = 20;
/// The first pause while something is due that cannot be claimed, or the database fails.
const FIRST: Duration = Duration::from_millis(20);
/// By how much a poll is late, so that instances do not all poll at the same moment.
const JITTER: Duration = Duration::from_millis(20);

/// The pauses while something is due that cannot be claimed, or the database fails.
pub fn poll_backoff(poll_interval: Duration) -> Backoff {
    Backoff::between(FIRST, poll_interval)
}

/// Returns the pause after a poll that found the next slot due in `next_in`.
pub fn poll_pause(next_in: Duration, poll_interval: Duration) -> Duration {
    let jitter = (next_in / 10).min(JITTER).mul_f64(fastrand::f64());
    next_in.min(poll_interval.mul_f64(0.9 + fastrand::f64() / 10.0)) + jitter
}
