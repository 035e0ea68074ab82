//! Where statements get their sessions: from the library's own, which nothing of the application
//! can reach, or from the application's pool.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    pin::Pin,
    sync::{Arc, LazyLock, Mutex, Weak},
    time::Duration,
};

use sqlx::{Connection as _, Pool};
use tokio::sync::Notify;

use crate::{
    retry::{Repeat, outage_pause},
    session::{
        line::Line,
        loan::{Loan, Patience},
        threads,
        time::Instant,
        timers::{Elapsed, timeout, timeout_at},
    },
    store::{Options, Reply, Store, failure::Failure},
    sync::lock,
};

/// The most sessions for requests. A second one is opened while the first is busy; the others
/// replace sessions that do not answer, and serve the locks that send each request by itself.
const MAX_REQUESTS: usize = 8;
/// The most sessions for renewals and endings.
const MAX_RENEWALS: usize = 4;

/// The most connections for values, and how long one may take to open at least.
const MAX_VALUES: u32 = 8;
const OPENING: Duration = Duration::from_secs(5);

/// After how long without a reply a statement that is sent repeatedly is sent on another session,
/// at least.
const LEAST: Duration = Duration::from_secs(1);

/// What sessions are for. None can use up those of another purpose.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Claims, releases and reads of the library's tables.
    Requests,
    Renewals,
    /// Statements on the application's tables, over a pool like the application's, whose hooks may
    /// prepare its connections for them.
    Values,
}

/// A source of sessions for one purpose. The sessions of a database end with its last source.
pub struct Sessions<DB: Store> {
    home: Arc<Home<DB>>,
    purpose: Purpose,
    /// The application's pool is used.
    is_shared: bool,
}

impl<DB: Store> Clone for Sessions<DB> {
    fn clone(&self) -> Self {
        Self { home: self.home.clone(), ..*self }
    }
}

impl<DB: Store> Sessions<DB> {
    /// Creates a source that all locks and tables of one application pool share.
    pub fn new(application: Pool<DB>, purpose: Purpose) -> Self {
        Self { home: Home::find(&application), purpose, is_shared: false }
    }

    /// Uses the application's pool, and checks each connection that is borrowed from it.
    pub fn share_pool(&mut self) {
        self.is_shared = true;
    }

    /// Returns the same source, for another purpose.
    pub fn with_purpose(&self, purpose: Purpose) -> Self {
        Self { purpose, ..self.clone() }
    }

    pub fn application(&self) -> &Pool<DB> {
        &self.home.application
    }

