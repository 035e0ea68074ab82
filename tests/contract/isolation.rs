//! Both strategies under each isolation level that an application may have set for its sessions.

use rowlock::{LeaseLock, Status};
use sqlx::{Pool, pool::PoolOptions};

use crate::{
    bank::{accounts, locks},
    bed::{Bed, Site, acquired},
    both::{commits_no_stale_claim, loses_no_update},
};

/// Returns a pool whose sessions have this setting. The statements differ between servers.
pub async fn pool_at<DB: Bed>(site: &Site<DB>, level: &str) -> Pool<DB> {
    pool_of_at(site, 10, level).await
}

/// The same, with this many connections.
pub async fn pool_of_at<DB: Bed>(site: &Site<DB>, connections: u32, level: &str) -> Pool<DB> {
    let sql: &'static str = match (site.server.name, level) {
        ("postgres", "read committed") => "SET default_transaction_isolation = 'read committed'",
        ("postgres", "repeatable read") => "SET default_transaction_isolation = 'repeatable read'",
        ("postgres", "serializable") => "SET default_transaction_isolation = 'serializable'",
        (_, "read committed") => "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        (_, "repeatable read") => "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        (_, "serializable") => "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        ("mariadb", "assignments at once") => "SET SESSION sql_mode = CONCAT(@@sql_mode, ',SIMULTANEOUS_ASSIGNMENT')",
        ("mariadb", "snapshot isolation") => "SET SESSION innodb_snapshot_isolation = ON",
        other => panic!("{other:?}"),
    };
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false);
    let options =
        options.after_connect(move |conn, _| Box::pin(async move { DB::execute_on(conn, sql).await.map(drop) }));
    options.connect(&site.url).await.unwrap()
}

/// Checks that no update is lost, no stale claim commits, and no contention is reported as a
/// database error.
async fn holds_at<DB: Bed>(site: Site<DB>, level: &str) {
    accounts(&site).await;
    let site = site.over(pool_at(&site, level).await);
    for (name, lock) in locks(&site.pool) {
        loses_no_update(&site, name, std::slice::from_ref(&lock)).await.unwrap();
        commits_no_stale_claim(&site, name, &*lock).await.unwrap();
    }
}

pub async fn read_committed<DB: Bed>(site: Site<DB>) {
    holds_at(site, "read committed").await;
}

pub async fn repeatable_read<DB: Bed>(site: Site<DB>) {
    holds_at(site, "repeatable read").await;
}

pub async fn serializable<DB: Bed>(site: Site<DB>) {
    holds_at(site, "serializable").await;
}

/// With this setting, MariaDB has an error of its own for a row that another transaction changed.
pub async fn snapshot_isolation<DB: Bed>(site: Site<DB>) {
    holds_at(site, "snapshot isolation").await;
}

/// With this setting, MariaDB's assignments see the original row, not what the assignments before
/// them wrote.
pub async fn assignments_at_once<DB: Bed>(site: Site<DB>) {
    let pool = pool_at(&site, "assignments at once").await;
    let lock = LeaseLock::new(pool.clone());
    let lease = acquired(lock.try_acquire("k").await);
    let token = lease.token();
    lease.abandon().await.unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(lease.taken_over_from().map(|prior| prior.token), Some(token));
    assert!(lease.token() > token && lease.renew().await.is_ok());
    lease.release(Status::Succeeded).await.unwrap();
    assert!(acquired(lock.try_acquire("k").await).taken_over_from().is_none());
    holds_at(site, "assignments at once").await;
}
