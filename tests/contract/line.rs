//! A lock behind a proxy, and checks of its row and its errors.

use std::time::Duration;

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{
    Attempt, Error, LeaseLock,
    errors::{Certainty, DatabaseFault},
};
use sqlx::Pool;
use tokio::time::{Instant, sleep};

pub const SHORT: Duration = Duration::from_millis(900);
pub const LIMIT: Duration = Duration::from_millis(300);
pub const WAYS: [Way; 2] = [Way::Requests, Way::Replies];

/// A lock behind a proxy, on a pool of one connection that has prepared every statement.
pub struct Line<DB: TestDatabase> {
    pub proxy: Proxy,
    pub pool: Pool<DB>,
    pub lock: LeaseLock<DB>,
}

impl<DB: TestDatabase> Line<DB> {
    pub async fn new(db: &TestDb<DB>, lease: Duration, limit: Duration) -> Self {
        let proxy = db.proxy().await;
        let pool = proxy.pool(1);
        let lock = LeaseLock::builder(pool.clone()).share_pool().label("line").time_limit(limit).build().unwrap();
        let lock = lock.lease(lease);
        // A slow machine may need longer than the limit to connect and to prepare the statements.
        let lease = acquired(lock.acquire("warm", PATIENCE).await);
        eventually("it is renewed", || async { lease.renew().await.is_ok() }).await;
        eventually("it is refused", || async { lock.try_acquire("warm").await.is_ok() }).await;
        lease.abandon().await.unwrap();
        acquired(lock.acquire("warm", PATIENCE).await).release().await.unwrap();
        // No task uses the connection any more, not even to ping it.
        eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
        Self { proxy, pool, lock }
    }

    /// The same, with a free row for the key `k`.
    pub async fn with_free_row(db: &TestDb<DB>, lease: Duration, limit: Duration) -> Self {
        acquired(db.lock().try_acquire("k").await).release().await.unwrap();
        Self::new(db, lease, limit).await
    }

    /// Does the same as [`Proxy::during`].
    pub async fn held<T>(
        &self,
        way: Way,
        after: usize,
        work: impl Future<Output = T>,
        between: impl AsyncFnOnce(&Proxy),
    ) -> T {
        self.proxy.during(way, after, work, between).await
    }

    /// Runs `work`, and loses one chunk this way together with the connection.
    pub async fn lost<T>(&self, way: Way, after: usize, work: impl Future<Output = T>) -> T {
        self.held(way, after, work, async |proxy| proxy.cut()).await
    }
}

/// Returns how many round trips a database needs: PostgreSQL returns everything in one, MySQL reads
/// the row in a second one.
pub fn trips<DB: TestDatabase>(db: &TestDb<DB>, postgres: usize, mysql: usize) -> usize {
    if db.server.name == "postgres" { postgres } else { mysql }
}

fn is_unknown(error: &Error) -> bool {
    matches!(
        error,
        Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })
            | Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. })
    )
}

#[track_caller]
pub fn unknown<T: std::fmt::Debug>(result: Result<T, Error>) {
    assert!(matches!(&result, Err(error) if is_unknown(error)), "not unknown: {result:?}");
}

#[track_caller]
pub fn timed_out<T: std::fmt::Debug>(result: Result<T, Error>) {
    let unknown = matches!(
        &result,
        Err(Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })
            | Error::Database(DatabaseFault::NoConnection { outcome: Certainty::Unknown, .. }))
    );
    assert!(unknown, "not timed out with an unknown outcome: {result:?}");
}

pub async fn token<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number("SELECT token FROM t_resource_lock WHERE key_resource = 'k'").await.unwrap()
}

/// Returns how many claims are valid.
pub async fn standing<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1 AND expires_at > ";
    db.number(&format!("{sql}{}", DB::ago(0))).await.unwrap()
}

/// Returns whether the row's claim has at least this many milliseconds left, by the database's
/// clock.
pub async fn has_left<DB: TestDatabase>(db: &TestDb<DB>, millis: u64) -> bool {
    let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND expires_at >= ";
    db.number(&format!("{sql}{}", DB::ago(-(millis as i64)))).await == Some(1)
}

/// Checks that a claim without a known holder ends with its lease, counted from `since`.
pub async fn had_within_the_lease<DB: TestDatabase>(db: &TestDb<DB>, since: Instant) {
    let lock = db.lock();
    loop {
        match lock.try_acquire("k").await.unwrap() {
            Attempt::Acquired(lease) => {
                assert_eq!(lease.taken_over_from().map(|prior| prior.label.as_str()), Some("line"));
                return lease.release().await.unwrap();
            }
            Attempt::Refused(refusal) => {
                assert!(since.elapsed() < SHORT + Duration::from_secs(1), "{refusal}");
                sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
