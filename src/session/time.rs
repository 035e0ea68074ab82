//! Time as leases count it: also the time for which the machine slept, so that a holder that wakes
//! after its lease finds it lost.

use std::{
    ops::{Add, Sub},
    time::Duration,
};

/// A moment on this machine's clock, which only moves forward, also while the machine sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        let now = clock::now();
        #[cfg(test)]
        let now = now + tests::slept();
        Self(now)
    }

    pub fn elapsed(self) -> Duration {
        Self::now() - self
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

impl Sub for Instant {
    type Output = Duration;

    /// Returns zero if `earlier` is the later one.
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// The clock of the system.
mod clock {
    use std::time::Duration;

    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    pub fn now() -> Duration {
        use rustix::time::{ClockId, Timespec, clock_gettime};

        #[cfg(not(target_vendor = "apple"))]
        const CLOCK: ClockId = ClockId::Boottime;
        /// The one that goes on while the machine sleeps.
        #[cfg(target_vendor = "apple")]
        const CLOCK: ClockId = ClockId::Monotonic;

        let Timespec { tv_sec, tv_nsec } = clock_gettime(CLOCK);
        Duration::new(tv_sec.unsigned_abs(), u32::try_from(tv_nsec).unwrap_or_default())
    }

    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    pub fn now() -> Duration {
        use std::{sync::LazyLock, time::Instant};

        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        START.elapsed()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Without this day, a machine that was started just now has no moment an hour ago.
    static SLEPT: AtomicU64 = AtomicU64::new(24 * 60 * 60);

    /// Returns for how many seconds the machine has slept, as the tests pretend.
    pub fn slept() -> Duration {
        Duration::from_secs(SLEPT.load(Ordering::Relaxed))
    }

    /// Pretends that the machine sleeps for this long.
    #[cfg(all(feature = "schedule", feature = "sqlite"))]
    pub fn put_to_sleep(time: Duration) {
        SLEPT.fetch_add(time.as_secs(), Ordering::Relaxed);
    }

    #[test]
    fn an_instant_never_overflows() {
        let now = Instant::now();
        assert!(now + Duration::MAX > now);
        assert_eq!(now - (now + Duration::MAX), Duration::ZERO);
    }
}
