//! Handles on the claims of a lease, which is renewed in the background, notified of its loss, and
//! ended once.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::TimeDelta;
use tokio::sync::oneshot;

use crate::{
    action::{Action, Certainty},
    error::Error,
    key::{Claim, Key, PreviousClaim},
    lease::{
        changes::{Release, Released},
        ending::EndOutcome,
        state::{LeaseState, NO_RENEWAL},
        terms::KeyTerms,
    },
    metrics,
    pacing::Backoff,
    rules::Status,
    session::{
        clock::Deadline, exchange::Exchange, fork::is_forked, queue::Limits, threads, time::Instant, timers::timeout_at,
    },
    store::{
        Change, Database, Outcome,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        skipped,
    },
    sync::lock,
};

/// One handle on the claims of a lease. Dropping the last handle abandons them, or undoes them if
/// their caller has not received them.
pub(crate) struct LeaseHandle<DB: Database> {
    key_terms: Arc<KeyTerms<DB>>,
    pub held: Arc<LeaseState>,
    /// What each of the claims took over, if its holder did not end it.
    pub priors: Vec<Option<PreviousClaim>>,
    state: HandleState,
    /// How the claims are ended if their caller does not receive them.
    undone_by: Mutex<Change>,
}

/// Ends the claims of work that has stopped. No lock-delay is kept.
const ABANDON: Change = Change::Abandon(TimeDelta::zero());

/// The longest pause between renewals by a caller, while a row is locked.
const LONGEST_PAUSE: Duration = Duration::from_millis(40);

/// The state of a handle, which decides what dropping it does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HandleState {
    /// It is the handle of claims that their caller has not received.
    Undelivered,
    /// It is one of the open handles of the lease.
    Open,
    /// It was the last one and has not ended the claims yet.
    Ending,
    /// The claims are ended, or are not this handle's to end. Only their renewal has to stop.
    Ended,
    /// Nothing: another handle ends the claims, or has ended them.
    Closed,
}

impl<DB: Database> LeaseHandle<DB> {
    /// Creates the handle for claims that were granted to a request sent at `sent`.
    pub fn begin(
        key_terms: &Arc<KeyTerms<DB>>,
        claims: Vec<Claim>,
        priors: Vec<Option<PreviousClaim>>,
        sent: Instant,
    ) -> Self {
        let held = key_terms.renewer.hold(key_terms.span(), key_terms.terms.max_hold, claims, sent);
        let (key_terms, undone_by) = (key_terms.clone(), Mutex::new(Change::PutBack));
        Self { key_terms, held, priors, state: HandleState::Undelivered, undone_by }
    }

    /// Marks the claims as received by the caller.
    pub fn delivered(mut self) -> Self {
        self.state = HandleState::Open;
        self
    }

    /// Takes up a claim that stands in the table, for `left` at most: it is renewed once and then
    /// held like any other.
    pub async fn attach(key_terms: &Arc<KeyTerms<DB>>, claim: Claim, left: Duration) -> Result<Self, Error> {
        let mut handle = Self::begin(key_terms, vec![claim], vec![None], Instant::now());
        // A renewal makes no lease shorter.
        handle.held.row_lasts_until(Instant::now() + left);
        // Until the renewal is answered, the claim is not this handle's to abandon.
        handle.state = HandleState::Ended;
        // Another process may have worked under it.
        handle.undone_by = Mutex::new(ABANDON);
        handle.renew().await?;
        Ok(handle.delivered())
    }

    /// Returns one more handle.
    pub fn reenter(&self) -> Result<Self, Error> {
        if !self.held.stands() {
            return Err(self.error_lost());
        }
        self.held.add_handle();
        let mut handle = self.copy();
        handle.state = HandleState::Open;
        Ok(handle)
    }

    /// Leaves the claims standing if this is the last handle.
    pub fn detach(mut self) {
        self.state = if self.held.drop_handle() { HandleState::Ended } else { HandleState::Closed };
    }

    pub async fn lost(&self) {
        if !self.held.stands() {
            self.held.mark_lost(0, NO_RENEWAL);
        }
        self.held.lost.cancelled().await;
    }

    pub async fn renew(&self) -> Result<(), Error> {
        let renewed = self.copy();
        let tracker = self.key_terms.renewer.tracker.clone();
        threads::run(tracker, Box::pin(async move { renewed.renew_here().await })).await?
    }

    /// Returns a handle that does nothing when it is dropped.
    fn copy(&self) -> Self {
        let (key_terms, held, priors) = (self.key_terms.clone(), self.held.clone(), self.priors.clone());
        Self { key_terms, held, priors, state: HandleState::Closed, undone_by: Mutex::new(*lock(&self.undone_by)) }
    }

