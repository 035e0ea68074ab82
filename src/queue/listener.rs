//! Release notifications from other processes, where the database delivers them: one connection for
//! a database and process, or a watch on SQLite's files, open while a task waits.
//!
//! A notification is a hint. No waiter relies on it: each also polls.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sqlx::Pool;
use tokio::sync::watch;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::AbortOnDropHandle,
};

use crate::{
    pacing::open_backoff,
    queue::wakeups::Wakeups,
    session::{
        sessions::of_pool,
        threads,
        time::Instant,
        timers::{sleep, timeout},
    },
    store::{Database, fault::said, queue::Notification},
};

/// How long the connection is kept open for the next waiter.
const LINGER: Duration = Duration::from_secs(5);
/// How long opening the connection may take, and closing it.
const LIMIT: Duration = Duration::from_secs(10);
/// How often the connection is asked whether it still answers: it may have fallen silent.
const CHECK: Duration = Duration::from_secs(30);
/// The pause after a notification for all keys, for each waiter that sends requests: they send at
/// most 500 a second because of them.
const PER_WAITER: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The listener of a database, which the locks of one pool share. Its connection ends with it.
pub(crate) struct Listener<DB: Database> {
    /// What it wakes. A release in this process does it too.
    pub wakeups: Arc<Wakeups>,
    work: Arc<Work<DB>>,
    _closed: DropGuard,
}

struct Work<DB: Database> {
    pool: Pool<DB>,
    wakeups: Arc<Wakeups>,
    waiters: watch::Sender<usize>,
    /// Notifications are received.
    open: AtomicBool,
    /// The task that receives them was started.
    has_task: AtomicBool,
    closed: CancellationToken,
}

/// A registered waiter, until it is dropped.
pub(crate) struct Listening<DB: Database>(Arc<Work<DB>>);

impl<DB: Database> Listening<DB> {
    /// Returns whether notifications are received at the moment, of rows that are marked.
    pub fn needs_marks(&self) -> bool {
        DB::NOTIFIES_IF_MARKED && self.0.open.load(Ordering::Relaxed)
    }
}

impl<DB: Database> Drop for Listening<DB> {
    fn drop(&mut self) {
        self.0.waiters.send_modify(|count| *count -= 1);
    }
}

impl<DB: Database> Listener<DB> {
    pub fn of_pool(pool: &Pool<DB>) -> Arc<Self> {
        of_pool(pool, || {
            let wakeups = Arc::<Wakeups>::default();
            let closed = CancellationToken::new();
            let guard = closed.clone().drop_guard();
            let work = Arc::new(Work {
                pool: pool.clone(),
                wakeups: wakeups.clone(),
                waiters: watch::Sender::new(0),
                open: AtomicBool::new(false),
                has_task: AtomicBool::new(false),
                closed,
            });
            Self { wakeups, work, _closed: guard }
        })
    }

    /// Registers a waiter. The first one opens the connection.
    pub fn register_waiter(&self) -> Listening<DB> {
        let work = &self.work;
        work.waiters.send_modify(|count| *count += 1);
        if DB::NOTIFIES && !work.has_task.swap(true, Ordering::Relaxed) {
            let (work, closed) = (work.clone(), work.closed.clone());
            threads::spawn(async move {
                closed.run_until_cancelled(work.run()).await;
            });
        }
        Listening(work.clone())
    }
}

/// Why nothing more is received.
enum Ended {
    /// There are no notifications, now and later.
    Unavailable,
    /// No task waits any more.
    Unused,
    /// The connection was lost, for this reason. It was open for this long.
    Lost(String, Duration),
    /// The connection was not opened, for this reason.
    NotOpened(String),
}

impl<DB: Database> Work<DB> {
    /// Receives notifications while a task waits. Returns if the database has none, now and later.
    async fn run(self: Arc<Self>) {
        let (mut pauses, mut reported) = (open_backoff(), None);
        loop {
            let (work, is_reported) = (self.clone(), reported.is_some());
            // A hook of the pool may panic.
            let ended = AbortOnDropHandle::new(tokio::spawn(async move { work.listen(is_reported).await }));
            let ended = ended.await.unwrap_or_else(|panic| Ended::NotOpened(panic.to_string()));
            self.open.store(false, Ordering::Relaxed);
            let has_waiters = *self.waiters.borrow() > 0;
            match ended {
                Ended::Unavailable => return,
                Ended::Lost(why, after) if has_waiters => {
                    tracing::warn!(why, "notifications have ended; they are requested again, and waiters poll");
                    reported = Some(why);
                    if after > LINGER {
                        pauses = open_backoff();
                    }
                }
                Ended::NotOpened(why) if has_waiters => {
                    // A reason is reported once.
                    if reported.as_ref() != Some(&why) {
                        tracing::warn!(why, "releases cannot be notified; waiters poll");
                        reported = Some(why);
                    }
                }
                // A failure that delays no waiter is not reported.
                Ended::Unused | Ended::Lost(..) | Ended::NotOpened(_) => {
                    (pauses, reported) = (open_backoff(), None);
                    // The sender lives in `self`, so waiting does not fail.
                    let _ = self.waiters.subscribe().wait_for(|count| *count > 0).await;
                    continue;
                }
            }
            sleep(pauses.next()).await;
        }
    }

    /// Opens the connection, and receives notifications until it is lost, or no task waits.
    /// `is_reported`: a failure was reported, whose end is reported too.
    async fn listen(&self, is_reported: bool) -> Ended {
        let mut notifications = match timeout(LIMIT, DB::listen(&self.pool)).await {
            Ok(Ok(Some(notifications))) => notifications,
            Ok(Ok(None)) => {
                tracing::info!("a pooler, or a database in memory: releases are not notified, and waiters poll");
                return Ended::Unavailable;
            }
            Ok(Err(error)) => return Ended::NotOpened(said(&error)),
            Err(_) => return Ended::NotOpened(format!("no connection was opened within {LIMIT:?}")),
        };
        if is_reported {
            tracing::info!("releases are notified again");
        }
        let opened_at = Instant::now();
        self.open.store(true, Ordering::Relaxed);
        // Tasks that already wait are woken, so that they request a notification.
        self.wakeups.notify_all();
        let ended = tokio::select! {
            why = self.receive(&mut notifications) => Ended::Lost(why, opened_at.elapsed()),
            () = self.unused() => Ended::Unused,
        };
        self.open.store(false, Ordering::Relaxed);
        let _ = timeout(LIMIT, DB::stop_listening(notifications)).await;
        ended
    }

    /// Receives notifications until the connection is lost. Returns the reason.
    async fn receive(&self, notifications: &mut DB::Notifications) -> String {
        loop {
            return match timeout(CHECK, DB::next_notification(notifications)).await {
                Ok(Ok(Some(Notification::Released(key)))) => {
                    self.wakeups.notify(&key);
                    continue;
                }
                Ok(Ok(Some(Notification::Changed))) => {
                    self.wakeups.notify_all();
                    sleep(PER_WAITER.saturating_mul(self.wakeups.count()).min(LONGEST_PAUSE)).await;
                    continue;
                }
                Ok(Ok(None)) => "the connection ended".to_owned(),
                Ok(Err(error)) => said(&error),
                Err(_) => match timeout(LIMIT, DB::check_listening(notifications)).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => said(&error),
                    Err(_) => format!("no answer within {LIMIT:?}"),
                },
            };
        }
    }

    /// Returns once no task has waited for `LINGER`.
    async fn unused(&self) {
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
