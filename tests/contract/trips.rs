//! Round trips, counted by the server: everything that a connection sends, a BEGIN or COMMIT included.

use std::convert::Infallible;

use rowlock::{LeaseLock, ResourceLockExt, Status};

use crate::{
    bank::{LEASE, accounts, locks},
    bed::{Bed, Site, acquired, refused},
};

/// SQLite sends nothing anywhere and counts nothing: there the test is about the answers alone.
pub async fn round_trips_are_as_stated<DB: Bed>(site: Site<DB>) {
    let pool = site.pool_of(1).await;
    let lock = LeaseLock::new(pool.clone());
    let is_postgres = site.server.name == "postgres";
    DB::statements(&pool).await;
    acquired(lock.try_acquire("warm").await).release(Status::Succeeded).await.unwrap();

    let mut counted = Vec::new();
    macro_rules! count {
        ($what:literal, $most:expr, $work:expr) => {{
            let before = DB::statements(&pool).await;
            let result = $work;
            let after = DB::statements(&pool).await;
            if let (Some(before), Some(after)) = (before, after) {
                counted.push(($what, after - before - DB::COUNTING, $most));
            }
            result
        }};
    }
    let lease = count!("acquire", 1, acquired(lock.try_acquire("warm").await));
    count!("renew", 1, lease.renew().await.unwrap());
    let refusal = if is_postgres { 1 } else { 2 };
    count!("refusal", refusal, refused(lock.try_acquire("warm").await));
    count!("release", 1, lease.release(Status::Succeeded).await.unwrap());
    let lease = count!("new row", if is_postgres { 3 } else { 4 }, acquired(lock.try_acquire("new").await));
    count!("abandon", 1, lease.abandon().await.unwrap());
    let takeover = if is_postgres { 1 } else { 2 };
    count!("takeover", takeover, acquired(lock.try_acquire("new").await).release(Status::Succeeded).await.unwrap());
    for (what, count, most) in counted {
        let most = if what == "takeover" { most + 1 } else { most };
        assert_eq!(count, most, "{what}");
    }
}

/// What a transaction adds to the work's own statements. BEGIN and SAVEPOINT travel together, and count as two.
pub async fn a_transactions_round_trips_are_as_stated<DB: Bed>(site: Site<DB>) {
    accounts(&site).await;
    let pool = site.pool_of(1).await;
    for (name, lock) in locks(&pool) {
        let transaction = || lock.transaction(name, async |_, _| Ok::<_, Infallible>(()));
        transaction().await.unwrap();
        let before = DB::statements(&pool).await;
        transaction().await.unwrap();
        let after = DB::statements(&pool).await;
        // Acquire, or read the version; BEGIN, SAVEPOINT; confirm; check; COMMIT; and a lease is released.
        let stated = if name == LEASE { 7 } else { 6 };
        if let (Some(before), Some(after)) = (before, after) {
            assert_eq!(after - before - DB::COUNTING, stated, "{name}");
        }
    }
}
