//! One attempt: the same holder sends its claim request until it has a reply.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    batch::op::Limits,
    error::{Action, Certainty, Error},
    key::{Claim, Holder, Key},
    lease::{
        claims::{ClaimSet, Claimed, Granted, needs_own_statement},
        handle::subject,
        shared::Shared,
    },
    lock::Attempt,
    metrics,
    queue::position::Position,
    retry::Backoff,
    rules::{Reason, Refusal, Row, Verdict, judge},
    store::{ClaimReply, ClaimRequest, Database, connection::PooledConn, failure::Failure, fault::Fault},
};

/// How long a busy row is retried within one attempt.
const PATIENCE: Duration = Duration::from_millis(100);

/// The longest pause between two creations of the same row.
const MOST_BETWEEN_CREATES: Duration = Duration::from_millis(500);

pub(crate) struct Try<'a, DB: Database> {
    lock: &'a Shared<DB>,
    runtime: Handle,
    asks: Vec<ClaimRequest>,
    /// No other waiter precedes this one in the queues of the keys, or the lock is not fair.
    in_turn: bool,
    /// When the caller stops waiting. A request sent before that is answered, or given up together
    /// with its connection, before the attempt ends in any other way. So a late grant is never
    /// ended while the same holder's next attempt is running.
    caller: Instant,
    /// When this attempt ends.
    limit: Instant,
    /// When a statement is given up.
    last: Instant,
    /// How long the attempt retries while another transaction has a row locked.
    patience: Duration,
    /// A claim request was sent whose outcome is unknown.
    unanswered: bool,
    doubt: Option<&'a AtomicBool>,
    /// The rows that this attempt created. One that is still missing afterwards is not visible.
    created: Vec<Key>,
    /// The request met contention, possibly with other requests of its batch, or it cannot be
    /// granted by a statement of many requests.
    contended: bool,
}

/// What the claim replies call for.
enum Next {
    Refuse(Refusal),
    Create(Vec<Key>),
    /// Another transaction has a row locked, which was seen like this; or the claim needs a
    /// statement of its own.
    Busy {
        row: Option<Row>,
        lone: bool,
    },
}

impl<'a, DB: Database> Try<'a, DB> {
    /// Creates an attempt by a new holder, or by the holder `before`, whose claim request was sent
    /// and is unanswered. The attempt ends at `until` at the latest.
    pub fn new(
        lock: &'a Shared<DB>,
        keys: &[Key],
        until: Option<Instant>,
        before: Option<Holder>,
    ) -> Result<Self, Error> {
        let holder = before.unwrap_or_else(Holder::unique);
        let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
        let last = Instant::now() + lock.settings.time_limit;
        let asks = keys.iter().map(|key| ClaimRequest { key: key.clone(), holder, waited: false }).collect();
        // A holder with an unanswered request was first in the queue when that request was sent.
        let in_turn = !lock.settings.fair || before.is_some();
        let (caller, limit) = (until.unwrap_or(last), until.map_or(last, |until| until.min(last)));
        let (unanswered, contended, doubt) = (before.is_some(), false, None);
        let (created, patience) = (Vec::new(), PATIENCE);
        Ok(Self { lock, runtime, asks, in_turn, caller, limit, last, patience, unanswered, doubt, created, contended })
    }

    /// Sets this flag as soon as a claim request has no reply while its caller still waits for one.
    pub fn reporting_to(mut self, doubt: &'a AtomicBool) -> Self {
        self.doubt = Some(doubt);
        self
    }

    /// Marks the request as one of a waiter that has waited and will soon retry. `in_turn` is set
    /// if the waiter is first in the queue.
    pub fn after_waiting(mut self, in_turn: bool) -> Self {
        for ask in &mut self.asks {
            ask.waited = true;
        }
        self.in_turn |= in_turn;
        self.patience = Duration::ZERO;
        self
    }

    pub async fn run(&mut self) -> Result<Attempt<Granted<DB>>, Error> {
        let attempt = self.ask().await?;
        match &attempt {
            Attempt::Acquired(granted) => {
                metrics::acquired();
                for (Claim { key, token, .. }, prior) in granted.handle.claims().iter().zip(&granted.priors) {
                    tracing::info!(%key, %token, taken_over_from = ?prior, "acquired");
                }
            }
            Attempt::Refused(refusal) => {
                metrics::refused(refusal.reason);
                tracing::debug!(key = %refusal.key, reason = %refusal.reason, %refusal, "refused");
            }
        }
        Ok(attempt)
    }

