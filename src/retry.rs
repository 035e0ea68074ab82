//! Trying again: how often, how long, and how far apart.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{
    error::Error,
    lease::settings,
    store::{
        connection::Failure,
        fault::{self, Fault, fault},
    },
};

/// How long conflicts are tried again; whichever limit comes first ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The most attempts: 1 to 1,000,000, 100 unless set.
    pub attempts: u32,
    /// The most time: 1 ms to one day, 10 s unless set. Waiting for the key and for a connection count.
    pub within: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 100, within: Duration::from_secs(10) }
    }
}

impl Retry {
    /// # Errors
    /// [`Error::InvalidSetting`] for limits that are not possible.
    pub(crate) fn checked(self) -> Result<Self, Error> {
        let rule = "it has to be from 1 ms to one day";
        settings::within("a time for retries", self.within, Duration::from_millis(1), settings::DAY, rule)?;
        if !(1..=1_000_000).contains(&self.attempts) {
            let value = self.attempts.to_string();
            return Err(Error::InvalidSetting {
                setting: "a number of attempts",
                value,
                rule: "it has to be from 1 to 1,000,000",
            });
        }
        Ok(self)
    }

    pub(crate) fn begin(self) -> Tries {
        Tries {
            retry: self,
            attempt: 1,
            until: Instant::now() + self.within,
            backoff: Backoff::up_to(Duration::from_millis(100)),
        }
    }
}

/// Attempts at one thing.
pub(crate) struct Tries {
    retry: Retry,
    /// The number of the attempt under way, from 1.
    pub attempt: u32,
    /// When all of it has to be over.
    pub until: Instant,
    backoff: Backoff,
}

impl Tries {
    pub fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Pauses and counts the next attempt; `false` when there is to be none.
    pub async fn again(&mut self) -> bool {
        if self.attempt >= self.retry.attempts || self.left().is_zero() {
            return false;
        }
        self.backoff.pause(self.left()).await;
        if self.left().is_zero() {
            return false;
        }
        self.attempt += 1;
        true
    }
}

/// What a failure calls for: the one policy of renewals, endings, releases and batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// No pause mends it: the pool is closed, the table or a column is missing, or a right is.
    Nothing,
    /// The server refused the statement, perhaps for the sake of one of its rows: several requests are sent apart, and one
    /// again after a pause.
    Apart,
    /// It is sent again after a pause.
    Again,
}

/// What a failure of one statement calls for that carried so many requests.
pub(crate) fn remedy(failure: &Failure, requests: usize) -> Remedy {
    match (failure, failure.fault()) {
        (Failure::NoConnection(sqlx::Error::PoolClosed), _) => Remedy::Nothing,
        (Failure::NoConnection(error), _) if fault(error) == Fault::Denied => Remedy::Nothing,
        (Failure::NoConnection(_) | Failure::NoReply | Failure::Undone, _) => Remedy::Again,
        (_, Fault::Contention | Fault::Outage | Fault::NoConnection) => Remedy::Again,
        (_, Fault::MissingTable | Fault::MissingColumn) => Remedy::Nothing,
        // A policy for rows denies some of them.
        (_, Fault::Denied) if requests == 1 => Remedy::Nothing,
        (Failure::Failed(error), Fault::ReadOnly) if !fault::may_take_writes_again(error) => Remedy::Nothing,
        (failure, _) if failure.is_in_doubt() => Remedy::Again,
        _ => Remedy::Apart,
    }
}

/// Pauses that double, each between half of its bound and the whole.
#[derive(Clone, Copy)]
pub(crate) struct Backoff {
    bound: Duration,
    longest: Duration,
}

impl Backoff {
    pub fn up_to(longest: Duration) -> Self {
        Self::between(Duration::from_millis(2), longest)
    }

    pub fn between(first: Duration, longest: Duration) -> Self {
        Self { bound: first.min(longest), longest }
    }

    /// How long the next pause is.
    pub fn next(&mut self) -> Duration {
        let bound = self.bound;
        self.bound = (bound * 2).min(self.longest);
        bound.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    pub async fn pause(&mut self, most: Duration) {
        sleep(self.next().min(most)).await;
    }
}

/// A moment before a fresh connection is tried, where the one at hand had gone away.
pub(crate) async fn outage_pause() {
    sleep(Duration::from_millis(fastrand::u64(5..30))).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_a_pause_may_mend_is_tried_again() {
        assert_eq!(remedy(&Failure::NoConnection(sqlx::Error::PoolClosed), 1), Remedy::Nothing);
        for failure in [Failure::NoConnection(sqlx::Error::PoolTimedOut), Failure::NoReply, Failure::Undone] {
            assert_eq!(remedy(&failure, 1), Remedy::Again, "{failure:?}");
        }
        // It was carried out, and what it said was not understood.
        assert_eq!(remedy(&Failure::Failed(sqlx::Error::RowNotFound), 2), Remedy::Again);
    }
}
