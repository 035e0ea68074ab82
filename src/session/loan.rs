//! A session that is lent for one statement, and returns only when it is known to be idle.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::{Pool, pool::PoolConnection};
use tokio::sync::Notify;

use crate::{
    metrics,
    retry::outage_pause,
    session::{
        line::{Line, Session},
        threads,
        time::Instant,
        timers::{Elapsed, sleep, timeout, timeout_at},
    },
    store::{Reply, Store, failure::Failure},
};

/// A session that is lent. If it is dropped with a statement in flight (a cancelled future, a limit
/// reached), it is closed: no other statement is sent where one may still be running. A connection
/// that may be a database in memory, which would be lost with it, is instead made idle in the
/// background.
pub struct Loan<DB: Store> {
    conn: Option<Conn<DB>>,
}

enum Conn<DB: Store> {
    Own(Session<DB>, Arc<Line<DB>>),
    /// Of this pool.
    Borrowed(PoolConnection<DB>, Pool<DB>),
}

/// How long the check of an idle connection may take.
const CHECK: Duration = Duration::from_secs(5);
/// After this time, the server's clock is read again: clocks diverge.
const DIVERGED: Duration = Duration::from_secs(3600);

/// The error of connections on which nothing of the caller's can begin.
pub const IN_TRANSACTION: &str =
    "the pool's connections are inside a transaction already: see its hooks (after_connect, before_acquire)";

impl<DB: Store> Loan<DB> {
    pub(super) fn own(conn: Session<DB>, line: &Arc<Line<DB>>) -> Self {
        Self { conn: Some(Conn::Own(conn, line.clone())) }
    }

