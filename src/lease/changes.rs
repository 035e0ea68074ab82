//! Changes of claims that stand: renewals and endings. A connection that stops replying, or a row
//! that the server refuses to change, does not affect the other claims.

use std::{
    ops::Range,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::{Instant, timeout, timeout_at};

use crate::{
    key::Claim,
    rules::Terms,
    store::{
        Change, Database, Outcome,
        connection::PooledConn,
        failure::{Failure, Remedy, remedy},
        pools::Connections,
        skipped_among,
    },
    sync::lock,
};

/// How many statements in a row may fail before the rest waits for the next time. So many failures
/// are unlikely to be caused by single rows.
const FAILURES: usize = 64;

pub(crate) struct Changes<DB: Database> {
    pub pool: Connections<DB>,
    /// The source of a connection if the server grants no other one.
    pub requests: Connections<DB>,
    pub terms: Arc<Terms>,
    /// How long a request waits for its reply before it is sent on another connection as well.
    pub patience: Duration,
    /// Until when no connection of the pool is waited for, because it had none a moment ago.
    pub scarce_until: Mutex<Instant>,
}

/// The result of a request.
pub(crate) struct Exchange<T> {
    pub reply: Result<T, Failure>,
    /// A request was sent, and it is unknown whether it was carried out.
    pub unanswered: bool,
}

pub(crate) struct ChangeReply {
    /// When the request that was answered was sent.
    pub sent: Instant,
    /// One per claim, in order.
    pub outcomes: Vec<Outcome>,
}

/// The result of a request for one of several parties.
pub(crate) struct PartReply {
    pub reply: Result<ChangeReply, Remedy>,
    pub unanswered: bool,
}

impl<DB: Database> Changes<DB> {
    /// Sends one change for all of these claims. If no reply arrives in time to act on it, the same
    /// change is sent on another connection, and the first of the two requests that settles it
    /// counts. The other request is dropped and its connection closed.
    ///
    /// A pool of one connection has none for the second request, which waits for the first.
    pub async fn send(&self, claims: &[Claim], change: Change, limit: Instant) -> Exchange<ChangeReply> {
        let (first_sent, second_sent) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut first = pin!(self.send_once(claims, change, limit, &first_sent));
        if let Ok(reply) = timeout(self.patience, &mut first).await {
            return Exchange { unanswered: is_unanswered(&reply), reply };
        }
        let mut second = pin!(self.send_once(claims, change, limit, &second_sent));
        let (reply, other) = tokio::select! {
            reply = &mut first => (reply, second),
            reply = &mut second => (reply, first),
        };
        // A row that one request skipped may be locked by the other request.
        if reply.as_ref().is_ok_and(|answer| skipped_among(&answer.outcomes).is_none()) {
            return Exchange {
                reply,
                unanswered: first_sent.load(Ordering::Relaxed) && second_sent.load(Ordering::Relaxed),
            };
        }
        let later = other.await;
        let unanswered = is_unanswered(&reply) || is_unanswered(&later);
        let earlier_tells_more = reply.is_ok() || matches!(later, Err(Failure::NoConnection(_)));
        Exchange { reply: if later.is_err() && earlier_tells_more { reply } else { later }, unanswered }
    }

    async fn send_once(
        &self,
        claims: &[Claim],
        change: Change,
        limit: Instant,
        is_sent: &AtomicBool,
    ) -> Result<ChangeReply, Failure> {
        let mut conn = self.connection(limit).await?;
        let sent = Instant::now();
        if sent >= limit {
            // A statement that is sent and given up at once might still be carried out. Other
            // transactions had the row locked until the limit.
            conn.give_back();
            return Err(Failure::Undone);
        }
        is_sent.store(true, Ordering::Relaxed);
        let reply = timeout_at(limit, DB::change(conn.get(), claims, change, &self.terms, false)).await;
        conn.settle(reply).map(|outcomes| ChangeReply { sent, outcomes })
    }

    async fn connection(&self, limit: Instant) -> Result<PooledConn<DB>, Failure> {
        if self.pool.is_shared() {
            return PooledConn::checkout(&self.pool, limit).await;
        }
        let now = Instant::now();
        let patience = if *lock(&self.scarce_until) > now { Duration::ZERO } else { self.patience };
        let soon = now + patience.min(limit.saturating_duration_since(now) / 4);
        match PooledConn::checkout(&self.pool, soon).await {
            Err(Failure::NoConnection(_)) if self.requests.has_spare() => {
                *lock(&self.scarce_until) = Instant::now() + 4 * self.patience;
                PooledConn::checkout(&self.requests, limit).await
            }
            Err(Failure::NoConnection(_)) => PooledConn::checkout(&self.pool, limit).await,
            taken => taken,
        }
    }

    /// Sends one change for the claims of several parties, in one statement if possible. A
    /// statement that the server refuses is split in halves and sent again, so that only the
    /// parties that cause the refusal are refused.
    ///
    /// The parties from index `suspects` on were refused before and are sent apart from the others.
    pub async fn send_apart(
        &self,
        parties: &[Vec<Claim>],
        suspects: usize,
        change: Change,
        limit: Instant,
    ) -> Vec<PartReply> {
        let mut shares: Vec<PartReply> = Vec::with_capacity(parties.len());
        // In the order of the parties, the next range last.
        let mut left: Vec<Range<usize>> = vec![suspects..parties.len(), 0..suspects];
        let mut failures = 0;
        while let Some(range) = left.pop() {
            let (many, all) = (range.len(), &parties[range.clone()]);
            if many == 0 {
                continue;
            }
            if failures >= FAILURES || Instant::now() >= limit {
                shares.extend(all.iter().map(|_| PartReply { reply: Err(Remedy::Apart), unanswered: false }));
                continue;
            }
            let Exchange { reply, unanswered } = self.send(&all.concat(), change, limit).await;
            failures = if reply.is_ok() { 0 } else { failures + 1 };
            match reply {
                Ok(ChangeReply { sent, outcomes }) => {
                    let mut rest = outcomes.into_iter();
                    shares.extend(all.iter().map(|claims| {
                        let outcomes = rest.by_ref().take(claims.len()).collect();
                        PartReply { reply: Ok(ChangeReply { sent, outcomes }), unanswered }
                    }));
                }
                Err(failure) => {
                    let remedy = remedy(&failure, many);
                    let halves = remedy == Remedy::Apart && many > 1 && !unanswered;
                    if halves {
                        tracing::debug!(?change, parties = many, %failure, "refused, and sent again by halves");
                        let middle = range.start + many / 2;
                        left.extend([middle..range.end, range.start..middle]);
                    } else {
                        tracing::debug!(?change, parties = many, %failure, "not answered, or refused");
                        shares.extend(all.iter().map(|_| PartReply { reply: Err(remedy), unanswered }));
                    }
                }
            }
        }
        shares
    }
}

/// Returns whether it is unknown what was done.
fn is_unanswered(reply: &Result<ChangeReply, Failure>) -> bool {
    reply.as_ref().is_err_and(Failure::is_unanswered)
}
