//! When statements are sent: pauses, the parts of a lease, and what keeps instances apart. Nothing
//! here waits or sends, so that `tests/scale` can run the same decisions in simulated time.

use std::time::Duration;

/// The bounds of the interval between two requests of a waiter, at first and in the end.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Where releases are not notified, the first interval, and by what the intervals grow. A pause is
/// then about a quarter of the wait before it, and at most half of it and 8 ms.
const UNNOTIFIED: (Duration, f64) = (Duration::from_millis(8), 1.25);
/// The bounds of the intervals between attempts to open a session, or the connection that listens.
const OPEN_INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Pauses with a bound that grows. Each pause is between half of the bound and the bound.
#[derive(Clone, Copy)]
pub(crate) struct Backoff {
    bound: Duration,
    longest: Duration,
    growth: f64,
}

impl Backoff {
    pub fn up_to(longest: Duration) -> Self {
        Self::between(Duration::from_millis(2), longest)
    }

    /// The bound doubles.
    pub fn between(first: Duration, longest: Duration) -> Self {
        Self { bound: first.min(longest), longest, growth: 2.0 }
    }

    /// Returns the length of the next pause.
    pub fn next(&mut self) -> Duration {
        let bound = self.bound;
        self.bound = bound.mul_f64(self.growth).min(self.longest);
        upper_half(bound)
    }
}

/// The pauses of a waiter, from the start of its wait. `notifies`: the database notifies of
/// releases.
pub(crate) fn poll_backoff(notifies: bool) -> Backoff {
    let (first, growth) = UNNOTIFIED;
    if notifies { retry_backoff() } else { Backoff { growth, ..Backoff::between(first, POLL_INTERVAL.1) } }
}

/// The pauses between requests that are repeated for another reason than that a key is held: they
/// failed, no place is free, or a leader is observed.
pub(crate) fn retry_backoff() -> Backoff {
    Backoff::between(POLL_INTERVAL.0, POLL_INTERVAL.1)
}

/// The pauses of a waiter whose keys have changed hands since its last request. Their bound shrinks
/// by as much as it grows in two pauses, because all waiters for the keys see the same change.
pub(crate) fn poll_sooner(before: Backoff) -> Backoff {
    let bound = before.bound.div_f64(before.growth * before.growth);
    Backoff { bound: bound.max(POLL_INTERVAL.0.min(before.bound)), ..before }
}

/// The pauses between attempts to open a session, or the connection that listens. An account may be
/// locked after some failed logins.
pub(crate) fn open_backoff() -> Backoff {
    Backoff::between(OPEN_INTERVAL.0, OPEN_INTERVAL.1)
}

/// Returns how long a waiter pauses after a refusal that ends by itself after `ends_in`. A holder
/// may release early, so it pauses no longer than `pause`.
///
/// All waiters for a key see the same end. Those that have waited for long, whose pauses are long,
/// return within a quarter of a second after it, and not at one moment. One whose wait ends in
/// `left` returns before that.
pub(crate) fn poll_pause(pause: Duration, ends_in: Duration, left: Duration) -> Duration {
    let later = pause.mul_f64(fastrand::f64() / 4.0);
    pause.min(ends_in + later.min(left.saturating_sub(ends_in) / 2))
}

/// Returns how long a holder trusts a lease: a little less than all of it, for clocks that diverge
/// and timers that fire late. `lease` is the full duration, `left` the part that remains.
pub(crate) fn trusted(left: Duration, lease: Duration) -> Duration {
    left.saturating_sub(reserve(lease))
}

/// Returns the part of a lease that its holder does not trust. It is left when the lease counts as
/// lost.
pub(crate) fn reserve(lease: Duration) -> Duration {
    lease / 20
}

/// Returns how long after it was sent a claim or a renewal is followed by the next renewal, at the
/// latest.
pub(crate) fn renewed_within(lease: Duration) -> Duration {
    lease / 3
}

