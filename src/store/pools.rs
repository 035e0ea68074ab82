//! Where statements get their connections: a few of the lock's own, or the application's pool.
//!
//! An application can leave a pooled connection inside a transaction that its pool does not know of
//! (a `begin()` whose future was dropped, a BEGIN sent as text), or with other settings. A claim
//! made there would be undone later. A lock therefore opens connections of its own, with the
//! options and hooks of the application's pool. Where it shares that pool, each connection that it
//! borrows is checked first.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, Weak},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    runtime::{Handle, Id},
    sync::Semaphore,
    task::AbortHandle,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    store::{
        Options, Store,
        failure::Failure,
        kept::{Kept, application_has_spare, has_spare},
    },
    sync::lock,
};

/// The most connections for requests, and as many again for values. There are at least two, because
/// one may be slow to open.
const MAX_REQUESTS: u32 = 8;
const MIN_REQUESTS: u32 = 2;
/// The most connections for renewals and endings: one for each, and a second for each if the first
/// does not answer, for leases of two durations. More than two of them rarely renew at once.
const MAX_RENEWALS: u32 = 8;
/// How long a connection continues to open after its caller has stopped waiting. Without this
/// limit, a server that does not answer would occupy the pool's capacity.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long closing the idle connections may take.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// A source of connections for one purpose.
pub struct Connections<DB: Store> {
    application: Pool<DB>,
    pools: Arc<SharedPools<DB>>,
    purpose: Purpose,
    /// The application's pool is used.
    is_shared: bool,
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

impl<DB: Store> Clone for Connections<DB> {
    fn clone(&self) -> Self {
        Self { application: self.application.clone(), pools: self.pools.clone(), ..*self }
    }
}

impl<DB: Store> Connections<DB> {
    /// Creates connections that all locks and tables of one application pool share. SQLite has
    /// none: there the application's pool is used.
    pub fn new(application: Pool<DB>, purpose: Purpose) -> Self {
        let pools = SharedPools::find(&application);
        Self { application, pools, purpose, is_shared: !DB::OWN_CONNECTIONS }
    }

    /// Uses the application's pool, and checks each connection that is borrowed from it.
    pub fn shared(application: Pool<DB>, purpose: Purpose) -> Self {
        Self { is_shared: true, ..Self::new(application, purpose) }
    }

    /// Returns the same source, for another purpose.
    pub fn with_purpose(&self, purpose: Purpose) -> Self {
        Self { purpose, ..self.clone() }
    }

    pub fn application(&self) -> &Pool<DB> {
        &self.application
    }

    /// Returns the connections that are kept between statements. For statements on the
    /// application's tables none is: the hooks of its pool may prepare each use of a connection for
    /// its caller.
    pub fn kept(&self) -> Option<&Arc<Kept<DB>>> {
        match (self.purpose, self.is_shared) {
            (Purpose::Values, _) => None,
            (_, true) => self.pools.kept.as_ref(),
            (purpose, false) => Some(&self.pools.of(purpose).kept),
        }
    }

    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Returns whether they are own connections for the application's tables.
    pub fn is_for_values(&self) -> bool {
        matches!(self.purpose, Purpose::Values) && !self.is_shared
    }

    /// Returns the pool to take a connection from. Closing the application's pool closes the lock
    /// too.
    pub fn pool(&self) -> Result<Pool<DB>, Failure> {
        if self.application.is_closed() {
            return Err(Failure::NoConnection(sqlx::Error::PoolClosed));
        }
        Ok(self.dedicated().map_or_else(|| self.application.clone(), |dedicated| dedicated.pool(&self.application)))
    }

    /// Returns the semaphore whose permit allows a connection to open to its end, for the next
    /// request, after its caller has stopped waiting. The permit is held until then. Without this,
    /// a time limit shorter than the handshake would leave every request without a connection.
    pub fn background_permit(&self) -> Option<Arc<Semaphore>> {
        let runtime = Handle::try_current().ok()?;
        lock(&self.dedicated()?.pools).get(&runtime.id()).map(|opened| opened.background_open.clone())
    }

    /// Returns whether a connection was not opened because a pooler rejected the mark of own
    /// sessions. Connections are then opened without it.
    pub fn opens_unmarked(&self, failure: &Failure) -> bool {
        let Failure::NoConnection(error) = failure else { return false };
        let Some(dedicated) = self.dedicated().filter(|_| DB::refuses_own_session(error)) else { return false };
        dedicated
            .opened()
            .inspect(|pool| pool.set_connect_options((*self.application.connect_options()).clone()))
            .is_some()
    }

    /// Returns whether another statement finds a connection while this one is kept.
    pub fn has_spare(&self) -> bool {
        let has_kept = || self.kept().is_some_and(|kept| kept.has_one());
        let has_spare = if self.is_shared { application_has_spare } else { has_spare };
        self.pool().is_ok_and(|pool| has_spare(&pool) || has_kept())
    }

    /// Closes the lock's own connections as they become idle, and notifies the server.
    pub async fn close_idle(&self) {
        let Some(pool) = self.dedicated().and_then(|dedicated| dedicated.opened()) else { return };
        let limit = Instant::now() + CLOSE_TIMEOUT;
        if let Some(kept) = self.kept() {
            kept.give_back();
        }
        while pool.size() > 0 && Instant::now() < limit {
            match pool.try_acquire() {
                // If the server does not answer, the connection is dropped.
                Some(conn) => drop(timeout_at(limit, conn.close()).await),
                // A connection that was just given back is available only after a moment.
                None => sleep(Duration::from_millis(2)).await,
            }
        }
    }

