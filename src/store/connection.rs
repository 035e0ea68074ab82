//! A pooled connection that returns to its pool only when it is known to be idle.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use sqlx::{Connection as _, Pool, pool::PoolConnection};
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    time::{Instant, error::Elapsed, sleep, timeout, timeout_at},
};

use crate::{
    metrics,
    retry::{Repeat, outage_pause},
    store::{
        Options, Reply, Store,
        failure::Failure,
        kept::{Borrowed, Kept},
        pools::{Connections, HANDSHAKE},
    },
};

/// A borrowed connection. If it is dropped with a statement in flight (a cancelled future, a limit
/// reached), it is closed: the pool never gets back a connection on which a statement may still be
/// running. A connection that may be a database in memory, which would be lost with it, is instead
/// made idle in the background.
pub struct PooledConn<DB: Store> {
    conn: Option<Borrowed<DB>>,
    /// Where it is kept between statements. `None`: it returns to its pool.
    kept: Option<Arc<Kept<DB>>>,
    /// The connection is closed when dropped, whatever the database.
    closes: bool,
}

/// The error of connections on which nothing of the caller's can begin.
pub const IN_TRANSACTION: &str =
    "the pool's connections are inside a transaction already: see its hooks (after_connect, before_acquire)";

/// How long a connection may take to open before idle ones are looked for. Each further look comes
/// after twice the time. It is longer than the pool takes to test a connection of a remote server:
/// a second test that is abandoned closes its connection.
const OPENING: Duration = Duration::from_millis(250);

impl<DB: Store> PooledConn<DB> {
    /// Waits for a connection of a pool, up to the limit. Its state is not checked.
    pub async fn unchecked(pool: &Pool<DB>, limit: Instant) -> Result<Self, Failure> {
        Ok(Self::of(borrow(pool, None, limit).await?, None))
    }

    fn of(conn: Borrowed<DB>, kept: Option<Arc<Kept<DB>>>) -> Self {
        Self { conn: Some(conn), kept, closes: false }
    }

    /// Returns the connection, for one statement.
    #[expect(clippy::expect_used, reason = "it is taken out by `settle` and `drop` alone, which end the loan")]
    pub fn get(&mut self) -> &mut DB::Connection {
        &mut self.conn.as_mut().expect("the loan has not ended").conn
    }

    /// Returns the connection, for inspection.
    #[expect(clippy::expect_used, reason = "as for `get`")]
    pub fn peek(&self) -> &DB::Connection {
        &self.conn.as_ref().expect("the loan has not ended").conn
    }

    /// Returns the loan and the value if the statement succeeded. On a server error, which ended
    /// the statement, the connection returns to its pool, unless the server takes no writes. After
    /// any other error its state is unknown.
    pub fn proceed<T>(self, reply: Result<Reply<T>, Elapsed>) -> Result<(Self, T), Failure> {
        match reply {
            Ok(Ok(value)) => Ok((self, value)),
            Ok(Err(error)) => {
                let failure = Failure::Failed(error);
                metrics::database_error(failure.fault().name());
                if !failure.may_still_run() && !failure.is_at_a_standby() {
                    self.return_to_pool();
                }
                Err(failure)
            }
            Err(_) => {
                metrics::database_error("no_reply");
                Err(Failure::NoReply)
            }
        }
    }

    /// Ends the loan of an idle connection, which is kept for a next statement for a short time.
    pub fn give_back(mut self) {
        match (self.conn.take(), &self.kept) {
            (Some(conn), Some(kept)) => kept.keep(conn),
            (conn, _) => drop(conn.map(Borrowed::give_back)),
        }
    }

    /// Returns an idle connection to its pool at once. The pool tests it.
    fn return_to_pool(mut self) {
        self.kept = None;
        self.give_back();
    }

    /// Returns a connection that may be a database in memory to its pool, once no statement or
    /// transaction is left on it.
    async fn make_idle(mut self) {
        if DB::make_idle(self.get()).await {
            self.give_back();
        }
    }

    /// Ends the loan with the statement's result. A success returns the connection to its pool too.
    pub fn settle<T>(self, reply: Result<Reply<T>, Elapsed>) -> Result<T, Failure> {
        let (loan, value) = self.proceed(reply)?;
        loan.give_back();
        Ok(value)
    }
}

