//! Sends batches of requests, and delivers a reply to each request.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::OwnedMutexGuard,
    time::{Instant, timeout_at},
};
use tokio_util::task::TaskTracker;

use crate::{
    batch::{
        op::{BatchOp, Limits},
        state::{Numbered, Slot, State, Waiting},
    },
    store::{
        Database,
        connection::PooledConn,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        pools::Connections,
    },
    sync::lock,
};

/// How long a statement waits for its turn to write.
const TURN: Duration = Duration::from_millis(20);

/// The turn to write, of the batches of one lock on a database with one writer. If two connections
/// of this process wrote at the same time, one of them would sleep, for longer than the other's
/// statement takes.
#[derive(Default)]
pub(crate) struct Turn {
    writing: Arc<tokio::sync::Mutex<()>>,
    /// The turn was not passed on in time: its statement waits for another process, or its future
    /// is not polled. Until it has been, nothing waits for it.
    is_late: AtomicBool,
}

/// The turn to write, of one statement. `None`: the database has several writers, or the turn was
/// not passed on in time.
pub(crate) type TurnGuard = Option<OwnedMutexGuard<()>>;

impl Turn {
    /// Waits for the turn, for a short time. Without it the statement is sent all the same.
    async fn take(&self, limit: Instant) -> TurnGuard {
        let writing = self.writing.clone();
        if self.is_late.load(Ordering::Relaxed) {
            let turn = writing.try_lock_owned().ok()?;
            self.is_late.store(false, Ordering::Relaxed);
            return Some(turn);
        }
        let late = Instant::now() + TURN;
        let turn = timeout_at(limit.min(late), writing.lock_owned()).await.ok();
        if turn.is_none() && late <= limit {
            self.is_late.store(true, Ordering::Relaxed);
        }
        turn
    }
}

/// Sends the requests of one lock.
pub(crate) struct Batcher<DB: Database, Op: BatchOp<DB>> {
    op: Op,
    pub pool: Connections<DB>,
    pub tracker: TaskTracker,
    pub enabled: bool,
    turn: Option<Arc<Turn>>,
    pub state: Mutex<State<DB, Op>>,
}

impl<DB: Database, Op: BatchOp<DB>> Batcher<DB, Op> {
    /// With `enabled` unset, each request is sent by itself. With a turn, its statements take turns
    /// with those of the other batches that have it.
    pub fn new(
        op: Op,
        pool: Connections<DB>,
        tracker: TaskTracker,
        enabled: bool,
        turn: &Option<Arc<Turn>>,
    ) -> Arc<Self> {
        Arc::new(Self { op, pool, tracker, enabled, turn: turn.clone(), state: Mutex::new(State::new()) })
    }

    /// Waits for a connection and for the turn, for a batch. With the turn, it usually finds the
    /// connection of the previous statement, whose page cache is up to date. It never waits for a
    /// connection while it has the turn: others may have taken all, and wait for the turn.
    pub async fn checkout(&self, limit: Instant) -> Result<(PooledConn<DB>, TurnGuard), Failure> {
        if self.turn.is_some() {
            let turn = self.take_turn(limit).await;
            if let Some(conn) = PooledConn::kept(&self.pool) {
                return Ok((conn, turn));
            }
        }
        self.checkout_alone(limit).await
    }

    /// Waits for a connection, and then for the turn. No more requests than connections wait for
    /// the turn by themselves, so batches get it soon.
    pub async fn checkout_alone(&self, limit: Instant) -> Result<(PooledConn<DB>, TurnGuard), Failure> {
        // If the future is dropped during the wait for the turn, the connection is given back.
        let conn = PooledConn::checkout(&self.pool, limit).await?.unused();
        let turn = self.take_turn(limit).await;
        Ok((conn.lend(), turn))
    }

    async fn take_turn(&self, limit: Instant) -> TurnGuard {
        match &self.turn {
            Some(turn) => turn.take(limit).await,
            None => None,
        }
    }

