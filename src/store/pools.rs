//! Where statements get their connections: a few of the lock's own, or the application's pool.
//!
//! An application can leave a pooled connection inside a transaction that its pool does not know of
//! (a `begin()` whose future was dropped, a BEGIN sent as text), or with other settings. A claim made
//! there would be undone later. So a lock opens connections of its own, with the options and hooks of
//! the application's pool; where it shares that pool, each connection is checked before it is used.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, Weak},
    time::Duration,
};

use sqlx::{Connection, Database, Pool};
use tokio::{
    runtime::{Handle, Id},
    sync::Semaphore,
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use crate::store::{Store, failure::Failure};
use crate::sync::lock;

/// The most connections for requests, and as many for values; one more than one, as one may be slow to open.
const MOST: u32 = 8;
const LEAST: u32 = 2;
/// The most connections for renewals and endings: one each, and another where the first brings no
/// answer.
const MOST_RENEWALS: u32 = 4;
/// How long opening a connection goes on that no caller waits for any more: a silent server would keep its place in the pool.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long taking leave of the server may take.
const GOODBYE: Duration = Duration::from_millis(200);

/// What a pool opens its connections with.
pub type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

/// A source of connections for one purpose.
pub struct Connections<DB: Database> {
    application: Pool<DB>,
    /// `None`: the application's pool is shared.
    own: Option<(Arc<OfLocks<DB>>, Purpose)>,
}

/// What connections are for. None can use up those of another purpose.
#[derive(Clone, Copy)]
pub enum Purpose {
    /// Claims, releases and looks at the lock's table.
    Requests,
    Renewals,
    /// Values and versions in tables of the application's.
    Values,
}

impl<DB: Database> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self { application: self.application.clone(), own: self.own.clone() }
    }
}

impl<DB: Store> Connections<DB> {
    /// Connections that all locks and tables of one application pool share among themselves. SQLite
    /// has none: there the application's pool is shared.
    pub fn new(application: Pool<DB>, purpose: Purpose) -> Self {
        let own = DB::OWN_CONNECTIONS.then(|| (OfLocks::find(&application), purpose));
        Self { application, own }
    }

    /// The application's pool, each connection checked before it is used.
    pub fn shared(application: Pool<DB>) -> Self {
        Self { application, own: None }
    }

    pub fn application(&self) -> &Pool<DB> {
        &self.application
    }

    pub fn is_shared(&self) -> bool {
        self.own.is_none()
    }

    /// The pool to take a connection from. With the application's pool a lock is closed, too.
    pub fn pool(&self) -> Result<Pool<DB>, Failure> {
        if self.application.is_closed() {
            return Err(Failure::NoConnection(sqlx::Error::PoolClosed));
        }
        Ok(self.own().map_or_else(|| self.application.clone(), |own| own.pool(&self.application)))
    }

    /// Whether a connection that a caller no longer waits for is opened to its end, for the next one; the permit says so
    /// until it is. With a time limit shorter than the handshake no request would ever get one.
    pub fn may_go_on(&self) -> Option<Arc<Semaphore>> {
        let runtime = Handle::try_current().ok()?;
        lock(&self.own()?.pools).get(&runtime.id()).map(|opened| opened.going_on.clone())
    }

    /// How many connections there may be.
    pub fn most(&self) -> u32 {
        self.own().map_or_else(|| self.application.options().get_max_connections(), |own| own.most)
    }

    /// Whether another statement finds a connection while this one is kept.
    pub fn has_spare(&self) -> bool {
        self.pool().is_ok_and(|pool| pool.num_idle() > 0 || pool.size() < self.most())
    }

    /// Takes leave of the server on the lock's own connections, as they become idle.
    pub async fn close_idle(&self) {
        let Some(pool) = self.own().and_then(|own| own.opened()) else { return };
        let limit = Instant::now() + GOODBYE;
        while pool.size() > 0 && Instant::now() < limit {
            match pool.try_acquire() {
                // A server that does not answer sees the connection end.
                Some(conn) => drop(timeout_at(limit, conn.close()).await),
                // One that was given back is on its way for a moment.
                None => sleep(Duration::from_millis(2)).await,
            }
        }
    }

    fn own(&self) -> Option<&Arc<Own<DB>>> {
        self.own.as_ref().map(|(own, purpose)| match purpose {
            Purpose::Requests => &own.requests,
            Purpose::Renewals => &own.renewals,
            Purpose::Values => &own.values,
        })
    }
}

