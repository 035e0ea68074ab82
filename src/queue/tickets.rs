//! Waiting in order across processes: tickets in the table `t_resource_lock_queue`.
//!
//! A ticket is a number, drawn when its waiter arrives and kept alive by heartbeats of the process:
//! one statement for all tickets of a lock, on the threads for renewals.
//! The waiter with the lowest live ticket may claim. A ticket without heartbeats lapses after
//! [`ALIVE_SECONDS`]; other waiters skip it.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::sync::Notify;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

use crate::{
    key::Key,
    queue::position::{Position, read_queue},
    retry::Repeat,
    session::{
        fork::is_forked,
        sessions::Sessions,
        threads,
        time::Instant,
        timers::{sleep, sleep_until, timeout_at},
    },
    store::{BATCH, Database, TooLate, failure::Failure, queue::ALIVE_SECONDS},
    sync::lock,
};

/// The interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_secs(ALIVE_SECONDS / 3);
/// How soon deleting tickets is tried again after a failure.
const SOON: Duration = Duration::from_millis(250);
/// How long a background statement may take.
const LIMIT: Duration = Duration::from_secs(ALIVE_SECONDS / 4);

/// The tickets of one lock.
pub(crate) struct Tickets<DB: Database> {
    pool: Sessions<DB>,
    /// The sessions for heartbeats and for deleting tickets in the background.
    renewals: Sessions<DB>,
    state: Mutex<State>,
    /// Wakes the background task.
    changed: Notify,
    tracker: TaskTracker,
}

struct State {
    has_task: bool,
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
    /// Returns the tickets to keep alive now, those to delete now, and when the next statement is
    /// due. If there is none, the task ends.
    fn due(&mut self) -> Option<(Instant, Vec<i64>, Vec<i64>)> {
        let Some(next) = self.next() else {
            self.has_task = false;
            return None;
        };
        let now = Instant::now();
        let beat = !self.tickets.is_empty() && self.heartbeat_at <= now;
        if beat {
            // Until the next heartbeat, this time is only moved earlier.
            self.heartbeat_at = now + HEARTBEAT;
        }
        let numbers = self.tickets.iter().copied().filter(|_| beat).collect();
        let leaves = !self.leaving.is_empty() && self.leave_at <= now;
        let leaving = self.leaving.iter().take(if leaves { BATCH } else { 0 }).map(|leaving| leaving.number).collect();
        Some((next, numbers, leaving))
    }

    /// Returns when the next statement is due.
    fn next(&self) -> Option<Instant> {
        let heartbeat_at = (!self.tickets.is_empty()).then_some(self.heartbeat_at);
        let leave_at = (!self.leaving.is_empty()).then_some(self.leave_at);
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
        // On SQLite, a waiter that comes within the same millisecond may draw the number again.
        lock(&self.tickets.state).tickets.remove(&number);
        self.left = self.tickets.pool.send(limit, async |conn| DB::leave(conn, &[number]).await).await.is_ok();
    }
}

impl<DB: Database> Drop for Ticket<DB> {
    fn drop(&mut self) {
        if !self.left && !is_forked() {
            self.tickets.leave_later(self.number);
        }
    }
}

impl<DB: Database> Tickets<DB> {
    pub fn new(requests: &Sessions<DB>, renewals: &Sessions<DB>, tracker: TaskTracker) -> Arc<Self> {
        let now = Instant::now();
        let state =
            State { has_task: false, tickets: HashSet::new(), leaving: Vec::new(), leave_at: now, heartbeat_at: now };
        let (pool, renewals) = (requests.clone(), renewals.clone());
        Arc::new(Self { pool, renewals, state: Mutex::new(state), changed: Notify::new(), tracker })
    }

