//! What the test suites share.
//!
//! Each test has a database of its own ([`TestDb`]), and plain SQL that reads and changes it
//! without the lock. [`Proxy`](proxy::Proxy) stands between a lock and its server. A module lists
//! its tests with [`tests!`]; the [`Suites`] have those of all servers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, missing_docs)]
// The futures of tests are run by `block_on`, which does not need them to be `Send`.
#![allow(async_fn_in_trait)]

mod database;
mod databases;
pub mod events;
pub mod proxy;
mod server;
mod suite;
mod user;

use std::{fmt::Debug, future::Future, pin::Pin, sync::Mutex, time::Duration};

use proptest::{
    strategy::Strategy,
    test_runner::{Config, TestCaseError, TestRunner},
};
use rowlock::{Attempt, Lease, LeaseLock, Refusal, leases::LeaseLockBuilder, strategy::Grant};
use sqlx::{
    Pool,
    pool::{PoolConnection, PoolOptions},
};
use tokio::{
    runtime::Handle,
    task::{JoinHandle, block_in_place},
    time::{Instant, sleep},
};

pub use database::{Holds, Named, Table, TestDatabase};
pub use databases::{PROCESSES, Reused};
pub use server::{Server, database_of, direct_url, pools_sessions, with_database};
pub use suite::{COUNTED, DIRECT, Group, Need, SESSION, Suites, all, run};
pub use user::User;

/// How long a test waits for an event that must happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The database of one test, with the table in it.
pub struct TestDb<DB: TestDatabase> {
    pub server: Server,
    pub pool: Pool<DB>,
    pub url: String,
    /// Where SQLite's file is, until the test has ended.
    _folder: Option<tempfile::TempDir>,
}

impl<DB: TestDatabase> TestDb<DB> {
    pub fn lock(&self) -> LeaseLock<DB> {
        LeaseLock::new(self.pool.clone())
    }

    pub fn builder(&self) -> LeaseLockBuilder<DB> {
        LeaseLock::builder(self.pool.clone())
    }

    pub fn lock_for(&self, lease: Duration) -> LeaseLock<DB> {
        self.lock().lease(lease)
    }

    /// Returns the same database, accessed through another pool.
    pub fn over(&self, pool: Pool<DB>) -> Self {
        Self { server: self.server, pool, url: self.url.clone(), _folder: None }
    }

    /// Returns a separate pool on the same database.
    pub async fn pool_of(&self, connections: u32) -> Pool<DB> {
        pool(&self.url, connections).await
    }