    pub async fn exchange_one(
        &self,
        conn: PooledConn<DB>,
        request: Op::Request,
        limits: Limits,
    ) -> Result<Op::Output, Failure> {
        let mut outputs = self.exchange(conn, &[request], limits.statement).await?;
        outputs.pop().ok_or(Failure::NoReply)
    }

    async fn exchange(
        &self,
        mut conn: PooledConn<DB>,
        requests: &[Op::Request],
        limit: Instant,
    ) -> Result<Vec<Op::Output>, Failure> {
        let sent = Instant::now();
        if sent >= limit {
            // A statement that is started and abandoned at once may still be carried out.
            conn.give_back();
            return Err(Failure::NoConnection(sqlx::Error::PoolTimedOut));
        }
        let reply = timeout_at(limit, self.op.run(conn.get(), requests, sent)).await;
        let (conn, outputs) = conn.proceed(reply)?;
        conn.give_back();
        Ok(outputs)
    }

    /// Sends requests in one statement.
    pub async fn send_together(&self, conn: PooledConn<DB>, slots: Vec<Slot<DB, Op>>, turn: TurnGuard) {
        let Some(limit) = slots.iter().map(|slot| slot.first.limits.statement).max() else { return conn.give_back() };
        let _token = self.tracker.token();
        let (mut requests, mut replies) = (Vec::with_capacity(slots.len()), Vec::with_capacity(slots.len()));
        for Slot { first: Waiting { request, reply, limits }, others } in slots {
            requests.push(request);
            replies.push((reply, limits, others));
        }
        match self.exchange(conn, &requests, limit).await {
            Ok(outputs) => {
                for ((reply, _, others), output) in replies.into_iter().zip(outputs) {
                    self.share(&output, others);
                    // The result of a cancelled request is dropped, which abandons a granted lease.
                    drop(reply.send(Ok(output)));
                }
                // A runtime with several threads runs the task that is woken last first: here that
                // of the next statement.
                drop(turn);
            }
            Err(failure) => {
                drop(turn);
                let mut firsts = Vec::with_capacity(replies.len());
                for (request, (reply, limits, others)) in requests.into_iter().zip(replies) {
                    lock(&self.state).put_back(others);
                    firsts.push(Waiting { request, reply, limits });
                }
                self.fail(firsts, failure).await;
            }
        }
    }

    fn share(&self, output: &Op::Output, others: Vec<Numbered<DB, Op>>) {
        if others.is_empty() {
            return;
        }
        let mut rest = Vec::new();
        for (number, other) in others {
            match Op::share(output) {
                Some(output) => drop(other.reply.send(Ok(output))),
                None => rest.push((number, other)),
            }
        }
        lock(&self.state).put_back(rest);
    }

    /// Handles a statement that failed, or whose outcome is unknown.
    async fn fail(&self, firsts: Vec<Waiting<DB, Op>>, failure: Failure) {
        let fault = failure.fault();
        // One of the requests may have caused the failure, and each caller needs an error of its
        // own.
        if firsts.len() > 1 && remedy(&failure, firsts.len()) != Remedy::Again {
            for first in firsts {
                if Op::APART_BY_CALLER {
                    drop(first.reply.send(Err(Failure::Undone)));
                    continue;
                }
                self.send_by_itself(first).await;
            }
            return;
        }
        let mut failure = Some(failure);
        for first in firsts {
            let other = match fault {
                Fault::Contention => Failure::Undone,
                Fault::NoConnection => Failure::NoConnection(sqlx::Error::PoolTimedOut),
                _ => Failure::NoReply,
            };
            drop(first.reply.send(Err(failure.take().unwrap_or(other))));
        }
    }

    async fn send_by_itself(&self, Waiting { request, reply, limits }: Waiting<DB, Op>) {
        if reply.is_closed() {
            return;
        }
        let output = match self.checkout_alone(limits.caller).await {
            Ok((conn, _)) if reply.is_closed() => return conn.give_back(),
            Ok((conn, _turn)) => self.exchange_one(conn, request, limits).await,
            Err(failure) => Err(failure),
        };
        drop(reply.send(output));
    }
}