    /// Draws a ticket behind all existing ones. A ticket that is drawn for a caller that has left
    /// is given up.
    pub async fn join(self: &Arc<Self>, keys: &Arc<[Key]>, limit: Instant) -> Result<Ticket<DB>, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            // The token outlasts a ticket that no caller receives.
            let (drawing, token) = (self.clone().draw(keys.clone(), limit), self.tracker.token());
            let joined = threads::run_to_end(Box::pin(async move { (drawing.await, token) })).await;
            let joined = match joined {
                Ok((drawn, _)) => drawn,
                Err(error) => Err(Failure::NoThreads(Box::new(error))),
            };
            // A ticket that was drawn although no reply arrived lapses.
            if let Some(drawn) = repeat.final_or_pause(joined).await {
                return drawn;
            }
        }
    }

    async fn draw(self: Arc<Self>, keys: Arc<[Key]>, limit: Instant) -> Result<Ticket<DB>, Failure> {
        let mut conn = self.pool.take(limit).await?;
        let not_after = conn.not_after(limit);
        let reply = timeout_at(limit, DB::join(conn.get(), &keys, not_after)).await;
        let (mut conn, number) = conn.proceed(reply)?;
        if let Err(TooLate { now }) = number {
            conn.set_clock(now);
        }
        conn.give_back();
        Ok(self.take(number.map_err(|_| Failure::Undone)?))
    }

    /// Registers a drawn ticket for heartbeats.
    fn take(self: &Arc<Self>, number: i64) -> Ticket<DB> {
        let mut state = lock(&self.state);
        if state.tickets.is_empty() {
            state.heartbeat_at = Instant::now() + HEARTBEAT;
        }
        state.tickets.insert(number);
        self.ensure_task(state);
        Ticket { tickets: self.clone(), number, left: false }
    }

    /// Returns the position in the queues of these keys, and deletes lapsed tickets in front of it.
    /// `i64::MAX` stands for a task without a ticket.
    pub async fn position(&self, keys: &[Key], number: i64, limit: Instant) -> Result<Position, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let front = self.pool.send(limit, async |conn| DB::front(conn, keys, number).await).await;
            let Some(front) = repeat.final_or_pause(front).await else { continue };
            let view = read_queue(keys, number, &front?);
            if !view.lapsed.is_empty() && matches!(view.at, Position::First | Position::Unknown) {
                let cleared = self.pool.send(limit, async |conn| DB::clear(conn, &view.lapsed).await).await;
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
        self.ensure_task(state);
    }

    /// Ensures that a task does what is due.
    fn ensure_task(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if std::mem::replace(&mut state.has_task, true) {
            drop(state);
            self.changed.notify_one();
        } else {
            drop(state);
            threads::spawn_renewal(self.clone().work());
        }
    }

    /// Sends heartbeats and deletes tickets, until there are none.
    async fn work(self: Arc<Self>) {
        loop {
            let Some((next, numbers, leaving)) = lock(&self.state).due() else { return };
            if numbers.is_empty() && leaving.is_empty() {
                tokio::select! {
                    () = self.changed.notified() => {}
                    () = sleep_until(next) => {}
                }
                continue;
            }
            let tickets = self.clone();
            let sending = tokio::spawn(async move {
                tickets.heartbeat(&numbers).await;
                if !leaving.is_empty() {
                    tickets.clear(leaving).await;
                }
            });
            // After a panic of the driver, the next statement follows after a pause.
            if sending.await.is_err() {
                sleep(SOON).await;
            }
        }
    }

    async fn clear(&self, numbers: Vec<i64>) {
        let limit = Instant::now() + LIMIT;
        let left = self.renewals.send(limit, async |conn| DB::leave(conn, &numbers).await).await;
        let alive = Duration::from_secs(ALIVE_SECONDS);
        let mut state = lock(&self.state);
        match left {
            Ok(_) => state.leaving.retain(|leaving| !numbers.contains(&leaving.number)),
            Err(failure) => {
                threads::emit(
                    move || tracing::debug!(%failure, "tickets were not deleted; trying again until they lapse"),
                );
                state.leave_at = Instant::now() + SOON;
                state.leaving.retain(|leaving| leaving.since.elapsed() < alive);
            }
        }
    }

    /// Sends a heartbeat for these tickets.
    async fn heartbeat(&self, numbers: &[i64]) {
        for numbers in numbers.chunks(BATCH) {
            let limit = Instant::now() + LIMIT;
            let stayed = self.renewals.send(limit, async |conn| DB::heartbeat(conn, numbers).await).await;
            if let Err(failure) = stayed {
                let tickets = numbers.len();
                threads::emit(move || tracing::warn!(tickets, %failure, "ticket heartbeat failed; trying again"));
                let soon = Instant::now() + HEARTBEAT / 4;
                let mut state = lock(&self.state);
                state.heartbeat_at = state.heartbeat_at.min(soon);
                return;
            }
        }
    }
}
