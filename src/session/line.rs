//! The library's own sessions of one purpose: how they are opened, lent and closed.
//!
//! A session is opened with the options and the hook `after_connect` of the application's pool. One
//! is opened at a time, unless that takes long, and its opening is never cancelled: a server may
//! count openings that are cut short. One that fails is followed by a pause for the whole process.

use std::{
    mem,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use chrono::{DateTime, Utc};
use sqlx::{ConnectOptions as _, Connection as _, Pool};
use tokio::sync::Notify;

use crate::{
    pacing::{Backoff, open_backoff},
    session::{
        threads,
        time::Instant,
        timers::{timeout, timeout_at},
    },
    store::{
        Options, Reply, Store,
        failure::Failure,
        fault::{Shared, fault, said},
    },
    sync::lock,
};

/// How long opening a session may take.
const OPENING: Duration = Duration::from_secs(10);
/// After this time, another connection is tried, to learn why none opens.
const SLOW: Duration = Duration::from_secs(1);
/// How long closing a session may take.
const CLOSING: Duration = Duration::from_secs(1);
/// How long a session is kept without a use, if there is another one, and if there is none: for
/// less than the `wait_timeout` of MySQL's own sessions.
const UNUSED: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(50)];

/// The sessions of one purpose.
pub(super) struct Line<DB: Store> {
    application: Pool<DB>,
    most: usize,
    /// They are driven by the threads for renewals.
    renewals: bool,
    state: Mutex<State<DB>>,
    /// Notified when a session is idle, or when none could be opened.
    changed: Notify,
    /// How long a reply usually takes, in microseconds.
    usual_reply: AtomicU64,
    /// The database was found to be one that may have own sessions.
    may_have_own: AtomicBool,
    /// It has none after all. The application's pool is used instead.
    unusable: AtomicBool,
}

struct State<DB: Store> {
    /// The session that was used last is at the end.
    idle: Vec<Session<DB>>,
    /// The number of sessions, with those that are lent or being opened.
    count: usize,
    /// Since when the last session is being opened, if one is.
    opening: Option<Instant>,
    failed: Option<Failed<DB>>,
    pauses: Backoff,
    /// A task closes unused sessions.
    closing: bool,
    /// Sessions that were used before are closed instead of used: one of them has fallen silent.
    suspect: Option<Instant>,
}

/// A session of the library's own.
pub(super) struct Session<DB: Store> {
    pub conn: DB::Connection,
    /// What the server's clock showed, and when that was known.
    pub clock: DateTime<Utc>,
    pub clock_read_at: Instant,
    /// When it was used last.
    used: Instant,
}

/// An opening that failed.
struct Failed<DB: Store> {
    error: Arc<sqlx::Error>,
    /// The options of the application's pool then. Others may have a new password.
    options: Arc<Options<DB>>,
    /// When another one is begun.
    again_at: Instant,
}

enum Next<DB: Store> {
    Session(Session<DB>),
    Wait(Instant),
    Unusable,
}

impl<DB: Store> Line<DB> {
    pub fn new(application: &Pool<DB>, most: usize, renewals: bool) -> Arc<Self> {
        let state = State {
            idle: Vec::new(),
            count: 0,
            opening: None,
            failed: None,
            pauses: open_backoff(),
            closing: false,
            suspect: None,
        };
        let (application, state) = (application.clone(), Mutex::new(state));
        Arc::new(Self {
            application,
            most,
            renewals,
            state,
            changed: Notify::new(),
            usual_reply: AtomicU64::new(0),
            may_have_own: AtomicBool::new(false),
            unusable: AtomicBool::new(false),
        })
    }

    /// A file of SQLite may be created after its first lock. Until then it may be a database in
    /// memory.
    pub fn is_usable(&self) -> bool {
        if self.unusable.load(Ordering::Relaxed) {
            return false;
        }
        if !self.may_have_own.load(Ordering::Relaxed) {
            self.may_have_own.store(DB::has_own_sessions(&self.application), Ordering::Relaxed);
        }
        self.may_have_own.load(Ordering::Relaxed)
    }

