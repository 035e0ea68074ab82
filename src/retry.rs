//! Retries: how often, for how long, and at which intervals.

use std::{fmt, sync::Mutex, time::Duration};

use chrono::TimeDelta;

use crate::{
    action::Certainty,
    causes::DatabaseFault,
    error::Error,
    invalid::Invalid,
    pacing::{Backoff, retry_backoff},
    session::{time::Instant, timers::sleep},
    store::failure::Failure,
    sync::lock,
};

/// How long one statement may take, by default.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(5);

pub(crate) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The limits for retries after conflicts. The first limit that is reached ends them.
///
/// ```
/// # fn example<DB: rowlock::Database>(lock: rowlock::LeaseLock<DB>) {
/// use rowlock::Retry;
/// use std::time::Duration;
///
/// let patient = lock.retry(Retry { attempts: 1000, within: Duration::from_secs(60) });
/// let short = patient.clone().retry(Retry { attempts: 3, ..Retry::default() });
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The maximum number of attempts: 1 to 1,000,000. The default is 100.
    pub attempts: u32,
    /// The maximum time: 1 ms to one day. The default is 10 s. Waiting for the key and for a
    /// connection counts. A write that was sent within it may take its own time limit longer, and
    /// so may a COMMIT.
    pub within: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { attempts: 100, within: Duration::from_secs(10) }
    }
}

impl Retry {
    pub(crate) fn checked(self) -> Result<Self, Invalid> {
        let rule = "it has to be from 1 ms to one day";
        within("a time for retries", self.within, Duration::from_millis(1), DAY, rule)?;
        if !(1..=1_000_000).contains(&self.attempts) {
            let rule = "it has to be from 1 to 1,000,000";
            return Err(Invalid::setting("a number of attempts", self.attempts, rule));
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

/// Attempts at one operation.
pub(crate) struct Tries {
    retry: Retry,
    /// The number of the current attempt, from 1.
    pub attempt: u32,
    /// When all attempts have to be over.
    pub until: Instant,
    backoff: Backoff,
}

impl Tries {
    pub fn left(&self) -> Duration {
        self.until - Instant::now()
    }

    /// Pauses and counts the next attempt. Returns `false` if a limit is reached.
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

/// Validates how long a statement may take.
pub(crate) fn time_limit(limit: Duration) -> Result<Duration, Invalid> {
    let hour = Duration::from_secs(60 * 60);
    within("a time limit", limit, Duration::from_millis(1), hour, "it has to be from 1 ms to one hour")?;
    Ok(limit)
}

/// Validates the age of what is selected, or deleted.
pub(crate) fn age(age: Duration) -> Result<TimeDelta, Invalid> {
    within("an age", age, Duration::ZERO, 3653 * DAY, "it has to be at most ten years")
}

/// Validates a duration and truncates it to the databases' precision, the microsecond.
pub(crate) fn within(
    setting: &str,
    value: Duration,
    least: Duration,
    most: Duration,
    rule: &str,
) -> Result<TimeDelta, Invalid> {
    let micros = i64::try_from(value.as_micros()).ok().filter(|_| value >= least && value <= most);
    // `Debug` has nanoseconds for it.
    let text = || if value.is_zero() { "0s".to_owned() } else { format!("{value:?}") };
    micros.map(TimeDelta::microseconds).ok_or_else(|| Invalid::setting(setting, text(), rule))
}

impl Backoff {
    pub async fn pause(&mut self, most: Duration) {
        sleep(self.next().min(most)).await;
    }
}

/// A failure that may pass: an outage, contention, no session in time.
pub(crate) trait Transient: fmt::Display {
    fn may_pass(&self) -> bool;
}

impl Transient for Failure {
    fn may_pass(&self) -> bool {
        self.fault().is_transient()
    }
}

impl Transient for Error {
    fn may_pass(&self) -> bool {
        self.is_retryable()
    }
}

/// Repetitions through failures that may pass, up to a limit. What is repeated changes nothing, or
/// may be done twice.
pub(crate) struct Repeat<'a, E> {
    limit: Instant,
    pauses: Backoff,
    /// The failure that is being waited out.
    last: Option<&'a Mutex<Option<E>>>,
}

impl<'a, E: Transient> Repeat<'a, E> {
    /// Repeats one statement.
    pub fn until(limit: Instant) -> Self {
        Self { limit, pauses: Backoff::up_to(Duration::from_millis(50)), last: None }
    }

    /// Repeats the requests of a wait. `last` receives the failure that is being waited out.
    pub fn recording(limit: Instant, last: &'a Mutex<Option<E>>) -> Self {
        Self { limit, pauses: retry_backoff(), last: Some(last) }
    }

    /// Returns the reply if it is final. Returns `None`, after a pause, if the failure may pass and
    /// there is time left.
    pub async fn final_or_pause<T>(&mut self, reply: Result<T, E>) -> Option<Result<T, E>> {
        let left = self.limit - Instant::now();
        match reply {
            Err(failure) if failure.may_pass() && !left.is_zero() => {
                if let Some(last) = self.last {
                    tracing::warn!(error = %failure, ?left, "a request failed; the wait continues");
                    *lock(last) = Some(failure);
                }
                self.pauses.pause(left).await;
                None
            }
            reply => {
                if let (Some(last), Ok(_)) = (self.last, &reply) {
                    *lock(last) = None;
                }
                Some(reply)
            }
        }
    }
}

/// Returns the error at the end of a wait, with the length of the wait and what is known of the
/// outcome by then.
pub(crate) fn late(mut error: Error, wait: Duration, unsure: bool) -> Error {
    if let Error::Database(DatabaseFault::TimedOut { limit, .. })
    | Error::Database(DatabaseFault::NoConnection { limit, .. }) = &mut error
    {
        *limit = wait;
    }
    if let Some((_, outcome)) = error.outcome_mut().filter(|_| unsure) {
        *outcome = Certainty::Unknown;
    }
    error
}

/// Pauses for a moment before another connection is tried in place of one that was closed.
pub(crate) async fn outage_pause() {
    pause(5..30).await;
}

/// Pauses for a random number of milliseconds.
pub(crate) async fn pause(millis: std::ops::Range<u64>) {
    sleep(Duration::from_millis(fastrand::u64(millis))).await;
}
