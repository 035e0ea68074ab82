//! Release notifications from other processes, where the database delivers them: one connection per
//! lock, or a watch on SQLite's files, open while a task waits.
//!
//! A notification is a hint. No waiter relies on it: each also polls.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    runtime::Id,
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    pacing::{Backoff, listen_backoff},
    queue::wakeups::Wakeups,
    store::{Database, fault::said, queue::Notification},
    sync::lock,
    task::{self, Duty, InFlight, Role, Work},
};

/// How long the connection is kept open for the next waiter.
const LINGER: Duration = Duration::from_secs(5);
/// How long opening the connection may take, and closing it.
const LIMIT: Duration = Duration::from_secs(10);
/// How often the active task shows that its runtime makes progress.
const PROGRESS: Duration = Duration::from_secs(1);
/// The pause after a notification for all keys, for each waiter that sends requests: they send at
/// most 500 a second because of them.
const PER_WAITER: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(crate) struct Listener<DB: Database> {
    pool: Pool<DB>,
    wakeups: Arc<Wakeups>,
    state: Mutex<State>,
    waiters: watch::Sender<usize>,
    open: watch::Sender<bool>,
    /// Wakes the tasks.
    work: watch::Sender<()>,
}

struct State {
    duty: Duty,
    /// When to open the connection next.
    open_at: Instant,
    pauses: Backoff,
    /// The connection was lost while a task waited. It is opened again, for the next waiter.
    lost: bool,
    /// Notifications are unavailable, now and later.
    unavailable: bool,
}

/// A registered waiter, until it is dropped.
pub(crate) struct Listening<DB: Database>(Arc<Listener<DB>>);

impl<DB: Database> Listening<DB> {
    /// Returns whether notifications are received at the moment, of rows that are marked.
    pub fn needs_marks(&self) -> bool {
        DB::NOTIFIES_IF_MARKED && *self.0.open.borrow()
    }
}

impl<DB: Database> Drop for Listening<DB> {
    fn drop(&mut self) {
        self.0.waiters.send_modify(|count| *count -= 1);
    }
}

impl<DB: Database> Listener<DB> {
    pub fn new(pool: Pool<DB>, wakeups: Arc<Wakeups>) -> Arc<Self> {
        let state = State {
            duty: Duty::new(PROGRESS),
            open_at: Instant::now(),
            pauses: listen_backoff(),
            lost: false,
            unavailable: false,
        };
        let (waiters, open, work) = (watch::Sender::new(0), watch::Sender::new(false), watch::Sender::new(()));
        Arc::new(Self { pool, wakeups, state: Mutex::new(state), waiters, open, work })
    }

    /// Registers a waiter, and starts the task of this runtime if it has none.
    pub fn register_waiter(self: &Arc<Self>) -> Listening<DB> {
        self.waiters.send_modify(|count| *count += 1);
        if DB::NOTIFIES && !lock(&self.state).unavailable {
            let _ = task::start(self);
        }
        Listening(self.clone())
    }

    /// Opens the connection, and receives notifications until no task waits any more or the
    /// connection is lost.
    async fn listen(self: Arc<Self>, runtime: Id) {
        match timeout(LIMIT, DB::listen(&self.pool)).await {
            Ok(Ok(None)) => {
                tracing::info!("a pooler, or a database in memory: releases are not notified, and waiters poll");
                lock(&self.state).unavailable = true;
                return;
            }
            Ok(Ok(Some(mut notifications))) => {
                let began = Instant::now();
                self.receive(&mut notifications).await;
                self.ended(runtime, began.elapsed() > LINGER);
                let _ = timeout(LIMIT, DB::stop_listening(notifications)).await;
            }
            failed => {
                let error = failed.map(|opened| opened.err().map(|error| said(&error)));
                tracing::warn!(?error, "releases cannot be notified; waiters poll");
            }
        }
        let mut state = lock(&self.state);
        if state.duty.is_active(runtime) {
            state.open_at = Instant::now() + state.pauses.next();
        }
    }

    /// Records that the connection of this runtime receives nothing more.
    fn ended(&self, runtime: Id, lasted: bool) {
        let mut state = lock(&self.state);
        if state.duty.is_active(runtime) {
            self.open.send_replace(false);
            state.lost = self.is_waited_for();
            if lasted {
                state.pauses = listen_backoff();
            }
        }
    }

    fn is_waited_for(&self) -> bool {
        *self.waiters.borrow() > 0
    }

    async fn receive(&self, notifications: &mut DB::Notifications) {
        self.open.send_replace(true);
        // Tasks that already wait are woken, so that they request a notification.
        self.wakeups.notify_all();
        let mut idle = std::pin::pin!(self.idle());
        loop {
            let notified = tokio::select! {
                notified = DB::next_notification(notifications) => notified,
                () = &mut idle => return,
            };
            match notified {
                Ok(Some(Notification::Released(key))) => self.wakeups.notify(&key),
                Ok(Some(Notification::Changed)) => {
                    self.wakeups.notify_all();
                    sleep(PER_WAITER.saturating_mul(self.wakeups.count()).min(LONGEST_PAUSE)).await;
                }
                lost => {
                    tracing::warn!(?lost, "notifications have ended; they are requested again, and waiters poll");
                    return;
                }
            }
        }
    }

    /// Returns once no task has waited for `LINGER`.
    async fn idle(&self) {
        let mut waiters = self.waiters.subscribe();
        loop {
            // The sender lives in `self`, so waiting does not fail.
            let _ = waiters.wait_for(|count| *count == 0).await;
            if timeout(LINGER, waiters.wait_for(|count| *count > 0)).await.is_err() {
                return;
            }
        }
    }
}

impl<DB: Database> Work for Listener<DB> {
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
        if role == Role::TakeOver {
            self.open.send_replace(false);
        }
        let is_wanted = (state.lost || self.is_waited_for()) && !state.unavailable;
        if !is_wanted && in_flight.is_empty() {
            (state.open_at, state.pauses) = (now, listen_backoff());
            state.duty.leave(runtime);
            return None;
        }
        if let Role::StandBy(until) = role {
            return Some(until);
        }
        if in_flight.keeping.is_none() && state.open_at <= now {
            state.lost = false;
            in_flight.keeping = Some(Box::pin(self.clone().listen(runtime)));
        }
        let progress = now + PROGRESS;
        let wakes_at = if in_flight.keeping.is_some() { progress } else { state.open_at.min(progress) };
        state.duty.wakes_at(wakes_at);
        Some(wakes_at)
    }

    fn leave(&self, runtime: Id) {
        let mut state = lock(&self.state);
        if state.duty.is_active(runtime) {
            self.open.send_replace(false);
        }
        if state.duty.leave(runtime) {
            self.work.send_replace(());
        }
    }
}