    /// Waits for a session, up to the limit. Returns `None` if the application's pool is to be
    /// used.
    pub async fn take(self: &Arc<Self>, limit: Instant) -> Result<Option<Session<DB>>, Failure> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on, no change is missed.
            changed.as_mut().enable();
            let until = match self.next()? {
                Next::Session(session) => return Ok(Some(session)),
                Next::Unusable => return Ok(None),
                Next::Wait(until) => until,
            };
            if timeout_at(limit.min(until), changed).await.is_err() && Instant::now() >= limit {
                return Err(Failure::NoConnection(self.why_none()));
            }
        }
    }

    fn next(self: &Arc<Self>) -> Result<Next<DB>, Failure> {
        if self.application.is_closed() {
            self.close_idle();
            return Err(Failure::NoConnection(sqlx::Error::PoolClosed));
        }
        if !self.is_usable() {
            return Ok(Next::Unusable);
        }
        let mut state = lock(&self.state);
        if let Some(session) = state.take_idle() {
            return Ok(Next::Session(session));
        }
        let (now, options) = (Instant::now(), self.application.connect_options());
        match state.failed.as_ref().filter(|failed| Arc::ptr_eq(&failed.options, &options)) {
            // A pause mends a wrong password as little as another login does. A session that was
            // opened before serves on.
            Some(failed) if now < failed.again_at && state.count == 0 && !fault(&failed.error).is_transient() => {
                Err(Failure::NoConnection(failed.error()))
            }
            Some(failed) if now < failed.again_at => Ok(Next::Wait(failed.again_at)),
            _ => {
                // One is opened at a time, unless that takes long.
                let next = state.opening.map_or(now, |since| since + SLOW);
                if now < next {
                    return Ok(Next::Wait(next));
                }
                if state.count >= self.most {
                    return Ok(Next::Wait(now + SLOW));
                }
                state.opening = Some(now);
                state.count += 1;
                drop(state);
                let opening = open(Arc::downgrade(self), self.application.clone());
                self.spawn(opening);
                Ok(Next::Wait(now + SLOW))
            }
        }
    }

    /// Starts a task on the threads that drive these sessions.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if self.renewals { threads::spawn_renewal(task) } else { threads::spawn(task) }
    }

    pub fn why_none(&self) -> sqlx::Error {
        if self.application.is_closed() {
            return sqlx::Error::PoolClosed;
        }
        lock(&self.state).failed.as_ref().map_or(sqlx::Error::PoolTimedOut, Failed::error)
    }

    fn opened(self: &Arc<Self>, opened: Reply<Option<Session<DB>>>) {
        let mut state = lock(&self.state);
        state.opening = None;
        match opened {
            Ok(Some(session)) => {
                if state.failed.take().is_some() {
                    threads::emit(|| tracing::info!(target: threads::RECOVERED, "sessions can be opened again"));
                }
                state.pauses = open_backoff();
                state.idle.push(Session { used: Instant::now(), ..session });
                drop(state);
                self.changed.notify_waiters();
                self.close_unused_later();
            }
            Ok(None) => {
                state.count -= 1;
                self.unusable.store(true, Ordering::Relaxed);
                drop(state);
                self.changed.notify_waiters();
            }
            Err(error) => {
                state.count -= 1;
                let pause = state.pauses.next();
                self.failed(state, error, pause);
            }
        }
    }

    fn failed(&self, mut state: std::sync::MutexGuard<'_, State<DB>>, error: sqlx::Error, pause: Duration) {
        if state.failed.is_none() {
            let said = said(&error);
            threads::emit(move || tracing::warn!(error = said, "no session could be opened; trying until one can"));
        }
        let options = self.application.connect_options();
        state.failed = Some(Failed { error: Arc::new(error), options, again_at: Instant::now() + pause });
        drop(state);
        self.changed.notify_waiters();
    }

    /// Takes back a session on which no statement is in flight and no transaction is open.
    pub fn give_back(self: &Arc<Self>, session: Session<DB>) {
        lock(&self.state).idle.push(Session { used: Instant::now(), ..session });
        self.changed.notify_one();
        self.close_unused_later();
    }

    /// Records that a session that was lent was closed.
    pub fn closed(&self) {
        lock(&self.state).count -= 1;
        self.changed.notify_one();
    }

    /// Records that a session does not answer since then: others may have been lost with it.
    pub fn suspect(&self, since: Instant) {
        let mut state = lock(&self.state);
        state.suspect = Some(state.suspect.map_or(since, |before| before.max(since)));
        // The silent session may never be given back.
        drop(state);
        self.changed.notify_one();
    }

    pub fn replied(&self, after: Duration) {
        let (usual, after) = (self.usual_reply.load(Ordering::Relaxed), u64::try_from(after.as_micros()));
        self.usual_reply.store((3 * usual + after.unwrap_or(usual)) / 4, Ordering::Relaxed);
    }

    pub fn usual_reply(&self) -> Duration {
        Duration::from_micros(self.usual_reply.load(Ordering::Relaxed))
    }

    pub fn close_idle(&self) {
        close(lock(&self.state).take_all(|_, _| true));
    }

    fn close_unused_later(self: &Arc<Self>) {
        if mem::replace(&mut lock(&self.state).closing, true) {
            return;
        }
        let (line, closed) = (Arc::downgrade(self), self.application.close_event());
        threads::spawn(async move {
            let mut closed = std::pin::pin!(closed);
            loop {
                let is_closed = timeout(UNUSED[0] / 4, &mut closed).await.is_ok();
                let Some(line) = line.upgrade() else { return };
                if is_closed {
                    lock(&line.state).closing = false;
                    line.changed.notify_waiters();
                    return line.close_idle();
                }
                let mut state = lock(&line.state);
                let unused = state.take_all(|place, used| used.elapsed() >= UNUSED[usize::from(place == 0)]);
                state.closing = !state.idle.is_empty();
                let ends = state.idle.is_empty();
                drop(state);
                close(unused);
                if ends {
                    return;
                }
            }
        });
    }
}

