//! Waiting through transient failures, up to the end of a wait.

use std::{sync::Mutex, time::Duration};

use crate::{
    action::Certainty,
    error::Error,
    pacing::{Backoff, retry_backoff},
    session::time::Instant,
    sync::lock,
};

/// Retries through transient failures: an outage, contention, no session in time.
pub(crate) struct TransientRetry<'a> {
    until: Instant,
    pauses: Backoff,
    /// The failure that is being waited out.
    last_error: &'a Mutex<Option<Error>>,
}

impl<'a> TransientRetry<'a> {
    pub fn new(until: Instant, last_error: &'a Mutex<Option<Error>>) -> Self {
        Self { until, pauses: retry_backoff(), last_error }
    }

    /// Returns the reply if it is final. Returns `None`, after a pause, if a retry makes sense.
    pub async fn final_or_pause<T>(&mut self, reply: Result<T, Error>) -> Option<Result<T, Error>> {
        let left = self.until.saturating_duration_since(Instant::now());
        match reply {
            Err(error) if error.is_retryable() && !left.is_zero() => {
                tracing::warn!(%error, ?left, "a request failed; the wait continues");
                *lock(self.last_error) = Some(error);
                self.pauses.pause(left).await;
                None
            }
            reply => {
                if reply.is_ok() {
                    *lock(self.last_error) = None;
                }
                Some(reply)
            }
        }
    }
}

/// The error at the end of a wait, with the length of the wait and what is known of the outcome by
/// then.
pub(crate) fn late(mut error: Error, wait: Duration, unsure: bool) -> Error {
    if let Error::TimedOut { limit, .. } | Error::NoConnection { limit, .. } = &mut error {
        *limit = wait;
    }
    if let Some((_, outcome)) = error.outcome_mut().filter(|_| unsure) {
        *outcome = Certainty::Unknown;
    }
    error
}