    /// Returns the holder if its claim may have been granted although no reply arrived.
    pub fn unanswered(&self) -> Option<Holder> {
        self.asks.first().filter(|_| self.unanswered).map(|ask| ask.holder)
    }

    fn goes_unanswered(&mut self) {
        self.unanswered = true;
        // Later the caller has stopped waiting, and a claim in flight is finished.
        if let Some(doubt) = self.doubt.filter(|_| Instant::now() < self.caller) {
            doubt.store(true, Ordering::Relaxed);
        }
    }

    async fn ask(&mut self) -> Result<Attempt<Granted<DB>>, Error> {
        if !self.in_turn
            && let Some(refusal) = self.look_at_queue().await?
        {
            return Ok(Attempt::Refused(refusal));
        }
        let (began, mut busy_since) = (Instant::now(), None);
        let mut pauses = Backoff::up_to(MOST_BETWEEN_CREATES);
        loop {
            let answers = match self.claim().await {
                // Dropping the handle puts the claim back. The next request is made by another
                // holder.
                Ok(Claimed::Granted(granted)) if !granted.handle.is_held() => {
                    self.unanswered = false;
                    return Err(self.too_late());
                }
                Ok(Claimed::Granted(granted)) => return Ok(Attempt::Acquired(granted)),
                Ok(Claimed::Late) => {
                    self.goes_unanswered();
                    if Instant::now() < self.limit {
                        continue;
                    }
                    return Err(self.too_late());
                }
                Ok(Claimed::Not { answers, .. }) => answers,
                Err(failure) => match failure.fault() {
                    Fault::Contention => {
                        if self.goes_alone() {
                            continue;
                        }
                        if let Some(refusal) = self.busy(&mut busy_since, None).await? {
                            return Ok(Attempt::Refused(refusal));
                        }
                        continue;
                    }
                    // The request was sent and has no reply. The same holder asks again, and
                    // receives the same claim if it was granted.
                    Fault::Outage => {
                        self.goes_unanswered();
                        if Instant::now() >= self.limit {
                            return Err(self.error(failure));
                        }
                        pause(20..60).await;
                        continue;
                    }
                    _ => return Err(self.error(failure)),
                },
            };
            match self.next(answers) {
                Next::Refuse(refusal) => return Ok(Attempt::Refused(refusal)),
                Next::Create(keys) => {
                    if let Some(key) = keys.iter().find(|key| self.created.contains(key)) {
                        let left = self.limit.saturating_duration_since(Instant::now());
                        // Not until the time limit, because a claim that is cut short reports a
                        // different error.
                        if left < self.limit.saturating_duration_since(began) / 4 {
                            return Err(Error::RowNotVisible { key: key.clone() });
                        }
                        pauses.pause(left / 2).await;
                    }
                    self.create(keys).await?;
                }
                Next::Busy { lone: true, .. } if self.goes_alone() => {}
                Next::Busy { row, .. } => {
                    if let Some(refusal) = self.busy(&mut busy_since, row.as_ref()).await? {
                        return Ok(Attempt::Refused(refusal));
                    }
                }
            }
        }
    }

    /// Returns true once. The contention may have concerned only other requests of the batch, so
    /// the request is sent alone, at once.
    fn goes_alone(&mut self) -> bool {
        Instant::now() < self.limit && !std::mem::replace(&mut self.contended, true)
    }

    /// The first refusal decides, before any row is created. Missing rows are created before busy
    /// rows are retried.
    fn next(&self, answers: Vec<ClaimReply>) -> Next {
        let terms = &self.lock.settings.terms;
        let (mut create, mut busy, mut lone) = (Vec::new(), None, false);
        for (ask, answer) in self.asks.iter().zip(answers) {
            let ClaimReply::Seen { row, now } = answer else { continue };
            match (judge(row.as_ref(), now, ask.holder, terms), row) {
                (Verdict::Refuse(reason, until), Some(row)) => {
                    return Next::Refuse(Refusal::new(ask.key.clone(), reason, until, &row, now));
                }
                (Verdict::Create, _) => create.push(ask.key.clone()),
                (verdict, row) => {
                    lone |= needs_own_statement(verdict, row.as_ref(), now);
                    busy = row;
                }
            }
        }
        match create.is_empty() {
            false => Next::Create(create),
            true => Next::Busy { row: busy, lone },
        }
    }

