//! A statement that is sent on a second connection if the first does not answer in time.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    store::{Database, Reply, connection::PooledConn, failure::Failure, pools::Connections},
    sync::lock,
};

/// The connections of statements that keep a claim, or end it.
pub(crate) struct Hedge<DB: Database> {
    pub pool: Connections<DB>,
    /// The source of a connection if the server grants no other one.
    pub requests: Connections<DB>,
    /// How long a request waits for its reply before it is sent on another connection as well.
    pub delay: Duration,
    /// Until when no connection of the pool is waited for, because it had none a moment ago.
    pub pool_exhausted_until: Arc<Mutex<Instant>>,
}

/// A statement that may be sent twice.
pub(crate) trait Request<DB: Database>: Sync {
    type Reply: Send;

    fn send(&self, conn: &mut DB::Connection) -> impl Future<Output = Reply<Self::Reply>> + Send;

    /// Returns whether the reply settles the request. A row that one request skipped may be locked
    /// by the other request.
    fn is_settled(reply: &Self::Reply) -> bool;
}

/// The result of a request.
pub(crate) struct Exchange<T> {
    pub reply: Result<T, Failure>,
    /// A request was sent, and it is unknown whether it was carried out.
    pub unanswered: bool,
}

/// A reply, and when the request that was answered was sent.
pub(crate) struct Answer<T> {
    pub sent: Instant,
    pub reply: T,
}

impl<DB: Database> Hedge<DB> {
    /// Sends the request. If no reply arrives in time to act on it, it is sent on another
    /// connection, and the first of the two replies that settles it counts. The other request is
    /// dropped and its connection closed.
    ///
    /// A pool of one connection has none for the second request, which waits for the first.
    pub async fn send<R: Request<DB>>(&self, request: &R, limit: Instant) -> Exchange<Answer<R::Reply>> {
        if Handle::try_current().is_err() {
            return Exchange { unanswered: false, reply: Err(Failure::NoRuntime) };
        }
        let (first_sent, second_sent) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut first = pin!(self.send_once(request, limit, &first_sent));
        if let Ok(reply) = timeout(self.delay, &mut first).await {
            return Exchange { unanswered: is_unanswered(&reply), reply };
        }
        let mut second = pin!(self.send_once(request, limit, &second_sent));
        let (reply, other) = tokio::select! {
            reply = &mut first => (reply, second),
            reply = &mut second => (reply, first),
        };
        if reply.as_ref().is_ok_and(|answer| R::is_settled(&answer.reply)) {
            return Exchange {
                reply,
                unanswered: first_sent.load(Ordering::Relaxed) && second_sent.load(Ordering::Relaxed),
            };
        }
        let later = other.await;
        let unanswered = is_unanswered(&reply) || is_unanswered(&later);
        let keep_earlier = reply.is_ok() || matches!(later, Err(Failure::NoConnection(_)));
        Exchange { reply: if later.is_err() && keep_earlier { reply } else { later }, unanswered }
    }

    async fn send_once<R: Request<DB>>(
        &self,
        request: &R,
        limit: Instant,
        is_sent: &AtomicBool,
    ) -> Result<Answer<R::Reply>, Failure> {
        let mut conn = self.connection(limit).await?;
        let sent = Instant::now();
        if sent >= limit {
            // A statement that is sent and given up at once might still be carried out. Other
            // transactions had the row locked until the limit.
            conn.give_back();
            return Err(Failure::Undone);
        }
        is_sent.store(true, Ordering::Relaxed);
        let reply = timeout_at(limit, request.send(conn.get())).await;
        conn.settle(reply).map(|reply| Answer { sent, reply })
    }

    async fn connection(&self, limit: Instant) -> Result<PooledConn<DB>, Failure> {
        if self.pool.is_shared() {
            return PooledConn::checkout(&self.pool, limit).await;
        }
        let now = Instant::now();
        let wait = if *lock(&self.pool_exhausted_until) > now { Duration::ZERO } else { self.delay };
        let soon = now + wait.min(limit.saturating_duration_since(now) / 4);
        match PooledConn::checkout_soon(&self.pool, soon, limit).await {
            Err(Failure::NoConnection(_)) if self.requests.has_spare() => {
                *lock(&self.pool_exhausted_until) = Instant::now() + 4 * self.delay;
                PooledConn::checkout(&self.requests, limit).await
            }
            Err(Failure::NoConnection(_)) => PooledConn::checkout(&self.pool, limit).await,
            taken => taken,
        }
    }
}

/// Returns whether it is unknown what was done.
fn is_unanswered<T>(reply: &Result<T, Failure>) -> bool {
    reply.as_ref().is_err_and(Failure::is_unanswered)
}
