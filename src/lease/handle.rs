//! Handles on the claims of a lease, which is renewed in the background, notified of its loss, and
//! ended once.

use std::{fmt, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use crate::{
    batch::op::Limits,
    error::{Action, Certainty, Error},
    key::Claim,
    lease::{changes::Exchange, ending::Ended, releases::Release, renewer::Renewer, state::LeaseState},
    metrics,
    queue::local::Permit,
    retry::Backoff,
    rules::Status,
    store::{
        Change, Database, Outcome,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        skipped,
    },
};

/// One handle on the claims of a lease. Dropping the last handle abandons them.
pub(crate) struct LeaseHandle<DB: Database> {
    renewer: Arc<Renewer<DB>>,
    held: Arc<LeaseState>,
    time_limit: Duration,
    part: Part,
    /// The change that ends the claims while their caller has not received them, so that no work
    /// was begun under them.
    unheard: Option<Change>,
}

/// What remains to be done for this handle.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// It is counted among the handles.
    Counted,
    /// It was the last one and has not ended the claims yet.
    Last,
    /// The claims are ended, or are not this handle's to end. Only their renewal has to stop.
    Ended,
    /// Nothing: another handle ends the claims, or has ended them.
    None,
}

impl<DB: Database> fmt::Debug for LeaseHandle<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseHandle")
            .field("claims", &self.held.claims)
            .field("time_left", &self.held.time_left())
            .finish()
    }
}

impl<DB: Database> LeaseHandle<DB> {
    /// Creates the handle for claims that were granted to a request sent at `sent`.
    pub fn begin(
        renewer: &Arc<Renewer<DB>>,
        claims: Vec<Claim>,
        sent: Instant,
        time_limit: Duration,
        unheard: Change,
    ) -> Self {
        let (held, unheard) = (renewer.hold(claims, sent), Some(unheard));
        Self { held, renewer: renewer.clone(), time_limit, part: Part::Counted, unheard }
    }

    /// Marks the claims as received by the caller.
    pub fn heard(mut self) -> Self {
        self.unheard = None;
        self
    }

    /// Takes up a claim that stands in the table: it is renewed once and then held like any other.
    pub async fn resume(renewer: &Arc<Renewer<DB>>, claim: Claim, time_limit: Duration) -> Result<Self, Error> {
        let mut handle = Self::begin(renewer, vec![claim], Instant::now(), time_limit, Change::Abandon);
        // Until the renewal is answered, the claim is not this handle's to abandon.
        handle.part = Part::Ended;
        handle.renew().await?;
        handle.part = Part::Counted;
        Ok(handle.heard())
    }

    /// Returns one more handle.
    pub fn reenter(&self) -> Result<Self, Error> {
        if !self.held.stands() {
            return Err(self.error_lost());
        }
        self.held.share();
        let (renewer, held) = (self.renewer.clone(), self.held.clone());
        Ok(Self { renewer, held, time_limit: self.time_limit, part: Part::Counted, unheard: None })
    }

    /// Leaves the claims standing if this is the last handle.
    pub fn detach(mut self) {
        self.part = if self.held.give_up() { Part::Ended } else { Part::None };
    }

    /// Keeps the permit under which the lease was acquired until the lease is over.
    pub fn keep(&self, turn: Permit) {
        self.held.keep(turn);
    }

    pub fn claims(&self) -> &[Claim] {
        &self.held.claims
    }

    pub fn is_held(&self) -> bool {
        self.held.stands()
    }

    pub fn time_left(&self) -> Duration {
        self.held.time_left()
    }