    fn dedicated(&self) -> Option<&Arc<DedicatedPools<DB>>> {
        (!self.is_shared).then(|| self.pools.of(self.purpose))
    }
}

/// The connections that the locks of one application pool share.
struct SharedPools<DB: Store> {
    /// Kept, so that no other pool gets the same address.
    _application: Pool<DB>,
    /// Connections of the application's pool. A database in memory would end with one that is kept
    /// when its runtime ends.
    kept: Option<Arc<Kept<DB>>>,
    requests: Arc<DedicatedPools<DB>>,
    renewals: Arc<DedicatedPools<DB>>,
    values: Arc<DedicatedPools<DB>>,
}

/// The shared connections, by the address of a pool's options, which lie within what all clones of
/// the pool share.
static FOUND: LazyLock<Mutex<HashMap<usize, Weak<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

impl<DB: Store> SharedPools<DB> {
    fn find(application: &Pool<DB>) -> Arc<Self> {
        let address = std::ptr::from_ref(application.options()).addr();
        let mut found = lock(&FOUND);
        if let Some(Ok(dedicated)) = found.get(&address).and_then(Weak::upgrade).map(Arc::downcast) {
            return dedicated;
        }
        found.retain(|_, dedicated| dedicated.strong_count() > 0);
        let most = application.options().get_max_connections().clamp(MIN_REQUESTS, MAX_REQUESTS);
        let (requests, renewals) = (DedicatedPools::new(most, true), DedicatedPools::new(MAX_RENEWALS, true));
        let values = DedicatedPools::new(most, false);
        let in_memory = DB::may_be_in_memory(&application.connect_options());
        let kept = (!in_memory).then(|| Kept::shared(application.clone()));
        let dedicated = Arc::new(Self { _application: application.clone(), kept, requests, renewals, values });
        let shared: Arc<dyn Any + Send + Sync> = dedicated.clone();
        found.insert(address, Arc::downgrade(&shared));
        dedicated
    }

    fn of(&self, purpose: Purpose) -> &Arc<DedicatedPools<DB>> {
        match purpose {
            Purpose::Requests => &self.requests,
            Purpose::Renewals => &self.renewals,
            Purpose::Values => &self.values,
        }
    }
}

/// The locks' own pools, one for each runtime that uses them. A connection that was opened on a
/// runtime answers only while that runtime is driven.
struct DedicatedPools<DB: Store> {
    most: u32,
    /// Sessions have the mark of own sessions. Those for values have none: what they do to the
    /// application's tables is done at the application's isolation level.
    marked: bool,
    pools: Mutex<HashMap<Id, Opened<DB>>>,
    kept: Arc<Kept<DB>>,
}

struct Opened<DB: Store> {
    pool: Pool<DB>,
    /// Holds one permit: while the server is unreachable, not every caller leaves an attempt
    /// behind.
    background_open: Arc<Semaphore>,
    /// The options of its connections: those of the application's pool, which may be replaced
    /// (after a change of password).
    options: Arc<Options<DB>>,
    /// Closes the pool together with the application's, or ends with the runtime, and removes the
    /// pool from the map.
    watch: Option<AbortHandle>,
}

impl<DB: Store> Drop for Opened<DB> {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            watch.abort();
        }
    }
}

impl<DB: Store> DedicatedPools<DB> {
    fn new(most: u32, marked: bool) -> Arc<Self> {
        Arc::new(Self { most, marked, pools: Mutex::default(), kept: Kept::dedicated() })
    }

    /// Returns the options of its connections, from those of the application's pool.
    fn own_options(&self, options: &Options<DB>) -> Options<DB> {
        if self.marked { DB::own_session(options.clone()) } else { options.clone() }
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
                opened.pool.set_connect_options(self.own_options(&options));
                opened.options = options;
            }
            return opened.pool.clone();
        }
        let like = application.options().clone().min_connections(0).max_connections(self.most);
        // A lost connection shows in the statement, which is sent again.
        let like = like.acquire_timeout(application.options().get_acquire_timeout().max(HANDSHAKE));
        let pool = like.test_before_acquire(false).connect_lazy_with(self.own_options(&options));
        let background_open = Arc::new(Semaphore::new(1));
        pools.insert(runtime.id(), Opened { pool: pool.clone(), background_open, options, watch: None });
        drop(pools);
        let remove = RemoveOnDrop { dedicated: Arc::downgrade(self), runtime: runtime.id() };
        let (closed, dedicated) = (application.close_event(), pool.clone());
        // On a runtime that is shutting down, `spawn` drops the task at once, and dropping it takes
        // this lock.
        let watch = runtime.spawn(async move {
            let _remove = remove;
            closed.await;
            dedicated.close().await;
        });
        if let Some(opened) = lock(&self.pools).get_mut(&runtime.id()) {
            opened.watch = Some(watch.abort_handle());
        }
        pool
    }
}

/// Removes the pool when the runtime drops the task. The connections end with their runtime.
struct RemoveOnDrop<DB: Store> {
    dedicated: Weak<DedicatedPools<DB>>,
    runtime: Id,
}

impl<DB: Store> Drop for RemoveOnDrop<DB> {
    fn drop(&mut self) {
        if let Some(dedicated) = self.dedicated.upgrade() {
            let opened = lock(&dedicated.pools).remove(&self.runtime);
            drop(opened);
        }
    }
}