    /// Renews the lease, within [`threads::run`].
    async fn renew_here(&self) -> Result<(), Error> {
        let limit = Instant::now() + self.key_terms.time_limit;
        let mut pauses = Backoff::up_to(LONGEST_PAUSE);
        let (mut before, mut is_busy) = (Certainty::NothingChanged, false);
        loop {
            // A renewal would close the key of a lease that is over.
            if !self.held.stands() {
                self.held.mark_lost(0, "its time was up before it was renewed");
                return Err(self.error_lost());
            }
            let Exchange { reply, unanswered } = self.key_terms.renewer.renew(&self.held, limit).await;
            if unanswered {
                before = Certainty::Unknown;
            }
            match reply {
                Ok(Outcome::Done) if self.held.stands() => return Ok(()),
                Ok(Outcome::Done | Outcome::Lost) => return Err(self.error_lost()),
                // Another transaction has the row locked; it may be the caller's own.
                Ok(Outcome::Skipped { .. }) if Instant::now() < limit => {
                    is_busy = true;
                    pauses.pause(self.key_terms.time_limit).await;
                }
                Ok(Outcome::Skipped { .. } | Outcome::TooLate(_)) => {
                    return Err(self.error_busy(Action::Renew, Certainty::Unknown));
                }
                // The time was over before the request could be sent once more.
                Err(failure) if is_busy && failure.fault() == Fault::NoConnection => {
                    return Err(self.error_busy(Action::Renew, Certainty::Unknown));
                }
                Err(failure) if failure.fault() == Fault::Contention && Instant::now() < limit => {
                    pauses.pause(self.key_terms.time_limit).await;
                }
                Err(failure) => {
                    return Err(failure.into_error(Action::Renew, self.subject(), self.key_terms.time_limit, before));
                }
            }
        }
    }

    pub async fn release(self, status: Status) -> Result<(), Error> {
        let tracker = self.key_terms.renewer.tracker.clone();
        threads::run(tracker, Box::pin(self.release_here(status))).await?
    }

    /// Releases the lease, within [`threads::run`].
    async fn release_here(mut self, status: Status) -> Result<(), Error> {
        if !self.held.drop_handle() {
            self.state = HandleState::Closed;
            return if self.held.lost.is_cancelled() { Err(self.error_lost()) } else { Ok(()) };
        }
        self.state = HandleState::Ending;
        self.key_terms.renewer.stop_renewing(&self.held);
        self.held.over.cancel();
        let sent = Instant::now();
        let result = self.try_release(status).await;
        // Claims that are not known to be ended are abandoned when `self` is dropped, and so is the
        // rest of a set of which one claim is lost.
        if result.is_ok() || (self.held.claims.len() == 1 && matches!(result, Err(Error::Lost { .. }))) {
            self.state = HandleState::Ended;
            self.key_terms.renewer.ended(&self.held.claims, sent);
            self.held.release_kept();
        }
        let status = status.letter();
        for Claim { key, token, .. } in &self.held.claims {
            match &result {
                Ok(()) => tracing::info!(%key, %token, status, "released"),
                Err(error) => tracing::info!(%key, %token, status, ?error, "not released"),
            }
        }
        result
    }

    async fn try_release(&self, status: Status) -> Result<(), Error> {
        let last = self.held.deadline();
        // A claim that was released is not sent again, because another holder may have the key by
        // then.
        let (mut left, mut lost, mut unanswered) = (self.held.claims.clone(), None, None);
        let (mut pauses, mut alone) = (self.key_terms.span().pauses(), false);
        let change = Change::release(status, &self.key_terms.terms, *lock(&self.key_terms.longest_interval));
        loop {
            let limits = Limits::both(Instant::now() + self.key_terms.time_limit);
            let release = Release { claims: left.clone(), change };
            let failure = match self.key_terms.releases.send(release, limits, alone).await {
                Ok(Released { outcomes, unanswered: is_unanswered }) => {
                    if is_unanswered {
                        unanswered.get_or_insert(Failure::NoReply);
                    }
                    let gone = outcomes.iter().position(|outcome| *outcome == Outcome::Lost);
                    lost = lost.or(gone.map(|index| left[index].clone()));
                    left = skipped(left, &outcomes);
                    match lost {
                        _ if !left.is_empty() => {}
                        None => return Ok(()),
                        // An unanswered request may have freed the row before another holder took
                        // it.
                        Some(Claim { key, token, .. }) => {
                            let lost = Error::Lost { key, token };
                            return Err(
                                unanswered.map_or(lost, |failure| self.error_release(failure, Certainty::Unknown))
                            );
                        }
                    }
                    None
                }
                Err(failure) => Some(failure),
            };
            let permanent = failure.as_ref().is_some_and(|failure| remedy(failure, 1) == Remedy::Nothing);
            if permanent || Instant::now() >= last {
                let untouched = unanswered.is_none() && left.len() == self.held.claims.len();
                let before = if untouched { Certainty::NothingChanged } else { Certainty::Unknown };
                return Err(match failure {
                    Some(failure) => self.error_release(failure, before),
                    None => self.error_busy(Action::Release, Certainty::Unknown),
                });
            }
            // It was sent and is not settled.
            alone = true;
            unanswered = failure.filter(Failure::is_unanswered).or(unanswered);
            pauses.pause(self.key_terms.time_limit).await;
        }
    }