/// What the locks of one application pool share.
struct OfLocks<DB: Database> {
    /// Kept, so that no other pool gets its address.
    _application: Pool<DB>,
    requests: Arc<Own<DB>>,
    renewals: Arc<Own<DB>>,
    values: Arc<Own<DB>>,
}

/// By the address of a pool's options, which lie within what all clones of the pool share.
static FOUND: LazyLock<Mutex<HashMap<usize, Weak<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

impl<DB: Database> OfLocks<DB> {
    fn find(application: &Pool<DB>) -> Arc<Self> {
        let address = std::ptr::from_ref(application.options()).addr();
        let mut found = lock(&FOUND);
        if let Some(Ok(own)) = found.get(&address).and_then(Weak::upgrade).map(Arc::downcast) {
            return own;
        }
        found.retain(|_, own| own.strong_count() > 0);
        let most = application.options().get_max_connections().clamp(LEAST, MOST);
        let (requests, renewals, values) = (Own::new(most), Own::new(MOST_RENEWALS), Own::new(most));
        let own = Arc::new(Self { _application: application.clone(), requests, renewals, values });
        let shared: Arc<dyn Any + Send + Sync> = own.clone();
        found.insert(address, Arc::downgrade(&shared));
        own
    }
}

/// Pools of the locks' own, one for each runtime that uses them: a connection that was opened on a
/// runtime answers only while that one is driven.
struct Own<DB: Database> {
    most: u32,
    pools: Mutex<HashMap<Id, Opened<DB>>>,
}

struct Opened<DB: Database> {
    pool: Pool<DB>,
    /// One permit: while the server is out of reach, not every caller leaves one behind.
    going_on: Arc<Semaphore>,
    /// What its connections are opened with: the options of the application's pool, which may be
    /// given others (a password that was changed).
    options: Arc<Options<DB>>,
    /// Closes the pool with the application's, or ends with the runtime, and takes it out.
    watch: Option<AbortHandle>,
}

impl<DB: Database> Drop for Opened<DB> {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }
}

impl<DB: Database> Own<DB> {
    fn new(most: u32) -> Arc<Self> {
        Arc::new(Self { most, pools: Mutex::default() })
    }

    /// The pool of this runtime, if it has one.
    fn opened(&self) -> Option<Pool<DB>> {
        let runtime = Handle::try_current().ok()?;
        lock(&self.pools).get(&runtime.id()).map(|opened| opened.pool.clone())
    }

    /// The pool of this runtime. Without one nothing can be awaited, nor opened: the application's.
    fn pool(self: &Arc<Self>, application: &Pool<DB>) -> Pool<DB> {
        let Ok(runtime) = Handle::try_current() else { return application.clone() };
        let options = application.connect_options();
        let mut pools = lock(&self.pools);
        if let Some(opened) = pools.get_mut(&runtime.id()) {
            if !Arc::ptr_eq(&opened.options, &options) {
                opened.pool.set_connect_options((*options).clone());
                opened.options = options;
            }
            return opened.pool.clone();
        }
        let like = application.options().clone().min_connections(0).max_connections(self.most);
        // A connection that went away shows in the statement, which is sent again.
        let like = like.acquire_timeout(application.options().get_acquire_timeout().max(HANDSHAKE));
        let pool = like.test_before_acquire(false).connect_lazy_with((*options).clone());
        let going_on = Arc::new(Semaphore::new(1));
        pools.insert(runtime.id(), Opened { pool: pool.clone(), going_on, options, watch: None });
        drop(pools);
        let ends = Ends { own: Arc::downgrade(self), runtime: runtime.id() };
        let (closed, own) = (application.close_event(), pool.clone());
        // Of a runtime that is shutting down the task is dropped within `spawn`, and takes this lock.
        let watch = runtime.spawn(async move {
            let _ends = ends;
            closed.await;
            own.close().await;
        });
        if let Some(opened) = lock(&self.pools).get_mut(&runtime.id()) {
            opened.watch = Some(watch.abort_handle());
        }
        pool
    }
}

/// Dropped with its runtime, whose connections end with it.
struct Ends<DB: Database> {
    own: Weak<Own<DB>>,
    runtime: Id,
}

impl<DB: Database> Drop for Ends<DB> {
    fn drop(&mut self) {
        if let Some(own) = self.own.upgrade() {
            let opened = lock(&own.pools).remove(&self.runtime);
            drop(opened);
        }
    }
}
