//! One attempt: the same holder sends its claim request until it has a reply.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use crate::{
    action::{Action, Certainty},
    causes::Setup,
    error::Error,
    grant::Attempt,
    key::{Claim, Holder, Key},
    lease::{
        claims::{ClaimSet, Claimed, Creation},
        handle::{LeaseHandle, subject},
        ledger::Pending,
        replies::{Next, next_of_all, next_of_any, queued},
        shared::Shared,
        terms::KeyTerms,
        wanted::Wanted,
    },
    metrics,
    pacing::Backoff,
    queue::{
        local::{LocalQueue, Place},
        position::Position,
    },
    retry::pause,
    rules::{Reason, Refusal, Row},
    session::{queue::Limits, time::Instant},
    store::{ClaimReply, ClaimRequest, Database, failure::Failure, fault::Fault},
};

/// How long a busy row is retried within one attempt, unless the request will soon be made again.
const BUSY_TIMEOUT: Duration = Duration::from_millis(100);

/// How long a waiter's request may have no reply before an earlier refusal is out of date.
pub(super) const REPLY: Duration = Duration::from_secs(1);

/// The longest pause between two creations of the same row.
const MAX_CREATE_PAUSE: Duration = Duration::from_millis(500);

/// A creation with less time than this is not sent with others. On MySQL the shortest wait is a
/// second.
const ALONE_WITHIN: Duration = Duration::from_secs(2);

pub(crate) struct ClaimAttempt<'a, DB: Database> {
    shared: &'a Shared<DB>,
    key_terms: &'a Arc<KeyTerms<DB>>,
    wanted: Wanted,
    holder: Holder,
    /// The request has waited, and will soon be made again.
    waited: bool,
    /// The queue of the tasks that want any one of the keys, if one is enough.
    any: Option<Arc<LocalQueue>>,
    /// The key that is claimed, of those of which one is enough.
    chosen: Option<Place>,
    /// No other waiter precedes this one in the queues of the keys, or the lock is not fair.
    is_first_in_queue: bool,
    /// A request sent before the caller stops waiting is answered, or given up together with its
    /// connection, before the attempt ends in any other way, so that a late grant is never ended
    /// while the same holder's next attempt is running.
    limits: Limits,
    /// A claim request was sent whose outcome is unknown.
    unanswered: bool,
    /// When the last request was sent, or a little before.
    sent: Instant,
    /// What the call knows of its claim requests.
    pending: Pending,
    /// The rows that this attempt created. One that is still missing afterwards is not visible.
    created: Vec<Key>,
    /// The request met contention, possibly with other requests of its batch, or it cannot be
    /// granted by a statement of many requests.
    contended: bool,
}

impl<'a, DB: Database> ClaimAttempt<'a, DB> {
    /// Creates an attempt by a new holder, which ends at `until` at the latest.
    pub fn new(
        shared: &'a Shared<DB>,
        key_terms: &'a Arc<KeyTerms<DB>>,
        wanted: &Wanted,
        until: Option<Instant>,
        pending: &Pending,
    ) -> Self {
        let statement = Instant::now() + shared.time_limit;
        let any = wanted.any.then(|| key_terms.queues.queue(&wanted.keys, true));
        Self {
            shared,
            key_terms,
            wanted: wanted.clone(),
            holder: Holder::unique(),
            waited: false,
            chosen: any.as_ref().and_then(LocalQueue::take_place),
            any,
            is_first_in_queue: !key_terms.terms.fair,
            limits: Limits { caller: until.unwrap_or(statement), statement },
            unanswered: false,
            sent: Instant::now(),
            pending: pending.clone(),
            created: Vec::new(),
            contended: false,
        }
    }

    /// Returns the attempt, to be continued by the same holder, if its claim may have been granted
    /// although no reply arrived.
    pub fn into_unanswered(self) -> Option<Self> {
        // The holder was first in the queue when that request was sent.
        self.unanswered.then(|| Self {
            is_first_in_queue: true,
            limits: Limits { statement: Instant::now() + self.shared.time_limit, ..self.limits },
            created: Vec::new(),
            contended: false,
            ..self
        })
    }

    /// Returns when this attempt ends.
    fn limit(&self) -> Instant {
        self.limits.caller.min(self.limits.statement)
    }

    /// Marks the request as one of a waiter that has waited and will soon retry. `is_first` is
    /// set if the waiter is first in the queue.
    pub fn after_waiting(mut self, is_first: bool) -> Self {
        self.waited = true;
        self.is_first_in_queue |= is_first;
        self
    }

    /// Marks the request as one that no waiter precedes, because its caller holds the key that they
    /// wait for.
    pub fn ahead_of_queue(mut self) -> Self {
        self.is_first_in_queue = true;
        self
    }

