//! When an instance polls for ticks: pure.

use std::time::Duration;

use crate::pacing::Backoff;

/// The most schedules that one poll claims, alone and beside many other instances.
pub const MAX_CLAIMS: u32 = 20;
const LEAST_CLAIMS: u32 = 4;
/// By how much a poll beside other instances is later for each run that is under way.
const FOR_EACH_RUN: Duration = Duration::from_millis(1);
/// The first pause while something is due that cannot be claimed, or the database fails.
const FIRST: Duration = Duration::from_millis(20);
/// The longest one, in which other schedules may come due.
const LONGEST: Duration = Duration::from_secs(2);
/// By how much a poll is late, so that instances do not all poll at the same moment.
const JITTER: Duration = Duration::from_millis(20);

/// The pauses while something is due that cannot be claimed, or the database fails.
pub fn poll_backoff(poll_interval: Duration) -> Backoff {
    Backoff::between(FIRST, poll_interval.min(LONGEST))
}

/// Returns how many schedules one poll of this many instances claims: few, so that ticks that are
/// due together are shared out.
pub fn most_claims(instances: u32) -> u32 {
    (MAX_CLAIMS / instances.max(1)).max(LEAST_CLAIMS)
}

/// Returns by how much a poll is later because of the runs of the instance: others with fewer runs
/// come first.
pub fn precedence_of_others(runs: u32, instances: u32) -> Duration {
    if instances < 2 { Duration::ZERO } else { (FOR_EACH_RUN * runs).min(JITTER) }
}

/// Returns the pause after a poll that found the next slot due in `next_in`.
pub fn poll_pause(next_in: Duration, poll_interval: Duration) -> Duration {
    let jitter = (next_in / 10).min(JITTER).mul_f64(fastrand::f64());
    next_in.min(poll_interval.mul_f64(0.9 + fastrand::f64() / 10.0)) + jitter
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_secs(60);

    /// Returns the shortest and the longest of many pauses.
    fn pauses(next_in: Duration) -> (Duration, Duration) {
        let pauses: Vec<Duration> = (0..1_000).map(|_| poll_pause(next_in, POLL)).collect();
        (*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap())
    }

    #[test]
    fn a_poll_is_late_by_a_little_and_never_early() {
        for (next_in, jitter) in [(Duration::from_secs(10), JITTER), (JITTER, JITTER / 10)] {
            let (shortest, longest) = pauses(next_in);
            assert!(shortest >= next_in && longest <= next_in + jitter, "{shortest:?} {longest:?}");
            assert!(longest - shortest > jitter * 8 / 10, "{shortest:?} {longest:?}");
        }
        assert_eq!(pauses(Duration::ZERO).1, Duration::ZERO);
    }

    #[test]
    fn instances_with_nothing_to_do_poll_at_different_moments() {
        let (shortest, longest) = pauses(10 * POLL);
        assert!(shortest >= POLL * 9 / 10 && longest <= POLL + JITTER, "{shortest:?} {longest:?}");
        assert!(longest - shortest > POLL * 8 / 100, "{shortest:?} {longest:?}");
    }

    #[test]
    fn a_lone_instance_claims_all_that_is_due_without_a_pause() {
        assert_eq!((most_claims(0), most_claims(1)), (MAX_CLAIMS, MAX_CLAIMS));
        assert_eq!(precedence_of_others(20, 1), Duration::ZERO);
    }

    /// Ticks that are due together, and whose runs go on, are shared out between instances.
    #[test]
    fn ticks_that_are_due_together_are_shared_out() {
        for seed in 0..1_000 {
            fastrand::seed(seed);
            let (mut due, mut runs) = (30, [0_u32; 3]);
            let mut polls = runs.map(|_| poll_pause(Duration::from_secs(1), POLL));
            while due > 0 {
                let (place, now) = polls.iter().copied().enumerate().min_by_key(|(_, at)| *at).unwrap();
                let claimed = most_claims(3).min(due);
                (due, runs[place]) = (due - claimed, runs[place] + claimed);
                // A claim takes some time.
                polls[place] = now + Duration::from_millis(1) + precedence_of_others(runs[place], 3);
            }
            assert!(runs.iter().all(|runs| *runs <= 18), "{runs:?}");
        }
    }

    #[test]
    fn the_first_pause_is_short() {
        let first = poll_backoff(POLL).next();
        assert!((FIRST / 2..=FIRST).contains(&first), "{first:?}");
    }
}
