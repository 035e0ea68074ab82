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
    retry::Backoff,
    store::{
        BATCH, Database, Reply, connection::PooledConn, failure::Failure, fault::Fault, pools::Connections,
        queue::ALIVE_SECONDS,
    },
    sync::lock,
    task::{self, Duty, Role, UnderWay, Work},
};

/// The interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(ALIVE_SECONDS / 3);
/// The longest pause before a statement that failed with a transient error is sent again.
const PAUSE: Duration = Duration::from_millis(50);
/// How soon deleting tickets is tried again after a failure.
const SOON: Duration = Duration::from_millis(250);
/// How long a background statement may take.
const LIMIT: Duration = Duration::from_secs(ALIVE_SECONDS / 4);

/// The tickets of one lock object.
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
    places: HashSet<i64>,
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
        self.places.is_empty() && self.leaving.is_empty()
    }

    /// Returns when the next statement is due, except for a kind that is already in flight.
    fn next(&self, beating: bool, leaving: bool) -> Option<Instant> {
        let heartbeat_at = (!beating && !self.places.is_empty()).then_some(self.heartbeat_at);
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
            self.tickets.send(&self.tickets.pool, limit, async |conn| DB::leave(conn, &[number]).await).await.is_ok();
        if self.left {
            lock(&self.tickets.state).places.remove(&number);
        }
    }
}

impl<DB: Database> Drop for Ticket<DB> {
    fn drop(&mut self) {
        if !self.left {
            self.tickets.give_up(self.number);
        }
    }
}

impl<DB: Database> Tickets<DB> {
    pub fn new(requests: &Connections<DB>, renewals: &Connections<DB>, tracker: TaskTracker) -> Arc<Self> {
        let now = Instant::now();
        let duty = Duty::new(HEARTBEAT);
        let state = State { duty, places: HashSet::new(), leaving: Vec::new(), leave_at: now, heartbeat_at: now };
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
        let mut pauses = Backoff::up_to(Duration::from_millis(40));
        loop {
            let conn = PooledConn::checkout(&self.pool, limit).await?;
            let joining = self.clone().draw(conn, keys.clone(), limit);
            match DetachOnDrop::new(runtime.clone(), &self.tracker, joining).await {
                // A ticket that was drawn although no reply arrived lapses.
                Err(failure)
                    if matches!(failure.fault(), Fault::Contention | Fault::Outage) && Instant::now() < limit =>
                {
                    pauses.pause(PAUSE).await;
                }
                other => return other,
            }
        }
    }

    async fn draw(
        self: Arc<Self>,
        mut conn: PooledConn<DB>,
        keys: Arc<[Key]>,
        limit: Instant,
    ) -> Result<Ticket<DB>, Failure> {
        let reply = timeout_at(limit, DB::join(conn.get(), &keys)).await;
        Ok(self.take(conn.settle(reply)?))
    }

    /// Registers a drawn ticket for heartbeats.
    fn take(self: &Arc<Self>, number: i64) -> Ticket<DB> {
        let mut state = lock(&self.state);
        if state.places.is_empty() {
            state.heartbeat_at = Instant::now() + HEARTBEAT;
        }
        state.places.insert(number);
        let heartbeat_at = state.heartbeat_at;
        self.run(state, heartbeat_at);
        Ticket { tickets: self.clone(), number, left: false }
    }

