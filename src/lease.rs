//! A lease: one key, held.

use std::{fmt, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::{
    error::{Action, Certainty, Error},
    fault::Fault,
    keeper::{Held, Keeper},
    key::{Claim, Key, Prior, Token},
    rules::Status,
    store::{Change, Database, Outcome, borrowed::Failure},
    telemetry,
};

/// A key that is held, and renewed in the background until it is ended.
///
/// Work that came to its end calls [`release`](Self::release). Work that was stopped calls [`abandon`](Self::abandon),
/// or drops the lease, which abandons it in the background. Either way the next one need not wait for the lease to end.
/// Where no runtime is left to abandon it, a dropped lease ends by itself.
pub struct Lease<DB: Database> {
    keeper: Arc<Keeper<DB>>,
    held: Arc<Held>,
    prior: Option<Prior>,
    time_limit: Duration,
    ended: bool,
}

impl<DB: Database> fmt::Debug for Lease<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("claim", &self.held.claim).field("time_left", &self.time_left()).finish()
    }
}

impl<DB: Database> Lease<DB> {
    /// Begins with a claim that was granted to a request sent at `sent`.
    pub(crate) fn begin(
        keeper: &Arc<Keeper<DB>>,
        claim: Claim,
        prior: Option<Prior>,
        sent: Instant,
        time_limit: Duration,
    ) -> Self {
        Self { held: keeper.hold(claim, sent), keeper: keeper.clone(), prior, time_limit, ended: false }
    }

    /// Takes up a claim that stands in the table: renewed once, then kept like any other.
    pub(crate) async fn resume(keeper: &Arc<Keeper<DB>>, claim: Claim, time_limit: Duration) -> Result<Self, Error> {
        let mut lease = Self::begin(keeper, claim, None, Instant::now(), time_limit);
        // Until the renewal is answered it is not this lease's to abandon.
        lease.ended = true;
        lease.renew().await?;
        lease.ended = false;
        Ok(lease)
    }

    /// Leaves the claim standing, renewed no more: it ends with its lease, unless
    /// [`LeaseLock::resume`](crate::LeaseLock::resume) takes it up, in this process or another.
    pub fn detach(mut self) -> Claim {
        self.ended = true;
        self.claim().clone()
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.held.claim.key
    }

    /// The fencing token: higher than that of any claim on this key before.
    pub fn token(&self) -> Token {
        self.held.claim.token
    }