    async fn claim(&self) -> Result<Claimed<DB>, Failure> {
        // After contention the request is sent alone. It then does not contend with the other
        // requests of a batch, and its reply is its own.
        let wish = ClaimSet { asks: self.asks.clone(), alone: self.contended || self.unanswered };
        let limits = Limits { caller: self.caller, statement: self.last };
        self.lock.claims.send(&self.runtime, wish, limits).await
    }

    /// A row created by another transaction is as good. Contention is retried.
    async fn create(&mut self, keys: Vec<Key>) -> Result<(), Error> {
        let terms = &self.lock.settings.terms;
        // The server gives up slightly earlier than the client, so that no backend continues to
        // wait there.
        let patience = self.limit.saturating_duration_since(Instant::now()).mul_f64(0.9);
        let conn = PooledConn::checkout(&self.lock.settings.pool, self.limit).await;
        let mut conn = conn.map_err(|failure| self.error(failure))?;
        let reply = timeout_at(self.limit, DB::create(conn.get(), &keys, terms.minutes(), patience)).await;
        match conn.settle(reply) {
            Err(failure)
                if matches!(failure.fault(), Fault::Contention | Fault::Outage) && Instant::now() < self.limit =>
            {
                pause(2..10).await;
                Ok(())
            }
            Err(failure) => Err(self.error(failure)),
            Ok(()) => {
                self.created.extend(keys);
                Ok(())
            }
        }
    }

    /// Returns `None` if no waiter precedes the request and the keys may be claimed; otherwise
    /// returns the refusal.
    async fn look_at_queue(&self) -> Result<Option<Refusal>, Error> {
        let keys: Vec<Key> = self.asks.iter().map(|ask| ask.key.clone()).collect();
        let standing = self.lock.waiting.tickets.stand(&keys, i64::MAX, self.limit).await;
        Ok(match standing.map_err(|failure| self.error(failure))? {
            Position::Behind { key, left, .. } => Some(queued(key, left)),
            Position::First | Position::Gone | Position::Unseen => None,
        })
    }

    /// Pauses while another transaction has the row locked. Returns the refusal once the patience
    /// is used up.
    ///
    /// It does not refuse while an earlier request of this attempt has no reply, because the row
    /// may be locked by that request.
    async fn busy(&self, since: &mut Option<Instant>, row: Option<&Row>) -> Result<Option<Refusal>, Error> {
        let now = Instant::now();
        let since = *since.get_or_insert(now);
        if now < self.limit && (self.unanswered || now < since + self.patience) {
            pause(2..10).await;
            return Ok(None);
        }
        if self.unanswered {
            return Err(self.too_late());
        }
        Ok(Some(Refusal {
            key: self.asks[0].key.clone(),
            reason: Reason::Busy,
            by: row.map(|row| row.client_ip.clone()).unwrap_or_default(),
            since: row.and_then(|row| row.begin_time),
            until: None,
            retry_after: Some(PATIENCE),
            awaited: false,
        }))
    }

    fn too_late(&self) -> Error {
        self.error(Failure::NoReply)
    }

    fn error(&self, failure: Failure) -> Error {
        let before = if self.unanswered { Certainty::Unknown } else { Certainty::NothingChanged };
        let keys = subject(self.asks.iter().map(|ask| ask.key.as_str()));
        failure.into_error(Action::Acquire, keys, self.lock.settings.time_limit, before)
    }
}

/// The refusal of a request that other waiters precede.
pub(crate) fn queued(key: Key, left: Duration) -> Refusal {
    Refusal {
        key,
        reason: Reason::Queued,
        by: String::new(),
        since: None,
        until: None,
        retry_after: Some(left),
        awaited: true,
    }
}

async fn pause(millis: std::ops::Range<u64>) {
    sleep(Duration::from_millis(fastrand::u64(millis))).await;
}