    /// Returns a connection with an open transaction that has the row of the key `k` locked (on
    /// SQLite: the database).
    pub async fn row_locked(&self) -> PoolConnection<DB> {
        let mut other = self.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut other, DB::LOCK_ROW).await.unwrap();
        other
    }

    pub async fn execute(&self, sql: &str) -> u64 {
        DB::execute(&self.pool, sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    pub async fn number(&self, sql: &str) -> Option<i64> {
        DB::number(&self.pool, sql).await
    }

    pub async fn text(&self, sql: &str) -> Option<String> {
        DB::text(&self.pool, sql).await
    }

    /// Returns the value of an expression in a table's rows, as text.
    pub async fn cell(&self, expression: &str, rest: &str) -> Option<String> {
        let text = self.text(&format!("SELECT CAST({expression} AS char(80)) FROM {rest}")).await;
        text.map(|text| text.trim().to_owned())
    }

    /// Returns one column of a key's row.
    pub async fn column(&self, key: &str, column: &str) -> Option<String> {
        self.text(&format!("SELECT {column} FROM t_resource_lock WHERE key_resource = '{key}'")).await
    }

    /// Sets columns of a key's row.
    pub async fn set(&self, key: &str, set: &str) {
        let rows = self.execute(&format!("UPDATE t_resource_lock SET {set} WHERE key_resource = '{key}'")).await;
        assert_eq!(rows, 1, "{key} has one row");
    }

    /// Changes the row as if another instance had taken the key over: a new holder, a higher token.
    pub async fn take_from(&self, key: &str) {
        let holder = DB::uuid("0123456789abcdef0123456789abcdef");
        self.set(key, &format!("holder = {holder}, token = token + 1, client_ip = 'thief'")).await;
    }
}

pub async fn pool<DB: TestDatabase>(url: &str, connections: u32) -> Pool<DB> {
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
    options.connect(url).await.unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// The result of a call that does not wait, or of one that waits, whose refusal is an error.
pub trait Answer: Debug + Sized {
    type Granted;

    fn answer(self) -> Result<Result<Self::Granted, Refusal>, rowlock::Error>;
}

impl<G: Debug> Answer for Result<Attempt<G>, rowlock::Error> {
    type Granted = G;

    fn answer(self) -> Result<Result<G, Refusal>, rowlock::Error> {
        self.map(Attempt::into_result)
    }
}

impl<DB: TestDatabase, K> Answer for Result<Lease<DB, K>, rowlock::Error> {
    type Granted = Lease<DB, K>;

    fn answer(self) -> Result<Result<Lease<DB, K>, Refusal>, rowlock::Error> {
        answered(self)
    }
}

impl<DB: TestDatabase> Answer for Result<Grant<DB>, rowlock::Error> {
    type Granted = Grant<DB>;

    fn answer(self) -> Result<Result<Grant<DB>, Refusal>, rowlock::Error> {
        answered(self)
    }
}

fn answered<G>(result: Result<G, rowlock::Error>) -> Result<Result<G, Refusal>, rowlock::Error> {
    match result {
        Ok(granted) => Ok(Ok(granted)),
        Err(rowlock::Error::Refused(refusal)) => Ok(Err(refusal)),
        Err(error) => Err(error),
    }
}

/// Returns what was granted. Panics if it was not.
#[track_caller]
pub fn acquired<A: Answer>(answer: A) -> A::Granted {
    match answer.answer() {
        Ok(Ok(granted)) => granted,
        Ok(Err(refusal)) => panic!("not acquired: {refusal:?}"),
        Err(error) => panic!("not acquired: {error:?}"),
    }
}

/// Returns the refusal. Panics if there is none.
#[track_caller]
pub fn refused<A: Answer>(answer: A) -> Refusal {
    match answer.answer() {
        Ok(Err(refusal)) => refusal,
        Ok(Ok(_)) => panic!("not refused"),
        Err(error) => panic!("not refused: {error:?}"),
    }
}

/// Waits for a condition, not for a fixed time. Panics if it does not hold within a minute.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let patience = Patience { what, since: Instant::now() };
    while !holds().await {
        patience.pause().await;
    }
}

/// The part of [`eventually`] that is the same for all conditions.
struct Patience<'a> {
    what: &'a str,
    since: Instant,
}

impl Patience<'_> {
    async fn pause(&self) {
        assert!(self.since.elapsed() < 3 * PATIENCE, "{}: not within {:?}", self.what, 3 * PATIENCE);
        sleep(Duration::from_millis(10)).await;
    }
}

/// As [`tokio::spawn`], which compiles several copies of the scheduler's task for each type of
/// future.
pub fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(task(work))
}

/// A task whose type tells its result alone, for a [`JoinSet`](tokio::task::JoinSet) or a runtime.
pub fn task<T>(work: impl Future<Output = T> + Send + 'static) -> Pin<Box<dyn Future<Output = T> + Send>> {
    Box::pin(work)
}

/// Runs a future to completion within a call that cannot be awaited.
pub fn between<T>(work: impl Future<Output = T>) -> T {
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(work))
}

/// Checks this many values, one after the other.
pub fn each<S: Strategy, F: Future<Output = ()>>(cases: u32, values: S, mut check: impl FnMut(S::Value) -> F) {
    let check = Mutex::new(&mut check);
    let tried =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() }).run(&values, |value| {
            let check = || block_in_place(|| Handle::current().block_on((check.lock().unwrap())(value)));
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).map_err(|_| TestCaseError::fail("see above"))
        });
    tried.unwrap_or_else(|failure| panic!("{failure}"));
}
