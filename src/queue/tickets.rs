//! Waiting in order across processes: tickets in the table `t_resource_lock_queue`.
//!
//! A ticket is a number, drawn when its waiter arrives and kept alive by heartbeats of the process:
//! one statement for all tickets of a lock, on the threads for renewals.
//! The waiter with the lowest live ticket may claim. A ticket without heartbeats lapses after
//! [`ALIVE_SECONDS`]; other waiters skip it.

use std::{
    collections::HashSet,
    mem,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

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
    tracker: TaskTracker,
}

#[derive(Default)]
struct State {
    tickets: HashSet<i64>,
    /// A task sends heartbeats for the tickets.
    beats: bool,
    leaving: Vec<Leaving>,
    /// A task deletes the tickets in `leaving`.
    deletes: bool,
}

/// A ticket to be deleted. Deleting it is tried for as long as it would be alive.
struct Leaving {
    number: i64,
    since: Instant,
    _token: TaskTrackerToken,
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
        Arc::new(Self { pool: requests.clone(), renewals: renewals.clone(), state: Mutex::default(), tracker })
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
        let mut conn = self.pool.answering(limit).await?;
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
        state.tickets.insert(number);
        let has_task = mem::replace(&mut state.beats, true);
        drop(state);
        if !has_task {
            threads::spawn_renewal(Self::beat(Arc::downgrade(self), Instant::now() + HEARTBEAT));
        }
        Ticket { tickets: self.clone(), number, left: false }
    }

    /// Returns the position in the queues of these keys, and deletes lapsed tickets in front of it.
    /// `i64::MAX` stands for a task without a ticket.
    pub async fn position(&self, keys: &[Key], number: i64, limit: Instant) -> Result<Position, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let front = self.pool.send_repeatedly(limit, async |conn| DB::front(conn, keys, number).await).await?;
            let view = read_queue(keys, number, &front);
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
        state.tickets.remove(&number);
        state.leaving.push(Leaving { number, since: Instant::now(), _token: self.tracker.token() });
        let has_task = mem::replace(&mut state.deletes, true);
        drop(state);
        if !has_task {
            threads::spawn_renewal(self.clone().delete());
        }
    }

    /// Sends heartbeats from this moment on, until there are no tickets.
    async fn beat(tickets: Weak<Self>, mut next: Instant) {
        loop {
            sleep_until(next).await;
            // Every ticket holds them. This task holds none, so that it keeps no session open.
            let Some(tickets) = tickets.upgrade() else { return };
            let Some(numbers) = tickets.to_keep() else { return };
            next = Instant::now() + HEARTBEAT;
            // The driver may panic.
            let beating = tokio::spawn(async move { tickets.heartbeat(&numbers).await });
            if !beating.await.unwrap_or(false) {
                next = next.min(Instant::now() + HEARTBEAT / 4);
            }
        }
    }

    /// Returns the tickets to keep alive. If there are none, the task ends.
    fn to_keep(&self) -> Option<Vec<i64>> {
        let mut state = lock(&self.state);
        state.beats = !state.tickets.is_empty();
        state.beats.then(|| state.tickets.iter().copied().collect())
    }

    /// Sends a heartbeat for these tickets, and returns whether it succeeded.
    async fn heartbeat(&self, numbers: &[i64]) -> bool {
        for numbers in numbers.chunks(BATCH) {
            let limit = Instant::now() + LIMIT;
            let stayed = self.renewals.send_repeatedly(limit, async |conn| DB::heartbeat(conn, numbers).await).await;
            if let Err(failure) = stayed {
                let tickets = numbers.len();
                threads::emit(move || tracing::warn!(tickets, %failure, "ticket heartbeat failed; trying again"));
                return false;
            }
        }
        true
    }

    /// Deletes the tickets that are given up, until there are none.
    async fn delete(self: Arc<Self>) {
        while let Some(numbers) = self.to_delete() {
            let tickets = self.clone();
            // The driver may panic.
            let deleting = tokio::spawn(async move { tickets.clear(&numbers).await });
            if !deleting.await.unwrap_or(false) {
                let alive = Duration::from_secs(ALIVE_SECONDS);
                lock(&self.state).leaving.retain(|leaving| leaving.since.elapsed() < alive);
                sleep(SOON).await;
            }
        }
    }

    /// Returns the tickets to delete next. If there are none, the task ends.
    fn to_delete(&self) -> Option<Vec<i64>> {
        let mut state = lock(&self.state);
        state.deletes = !state.leaving.is_empty();
        state.deletes.then(|| state.leaving.iter().take(BATCH).map(|leaving| leaving.number).collect())
    }

    /// Deletes these tickets, and returns whether it succeeded.
    async fn clear(&self, numbers: &[i64]) -> bool {
        let limit = Instant::now() + LIMIT;
        let left = self.renewals.send_repeatedly(limit, async |conn| DB::leave(conn, numbers).await).await;
        let is_done = left.is_ok();
        match left {
            Ok(_) => lock(&self.state).leaving.retain(|leaving| !numbers.contains(&leaving.number)),
            Err(failure) => threads::emit(
                move || tracing::debug!(%failure, "tickets were not deleted; trying again until they lapse"),
            ),
        }
        is_done
    }
}
