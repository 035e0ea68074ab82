//! Waiting in order across processes: tickets in the table `t_resource_lock_queue`.
//!
//! A ticket is a number, drawn when its waiter arrives and kept alive by heartbeats of the process.
//! The waiter with the lowest live ticket may claim. A ticket without heartbeats lapses after
//! [`ALIVE_SECONDS`]; other waiters skip it.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    sync::watch,
    time::{Instant, timeout_at},
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

use crate::{
    detach::DetachOnDrop,
    key::Key,
    queue::position::{Position, read_queue},
    retry::Repeat,
    store::{BATCH, Database, connection::PooledConn, failure::Failure, pools::Connections, queue::ALIVE_SECONDS},
    sync::lock,
    task::{self, Duty, InFlight, Role, Work},
};

/// The interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(ALIVE_SECONDS / 3);
/// How soon deleting tickets is tried again after a failure.
const SOON: Duration = Duration::from_millis(250);
/// How long a background statement may take.
const LIMIT: Duration = Duration::from_secs(ALIVE_SECONDS / 4);

/// The tickets of one lock.
pub(crate) struct Tickets<DB: Database> {
    pool: Connections<DB>,
    /// The connections for heartbeats and for deleting tickets in the background.
    renewals: Connections<DB>,
    state: Mutex<State>,
    /// Wakes the background tasks.
    work: watch::Sender<()>,
    tracker: TaskTracker,
}

struct State {
    duty: Duty,
    tickets: HashSet<i64>,
    leaving: Vec<Leaving>,
    /// When to delete the tickets in `leaving`.
    leave_at: Instant,
    /// When to send the next heartbeat.
    heartbeat_at: Instant,
}

/// A ticket to be deleted. Deleting it is tried for as long as it would be alive.
struct Leaving {
    number: i64,
    since: Instant,
    _token: TaskTrackerToken,
}

impl State {
    fn is_empty(&self) -> bool {
        self.tickets.is_empty() && self.leaving.is_empty()
    }

    /// Returns when the next statement is due, except for a kind that is already in flight.
    fn next(&self, beating: bool, leaving: bool) -> Option<Instant> {
        let heartbeat_at = (!beating && !self.tickets.is_empty()).then_some(self.heartbeat_at);
        let leave_at = (!leaving && !self.leaving.is_empty()).then_some(self.leave_at);
        heartbeat_at.into_iter().chain(leave_at).min()
    }
}

/// A ticket. When it is dropped, it is given up in the background.
pub(crate) struct Ticket<DB: Database> {
    tickets: Arc<Tickets<DB>>,
    pub number: i64,
    left: bool,
}

impl<DB: Database> Ticket<DB> {
    /// Gives the ticket up after use.
    pub async fn leave(mut self, limit: Instant) {
        let number = self.number;
        self.left =
            PooledConn::send(&self.tickets.pool, limit, async |conn| DB::leave(conn, &[number]).await).await.is_ok();
        if self.left {
            lock(&self.tickets.state).tickets.remove(&number);
        }
    }
}

impl<DB: Database> Drop for Ticket<DB> {
    fn drop(&mut self) {
        if !self.left {
            self.tickets.leave_later(self.number);
        }
    }
}

impl<DB: Database> Tickets<DB> {
    pub fn new(requests: &Connections<DB>, renewals: &Connections<DB>, tracker: TaskTracker) -> Arc<Self> {
        let now = Instant::now();
        let duty = Duty::new(HEARTBEAT);
        let state = State { duty, tickets: HashSet::new(), leaving: Vec::new(), leave_at: now, heartbeat_at: now };
        let (pool, renewals) = (requests.clone(), renewals.clone());
        Arc::new(Self { pool, renewals, state: Mutex::new(state), work: watch::Sender::new(()), tracker })
    }