    /// Waits for a connection of a pool, up to the limit. Its state is not checked.
    pub async fn borrow(pool: &Pool<DB>, limit: Instant) -> Result<Self, Failure> {
        let pool = pool.clone();
        // The pool's timers run on the library's thread too. An acquisition whose caller has left
        // completes there: the pool would close the connection that it opens, and a database in
        // memory with it.
        let acquiring = threads::run_to_end(Box::pin(async move {
            let acquired = timeout_at(limit, acquire(&pool)).await.unwrap_or(Err(sqlx::Error::PoolTimedOut));
            // If the caller has left, the pool takes it back.
            acquired.map(|conn| IdleLoan(Some(Self { conn: Some(Conn::Borrowed(conn, pool)) }), Instant::now()))
        }));
        let acquired = acquiring.await.map_err(|error| Failure::NoThreads(Box::new(error)))?;
        let loan = acquired.map_err(Failure::NoConnection)?.lend();
        if Instant::now() >= limit {
            // A statement that is begun now would be abandoned, and the connection closed.
            loan.give_back();
            return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut));
        }
        Ok(loan)
    }

    /// Waits for a connection of the application's pool on which a statement commits by itself. The
    /// application, or a hook of its pool, may have left a transaction open.
    pub(super) async fn borrow_checked(pool: &Pool<DB>, for_values: bool, limit: Instant) -> Result<Self, Failure> {
        // As many as may be in a transaction that the application has left open, or that has
        // failed.
        let mut others = pool.options().get_max_connections();
        loop {
            let mut conn = Self::borrow(pool, limit).await?;
            match timeout_at(limit.min(Instant::now() + CHECK), DB::leave_transaction(conn.get())).await {
                Ok(Ok(true)) => return Ok(conn),
                // A hook of the pool has begun a transaction. Its settings may have been meant for
                // the application's tables, and ended with the transaction.
                Ok(Ok(false)) if for_values || others == 0 => {
                    return Err(Failure::NoConnection(sqlx::Error::Configuration(IN_TRANSACTION.into())));
                }
                Ok(Ok(false)) => others -= 1,
                Ok(Err(sqlx::Error::Database(_))) if others > 0 => others -= 1,
                // The pool may hold lost connections.
                Ok(Err(sqlx::Error::Io(_) | sqlx::Error::WorkerCrashed)) => {}
                // The check was answered: no statement is in flight.
                Ok(Err(error @ sqlx::Error::Configuration(_))) => {
                    conn.give_back();
                    return Err(Failure::NoConnection(error));
                }
                Ok(Err(error)) => return Err(Failure::NoConnection(error)),
                Err(_) if Instant::now() >= limit => return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut)),
                // It is silent. The limit may be years away, and other requests wait behind this one.
                Err(_) => {}
            }
            tracing::debug!("closed a connection of the pool that was in a transaction, had gone away, or was silent");
            drop(conn);
            outage_pause().await;
        }
    }

    /// Returns the connection, for one statement.
    #[expect(clippy::expect_used, reason = "it is taken out by `give_back` and `drop` alone, which end the loan")]
    pub fn get(&mut self) -> &mut DB::Connection {
        match self.conn.as_mut().expect("the loan has not ended") {
            Conn::Own(session, _) => &mut session.conn,
            Conn::Borrowed(conn, _) => conn,
        }
    }

    /// Returns what the server's clock shows at the latest when this limit is reached, as far as is
    /// known of it.
    pub fn not_after(&self, limit: Instant) -> Option<DateTime<Utc>> {
        let Some(Conn::Own(session, _)) = &self.conn else { return None };
        let left = TimeDelta::from_std(limit - session.clock_read_at).ok()?;
        session.clock.checked_add_signed(left)
    }

    /// Records what the server's clock showed a moment ago.
    pub fn set_clock(&mut self, now: DateTime<Utc>) {
        if let Some(Conn::Own(session, _)) = &mut self.conn {
            (session.clock, session.clock_read_at) = (now, Instant::now());
        }
    }

    /// Returns the connection, for inspection.
    #[expect(clippy::expect_used, reason = "as for `get`")]
    pub fn peek(&self) -> &DB::Connection {
        match self.conn.as_ref().expect("the loan has not ended") {
            Conn::Own(session, _) => &session.conn,
            Conn::Borrowed(conn, _) => conn,
        }
    }

    /// Returns the line of an own session.
    pub(super) fn line(&self) -> Option<Arc<Line<DB>>> {
        if let Some(Conn::Own(_, line)) = &self.conn { Some(line.clone()) } else { None }
    }

    /// Returns the loan and the value if the statement succeeded. On a server error, which ended
    /// the statement, the session returns, unless a new one may find a better server. After any
    /// other error its state is unknown.
    pub fn proceed<T>(self, reply: Result<Reply<T>, Elapsed>) -> Result<(Self, T), Failure> {
        match reply {
            Ok(Ok(value)) => Ok((self, value)),
            Ok(Err(error)) => {
                let failure = Failure::Failed(error);
                let name = failure.fault().name();
                threads::record(move || metrics::database_error(name));
                if let (true, Some(line)) = (failure.is_outage(), self.line()) {
                    // Others that are idle were lost with this one.
                    line.suspect(Instant::now());
                }
                if !failure.may_still_run() && !failure.is_outage() && !failure.is_at_a_standby() {
                    self.give_back();
                }
                Err(failure)
            }
            Err(Elapsed) => {
                threads::record(|| metrics::database_error("no_reply"));
                Err(Failure::NoReply)
            }
        }
    }

    /// Lets the caller hold an idle connection for its next statement, if the pool that lent it has
    /// another one. Otherwise the loan ends.
    pub fn keep(self) -> Option<IdleLoan<DB>> {
        if let Some(Conn::Borrowed(_, pool)) = &self.conn
            && (pool.num_idle() > 0 || pool.size() < pool.options().get_max_connections())
        {
            return Some(IdleLoan(Some(self), Instant::now()));
        }
        self.give_back();
        None
    }

    /// Ends the loan of an idle session.
    pub fn give_back(mut self) {
        match self.conn.take() {
            Some(Conn::Own(conn, line)) if conn.clock_read_at.elapsed() >= DIVERGED => {
                line.spawn(Self::own(conn, &line).read_clock());
            }
            Some(Conn::Own(conn, line)) => line.give_back(conn),
            // The pool takes it back by a task.
            Some(Conn::Borrowed(conn, _)) => threads::within(|| drop(conn)),
            None => {}
        }
    }

    /// Ends the loan once the server has told its time. A session that does not tell it is closed.
    async fn read_clock(mut self) {
        if let Ok(Ok(now)) = timeout(CHECK, DB::now(self.get())).await {
            self.set_clock(now);
            self.give_back();
        }
    }

    /// Ends the loan with the statement's result. A success returns the session too.
    pub fn settle<T>(self, reply: Result<Reply<T>, Elapsed>) -> Result<T, Failure> {
        let (loan, value) = self.proceed(reply)?;
        loan.give_back();
        Ok(value)
    }
}

/// How the reply to a statement is waited for that may be sent on a second session too.
#[derive(Clone, Copy)]
pub(super) struct Patience<'a> {
    /// After this time without a reply, the session is taken to be silent.
    pub silence: Duration,
    /// When the reply is given up.
    pub limit: Instant,
    /// Notified when a second session is to be tried. None that was lost with the first is lent any
    /// more.
    pub silent: &'a Notify,
}