    /// Key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.held.claim
    }

    /// The claim that this one took over from, if its holder did not end it: its work may be half done.
    pub fn taken_over_from(&self) -> Option<&Prior> {
        self.prior.as_ref()
    }

    /// Whether the key is known to be held at this moment, by this machine's monotonic clock.
    pub fn is_held(&self) -> bool {
        self.held.stands()
    }

    /// How long it is held for sure, unless it is renewed; zero when it is lost.
    pub fn time_left(&self) -> Duration {
        if self.held.lost.is_cancelled() {
            return Duration::ZERO;
        }
        self.held.deadline().saturating_duration_since(Instant::now())
    }

    /// Waits until the lease is lost: before the server could let another in, if neither the process nor its runtime is held up
    /// for longer than a twentieth of the lease.
    ///
    /// # Cancel safety
    /// Nothing is lost by dropping it.
    pub async fn lost(&self) {
        // The keeper tells; the clock is watched here too, for when the runtime that drives the keeper stands still.
        while !self.held.lost.is_cancelled() {
            let deadline = self.held.deadline();
            if timeout_at(deadline, self.held.lost.cancelled()).await.is_err() && !self.is_held() {
                self.keeper.lose(&self.held, "no renewal came through before its lease ended");
            }
        }
    }

    /// A token to hand to tasks of the work: cancelled when the lease is lost, and when it is released, abandoned or dropped.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.held.over.child_token()
    }

    /// Prolongs the lease now; in the background that happens at every third of it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, or the lease had run out. After any other error
    /// the lease stands until [`time_left`](Self::time_left) is over, and goes on being renewed.
    ///
    /// # Cancel safety
    /// Dropped, the lease may have been prolonged without this end knowing.
    pub async fn renew(&self) -> Result<(), Error> {
        if !self.is_held() {
            self.keeper.lose(&self.held, "its time was up before it was renewed");
            return Err(self.error_lost());
        }
        let limit = Instant::now() + self.time_limit;
        loop {
            match self.keeper.renew(&self.held, limit).await {
                Ok(Outcome::Done) if self.is_held() => return Ok(()),
                Ok(Outcome::Done | Outcome::Lost) => return Err(self.error_lost()),
                // Somebody's transaction is at the row; it may be the caller's own.
                Ok(Outcome::Skipped { .. }) if Instant::now() < limit => pause().await,
                Ok(Outcome::Skipped { .. }) => return Err(self.error_busy(Action::Renew)),
                Err(failure) if failure.fault() == Fault::Contention && Instant::now() < limit => pause().await,
                Err(failure) => {
                    return Err(failure.into_error(
                        Action::Renew,
                        self.subject(),
                        self.time_limit,
                        Certainty::NothingChanged,
                    ));
                }
            }
        }
    }

    /// Ends the lease: the work came to its end, well or badly.
    ///
    /// Tried until it is settled or the lease is over. It counts while nobody has taken the row, even if the lease has run out.
    ///
    /// # Errors
    /// [`Error::Lost`] if the row was seen without the claim, so that nothing was written. Any other error means that it is
    /// not known whether the ending was recorded: nothing came back before the lease was over, or somebody else had
    /// taken the key by the time that something did.
    ///
    /// # Cancel safety
    /// Dropped, the key is released or abandoned.
    pub async fn release(mut self, status: Status) -> Result<(), Error> {
        self.keeper.let_go(&self.held);
        self.held.over.cancel();
        let result = self.try_release(status).await;
        // What is not known to be ended is abandoned when `self` is dropped.
        self.ended = matches!(result, Ok(()) | Err(Error::Lost { .. }));
        let (key, token, status) = (self.key(), self.token(), status.letter());
        match &result {
            Ok(()) => tracing::info!(%key, %token, status, "released"),
            Err(error) => tracing::info!(%key, %token, status, %error, "not released"),
        }
        result
    }

    async fn try_release(&self, status: Status) -> Result<(), Error> {
        let last = self.held.deadline();
        let mut unanswered = None;
        loop {
            let limit = Instant::now() + self.time_limit;
            let claims = std::slice::from_ref(&self.held.claim);
            let failure = match self.keeper.change(claims, Change::Release(status), limit).await {
                Ok(outcomes) => match outcomes.first() {
                    Some(Outcome::Done) => return Ok(()),
                    Some(Outcome::Skipped { .. }) => None,
                    Some(Outcome::Lost) | None => {
                        // A request that went unanswered may have freed the row before somebody else took it.
                        return Err(unanswered.map_or_else(|| self.error_lost(), |failure| self.error_release(failure)));
                    }
                },
                Err(failure) => Some(failure),
            };
            let again = failure.as_ref().is_none_or(|failure| failure.fault().is_transient());
            if !again || Instant::now() >= last {
                return Err(match failure {
                    Some(failure) => self.error_release(failure),
                    None => self.error_busy(Action::Release),
                });
            }
            unanswered = failure.filter(|failure| failure.fault() == Fault::Outage).or(unanswered);
            pause().await;
        }
    }

    /// Ends the lease of work that was stopped: under [`Rules::Recover`](crate::Rules::Recover) the next one takes over
    /// at once, under [`Rules::Article`](crate::Rules::Article) the key waits for an operator, as after a crash.
    ///
    /// # Errors
    /// [`Error::Lost`] if the claim had been lost before; [`Error::TimedOut`] if it is not known whether this ended it.
    ///
    /// # Cancel safety
    /// Dropped, it goes on in the background.
    pub async fn abandon(mut self) -> Result<(), Error> {
        self.ended = true;
        self.held.over.cancel();
        let limit = self.held.deadline().max(Instant::now() + self.time_limit);
        match timeout_at(limit, self.keeper.abandon(self.held.clone())).await {
            Ok(Ok(Outcome::Done)) => Ok(()),
            Ok(Ok(Outcome::Lost)) => Err(self.error_lost()),
            Ok(Ok(Outcome::Skipped { .. }) | Err(_)) | Err(_) => Err(self.error_busy(Action::Abandon)),
        }
    }

    fn subject(&self) -> String {
        format!("{:?}", self.key().as_str())
    }

    fn error_lost(&self) -> Error {
        Error::Lost { key: self.key().clone(), token: self.token() }
    }

    fn error_release(&self, failure: Failure) -> Error {
        failure.into_error(Action::Release, self.subject(), self.time_limit, Certainty::Unknown)
    }

    fn error_busy(&self, action: Action) -> Error {
        Error::TimedOut { action, subject: self.subject(), limit: self.time_limit, outcome: Certainty::Unknown }
    }
}

impl<DB: Database> Drop for Lease<DB> {
    fn drop(&mut self) {
        telemetry::held(self.held.since.elapsed());
        self.held.over.cancel();
        if self.ended || self.held.lost.is_cancelled() {
            self.keeper.let_go(&self.held);
        } else {
            drop(self.keeper.abandon(self.held.clone()));
        }
    }
}

/// A moment for whoever is at the row, or for a server that is coming back.
async fn pause() {
    sleep(Duration::from_millis(fastrand::u64(10..40))).await;
}
