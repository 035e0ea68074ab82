//! One call of a read-write lock: what it is for, and how long it may take.

use std::{
    slice,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{
    action::{Action, Certainty},
    error::Error,
    grant::Attempt,
    key::Holder,
    lease::{
        attempt::ClaimAttempt,
        claims::RangeRead,
        handle::LeaseHandle,
        ledger::Pending,
        lock::LeaseLock,
        readers::{Number, Readers},
        wait::LONGEST,
        wanted::Wanted,
    },
    read_write::names::Names,
    retry::{Repeat, late},
    rules::{Refusal, Verdict, judge},
    session::{queue::Limits, time::Instant, timers::timeout_at},
    store::{
        Database,
        admin::{KeyRange, Listed},
    },
    sync::lock,
};

/// A call that is made once, or that waits.
pub(crate) struct Call<'a, DB: Database> {
    pub lock: &'a LeaseLock<DB>,
    pub names: &'a Names,
    pub readers: Arc<Readers<DB>>,
    pub since: Instant,
    wait: Duration,
    refusal: Mutex<Option<Refusal>>,
    error: Mutex<Option<Error>>,
    /// The claim on a reader's key that has no reply and may have been granted.
    pub unanswered: Mutex<Option<(Number<DB>, ClaimAttempt<'a, DB>)>>,
    /// What is known of the claims on the name, and on a reader's key.
    pending: [Pending; 2],
}

impl<'a, DB: Database> Call<'a, DB> {
    /// Checks that the table can hold the keys.
    pub async fn new(lock: &'a LeaseLock<DB>, names: &'a Names, wait: Duration) -> Result<Self, Error> {
        let (since, readers) = (Instant::now(), lock.shared.readers.of(&names.name));
        lock.check_admits_within(slice::from_ref(&names.longest), since, wait).await?;
        let (refusal, error, unanswered) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Self { lock, names, readers, since, wait, refusal, error, unanswered, pending: Default::default() })
    }

    /// Returns whether the call makes one attempt and does not wait.
    pub fn is_one_attempt(&self) -> bool {
        self.wait.is_zero()
    }

    fn until(&self) -> Instant {
        self.since + self.wait.min(LONGEST)
    }

    /// Returns how much of the wait is left.
    pub fn left(&self) -> Duration {
        self.until() - Instant::now()
    }

    /// Returns when one statement is given up.
    pub fn limit(&self) -> Instant {
        let limit = Instant::now() + self.lock.shared.time_limit;
        if self.is_one_attempt() { limit } else { limit.min(self.until()) }
    }

    pub fn retry(&self) -> Repeat<'_, Error> {
        Repeat::recording(self.until(), &self.error)
    }

    pub fn record(&self, refusal: &Refusal) {
        *lock(&self.refusal) = Some(refusal.clone());
    }

    /// Ends the work when the wait is over: with the last refusal, unless a claim without a reply
    /// may stand.
    pub async fn within<T>(&self, work: impl Future<Output = Result<Attempt<T>, Error>>) -> Result<Attempt<T>, Error> {
        if self.is_one_attempt() {
            return work.await;
        }
        let (refusal, error) = match timeout_at(self.until(), work).await {
            Ok(Ok(Attempt::Acquired(acquired))) => return Ok(Attempt::Acquired(acquired)),
            Ok(Ok(Attempt::Refused(refusal))) => (Some(refusal), None),
            Ok(Err(error)) if error.is_retryable() && self.left().is_zero() => {
                (lock(&self.refusal).take(), Some(error))
            }
            Ok(Err(error)) => (None, Some(error)),
            Err(_) => (lock(&self.refusal).take(), lock(&self.error).take()),
        };
        match refusal.filter(|_| !self.pending.iter().any(Pending::is_unanswered)) {
            Some(refusal) => Ok(Attempt::Refused(refusal)),
            None => {
                let may_stand = self.pending.iter().any(Pending::may_stand);
                Err(late(error.unwrap_or_else(|| self.timed_out(Certainty::NothingChanged)), self.wait, may_stand))
            }
        }
    }

    pub fn timed_out(&self, outcome: Certainty) -> Error {
        let limit = if self.is_one_attempt() { self.lock.shared.time_limit } else { self.wait };
        Error::timed_out(Action::Acquire, self.names.name.quoted(), limit, outcome)
    }

    /// Claims the name, as any holder of a key does.
    pub async fn claim_name(&self) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let wanted = Wanted::all([self.names.name.clone()].into());
        let wait = if self.is_one_attempt() { Duration::ZERO } else { self.left() };
        self.lock.granted_or_pending(&wanted, wait, &self.pending[0]).await
    }

    /// Begins an attempt to claim a reader's key.
    pub fn attempt(&self, wanted: &Wanted) -> ClaimAttempt<'a, DB> {
        let until = (!self.is_one_attempt()).then(|| self.until());
        ClaimAttempt::new(&self.lock.shared, &self.lock.key_terms, wanted, until, &self.pending[1])
    }

    /// Reads rows as they are at some moment after the call. Transient failures are retried up to
    /// the limit.
    pub async fn read_rows(&self, keys: &KeyRange) -> Result<Vec<Listed>, Error> {
        let LeaseLock { shared, key_terms, .. } = self.lock;
        let limits = Limits::both(self.limit());
        let mut repeat = Repeat::until(limits.caller);
        loop {
            let read = RangeRead { keys: keys.clone(), key_terms: key_terms.clone() };
            if let Some(rows) = repeat.final_or_pause(shared.reads.send(read, limits, false).await).await {
                return rows.map_err(|failure| {
                    let (subject, unchanged) = (keys.first.quoted(), Certainty::NothingChanged);
                    failure.into_error(Action::Inspect, subject, shared.time_limit, unchanged)
                });
            }
        }
    }

    /// Judges a row as a new holder finds it.
    pub fn judge(&self, Listed { row, now, .. }: &Listed) -> Verdict {
        judge(Some(row), *now, Holder::unique(), &self.lock.key_terms.terms)
    }
}