    /// Draws a ticket behind all existing ones.
    pub async fn join(
        self: &Arc<Self>,
        runtime: &Handle,
        keys: &Arc<[Key]>,
        limit: Instant,
    ) -> Result<Ticket<DB>, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let joined = async {
                let conn = PooledConn::checkout(&self.pool, limit).await?;
                let joining = self.clone().draw(conn, keys.clone(), limit);
                DetachOnDrop::new(runtime.clone(), &self.tracker, joining).await
            };
            // A ticket that was drawn although no reply arrived lapses.
            if let Some(drawn) = repeat.final_or_pause(joined.await).await {
                return drawn;
            }
        }
    }

    async fn draw(
        self: Arc<Self>,
        mut conn: PooledConn<DB>,
        keys: Arc<[Key]>,
        limit: Instant,
    ) -> Result<Ticket<DB>, Failure> {
        let joined = async { DB::join(conn.get(), &keys, None).await?.map_err(sqlx::Error::from) };
        let reply = timeout_at(limit, joined).await;
        Ok(self.take(conn.settle(reply)?))
    }

    /// Registers a drawn ticket for heartbeats.
    fn take(self: &Arc<Self>, number: i64) -> Ticket<DB> {
        let mut state = lock(&self.state);
        if state.tickets.is_empty() {
            state.heartbeat_at = Instant::now() + HEARTBEAT;
        }
        state.tickets.insert(number);
        let heartbeat_at = state.heartbeat_at;
        self.ensure_task_by(state, heartbeat_at);
        Ticket { tickets: self.clone(), number, left: false }
    }

    /// Returns the position in the queues of these keys, and deletes lapsed tickets in front of it.
    /// `i64::MAX` stands for a task without a ticket.
    pub async fn position(&self, keys: &[Key], number: i64, limit: Instant) -> Result<Position, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let front = PooledConn::send(&self.pool, limit, async |conn| DB::front(conn, keys, number).await).await;
            let Some(front) = repeat.final_or_pause(front).await else { continue };
            let view = read_queue(keys, number, &front?);
            if !view.lapsed.is_empty() && matches!(view.at, Position::First | Position::Unknown) {
                let cleared =
                    PooledConn::send(&self.pool, limit, async |conn| DB::clear(conn, &view.lapsed).await).await;
                // The first one does not depend on it. Others may delete the same tickets.
                if view.at == Position::Unknown {
                    repeat.final_or_pause(cleared).await.transpose()?;
                } else if let Err(failure) = cleared {
                    tracing::debug!(%failure, "lapsed tickets were not deleted");
                }
            }
            if view.at != Position::Unknown {
                return Ok(view.at);
            }
        }
    }

    /// Gives a ticket up in the background.
    fn leave_later(self: &Arc<Self>, number: i64) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.tickets.remove(&number);
        state.leaving.push(Leaving { number, since: now, _token: self.tracker.token() });
        state.leave_at = now;
        self.ensure_task_by(state, now);
    }

    /// Starts a task on this runtime too: the active one may be on a runtime that is not driven.
    pub fn ensure_task(self: &Arc<Self>) {
        if !lock(&self.state).is_empty() {
            let _ = task::start(self);
        }
    }

    /// Ensures that a task runs at this time.
    fn ensure_task_by(self: &Arc<Self>, mut state: MutexGuard<'_, State>, due: Instant) {
        let sooner = state.duty.expect(due);
        drop(state);
        if sooner {
            self.work.send_replace(());
        }
        let _ = task::start(self);
    }

    fn start_what_is_due(self: &Arc<Self>, state: &mut State, in_flight: &mut InFlight) {
        let now = Instant::now();
        if in_flight.keeping.is_none() && !state.tickets.is_empty() && state.heartbeat_at <= now {
            // Until the next heartbeat, this time is only moved earlier.
            state.heartbeat_at = now + HEARTBEAT;
            let (tickets, numbers) = (self.clone(), state.tickets.iter().copied().collect::<Vec<_>>());
            in_flight.keeping = Some(Box::pin(async move { tickets.heartbeat(&numbers).await }));
        }
        if in_flight.ending.is_none() && !state.leaving.is_empty() && state.leave_at <= now {
            let (tickets, leaving) =
                (self.clone(), state.leaving.iter().take(BATCH).map(|leaving| leaving.number).collect());
            in_flight.ending = Some(Box::pin(async move { tickets.clear(leaving).await }));
        }
    }

    async fn clear(&self, numbers: Vec<i64>) {
        let limit = Instant::now() + LIMIT;
        let left = PooledConn::send(&self.renewals, limit, async |conn| DB::leave(conn, &numbers).await).await;
        let alive = Duration::from_secs(ALIVE_SECONDS);
        let mut state = lock(&self.state);
        match left {
            Ok(_) => state.leaving.retain(|leaving| !numbers.contains(&leaving.number)),
            Err(failure) => {
                tracing::debug!(%failure, "tickets were not deleted; trying again until they lapse");
                state.leave_at = Instant::now() + SOON;
                state.leaving.retain(|leaving| leaving.since.elapsed() < alive);
            }
        }
    }

    /// Sends a heartbeat for these tickets.
    async fn heartbeat(&self, numbers: &[i64]) {
        for numbers in numbers.chunks(BATCH) {
            let limit = Instant::now() + LIMIT;
            let stayed = PooledConn::send(&self.renewals, limit, async |conn| DB::heartbeat(conn, numbers).await).await;
            if let Err(failure) = stayed {
                tracing::warn!(tickets = numbers.len(), %failure, "ticket heartbeat failed; trying again");
                let soon = Instant::now() + HEARTBEAT / 4;
                let mut state = lock(&self.state);
                state.heartbeat_at = state.heartbeat_at.min(soon);
                return;
            }
        }
    }
}

impl<DB: Database> Work for Tickets<DB> {
    fn with_duty<T>(&self, act: impl FnOnce(&mut Duty) -> T) -> T {
        act(&mut lock(&self.state).duty)
    }

    fn woken(&self) -> &watch::Sender<()> {
        &self.work
    }

    fn poll(self: &Arc<Self>, runtime: Id, role: Role, in_flight: &mut InFlight) -> Option<Instant> {
        let now = Instant::now();
        let mut state = lock(&self.state);
        if state.duty.was_replaced(runtime, role) {
            return Some(now);
        }
        if state.is_empty() && in_flight.is_empty() {
            state.duty.leave(runtime);
            return None;
        }
        if let Role::StandBy(until) = role {
            return Some(until);
        }
        self.start_what_is_due(&mut state, in_flight);
        // A statement in flight is given up by then.
        let latest = now + LIMIT;
        let next = state.next(in_flight.keeping.is_some(), in_flight.ending.is_some());
        let wakes_at = next.map_or(latest, |next| next.min(latest));
        state.duty.wakes_at(wakes_at);
        Some(wakes_at)
    }

    /// Called when the runtime drops the task. With no other task left, tickets to be deleted
    /// lapse, unless a later task deletes them first.
    fn leave(&self, runtime: Id) {
        if lock(&self.state).duty.leave(runtime) {
            self.work.send_replace(());
        }
    }
}