    pub async fn run(&mut self) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let attempt = self.attempt().await?;
        match &attempt {
            Attempt::Acquired(granted) => {
                let taken_over = granted.priors.iter().any(Option::is_some);
                metrics::acquired(granted.held.claims[0].key.as_str(), taken_over);
                for (Claim { key, token, .. }, prior) in granted.held.claims.iter().zip(&granted.priors) {
                    tracing::info!(%key, %token, taken_over_from = ?prior, "acquired");
                }
            }
            Attempt::Refused(refusal) => {
                self.settle();
                metrics::refused(refusal.key.as_str(), refusal.reason);
                tracing::debug!(key = %refusal.key, reason = %refusal.reason, %refusal, "refused");
            }
        }
        Ok(attempt)
    }

    /// Returns whether one of several keys is claimed, without a read of all of them.
    pub fn has_chosen(&self) -> bool {
        self.chosen.is_some()
    }

    /// Returns whether the request is for any one of the keys, of which none has been chosen.
    fn is_for_any(&self) -> bool {
        self.wanted.any && self.chosen.is_none()
    }

    /// The claims that are requested in the next statement.
    fn asked(&self) -> Vec<ClaimRequest> {
        let keys = match &self.chosen {
            Some(place) => std::slice::from_ref(&self.wanted.keys[place.index()]),
            None => &self.wanted.keys,
        };
        let (holder, waited) = (self.holder, self.waited);
        keys.iter().map(|key| ClaimRequest { key: key.clone(), holder, waited }).collect()
    }

    fn mark_unanswered(&mut self) {
        if self.is_for_any() {
            return; // only read
        }
        self.unanswered = true;
        // The background finishes a claim whose caller has stopped waiting, and puts it back.
        // A claim that was sent just before counts as not sent.
        if Instant::now() < self.limits.caller || self.sent.elapsed() >= REPLY {
            self.pending.set_unanswered(true);
        }
    }

    /// A reply has told whether the earlier requests for the keys that are asked for were granted.
    fn settle(&mut self) {
        if std::mem::take(&mut self.unanswered) {
            let asked = self.asked().into_iter();
            asked.for_each(|asked| self.key_terms.renewer.ledger.remove(&(asked.key, self.holder), self.sent));
            self.pending.set_unanswered(false);
        }
    }

    /// Sends the request until it is granted or refused.
    async fn attempt(&mut self) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        if !self.is_first_in_queue
            && let Some(refusal) = self.check_queue().await?
        {
            return Ok(Attempt::Refused(refusal));
        }
        let (began, mut busy_since) = (Instant::now(), None);
        let mut pauses = Backoff::up_to(MAX_CREATE_PAUSE);
        loop {
            let next = match self.claim().await {
                Ok(Claimed::Granted(granted)) => {
                    self.settle();
                    // Dropping the handle puts the claim back. The next request is made by another
                    // holder.
                    if !granted.held.stands() {
                        return Err(self.timed_out());
                    }
                    if let Some(place) = self.chosen.take() {
                        granted.held.keep(place);
                    }
                    return Ok(Attempt::Acquired(granted));
                }
                Ok(Claimed::Not { replies, unanswered, .. }) => {
                    if unanswered {
                        self.mark_unanswered();
                    }
                    self.next(replies)
                }
                Err(failure) => self.on_failure(failure).await?,
            };
            match next {
                Next::Refuse(refusal) => return Ok(Attempt::Refused(refusal)),
                Next::Create(keys) => self.create_missing(keys, began, &mut pauses).await?,
                Next::Retry => {}
                Next::Busy { needs_own_statement: true, .. } if self.retry_unbatched() => {}
                Next::Busy { key, row, .. } => {
                    if let Some(refusal) = self.busy(&mut busy_since, key, row.as_ref()).await? {
                        return Ok(Attempt::Refused(refusal));
                    }
                }
            }
        }
    }

    /// Returns what to do after a claim statement failed.
    async fn on_failure(&mut self, failure: Failure) -> Result<Next, Error> {
        match failure.fault() {
            Fault::Contention => Ok(Next::Busy { key: None, row: None, needs_own_statement: true }),
            // The request was sent and has no reply. The same holder sends it again, and receives
            // the same claim if it was granted.
            Fault::Outage => {
                self.mark_unanswered();
                if Instant::now() >= self.limit() {
                    return Err(self.error(failure));
                }
                pause(20..60).await;
                Ok(Next::Retry)
            }
            _ => Err(self.error(failure)),
        }
    }

    /// Creates missing rows. It pauses first if this attempt has created one of them before. A row
    /// that another transaction created serves as well. After contention or an outage the caller
    /// sends the claim again.
    async fn create_missing(&mut self, keys: Vec<Key>, began: Instant, pauses: &mut Backoff) -> Result<(), Error> {
        let limit = self.limit();
        if let Some(key) = keys.iter().find(|key| self.created.contains(key)) {
            let left = limit - Instant::now();
            // Not until the time limit, because a claim that is cut short reports a different
            // error.
            if left < (limit - began) / 4 {
                return Err(Setup::RowNotVisible { key: key.clone() }.into());
            }
            pauses.pause(left / 2).await;
        }
        let creation = Creation { keys: keys.clone(), minutes: self.key_terms.terms.minutes() };
        let alone = self.contended || limit - Instant::now() < ALONE_WITHIN;
        match self.shared.creates.send(creation, Limits::both(limit), alone).await {
            Ok(()) => self.created.extend(keys),
            Err(failure) if Instant::now() < limit && matches!(failure.fault(), Fault::Contention | Fault::Outage) => {
                self.contended = true;
                pause(2..10).await;
            }
            Err(failure) => return Err(self.error(failure)),
        }
        Ok(())
    }

    /// Returns true once. The contention may have concerned only other requests of the batch, so
    /// the request is sent alone, at once.
    fn retry_unbatched(&mut self) -> bool {
        Instant::now() < self.limit() && !std::mem::replace(&mut self.contended, true)
    }

    /// Returns what to do after a statement that granted nothing.
    fn next(&mut self, replies: Vec<ClaimReply>) -> Next {
        let terms = &self.key_terms.terms;
        if self.is_for_any() {
            return match next_of_any(&self.asked(), replies, terms) {
                ControlFlow::Continue(index) => {
                    self.chosen = self.any.as_ref().map(|queue| queue.take_place_at(index));
                    Next::Retry
                }
                ControlFlow::Break(next) => next,
            };
        }
        match next_of_all(&self.asked(), replies, terms) {
            // Another holder has it, and another key may be free.
            Next::Refuse(refusal) if self.chosen.is_some() => {
                self.settle();
                self.chosen.take().into_iter().for_each(Place::refused);
                if Instant::now() < self.limit() { Next::Retry } else { Next::Refuse(refusal) }
            }
            next @ Next::Busy { .. } if !self.unanswered => {
                self.chosen.take().into_iter().for_each(Place::refused);
                next
            }
            next => next,
        }
    }

    async fn claim(&mut self) -> Result<Claimed<DB>, Failure> {
        self.sent = Instant::now();
        let set = ClaimSet {
            requests: self.asked(),
            key_terms: self.key_terms.clone(),
            look: self.is_for_any(),
            pending: self.pending.clone(),
        };
        // After contention the request is sent alone. It then does not contend with the other
        // requests of a batch, and its reply is its own.
        let reply = self.shared.claims.send(set, self.limits, self.contended || self.unanswered).await;
        self.pending.set_in_flight(false);
        reply
    }

    /// Returns `None` if no waiter precedes the request and the keys may be claimed; otherwise
    /// returns the refusal.
    async fn check_queue(&self) -> Result<Option<Refusal>, Error> {
        let position = self.shared.tickets.position(&self.wanted.queues, i64::MAX, self.limit()).await;
        Ok(match position.map_err(|failure| self.error(failure))? {
            Position::Behind { key, left, .. } => Some(queued(self.wanted.asked(key), left)),
            Position::First | Position::TicketMissing | Position::Unknown => None,
        })
    }

    /// Pauses while another transaction has the row locked. Returns the refusal once the busy
    /// timeout is over.
    ///
    /// It does not refuse while an earlier request of this attempt has no reply, because the row
    /// may be locked by that request.
    async fn busy(
        &self,
        since: &mut Option<Instant>,
        key: Option<Key>,
        row: Option<&Row>,
    ) -> Result<Option<Refusal>, Error> {
        let now = Instant::now();
        let since = *since.get_or_insert(now);
        let goes_on = self.unanswered || (!self.waited && now < since + BUSY_TIMEOUT);
        if now < self.limit() && goes_on {
            pause(2..10).await;
            return Ok(None);
        }
        if self.unanswered {
            return Err(self.timed_out());
        }
        let key = key.unwrap_or_else(|| self.wanted.keys[self.chosen.as_ref().map_or(0, Place::index)].clone());
        Ok(Some(Refusal {
            by: row.map(|row| row.client_ip.clone()).unwrap_or_default(),
            since: row.and_then(|row| row.begin_time),
            retry_after: Some(BUSY_TIMEOUT),
            ..Refusal::bare(key, Reason::Busy)
        }))
    }

    fn timed_out(&self) -> Error {
        self.error(Failure::NoReply)
    }

    fn error(&self, failure: Failure) -> Error {
        let before = if self.unanswered { Certainty::Unknown } else { Certainty::NothingChanged };
        let keys = subject(self.wanted.keys.iter());
        failure.into_error(Action::Acquire, keys, self.shared.time_limit, before)
    }
}