impl Patience<'_> {
    /// Waits for the reply to what was sent at that time, on a session of this line.
    pub async fn reply<DB: Store, F: Future>(
        self,
        line: Option<&Line<DB>>,
        sent: Instant,
        reply: F,
    ) -> Result<F::Output, Elapsed> {
        let mut reply = pin!(reply);
        match timeout_at(self.limit.min(sent + self.silence), &mut reply).await {
            Err(Elapsed) if Instant::now() < self.limit => {
                // Another session may have replied since, and then been lost at the same moment.
                line.iter().for_each(|line| line.suspect(sent + self.silence / 2));
                self.silent.notify_one();
                timeout_at(self.limit, reply).await
            }
            replied => replied,
        }
    }
}

/// How long an idle connection is kept for the next statement of its caller.
const KEPT: Duration = Duration::from_secs(1);

/// A connection that a caller holds for its next statement. Dropping it ends the loan.
pub struct IdleLoan<DB: Store>(Option<Loan<DB>>, Instant);

impl<DB: Store> IdleLoan<DB> {
    /// Returns whether the connection answered a short time ago.
    pub fn is_fresh(&self) -> bool {
        self.1.elapsed() < KEPT
    }

    #[expect(clippy::expect_used, reason = "it is taken out here and by `drop` alone")]
    pub fn lend(mut self) -> Loan<DB> {
        self.0.take().expect("it was held")
    }
}

impl<DB: Store> Drop for IdleLoan<DB> {
    fn drop(&mut self) {
        if let Some(loan) = self.0.take() {
            loan.give_back();
        }
    }
}

impl<DB: Store> Drop for Loan<DB> {
    fn drop(&mut self) {
        match self.conn.take() {
            Some(Conn::Own(conn, line)) => {
                drop(conn);
                line.closed();
            }
            Some(Conn::Borrowed(conn, pool)) if DB::may_be_in_memory(&pool.connect_options()) => {
                threads::spawn(make_idle(conn));
            }
            // The pool opens another one by a task.
            Some(Conn::Borrowed(conn, _)) => threads::within(|| drop(conn.detach())),
            None => {}
        }
    }
}

/// How long a connection may take to open before idle ones are looked for. Each further look comes
/// after twice the time. It is longer than the pool takes to test a connection of a remote server:
/// a second test that is abandoned closes its connection.
const OPENING: Duration = Duration::from_millis(250);

/// A pool that opens a connection for a request does not give it one that becomes idle since. The
/// request therefore asks a second time once there is one.
async fn acquire<DB: Store>(pool: &Pool<DB>) -> Reply<PoolConnection<DB>> {
    let mut first = std::pin::pin!(pool.acquire());
    let has_idle = async {
        let mut pause = OPENING;
        loop {
            sleep(pause).await;
            if pool.num_idle() > 0 {
                return;
            }
            pause *= 2;
        }
    };
    tokio::select! {
        biased;
        taken = &mut first => return taken,
        () = has_idle => {}
    }
    tokio::select! {
        biased;
        taken = first => taken,
        taken = pool.acquire() => taken,
    }
}

/// Returns a connection that may be a database in memory to its pool, once no statement or
/// transaction is left on it.
async fn make_idle<DB: Store>(mut conn: PoolConnection<DB>) {
    if !matches!(DB::make_idle(&mut conn).await, Ok(true)) {
        drop(conn.detach());
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::session::line::tests::{of_file, take};

    #[tokio::test]
    async fn a_session_that_replied_just_before_it_was_lost_is_not_lent_again() {
        let (_folder, line) = of_file(2).await;
        let silence = Duration::from_millis(500);
        let (_silent, other) = (take(&line).await, take(&line).await);
        let (silent, sent) = (Notify::new(), Instant::now());
        let patience = Patience { silence, limit: sent + 2 * silence, silent: &silent };
        line.give_back(other);
        patience.reply(Some(&*line), sent, pending::<()>()).await.unwrap_err();
        silent.notified().await;
        assert!(take(&line).await.clock_read_at > sent, "it is a new one");
    }

    #[tokio::test]
    async fn a_clock_that_was_read_long_ago_is_read_again_on_the_same_session() {
        let (_folder, line) = of_file(1).await;
        let (mut session, before) = (take(&line).await, Instant::now());
        sqlx::query("CREATE TEMP TABLE mark (of INTEGER)").execute(&mut session.conn).await.unwrap();
        session.clock_read_at = session.clock_read_at - DIVERGED;
        Loan::own(session, &line).give_back();
        let mut session = take(&line).await;
        assert!(session.clock_read_at > before, "it is read again");
        sqlx::query("SELECT of FROM mark").fetch_all(&mut session.conn).await.unwrap();
    }
}