    /// Returns the position in the queues of these keys, and deletes lapsed tickets in front of it.
    /// `i64::MAX` stands for a task without a ticket.
    pub async fn stand(&self, keys: &[Key], number: i64, limit: Instant) -> Result<Position, Failure> {
        let mut pauses = Backoff::up_to(PAUSE);
        loop {
            match self.send(&self.pool, limit, async |conn| DB::front(conn, keys, number).await).await {
                Ok(front) => {
                    let standing = read_queue(keys, number, &front);
                    if !standing.lapsed.is_empty() && matches!(standing.at, Position::First | Position::Unseen) {
                        self.send(&self.pool, limit, async |conn| DB::clear(conn, &standing.lapsed).await).await?;
                    }
                    if standing.at != Position::Unseen {
                        return Ok(standing.at);
                    }
                }
                Err(failure) if failure.fault().is_transient() && Instant::now() < limit => {
                    pauses.pause(PAUSE).await;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Gives a ticket up in the background.
    fn give_up(self: &Arc<Self>, number: i64) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.places.remove(&number);
        state.leaving.push(Leaving { number, since: now, _token: self.tracker.token() });
        state.leave_at = now;
        self.run(state, now);
    }

    /// Starts a task on this runtime too: the active one may be on a runtime that is not driven.
    pub fn attend(self: &Arc<Self>) {
        if !lock(&self.state).is_empty() {
            task::start(self);
        }
    }

    /// Ensures that a task runs at this time.
    fn run(self: &Arc<Self>, mut state: MutexGuard<'_, State>, due: Instant) {
        let sooner = state.duty.expect(due);
        drop(state);
        if sooner {
            self.work.send_replace(());
        }
        task::start(self);
    }

    fn start_what_is_due(self: &Arc<Self>, state: &mut State, under_way: &mut UnderWay) {
        let now = Instant::now();
        if under_way.renewal.is_none() && !state.places.is_empty() && state.heartbeat_at <= now {
            // Until the next heartbeat, this time is only moved earlier.
            state.heartbeat_at = now + HEARTBEAT;
            let (tickets, places) = (self.clone(), state.places.iter().copied().collect::<Vec<_>>());
            under_way.renewal = Some(Box::pin(async move { tickets.heartbeat(&places).await }));
        }
        if under_way.ending.is_none() && !state.leaving.is_empty() && state.leave_at <= now {
            let (tickets, leaving) =
                (self.clone(), state.leaving.iter().take(BATCH).map(|leaving| leaving.number).collect());
            under_way.ending = Some(Box::pin(async move { tickets.clear(leaving).await }));
        }
    }

    async fn clear(&self, numbers: Vec<i64>) {
        let limit = Instant::now() + LIMIT;
        let left = self.send(&self.renewals, limit, async |conn| DB::leave(conn, &numbers).await).await;
        let alive = Duration::from_secs(ALIVE_SECONDS);
        let mut state = lock(&self.state);
        match left {
            Ok(_) => state.leaving.retain(|leaving| !numbers.contains(&leaving.number)),
            Err(failure) => {
                tracing::debug!(%failure, "places in queues were not given up, trying again until they lapse");
                state.leave_at = Instant::now() + SOON;
                state.leaving.retain(|leaving| leaving.since.elapsed() < alive);
            }
        }
    }

    /// Sends a heartbeat for these tickets.
    async fn heartbeat(&self, places: &[i64]) {
        for numbers in places.chunks(BATCH) {
            let limit = Instant::now() + LIMIT;
            let stayed = self.send(&self.renewals, limit, async |conn| DB::heartbeat(conn, numbers).await).await;
            if let Err(failure) = stayed {
                tracing::warn!(places = numbers.len(), %failure, "places in queues were not kept alive, trying again");
                let soon = Instant::now() + HEARTBEAT / 4;
                let mut state = lock(&self.state);
                state.heartbeat_at = state.heartbeat_at.min(soon);
                return;
            }
        }
    }

    async fn send<T>(
        &self,
        pool: &Connections<DB>,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = PooledConn::checkout(pool, limit).await?;
        let reply = timeout_at(limit, statement(conn.get())).await;
        conn.settle(reply)
    }
}

impl<DB: Database> Work for Tickets<DB> {
    fn join(&self, runtime: Id) -> bool {
        lock(&self.state).duty.join(runtime)
    }

    fn woken(&self) -> &watch::Sender<()> {
        &self.work
    }

    fn look(self: &Arc<Self>, runtime: Id, under_way: &mut UnderWay) -> Option<Instant> {
        let now = Instant::now();
        let role = lock(&self.state).duty.role(runtime, now);
        if role != Role::Work {
            // Statements from before a takeover are dropped; the task that took over sends them
            // again.
            *under_way = UnderWay::default();
        }
        let mut state = lock(&self.state);
        if state.duty.role(runtime, now).is_other_than(role) {
            return Some(now);
        }
        if state.is_empty() && under_way.renewal.is_none() && under_way.ending.is_none() {
            state.duty.leave(runtime);
            return None;
        }
        if let Role::StandBy(until) = role {
            return Some(until);
        }
        self.start_what_is_due(&mut state, under_way);
        // A statement in flight is given up by then.
        let latest = now + LIMIT;
        let next = state.next(under_way.renewal.is_some(), under_way.ending.is_some());
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
