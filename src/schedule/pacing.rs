//! When an instance looks for ticks: pure, so that `tests/scale` can run it in simulated time.

use std::time::Duration;

use crate::pacing::Backoff;

/// The most schedules that one look claims.
pub const MOST: u32 = 20;
/// The first pause while something is due that cannot be claimed, or the database fails.
const FIRST: Duration = Duration::from_millis(20);
/// By how much a look is late, so that instances do not all look at the same moment.
const JITTER: Duration = Duration::from_millis(20);

/// The pauses while something is due that cannot be claimed, or the database fails.
pub fn look_backoff(look_every: Duration) -> Backoff {
    Backoff::between(FIRST, look_every)
}

/// Returns the pause after a look that found the next slot due in `next_in`.
pub fn look_pause(next_in: Duration, look_every: Duration) -> Duration {
    let jitter = (next_in / 10).min(JITTER).mul_f64(fastrand::f64());
    next_in.min(look_every.mul_f64(0.9 + fastrand::f64() / 10.0)) + jitter
}
