//! Where statements get their connections: a few of the lock's own, or the application's pool.
//!
//! An application can leave a pooled connection inside a transaction that its pool does not know of
//! (a `begin()` whose future was dropped, a BEGIN sent as text), or with other settings. A claim
//! made there would be undone later. A lock therefore opens connections of its own, with the
//! options and hooks of the application's pool. Where it shares that pool, each connection is
//! checked before use.

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

/// The most connections for requests, and as many again for values. There are at least two, because
/// one may be slow to open.
const MOST: u32 = 8;
const LEAST: u32 = 2;
/// The most connections for renewals and endings: one for each, and a second for each if the first
/// does not answer.
const MOST_RENEWALS: u32 = 4;
/// How long a connection continues to open after its caller has stopped waiting. Without this
/// limit, a server that does not answer would occupy the pool's capacity.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long closing the idle connections may take.
const GOODBYE: Duration = Duration::from_millis(200);

/// The options with which a pool opens its connections.
pub type Options<DB> = <<DB as sqlx::Database>::Connection as Connection>::Options;

/// A source of connections for one purpose.
pub struct Connections<DB: Database> {
    application: Pool<DB>,
    /// `None`: the application's pool is used.
    own: Option<(Arc<OfLocks<DB>>, Purpose)>,
}

/// The purpose of connections. None can use up the connections of another.
#[derive(Clone, Copy)]
pub enum Purpose {
    /// Claims, releases and reads of the lock's table.
    Requests,
    Renewals,
    /// Values and versions in the application's tables.
    Values,
}

impl<DB: Database> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self { application: self.application.clone(), own: self.own.clone() }
    }
}

impl<DB: Store> Connections<DB> {
    /// Creates connections that all locks and tables of one application pool share. SQLite has
    /// none: there the application's pool is used.
    pub fn new(application: Pool<DB>, purpose: Purpose) -> Self {
        let own = DB::OWN_CONNECTIONS.then(|| (OfLocks::find(&application), purpose));
        Self { application, own }
    }

    /// Uses the application's pool, and checks each connection before use.
    pub fn shared(application: Pool<DB>) -> Self {
        Self { application, own: None }
    }

    pub fn application(&self) -> &Pool<DB> {
        &self.application
    }

    pub fn is_shared(&self) -> bool {
        self.own.is_none()
    }

    /// Returns the pool to take a connection from. Closing the application's pool closes the lock
    /// too.
    pub fn pool(&self) -> Result<Pool<DB>, Failure> {
        if self.application.is_closed() {
            return Err(Failure::NoConnection(sqlx::Error::PoolClosed));
        }
        Ok(self.own().map_or_else(|| self.application.clone(), |own| own.pool(&self.application)))
    }

    /// Returns the semaphore whose permit allows a connection to open to its end, for the next
    /// request, after its caller has stopped waiting. The permit is held until then. Without this,
    /// a time limit shorter than the handshake would leave every request without a connection.
    pub fn may_go_on(&self) -> Option<Arc<Semaphore>> {
        let runtime = Handle::try_current().ok()?;
        lock(&self.own()?.pools).get(&runtime.id()).map(|opened| opened.going_on.clone())
    }

    /// Returns the maximum number of connections.
    pub fn most(&self) -> u32 {
        self.own().map_or_else(|| self.application.options().get_max_connections(), |own| own.most)
    }

    /// Returns whether another statement finds a connection while this one is kept.
    pub fn has_spare(&self) -> bool {
        self.pool().is_ok_and(|pool| pool.num_idle() > 0 || pool.size() < self.most())
    }

    /// Closes the lock's own connections as they become idle, and notifies the server.
    pub async fn close_idle(&self) {
        let Some(pool) = self.own().and_then(|own| own.opened()) else { return };
        let limit = Instant::now() + GOODBYE;
        while pool.size() > 0 && Instant::now() < limit {
            match pool.try_acquire() {
                // If the server does not answer, the connection is dropped.
                Some(conn) => drop(timeout_at(limit, conn.close()).await),
                // A connection that was just given back is available only after a moment.
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

/// The connections that the locks of one application pool share.
struct OfLocks<DB: Database> {
    /// Kept, so that no other pool gets the same address.
    _application: Pool<DB>,
    requests: Arc<Own<DB>>,
    renewals: Arc<Own<DB>>,
    values: Arc<Own<DB>>,
}

/// The shared connections, by the address of a pool's options, which lie within what all clones of
/// the pool share.
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

/// The locks' own pools, one for each runtime that uses them. A connection that was opened on a
/// runtime answers only while that runtime is driven.
struct Own<DB: Database> {
    most: u32,
    pools: Mutex<HashMap<Id, Opened<DB>>>,
}

struct Opened<DB: Database> {
    pool: Pool<DB>,
    /// Holds one permit: while the server is unreachable, not every caller leaves an attempt
    /// behind.
    going_on: Arc<Semaphore>,
    /// The options of its connections: those of the application's pool, which may be replaced
    /// (after a change of password).
    options: Arc<Options<DB>>,
    /// Closes the pool together with the application's, or ends with the runtime, and removes the
    /// pool from the map.
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

    /// Returns the pool of this runtime, if there is one.
    fn opened(&self) -> Option<Pool<DB>> {
        let runtime = Handle::try_current().ok()?;
        lock(&self.pools).get(&runtime.id()).map(|opened| opened.pool.clone())
    }

    /// Returns the pool of this runtime, and creates it if necessary. Outside a runtime nothing can
    /// be awaited or opened, so the application's pool is returned.
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
        // A lost connection shows in the statement, which is sent again.
        let like = like.acquire_timeout(application.options().get_acquire_timeout().max(HANDSHAKE));
        let pool = like.test_before_acquire(false).connect_lazy_with((*options).clone());
        let going_on = Arc::new(Semaphore::new(1));
        pools.insert(runtime.id(), Opened { pool: pool.clone(), going_on, options, watch: None });
        drop(pools);
        let ends = Ends { own: Arc::downgrade(self), runtime: runtime.id() };
        let (closed, own) = (application.close_event(), pool.clone());
        // On a runtime that is shutting down, `spawn` drops the task at once, and dropping it takes
        // this lock.
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

/// Removes the pool when the runtime drops the task. The connections end with their runtime.
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
