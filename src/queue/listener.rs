//! Release notifications from other processes, where the database delivers them: one connection per
//! lock object, open while a task waits.
//!
//! A notification is a hint. No waiter relies on it: each also polls at its own pace.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    runtime::Handle,
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{queue::local::Wakeups, retry::Backoff, store::Database, sync::lock};

/// How long the connection is kept open for the next waiter.
const LINGER: Duration = Duration::from_secs(5);
/// How long opening the connection may take, and closing it.
const LIMIT: Duration = Duration::from_secs(10);

pub(crate) struct Listener<DB: Database> {
    pool: Pool<DB>,
    wakeups: Arc<Wakeups>,
    running: Mutex<bool>,
    /// Notifications are unavailable, now and later.
    deaf: AtomicBool,
    waiters: watch::Sender<usize>,
    open: watch::Sender<bool>,
}

/// A registered waiter, until it is dropped.
pub(crate) struct Listening<DB: Database>(Arc<Listener<DB>>);

impl<DB: Database> Listening<DB> {
    /// Returns whether notifications are received at the moment.
    pub fn hears(&self) -> bool {
        *self.0.open.borrow()
    }
}

impl<DB: Database> Drop for Listening<DB> {
    fn drop(&mut self) {
        self.0.waiters.send_modify(|count| *count -= 1);
    }
}

impl<DB: Database> Listener<DB> {
    pub fn new(pool: Pool<DB>, wakeups: Arc<Wakeups>) -> Arc<Self> {
        let (waiters, open) = (watch::Sender::new(0), watch::Sender::new(false));
        Arc::new(Self { pool, wakeups, running: Mutex::new(false), deaf: AtomicBool::new(false), waiters, open })
    }

    /// Registers a waiter, and starts the listening task if it is not running.
    pub fn attend(self: &Arc<Self>, runtime: &Handle) -> Listening<DB> {
        self.waiters.send_modify(|count| *count += 1);
        let mut running = lock(&self.running);
        if DB::NOTIFIES && !*running && !self.deaf.load(Ordering::Relaxed) {
            *running = true;
            drop(running);
            runtime.spawn(self.clone().run(OnStop { listener: self.clone(), armed: true }));
        }
        Listening(self.clone())
    }

    async fn run(self: Arc<Self>, mut on_stop: OnStop<DB>) {
        let fresh = || Backoff::between(Duration::from_millis(100), Duration::from_secs(30));
        let mut pauses = fresh();
        loop {
            match timeout(LIMIT, DB::listen(&self.pool)).await {
                Ok(Ok(None)) => {
                    tracing::info!(
                        "a pooler stands before the server: word of releases is not heard, waiting asks instead"
                    );
                    self.deaf.store(true, Ordering::Relaxed);
                    return;
                }
                Ok(Ok(Some(mut notifications))) => {
                    let began = Instant::now();
                    self.hear(&mut notifications).await;
                    let _ = timeout(LIMIT, DB::stop_listening(notifications)).await;
                    if began.elapsed() > LINGER {
                        pauses = fresh();
                    }
                }
                failed => {
                    let error = failed.map(|opened| opened.err());
                    tracing::warn!(?error, "word of releases cannot be heard; waiting goes on without it");
                }
            }
            {
                let mut running = lock(&self.running);
                if *self.waiters.borrow() == 0 {
                    *running = false;
                    on_stop.armed = false;
                    return;
                }
            }
            sleep(pauses.next()).await;
        }
    }

    /// Receives notifications until no task waits any more, or the connection is lost.
    async fn hear(&self, notifications: &mut DB::Notifications) {
        self.open.send_replace(true);
        // Tasks that already wait are woken, so that they request a notification.
        self.wakeups.notify_all();
        let mut unwanted = std::pin::pin!(self.unwanted());
        loop {
            let told = tokio::select! {
                told = DB::next_notification(notifications) => told,
                () = &mut unwanted => break,
            };
            match told {
                Ok(Some(key)) => self.wakeups.notify(&key),
                lost => {
                    tracing::warn!(?lost, "word of releases is not heard any more; opening it anew");
                    break;
                }
            }
        }
        self.open.send_replace(false);
    }

    /// Returns once no task has waited for `LINGER`.
    async fn unwanted(&self) {
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

/// Resets the listener if the runtime drops the task.
struct OnStop<DB: Database> {
    listener: Arc<Listener<DB>>,
    armed: bool,
}

impl<DB: Database> Drop for OnStop<DB> {
    fn drop(&mut self) {
        if self.armed {
            self.listener.open.send_replace(false);
            *lock(&self.listener.running) = false;
        }
    }
}