    /// Returns whether the application asked for its own pool to be used.
    #[cfg(feature = "schedule")]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Waits for a session on which a statement commits by itself, up to the limit. Closing the
    /// application's pool closes the sessions too.
    pub fn take(&self, limit: Instant) -> Taking<'_, DB> {
        // The futures of callers stay small, and their types shallow.
        Box::pin(async move {
            if self.application().is_closed() {
                return Err(Failure::NoConnection(sqlx::Error::PoolClosed));
            }
            let Home { application, requests, renewals, .. } = &*self.home;
            let own = match self.purpose {
                _ if self.is_shared || !requests.is_usable() => None,
                Purpose::Values => return Loan::borrow_checked(&self.home.values(), true, limit).await,
                Purpose::Requests => take(requests, limit).await?,
                Purpose::Renewals => take_first(renewals, requests, limit).await?,
            };
            match own {
                Some(own) => Ok(own),
                None => Loan::borrow_checked(application, false, limit).await,
            }
        })
    }

    /// Waits for a session that has just answered a ping, for a statement that is sent on no second
    /// session.
    pub async fn answering(&self, limit: Instant) -> Result<Loan<DB>, Failure> {
        loop {
            let mut conn = self.take(limit).await?;
            // A session that is silent is given up in time for another one.
            let soon = limit.min(Instant::now() + ((limit - Instant::now()) / 4).max(LEAST));
            let error = match timeout_at(soon, conn.get().ping()).await {
                Ok(Ok(())) => return Ok(conn),
                Ok(Err(error)) => error,
                Err(Elapsed) => sqlx::Error::PoolTimedOut,
            };
            // The session was closed while it was idle, or is silent. So may the other idle ones.
            conn.line().iter().for_each(|line| line.suspect(Instant::now()));
            drop(conn);
            if Instant::now() >= limit {
                return Err(Failure::NoConnection(error));
            }
            outage_pause().await;
        }
    }

    /// Sends one statement, on a session of its own, up to the limit.
    pub async fn send<T>(
        &self,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = self.take(limit).await?;
        let reply = timeout_at(limit, statement(conn.get())).await;
        conn.settle(reply)
    }

    /// Sends one statement, on a session that has just answered a ping.
    pub async fn send_once<T>(
        &self,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = self.answering(limit).await?;
        let reply = timeout_at(limit, statement(conn.get())).await;
        conn.settle(reply)
    }

    /// Waits for a session, and notifies that one is silent if this takes long: the check of a
    /// connection of the application's pool may have no reply.
    pub(super) async fn take_with(&self, patience: Patience<'_>) -> Result<Loan<DB>, Failure> {
        let mut taking = self.take(patience.limit);
        match timeout(patience.silence, &mut taking).await {
            Ok(taken) => taken,
            Err(Elapsed) => {
                patience.silent.notify_one();
                taking.await
            }
        }
    }

    async fn send_with<T>(
        &self,
        patience: Patience<'_>,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = self.take_with(patience).await?;
        let (line, sent) = (conn.line(), Instant::now());
        let reply = patience.reply(line.as_deref(), sent, statement(conn.get())).await;
        conn.settle(reply)
    }

    /// Sends a statement that may be carried out more than once until its reply is final or the
    /// limit is reached, on a second session too if the first does not answer in time. A database
    /// of one writer answers, or waits for another process, as it would on every session.
    ///
    /// The statement is copied for each attempt. The compiler does not accept the future as `Send`
    /// if one closure with references is called several times.
    pub async fn send_repeatedly<T>(
        &self,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T> + Copy,
    ) -> Result<T, Failure> {
        let mut repeat = Repeat::until(limit);
        loop {
            let silent = Notify::new();
            let silence = ((limit - Instant::now()) / 4).max(LEAST);
            let mut first = std::pin::pin!(self.send_with(Patience { silence, limit, silent: &silent }, statement));
            let reply = tokio::select! {
                biased;
                reply = &mut first => reply,
                () = silent.notified(), if !DB::ONE_WRITER => tokio::select! {
                    reply = first => reply,
                    reply = self.send(limit, statement) => reply,
                },
            };
            if let Some(reply) = repeat.final_or_pause(reply).await {
                return reply;
            }
        }
    }

    /// Returns how long a reply usually takes.
    pub fn usual_reply(&self) -> Duration {
        self.line().usual_reply()
    }

    /// Returns why no session was available.
    pub fn why_none(&self) -> sqlx::Error {
        if self.is_shared { sqlx::Error::PoolTimedOut } else { self.line().why_none() }
    }

    /// Closes the sessions that are idle, and notifies the server.
    pub fn close_idle(&self) {
        if !self.is_shared {
            self.line().close_idle();
        }
    }

    fn line(&self) -> &Arc<Line<DB>> {
        if self.purpose == Purpose::Renewals { &self.home.renewals } else { &self.home.requests }
    }
}

/// Waits for a session of this line. Returns `None` if the application's pool is to be used.
async fn take<DB: Store>(line: &Arc<Line<DB>>, limit: Instant) -> Result<Option<Loan<DB>>, Failure> {
    Ok(line.take(limit).await?.map(|session| Loan::own(session, line)))
}