impl<DB: Store> PooledConn<DB> {
    /// Waits for a connection on which a statement commits by itself, up to the limit. The
    /// application, or a hook of its pool, may have left a transaction open.
    pub async fn checkout(connections: &Connections<DB>, limit: Instant) -> Result<Self, Failure> {
        Self::checkout_soon(connections, limit, limit).await
    }

    /// Does the same, and waits for the pool only until `soon`. The check of the connection may
    /// take until `limit`: it is part of the request, which the caller may send on another one too.
    pub async fn checkout_soon(connections: &Connections<DB>, soon: Instant, limit: Instant) -> Result<Self, Failure> {
        let mut unmarked = false;
        loop {
            let pool = connections.pool()?;
            let kept = connections.kept().cloned();
            let _waiting = match kept.as_ref().map(Kept::take) {
                Some(Ok(conn)) => return Ok(Self::of(conn, kept)),
                waiting => waiting,
            };
            let conn = match borrow(&pool, connections.background_permit(), soon).await {
                Err(failure) if !unmarked && connections.opens_unmarked(&failure) => {
                    unmarked = true;
                    continue;
                }
                conn => conn?,
            };
            let mut conn = Self::of(conn, kept);
            match timeout_at(limit, DB::leave_transaction(conn.get())).await {
                Ok(Ok(true)) => return Ok(conn),
                // A hook of the pool has begun a transaction. Its settings may have been meant for
                // the application's tables, and ended with the transaction.
                Ok(Ok(false)) if connections.is_for_values() => {
                    return Err(Failure::NoConnection(sqlx::Error::Configuration(IN_TRANSACTION.into())));
                }
                Ok(Ok(false)) if !connections.is_shared() => return Ok(conn),
                // The pool may hold lost connections, and a transaction may have failed.
                Ok(Ok(_) | Err(sqlx::Error::Io(_) | sqlx::Error::Database(_) | sqlx::Error::WorkerCrashed)) => {
                    tracing::debug!("closed a connection of the pool that was in a transaction, or had gone away");
                    drop(conn);
                    outage_pause().await;
                }
                // The check was answered: no statement is in flight.
                Ok(Err(error @ sqlx::Error::Configuration(_))) => {
                    conn.return_to_pool();
                    return Err(Failure::NoConnection(error));
                }
                Ok(Err(error)) => return Err(Failure::NoConnection(error)),
                Err(_) => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
            }
        }
    }

    /// Returns a connection that is kept from a previous statement, if there is one.
    pub fn kept(connections: &Connections<DB>) -> Option<Self> {
        connections.pool().ok()?;
        let kept = connections.kept()?;
        kept.take().ok().map(|conn| Self::of(conn, Some(kept.clone())))
    }

    /// Waits for a connection that has just answered a ping, for a statement that is not sent
    /// again.
    pub async fn answering(connections: &Connections<DB>, limit: Instant) -> Result<Self, Failure> {
        loop {
            let mut conn = Self::checkout(connections, limit).await?;
            match timeout_at(limit, conn.get().ping()).await {
                Ok(Ok(())) => return Ok(conn),
                // The connection was closed while it was idle.
                Ok(Err(_)) if Instant::now() < limit => drop(conn),
                Ok(Err(error)) => return Err(Failure::NoConnection(error)),
                Err(_) => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
            }
            outage_pause().await;
        }
    }

    /// Sends one statement, on a connection of its own, up to the limit.
    pub async fn send<T>(
        connections: &Connections<DB>,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = Self::checkout(connections, limit).await?;
        let reply = timeout_at(limit, statement(conn.get())).await;
        conn.settle(reply)
    }

    /// Sends a statement that changes nothing until its reply is final or the limit is reached.
    ///
    /// The statement is copied for each attempt. The compiler does not accept the future as `Send`
    /// if one closure with references is called several times.
    pub async fn send_repeatedly<T>(
        connections: &Connections<DB>,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T> + Copy,
    ) -> Result<T, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let reply = Self::send(connections, limit, statement).await;
            if let Some(reply) = repeat.final_or_pause(reply).await {
                return reply;
            }
        }
    }

    fn is_fresh(&self) -> bool {
        self.conn.as_ref().is_some_and(Borrowed::is_fresh)
    }

    /// Lets the caller hold an idle connection for its next statement, if other requests still find
    /// one. Otherwise the loan ends.
    pub fn keep(self, connections: &Connections<DB>) -> Option<IdleConn<DB>> {
        if connections.has_spare() && self.is_fresh() {
            return Some(self.unused());
        }
        self.give_back();
        None
    }

    /// Returns the connection as one on which nothing is in flight.
    pub fn unused(self) -> IdleConn<DB> {
        IdleConn(Some(self))
    }
}

