//! Connections that are kept between statements.
//!
//! A pool tests each connection that returns to it, which takes a round trip, and a connection of
//! the application's pool is checked before each use. While statements follow each other, a
//! connection is therefore kept for the next one.

use std::{
    collections::HashSet,
    mem,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use sqlx::{Pool, pool::PoolConnection};
use tokio::{
    runtime::{Handle, Id},
    time::{Instant, sleep},
};

use crate::{
    store::{Options, Store},
    sync::lock,
};

/// How long a connection is kept without a statement.
const UNUSED: Duration = Duration::from_millis(10);
/// How long a connection is kept while there is always a next statement. An older one may have been
/// lost unnoticed.
const LOAN: Duration = Duration::from_secs(1);

/// A connection that was borrowed from its pool.
pub struct Borrowed<DB: Store> {
    pub conn: PoolConnection<DB>,
    since: Instant,
    /// The runtime of the request. The connection answers only while it is driven. `None`: outside
    /// of one.
    runtime: Option<Id>,
    pub options: Arc<Options<DB>>,
}

/// The connections that are kept of one pool. A request for which none is kept waits for the pool,
/// and while one waits, every connection returns there.
pub struct Kept<DB: Store> {
    /// An application's pool, which has to have a connection left.
    application: Option<Pool<DB>>,
    state: Mutex<State<DB>>,
}

struct State<DB: Store> {
    /// The connection that was used last is at the end.
    idle: Vec<Idle<DB>>,
    /// How many requests wait for the pool.
    waiting: usize,
    /// The runtimes on which a task returns unused connections.
    runtimes: HashSet<Id>,
}

struct Idle<DB: Store> {
    borrowed: Borrowed<DB>,
    used: Instant,
}

impl<DB: Store> Kept<DB> {
    /// Keeps connections of a pool that only the locks use.
    pub fn dedicated() -> Arc<Self> {
        Self::new(None)
    }

    /// Keeps connections of an application's pool while it has another one.
    pub fn shared(application: Pool<DB>) -> Arc<Self> {
        Self::new(Some(application))
    }

    fn new(application: Option<Pool<DB>>) -> Arc<Self> {
        let state = State { idle: Vec::new(), waiting: 0, runtimes: HashSet::new() };
        Arc::new(Self { application, state: Mutex::new(state) })
    }

    /// Returns whether a connection of this runtime is kept.
    pub fn has_one(&self) -> bool {
        let runtime = this_runtime();
        lock(&self.state).idle.iter().any(|idle| idle.borrowed.runtime == runtime)
    }

    /// Returns the connection of this runtime that was used last. Otherwise the caller waits for
    /// the pool until it drops what is returned.
    pub fn take(self: &Arc<Self>) -> Result<Borrowed<DB>, Waiting<DB>> {
        let mut state = lock(&self.state);
        match state.idle.iter().rposition(|idle| idle.borrowed.is_fresh()) {
            Some(place) => Ok(state.idle.remove(place).borrowed),
            None => {
                state.waiting += 1;
                Err(Waiting(self.clone()))
            }
        }
    }

    /// Keeps a connection on which no statement is in flight and no transaction is open, or returns
    /// it to its pool.
    pub fn keep(self: &Arc<Self>, borrowed: Borrowed<DB>) {
        let Ok(runtime) = Handle::try_current() else { return borrowed.close() };
        let mut state = lock(&self.state);
        if !borrowed.is_fresh() || state.waiting > 0 || !self.has_another() {
            drop(state);
            return borrowed.give_back();
        }
        state.idle.push(Idle { borrowed, used: Instant::now() });
        let is_new = state.runtimes.insert(runtime.id());
        drop(state);
        if is_new {
            let returning = Returning { kept: Arc::downgrade(self), runtime: runtime.id() };
            runtime.spawn(returning.work());
        }
    }

    fn has_another(&self) -> bool {
        self.application.as_ref().is_none_or(|pool| !pool.is_closed() && application_has_spare(pool))
    }

    /// Returns all connections of this runtime to the pool.
    pub fn give_back(&self) {
        if let Some(runtime) = this_runtime() {
            self.give_back_unused(runtime, Duration::ZERO);
        }
    }

    /// Returns connections of a runtime that were not used for a time, and whether any is left.
    fn give_back_unused(&self, runtime: Id, time: Duration) -> bool {
        let mut state = lock(&self.state);
        let is_here = |idle: &Idle<DB>| idle.borrowed.runtime == Some(runtime);
        let is_unused = |idle: &Idle<DB>| is_here(idle) && idle.used.elapsed() >= time;
        let (unused, used) = mem::take(&mut state.idle).into_iter().partition::<Vec<_>, _>(is_unused);
        let is_left = used.iter().any(is_here);
        state.idle = used;
        drop(state);
        unused.into_iter().for_each(Idle::give_back);
        is_left
    }
}

impl<DB: Store> Drop for Kept<DB> {
    fn drop(&mut self) {
        mem::take(&mut lock(&self.state).idle).into_iter().for_each(Idle::give_back);
    }
}

impl<DB: Store> Idle<DB> {
    /// Returns the connection to its pool, which tests it. If it was lost while its runtime stood
    /// still, the test would occupy the pool's capacity without a limit.
    fn give_back(self) {
        if self.used.elapsed() < LOAN { self.borrowed.give_back() } else { self.borrowed.close() }
    }
}

/// Returns whether a request finds a connection that is idle, or may open one.
pub fn has_spare<DB: Store>(pool: &Pool<DB>) -> bool {
    pool.num_idle() > 0 || pool.size() < pool.options().get_max_connections()
}

/// The same for an application's pool. Its server may have reached a limit of its own, and opens no
/// other connection.
pub fn application_has_spare<DB: Store>(pool: &Pool<DB>) -> bool {
    pool.num_idle() > 0 || !DB::OWN_CONNECTIONS && has_spare(pool)
}

fn this_runtime() -> Option<Id> {
    Handle::try_current().ok().map(|runtime| runtime.id())
}

impl<DB: Store> Borrowed<DB> {
    pub fn new(conn: PoolConnection<DB>, options: Arc<Options<DB>>) -> Self {
        Self { conn, since: Instant::now(), runtime: this_runtime(), options }
    }

    /// Returns whether the connection was borrowed on this runtime less than [`LOAN`] ago.
    pub fn is_fresh(&self) -> bool {
        self.runtime.is_some() && self.runtime == this_runtime() && self.since.elapsed() < LOAN
    }

    /// Returns the connection to its pool. Outside a runtime the pool cannot take it back, and it
    /// is closed.
    pub fn give_back(self) {
        match Handle::try_current() {
            Ok(_) => drop(self.conn),
            Err(_) => self.close(),
        }
    }

    pub fn close(self) {
        drop(self.conn.detach());
    }
}

/// A request that waits for the pool.
pub struct Waiting<DB: Store>(Arc<Kept<DB>>);

impl<DB: Store> Drop for Waiting<DB> {
    fn drop(&mut self) {
        lock(&self.0.state).waiting -= 1;
    }
}

/// Returns unused connections of one runtime, until none is kept. If the runtime ends first, its
/// connections end with it.
struct Returning<DB: Store> {
    kept: Weak<Kept<DB>>,
    runtime: Id,
}

impl<DB: Store> Returning<DB> {
    async fn work(self) {
        loop {
            sleep(UNUSED).await;
            let Some(kept) = self.kept.upgrade() else { return };
            if !kept.give_back_unused(self.runtime, UNUSED) {
                return;
            }
        }
    }
}

impl<DB: Store> Drop for Returning<DB> {
    fn drop(&mut self) {
        let Some(kept) = self.kept.upgrade() else { return };
        lock(&kept.state).runtimes.remove(&self.runtime);
        kept.give_back_unused(self.runtime, Duration::ZERO);
    }
}