/// Waits for a session for renewals. If none can be opened, or not in time, one for requests serves
/// them.
async fn take_first<DB: Store>(
    renewals: &Arc<Line<DB>>,
    requests: &Arc<Line<DB>>,
    limit: Instant,
) -> Result<Option<Loan<DB>>, Failure> {
    let mut own = std::pin::pin!(take(renewals, limit));
    let now = Instant::now();
    match timeout_at(now + (limit - now) / 4, &mut own).await {
        Ok(Ok(taken)) => Ok(taken),
        Ok(Err(_)) => take(requests, limit).await,
        Err(_) => tokio::select! {
            Ok(taken) = own => Ok(taken),
            Ok(taken) = take(requests, limit) => Ok(taken),
            else => Err(Failure::NoConnection(renewals.why_none())),
        },
    }
}

/// The wait for a session.
type Taking<'a, DB> = Pin<Box<dyn Future<Output = Result<Loan<DB>, Failure>> + Send + 'a>>;

/// The sessions that the locks of one application pool share.
struct Home<DB: Store> {
    application: Pool<DB>,
    requests: Arc<Line<DB>>,
    renewals: Arc<Line<DB>>,
    /// A pool like the application's, which the application cannot exhaust.
    values: Mutex<Option<Opened<DB>>>,
}

/// A pool, and the options with which it opens connections.
type Opened<DB> = (Pool<DB>, Arc<Options<DB>>);

impl<DB: Store> Home<DB> {
    fn find(application: &Pool<DB>) -> Arc<Self> {
        of_pool(application, || {
            let requests = Line::new(application, if DB::ONE_WRITER { 1 } else { MAX_REQUESTS }, false);
            let renewals = Line::new(application, if DB::ONE_WRITER { 1 } else { MAX_RENEWALS }, true);
            Self { application: application.clone(), requests, renewals, values: Mutex::default() }
        })
    }

    /// Returns the pool for values, with the application's current options.
    fn values(&self) -> Pool<DB> {
        let application = &self.application;
        if DB::ONE_WRITER {
            return application.clone();
        }
        let options = application.connect_options();
        let mut opened = lock(&self.values);
        if let Some((pool, of)) = &mut *opened {
            if !Arc::ptr_eq(of, &options) {
                pool.set_connect_options((*options).clone());
                *of = options;
            }
            return pool.clone();
        }
        let like = application.options().clone().min_connections(0).test_before_acquire(false);
        let like = like.max_connections(application.options().get_max_connections().clamp(2, MAX_VALUES));
        let like = like.acquire_timeout(application.options().get_acquire_timeout().max(OPENING));
        // Its tasks run on the library's thread.
        let pool = threads::within(|| like.connect_lazy_with((*options).clone()));
        let (closed, ours) = (application.close_event(), pool.clone());
        threads::spawn(async move {
            tokio::select! {
                () = closed => ours.close().await,
                () = ours.close_event() => {}
            }
        });
        *opened = Some((pool.clone(), options));
        pool
    }
}

impl<DB: Store> Drop for Home<DB> {
    fn drop(&mut self) {
        if let Some((pool, _)) = lock(&self.values).take() {
            threads::spawn(async move { pool.close().await });
        }
    }
}

/// What exists for the application pools.
type Known = HashMap<(usize, TypeId), Weak<dyn Any + Send + Sync>>;

/// By the address of a pool's options, which lie within what all clones of the pool share.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// Returns what exists of this type for the pool, or creates it. It has to keep the pool, so that
/// no other pool gets the same address.
pub(crate) fn of_pool<DB: Store, T: Send + Sync + 'static>(pool: &Pool<DB>, create: impl FnOnce() -> T) -> Arc<T> {
    let place = (std::ptr::from_ref(pool.options()).addr(), TypeId::of::<T>());
    let mut known = lock(&KNOWN);
    if let Some(Ok(shared)) = known.get(&place).and_then(Weak::upgrade).map(Arc::downcast) {
        return shared;
    }
    known.retain(|_, shared| shared.strong_count() > 0);
    let shared = Arc::new(create());
    let any: Arc<dyn Any + Send + Sync> = shared.clone();
    known.insert(place, Arc::downgrade(&any));
    shared
}