impl<DB: Store> Drop for PooledConn<DB> {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        match Handle::try_current() {
            Ok(runtime) if !self.closes && DB::may_be_in_memory(&conn.options) => {
                // If the runtime ends first, the connection is closed.
                let conn = Self { conn: Some(conn), kept: None, closes: true };
                runtime.spawn(conn.make_idle());
            }
            _ => conn.close(),
        }
    }
}

/// Borrows a connection, up to the limit. A pool that opens a connection for a request does not
/// give it one that becomes idle since. The request therefore asks a second time once there is one.
async fn borrow<DB: Store>(
    pool: &Pool<DB>,
    background_permit: Option<Arc<Semaphore>>,
    limit: Instant,
) -> Result<Borrowed<DB>, Failure> {
    if Handle::try_current().is_err() {
        return Err(Failure::NoRuntime);
    }
    let options = pool.connect_options();
    let acquire = |background_permit| {
        let work: Acquired<DB> = Box::pin(pool.acquire());
        Acquiring { work: Some(work), options: options.clone(), background_permit }
    };
    let mut first = acquire(background_permit);
    let taken = timeout_at(limit, async {
        tokio::select! {
            biased;
            taken = &mut first => return taken,
            () = has_idle(pool) => {}
        }
        tokio::select! {
            biased;
            taken = &mut first => taken,
            taken = acquire(None) => taken,
        }
    });
    match taken.await {
        Ok(Ok(conn)) => Ok(Borrowed::new(conn, options)),
        Ok(Err(error)) => Err(Failure::NoConnection(error)),
        Err(_) => Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
    }
}

/// Waits until the pool has an idle connection.
async fn has_idle<DB: Store>(pool: &Pool<DB>) {
    let mut pause = OPENING;
    loop {
        sleep(pause).await;
        if pool.num_idle() > 0 {
            return;
        }
        pause *= 2;
    }
}

type Acquired<DB> = Pin<Box<dyn Future<Output = Reply<PoolConnection<DB>>> + Send>>;

/// A pending acquisition. A pool closes the connection that it is testing or opening when this
/// future is dropped. For a database in memory, and for one of the lock's own connections at a
/// time, the acquisition therefore completes in the background, and the connection returns to its
/// pool.
struct Acquiring<DB: Store> {
    work: Option<Acquired<DB>>,
    options: Arc<Options<DB>>,
    background_permit: Option<Arc<Semaphore>>,
}

impl<DB: Store> Future for Acquiring<DB> {
    type Output = Reply<PoolConnection<DB>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = &mut self.work else { return Poll::Pending };
        let acquired = ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(acquired)
    }
}

impl<DB: Store> Drop for Acquiring<DB> {
    fn drop(&mut self) {
        let (Some(work), Ok(runtime)) = (self.work.take(), Handle::try_current()) else { return };
        let permit = self.background_permit.take().and_then(|semaphore| semaphore.try_acquire_owned().ok());
        if permit.is_some() || DB::may_be_in_memory(&self.options) {
            let limit = if permit.is_some() { HANDSHAKE } else { Duration::MAX };
            runtime.spawn(async move {
                drop(timeout(limit, work).await);
                drop(permit);
            });
        }
    }
}

/// A connection that a caller holds for its next statement. Dropping it ends the loan.
pub struct IdleConn<DB: Store>(Option<PooledConn<DB>>);

impl<DB: Store> IdleConn<DB> {
    /// Returns whether the connection was borrowed on this runtime a short time ago.
    pub fn is_fresh(&self) -> bool {
        self.0.as_ref().is_some_and(PooledConn::is_fresh)
    }

    #[expect(clippy::expect_used, reason = "it is taken out here and by `drop` alone")]
    pub fn lend(mut self) -> PooledConn<DB> {
        self.0.take().expect("it was held")
    }
}

impl<DB: Store> Drop for IdleConn<DB> {
    fn drop(&mut self) {
        if let Some(conn) = self.0.take() {
            conn.give_back();
        }
    }
}