/// Returns how long after it was sent a claim or a renewal is followed by the next renewal: a
/// quarter to a third of the lease. After a fail-over all instances renew at the same moment, and
/// would do so again and again if the intervals were equal.
pub(crate) fn renewal_interval(lease: Duration) -> Duration {
    renewed_within(lease) - joins_within(lease).mul_f64(fastrand::f64())
}

/// Returns by how much later renewals may be due that join a batch.
pub(crate) fn joins_within(lease: Duration) -> Duration {
    lease / 12
}

/// Returns how long one statement for leases of this duration may take, including all requests that
/// are sent in its place.
pub(crate) fn attempt(lease: Duration) -> Duration {
    (lease / 3).min(Duration::from_secs(10))
}

/// Returns after how long such a statement is sent on a second session as well.
pub(crate) fn hedge_delay(lease: Duration) -> Duration {
    attempt(lease) / 4
}

/// Returns the longest pause before a renewal or an ending is tried again.
pub(crate) fn longest_retry_pause(lease: Duration) -> Duration {
    (lease / 12).min(Duration::from_secs(1))
}

/// Returns the pause before a renewal is tried again.
pub(crate) fn renewal_retry(lease: Duration) -> Duration {
    upper_half(longest_retry_pause(lease))
}

fn upper_half(bound: Duration) -> Duration {
    bound.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(60);

    #[test]
    fn renewals_leave_each_other_and_are_never_later_than_a_third() {
        let intervals: Vec<Duration> = (0..1_000).map(|_| renewal_interval(LEASE)).collect();
        assert!(intervals.iter().all(|interval| (LEASE / 4..=LEASE / 3).contains(interval)), "{intervals:?}");
        let width = *intervals.iter().max().unwrap() - *intervals.iter().min().unwrap();
        assert!(width > joins_within(LEASE) * 9 / 10, "{width:?}");
    }

    #[test]
    fn long_waiters_do_not_return_at_the_end_of_a_lease_at_one_moment() {
        let ends_in = Duration::from_millis(300);
        let late: Vec<Duration> = (0..1_000).map(|_| poll_pause(POLL_INTERVAL.1, ends_in, LEASE) - ends_in).collect();
        assert!(late.iter().all(|late| *late <= POLL_INTERVAL.1 / 4), "{late:?}");
        assert!(late.iter().filter(|late| **late < Duration::from_millis(100)).count() < 500, "{late:?}");
        // One that has just come returns at the end.
        assert!(poll_pause(POLL_INTERVAL.0, ends_in / 100, LEASE) <= ends_in / 100 + POLL_INTERVAL.0 / 4);
        assert!(poll_pause(POLL_INTERVAL.0, LEASE, LEASE) == POLL_INTERVAL.0, "a holder may release early");
        // One that waits for little longer than the lease returns while it waits.
        let left = ends_in + Duration::from_millis(10);
        assert!((0..1_000).all(|_| poll_pause(POLL_INTERVAL.1, ends_in, left) < left));
    }

    #[test]
    fn a_key_that_changes_hands_often_is_asked_for_often() {
        let mut backoff = poll_backoff(true);
        for _ in 0..10 {
            backoff.next();
        }
        let pauses: Vec<Duration> = (0..10)
            .map(|_| {
                backoff = poll_sooner(backoff);
                backoff.next()
            })
            .collect();
        let quarter = POLL_INTERVAL.1 / 4;
        assert!((quarter / 2..=quarter).contains(&pauses[0]), "not all waiters at once: {pauses:?}");
        assert!(pauses[5..].iter().all(|pause| *pause <= POLL_INTERVAL.0), "{pauses:?}");
        assert!(pauses[9] >= POLL_INTERVAL.0 / 2, "{pauses:?}");
    }

    #[test]
    fn a_change_of_hands_makes_no_pause_longer() {
        let mut backoff = poll_backoff(false);
        for _ in 0..100 {
            let sooner = poll_sooner(backoff);
            assert!(sooner.bound <= backoff.bound && sooner.bound >= UNNOTIFIED.0, "{:?}", sooner.bound);
            backoff.next();
        }
        for _ in 0..100 {
            backoff = poll_sooner(backoff);
            backoff.next();
        }
        assert!(backoff.bound <= POLL_INTERVAL.0.mul_f64(UNNOTIFIED.1), "{:?}", backoff.bound);
    }

    #[test]
    fn where_no_release_is_notified_a_pause_is_short_beside_the_wait() {
        for _ in 0..100 {
            let (mut backoff, mut waited) = (poll_backoff(false), Duration::ZERO);
            while waited < 10 * POLL_INTERVAL.1 {
                let pause = backoff.next();
                assert!(pause <= (waited / 2 + UNNOTIFIED.0).min(POLL_INTERVAL.1), "{pause:?} after {waited:?}");
                waited += pause;
            }
        }
    }

    #[test]
    fn the_parts_of_a_lease() {
        let (minute, short) = (LEASE, Duration::from_secs(6));
        let millis = Duration::from_millis;
        assert_eq!((trusted(minute, minute), trusted(2 * short, minute)), (minute * 19 / 20, millis(9_000)));
        assert_eq!(trusted(millis(1), minute), Duration::ZERO);
        assert_eq!((renewed_within(minute), joins_within(minute)), (minute / 3, minute / 12));
        assert_eq!((attempt(minute), attempt(short)), (millis(10_000), millis(2_000)));
        assert_eq!((hedge_delay(minute), hedge_delay(short)), (millis(2_500), millis(500)));
        assert_eq!((longest_retry_pause(minute), longest_retry_pause(short)), (millis(1_000), millis(500)));
    }

    /// Asserts that the pauses are from half of the bound to the bound, and differ.
    fn assert_upper_half(bound: Duration, mut pause: impl FnMut() -> Duration) {
        let pauses: Vec<Duration> = (0..1_000).map(|_| pause()).collect();
        assert!(pauses.iter().all(|pause| (bound / 2..=bound).contains(pause)), "{bound:?}: {pauses:?}");
        let width = *pauses.iter().max().unwrap() - *pauses.iter().min().unwrap();
        assert!(width > bound * 4 / 10, "{bound:?}: {width:?}");
    }

    #[test]
    fn the_bounds_of_the_pauses_grow_from_the_first_to_the_longest() {
        assert_upper_half(Duration::from_millis(500), || renewal_retry(Duration::from_secs(6)));
        for (backoff, first, longest) in [
            (Backoff::up_to(POLL_INTERVAL.1), Duration::from_millis(2), POLL_INTERVAL.1),
            (retry_backoff(), POLL_INTERVAL.0, POLL_INTERVAL.1),
            (poll_backoff(true), POLL_INTERVAL.0, POLL_INTERVAL.1),
            (poll_backoff(false), UNNOTIFIED.0, POLL_INTERVAL.1),
            (open_backoff(), OPEN_INTERVAL.0, OPEN_INTERVAL.1),
        ] {
            assert_upper_half(first, || {
                let mut own = backoff;
                own.next()
            });
            let mut later = backoff;
            later.next();
            assert_eq!(later.bound, first.mul_f64(backoff.growth));
            for _ in 0..100 {
                later.next();
            }
            assert_eq!(later.bound, longest);
        }
    }

    #[test]
    fn a_change_of_hands_takes_two_steps_back() {
        let grown = |growth| Backoff { bound: POLL_INTERVAL.1, longest: POLL_INTERVAL.1, growth };
        assert_eq!(poll_sooner(grown(1.25)).bound, Duration::from_millis(640));
        assert_eq!(poll_sooner(grown(2.0)).bound, Duration::from_millis(250));
    }
}