    pub async fn abandon(mut self) -> Result<(), Error> {
        let Some(ended) = self.begin_ending(ABANDON) else {
            return if self.held.lost.is_cancelled() { Err(self.error_lost()) } else { Ok(()) };
        };
        let limit = self.held.deadline().max(Instant::now() + self.key_terms.time_limit);
        match timeout_at(limit, ended).await {
            Ok(Ok(EndOutcome::Done)) => Ok(()),
            Ok(Ok(EndOutcome::Lost { key, token })) => Err(Error::Lost { key, token }),
            Ok(Ok(EndOutcome::GivenUp(outcome))) => Err(self.error_busy(Action::Abandon, outcome)),
            Ok(Err(_)) | Err(_) => Err(self.error_busy(Action::Abandon, Certainty::Unknown)),
        }
    }

    /// Ends a claim under which another one was made. If it took over a claim that was not ended,
    /// the row says so.
    pub async fn pass_on(self) {
        self.told();
        self.undo().await;
    }

    /// Notes that a caller was told of what the claim took over: it is passed on, and not put back.
    pub fn told(&self) {
        let KeyTerms { terms, longest_interval, .. } = &*self.key_terms;
        let status = if self.prior().is_some() { Status::Failed } else { Status::Succeeded };
        *lock(&self.undone_by) = Change::release(status, terms, *lock(longest_interval));
    }

    /// Undoes the claims, and waits for the end of that, as long as a request may take.
    pub async fn undo(mut self) {
        let change = *lock(&self.undone_by);
        let Some(undone) = self.begin_ending(change) else { return };
        // What takes longer goes on in the background.
        let _ = timeout_at(Instant::now() + self.key_terms.time_limit, undone).await;
    }

    /// Ends the claims of work that has stopped, without waiting for the outcome. If nothing was
    /// done, it is as if they had not been made, unless they were attached.
    pub fn end_in_background(mut self, nothing_done: bool) {
        let change = if nothing_done { *lock(&self.undone_by) } else { ABANDON };
        drop(self.begin_ending(change));
    }

    /// Begins to end the claims with `change`. Returns `None` if another handle holds them.
    fn begin_ending(&mut self, change: Change) -> Option<oneshot::Receiver<EndOutcome>> {
        let last = self.held.drop_handle();
        self.state = if last { HandleState::Ended } else { HandleState::Closed };
        last.then(|| {
            self.held.over.cancel();
            self.key_terms.renewer.end(self.held.clone(), change)
        })
    }

    /// What the first claim took over.
    pub fn prior(&self) -> Option<&PreviousClaim> {
        self.priors.first()?.as_ref()
    }

    fn subject(&self) -> String {
        subject(self.held.claims.iter().map(|claim| &claim.key))
    }

    pub fn error_lost(&self) -> Error {
        let Claim { key, token, .. } = self.held.lost_claim().clone();
        Error::Lost { key, token }
    }

    fn error_release(&self, failure: Failure, before: Certainty) -> Error {
        failure.into_error(Action::Release, self.subject(), self.key_terms.time_limit, before)
    }

    fn error_busy(&self, action: Action, outcome: Certainty) -> Error {
        Error::timed_out(action, self.subject(), self.key_terms.time_limit, outcome)
    }
}

impl<DB: Database> Drop for LeaseHandle<DB> {
    fn drop(&mut self) {
        // The process that this one was forked from holds the lease.
        if is_forked() {
            return;
        }
        let change = match self.state {
            HandleState::Closed => return,
            HandleState::Undelivered | HandleState::Open if !self.held.drop_handle() => return,
            HandleState::Undelivered => Some(*lock(&self.undone_by)),
            // Work that has not ended may not have stopped yet.
            HandleState::Open => Some(Change::Abandon(self.key_terms.terms.lock_delay)),
            HandleState::Ending => Some(ABANDON),
            HandleState::Ended => None,
        };
        threads::record(metrics::held(self.held.claims[0].key.as_str(), self.held.since.elapsed()));
        self.held.over.cancel();
        match change {
            // A lease that is lost may still be in its row.
            Some(change) => drop(self.key_terms.renewer.end(self.held.clone(), change)),
            None => self.key_terms.renewer.stop_renewing(&self.held),
        }
    }
}

/// The keys as an error names them.
pub(crate) fn subject<'a>(mut keys: impl ExactSizeIterator<Item = &'a Key>) -> String {
    let (count, first) = (keys.len(), keys.next().map_or("", Key::as_str));
    if count > 1 { format!("{first:?} and {} more", count - 1) } else { format!("{first:?}") }
}
