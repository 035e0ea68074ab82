//! A lock behind a proxy, and what its row and its errors say.

use std::time::Duration;

use rowlock::{Attempt, Certainty, Error, LeaseLock, Status};
use sqlx::Pool;
use tokio::time::{Instant, sleep};

use crate::{
    bed::{Bed, PATIENCE, Site, acquired, eventually, refused},
    proxy::{Proxy, Way},
};

pub const SHORT: Duration = Duration::from_millis(900);
pub const LIMIT: Duration = Duration::from_millis(300);
pub const WAYS: [Way; 2] = [Way::Requests, Way::Replies];

/// A lock behind a proxy, on a pool of one connection, on which every statement has been prepared.
pub struct Line<DB: Bed> {
    pub proxy: Proxy,
    pub pool: Pool<DB>,
    pub lock: LeaseLock<DB>,
}

impl<DB: Bed> Line<DB> {
    pub async fn new(site: &Site<DB>, lease: Duration, limit: Duration) -> Self {
        let proxy = site.proxy().await;
        let pool = proxy.pool(1);
        let lock = LeaseLock::new(pool.clone()).share_pool().lease(lease).unwrap().label("line").unwrap();
        // A slow machine takes its time to connect; the claims' statements are the same whatever the limit.
        let warm = lock.clone().time_limit(PATIENCE).unwrap();
        let lease = acquired(warm.try_acquire("warm").await);
        lease.renew().await.unwrap();
        refused(warm.try_acquire("warm").await);
        lease.abandon().await.unwrap();
        acquired(warm.try_acquire("warm").await).release(Status::Succeeded).await.unwrap();
        let lock = lock.time_limit(limit).unwrap();
        // Whoever is still at the connection, be it to ping it, has gone.
        eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
        Self { proxy, pool, lock }
    }

    /// A key with a free row.
    pub async fn with_free_row(site: &Site<DB>, lease: Duration, limit: Duration) -> Self {
        acquired(site.lock().try_acquire("k").await).release(Status::Succeeded).await.unwrap();
        Self::new(site, lease, limit).await
    }

    /// As [`Proxy::during`].
    pub async fn held<T>(
        &self,
        way: Way,
        after: usize,
        work: impl Future<Output = T>,
        meanwhile: impl AsyncFnOnce(&Proxy),
    ) -> T {
        self.proxy.during(way, after, work, meanwhile).await
    }

    /// Does `work` with one chunk lost this way, and the connection with it.
    pub async fn lost<T>(&self, way: Way, after: usize, work: impl Future<Output = T>) -> T {
        self.held(way, after, work, async |proxy| proxy.cut()).await
    }
}

/// How many round trips a database takes: PostgreSQL tells all in one, MySQL looks in a second one.
pub fn trips<DB: Bed>(site: &Site<DB>, postgres: usize, mysql: usize) -> usize {
    if site.server.name == "postgres" { postgres } else { mysql }
}

fn is_unknown(error: &Error) -> bool {
    matches!(
        error,
        Error::TimedOut { outcome: Certainty::Unknown, .. } | Error::Database { outcome: Certainty::Unknown, .. }
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
        Err(Error::TimedOut { outcome: Certainty::Unknown, .. }
            | Error::NoConnection { outcome: Certainty::Unknown, .. })
    );
    assert!(unknown, "not timed out with an unknown outcome: {result:?}");
}

pub async fn token<DB: Bed>(site: &Site<DB>) -> i64 {
    site.number("SELECT token FROM t_resource_lock WHERE key_resource = 'k'").await.unwrap()
}

pub async fn standing<DB: Bed>(site: &Site<DB>) -> i64 {
    let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1 AND expires_at > ";
    site.number(&format!("{sql}{}", DB::ago(0))).await.unwrap()
}

/// How many milliseconds the row's claim has left, by the database's clock, at least.
pub async fn has_left<DB: Bed>(site: &Site<DB>, millis: u64) -> bool {
    let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND expires_at >= ";
    site.number(&format!("{sql}{}", DB::ago(-(millis as i64)))).await == Some(1)
}

/// A claim that nobody knows of ends with its lease, counted from `since`.
pub async fn had_within_the_lease<DB: Bed>(site: &Site<DB>, since: Instant) {
    let lock = site.lock();
    loop {
        match lock.try_acquire("k").await.unwrap() {
            Attempt::Acquired(lease) => {
                assert_eq!(lease.taken_over_from().map(|prior| prior.label.as_str()), Some("line"));
                return lease.release(Status::Succeeded).await.unwrap();
            }
            Attempt::Refused(refusal) => {
                assert!(since.elapsed() < SHORT + Duration::from_secs(1), "{refusal}");
                sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