    pub async fn lost(&self) {
        self.renewer.attend();
        // The renewer reports the loss. The clock is watched here too, in case the runtime that
        // drives the renewer makes no progress.
        while !self.held.lost.is_cancelled() {
            let deadline = self.held.deadline();
            if timeout_at(deadline, self.held.lost.cancelled()).await.is_err() && !self.is_held() {
                self.renewer.lose(&self.held, 0, "no renewal came through before its lease ended");
            }
        }
    }

    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.over.child_token()
    }

    pub async fn renew(&self) -> Result<(), Error> {
        if !self.is_held() {
            self.renewer.lose(&self.held, 0, "its time was up before it was renewed");
            return Err(self.error_lost());
        }
        let limit = Instant::now() + self.time_limit;
        let (mut pauses, mut before) = (pauses(), Certainty::NothingChanged);
        loop {
            let Exchange { reply, unanswered } = self.renewer.renew(&self.held, limit).await;
            if unanswered {
                before = Certainty::Unknown;
            }
            match reply {
                Ok(Outcome::Done) if self.is_held() => return Ok(()),
                Ok(Outcome::Done | Outcome::Lost) => return Err(self.error_lost()),
                // Another transaction has the row locked; it may be the caller's own.
                Ok(Outcome::Skipped { .. }) if Instant::now() < limit => pauses.pause(self.time_limit).await,
                Ok(Outcome::Skipped { .. }) => return Err(self.error_busy(Action::Renew, Certainty::Unknown)),
                Err(failure) if failure.fault() == Fault::Contention && Instant::now() < limit => {
                    pauses.pause(self.time_limit).await;
                }
                Err(failure) => {
                    return Err(failure.into_error(Action::Renew, self.subject(), self.time_limit, before));
                }
            }
        }
    }

    pub async fn release(mut self, status: Status) -> Result<(), Error> {
        if !self.held.give_up() {
            self.part = Part::None;
            return if self.held.lost.is_cancelled() { Err(self.error_lost()) } else { Ok(()) };
        }
        self.part = Part::Last;
        self.renewer.let_go(&self.held);
        self.held.over.cancel();
        let result = self.try_release(status).await;
        // Claims that are not known to be ended are abandoned when `self` is dropped, and so is the
        // rest of a set of which one claim is lost.
        if result.is_ok() || (self.claims().len() == 1 && matches!(result, Err(Error::Lost { .. }))) {
            self.part = Part::Ended;
            self.held.pass_on();
        }
        let status = status.letter();
        for Claim { key, token, .. } in self.claims() {
            match &result {
                Ok(()) => tracing::info!(%key, %token, status, "released"),
                Err(error) => tracing::info!(%key, %token, status, ?error, "not released"),
            }
        }
        result
    }

    async fn try_release(&self, status: Status) -> Result<(), Error> {
        let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let last = self.held.deadline();
        // A claim that was released is not sent again, because another holder may have the key by
        // then.
        let (mut left, mut lost, mut unanswered) = (self.claims().to_vec(), None, None);
        let (mut pauses, mut alone) = (self.renewer.pauses(), false);
        loop {
            let limit = Instant::now() + self.time_limit;
            let release = Release { claims: left.clone(), status, alone };
            let limits = Limits { caller: limit, statement: limit };
            let failure = match self.renewer.releases.send(&runtime, release, limits).await {
                Ok(outcomes) => {
                    let gone = outcomes.iter().position(|outcome| *outcome == Outcome::Lost);
                    lost = lost.or(gone.map(|place| left[place].clone()));
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
            let hopeless = failure.as_ref().is_some_and(|failure| remedy(failure, 1) == Remedy::Nothing);
            if hopeless || Instant::now() >= last {
                let untouched = unanswered.is_none() && left.len() == self.claims().len();
                let before = if untouched { Certainty::NothingChanged } else { Certainty::Unknown };
                return Err(match failure {
                    Some(failure) => self.error_release(failure, before),
                    None => self.error_busy(Action::Release, Certainty::Unknown),
                });
            }
            alone = true;
            unanswered = failure.filter(Failure::is_unanswered).or(unanswered);
            pauses.pause(self.time_limit).await;
        }
    }

    pub async fn abandon(mut self) -> Result<(), Error> {
        let last = self.held.give_up();
        self.part = if last { Part::Ended } else { Part::None };
        if !last {
            return if self.held.lost.is_cancelled() { Err(self.error_lost()) } else { Ok(()) };
        }
        self.held.over.cancel();
        let limit = self.held.deadline().max(Instant::now() + self.time_limit);
        match timeout_at(limit, self.renewer.abandon(self.held.clone())).await {
            Ok(Ok(Ended::Done)) => Ok(()),
            Ok(Ok(Ended::Lost)) => Err(self.error_lost()),
            Ok(Ok(Ended::GivenUp(outcome))) => Err(self.error_busy(Action::Abandon, outcome)),
            Ok(Err(_)) | Err(_) => Err(self.error_busy(Action::Abandon, Certainty::Unknown)),
        }
    }

    fn subject(&self) -> String {
        subject(self.claims().iter().map(|claim| claim.key.as_str()))
    }

    fn error_lost(&self) -> Error {
        let Claim { key, token, .. } = self.held.lost_claim().clone();
        Error::Lost { key, token }
    }

    fn error_release(&self, failure: Failure, before: Certainty) -> Error {
        failure.into_error(Action::Release, self.subject(), self.time_limit, before)
    }

    fn error_busy(&self, action: Action, outcome: Certainty) -> Error {
        Error::TimedOut { action, subject: self.subject(), limit: self.time_limit, outcome }
    }
}

impl<DB: Database> Drop for LeaseHandle<DB> {
    fn drop(&mut self) {
        if self.part == Part::None || (self.part == Part::Counted && !self.held.give_up()) {
            return;
        }
        metrics::held(self.held.since.elapsed());
        self.held.over.cancel();
        if self.part == Part::Ended || self.held.lost.is_cancelled() {
            self.renewer.let_go(&self.held);
        } else {
            drop(self.renewer.end(self.held.clone(), self.unheard.unwrap_or(Change::Abandon)));
        }
    }
}

/// The pauses between attempts while a row is locked or a server is recovering.
fn pauses() -> Backoff {
    Backoff::up_to(Duration::from_millis(40))
}

/// The keys as an error names them.
pub(crate) fn subject<'a>(mut keys: impl ExactSizeIterator<Item = &'a str>) -> String {
    let (count, first) = (keys.len(), keys.next().unwrap_or_default());
    if count > 1 { format!("{first:?} and {} more", count - 1) } else { format!("{first:?}") }
}