impl<DB: Store> State<DB> {
    /// Takes the session that was used last, unless it may have been lost.
    fn take_idle(&mut self) -> Option<Session<DB>> {
        while let Some(session) = self.idle.pop() {
            if self.suspect.is_none_or(|since| session.used > since) {
                return Some(session);
            }
            self.count -= 1;
        }
        None
    }

    /// Takes the idle sessions for which this holds of their place and last use.
    fn take_all(&mut self, which: impl Fn(usize, Instant) -> bool) -> Vec<DB::Connection> {
        let (taken, left): (Vec<_>, Vec<_>) =
            mem::take(&mut self.idle).into_iter().enumerate().partition(|(place, idle)| which(*place, idle.used));
        self.idle = left.into_iter().map(|(_, idle)| idle).collect();
        self.count -= taken.len();
        taken.into_iter().map(|(_, idle)| idle.conn).collect()
    }
}

impl<DB: Store> Failed<DB> {
    fn error(&self) -> sqlx::Error {
        Shared::wrap(&self.error)
    }
}

impl<DB: Store> Drop for Line<DB> {
    fn drop(&mut self) {
        self.close_idle();
    }
}

fn close<C: sqlx::Connection + 'static>(sessions: Vec<C>) {
    if sessions.is_empty() {
        return;
    }
    threads::spawn(async move {
        for session in sessions {
            // If the server does not answer, the session is dropped.
            let _ = timeout(CLOSING, session.close()).await;
        }
    });
}

async fn open<DB: Store>(line: Weak<Line<DB>>, application: Pool<DB>) {
    let opener = line.clone();
    // A hook of the pool may panic.
    let opening = tokio::spawn(async move {
        let options = application.connect_options();
        match open_with(&opener, &application, DB::own_session((*options).clone())).await {
            // A pooler rejects the mark of own sessions. There they are opened without it.
            Err(error) if DB::refuses_own_session(&error) => open_with(&opener, &application, (*options).clone()).await,
            opened => opened,
        }
    });
    let opened = opening.await.unwrap_or(Err(sqlx::Error::WorkerCrashed));
    if let Some(line) = line.upgrade() {
        line.opened(opened);
    }
}

/// Opens one session, through a pool that is made for it. It runs the hook `after_connect`.
async fn open_with<DB: Store>(
    line: &Weak<Line<DB>>,
    application: &Pool<DB>,
    options: Options<DB>,
) -> Reply<Option<Session<DB>>> {
    let like = application.options().clone().min_connections(0).max_connections(1).acquire_timeout(OPENING);
    let like = like.idle_timeout(None).max_lifetime(None).test_before_acquire(false);
    let pool = like.connect_lazy_with(options.disable_statement_logging());
    let mut acquiring = std::pin::pin!(pool.acquire());
    let opened = match timeout(SLOW, &mut acquiring).await {
        Ok(opened) => opened,
        Err(_) => {
            let mut probing = std::pin::pin!(probe(line, application.connect_options()));
            tokio::select! {
                opened = &mut acquiring => opened,
                () = &mut probing => acquiring.await,
            }
        }
    };
    let mut conn = opened?.detach();
    let begun = timeout(OPENING, DB::begin_session(&mut conn)).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))?;
    let now = Instant::now();
    Ok(begun.map(|clock| Session { conn, clock, clock_read_at: now, used: now }))
}

/// Learns why no session opens, for those that wait for one. The pool would tell that its time was
/// over. The mark of own sessions, which a pooler may reject, is not why.
async fn probe<DB: Store>(line: &Weak<Line<DB>>, options: Arc<Options<DB>>) {
    match timeout(OPENING, DB::Connection::connect_with(&options)).await {
        Ok(Ok(conn)) => drop(timeout(CLOSING, conn.close()).await),
        Ok(Err(error)) => {
            if let Some(line) = line.upgrade() {
                // The opening goes on.
                line.failed(lock(&line.state), error, Duration::ZERO);
            }
        }
        Err(_) => {}
    }
}

#[cfg(all(test, feature = "sqlite"))]
#[path = "line_tests.rs"]
pub(super) mod tests;
