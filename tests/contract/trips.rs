//! Round trips, counted by the server: everything that a connection sends, including BEGIN and
//! COMMIT; and what a read of one key reads.

use std::{convert::Infallible, sync::Arc};

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, between, eventually, refused};
use rowlock::{LeaseLock, VersionedTable, strategy::ResourceLockExt};

use crate::{
    bank::{LEASE, Lock, VERSION, accounts, version_lock},
    ledger::{COLUMNS, ledger, outside},
};

harness::tests!(
    everywhere[DIRECT].alone(
        round_trips_are_as_stated,
        round_trips_of_versions_are_as_stated,
        a_transactions_round_trips_are_as_stated
    ),
    postgres[DIRECT](a_reader_finds_the_name_by_its_index)
);

/// Does the work, and adds the number of statements that it took to the list.
macro_rules! count {
    ($counted:ident, $pool:expr, $what:literal, $most:expr, $work:expr) => {{
        let before = DB::statements(&$pool).await;
        let result = $work;
        let after = DB::statements(&$pool).await;
        if let (Some(before), Some(after)) = (before, after) {
            $counted.push(($what, after - before - DB::COUNTING, $most));
        }
        result
    }};
}

/// SQLite has no server and counts nothing: there the test checks the answers alone.
async fn round_trips_are_as_stated<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let is_postgres = db.server.name == "postgres";
    DB::statements(&pool).await;
    acquired(lock.try_acquire("warm").await).release().await.unwrap();

    let mut counted = Vec::new();
    let lease = count!(counted, pool, "acquire", 1, acquired(lock.try_acquire("warm").await));
    count!(counted, pool, "renew", 1, lease.renew().await.unwrap());
    let refusal = if is_postgres { 1 } else { 2 };
    count!(counted, pool, "refusal", refusal, refused(lock.try_acquire("warm").await));
    count!(counted, pool, "release", 1, lease.release().await.unwrap());
    let lease =
        count!(counted, pool, "new row", if is_postgres { 3 } else { 4 }, acquired(lock.try_acquire("new").await));
    count!(counted, pool, "abandon", 1, lease.abandon().await.unwrap());
    let takeover = if is_postgres { 1 } else { 2 };
    count!(counted, pool, "takeover", takeover, acquired(lock.try_acquire("new").await).release().await.unwrap());
    let others = ["one", "two", "three"];
    // The creation is one statement. A rollback is not counted, nor the one before it.
    let created = if is_postgres { 3 } else { 3 + 5 };
    let set =
        count!(counted, pool, "a new set", created, lock.try_acquire_all(others).await.unwrap().acquired().unwrap());
    set.release().await.unwrap();
    let together = if is_postgres { 1 } else { 3 + 2 };
    let set = count!(counted, pool, "a set", together, lock.try_acquire_all(others).await.unwrap().acquired().unwrap());
    count!(counted, pool, "the set's renewal", 1, set.renew().await.unwrap());
    count!(counted, pool, "the set's release", 1, set.release().await.unwrap());
    let fair = lock.clone().fair(true);
    let lease = count!(counted, pool, "in order", 2, acquired(fair.try_acquire("warm").await));
    lease.release().await.unwrap();
    for (what, count, most) in counted {
        let most = if what == "takeover" { most + 1 } else { most };
        assert_eq!(count, most, "{what}");
    }
}

/// What a transaction adds to the work's own statements. BEGIN and SAVEPOINT are sent together, and
/// count as two.
async fn a_transactions_round_trips_are_as_stated<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let pool = db.pool_of(1).await;
    let lease: Lock<DB> = Arc::new(LeaseLock::builder(pool.clone()).share_pool().build().unwrap());
    let version: Lock<DB> = Arc::new(version_lock(&pool).share_pool());
    for (name, lock) in [(LEASE, lease), (VERSION, version)] {
        let transaction = || lock.transaction(name, async |_| Ok::<_, Infallible>(()));
        transaction().await.unwrap();
        let before = DB::statements(&pool).await;
        transaction().await.unwrap();
        let after = DB::statements(&pool).await;
        // Acquire, or read the version; BEGIN, SAVEPOINT; confirm; check; COMMIT; and a lease is
        // released. MySQL's ROLLBACK before the BEGIN, and the driver's after the COMMIT, add one
        // statement each. The count takes them for that of a connection check, and subtracts two
        // for each. The texts of the BEGIN and of the COMMIT have three settings each.
        let others = if db.server.name == "postgres" { 0 } else { 4 };
        let stated = if name == LEASE { 7 } else { 6 } + others;
        if let (Some(before), Some(after)) = (before, after) {
            assert_eq!(after - before - DB::COUNTING, stated, "{name}");
        }
    }
}

/// The cost of a change of a versioned value: the check of its table once, then two statements for
/// each attempt.
async fn round_trips_of_versions_are_as_stated<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    // PostgreSQL counts every statement on the database, MySQL those of the connection.
    let others = if db.server.name == "postgres" { 1 } else { 0 };
    let pool = db.pool_of(1).await;
    let table = || VersionedTable::new(pool.clone(), COLUMNS).share_pool();
    DB::statements(&pool).await;
    let mut counted = Vec::new();
    let first = table();
    count!(counted, pool, "first use", 2, first.read("a").await.unwrap());
    count!(counted, pool, "read", 1, first.read("a").await.unwrap());
    count!(counted, pool, "update", 2, first.update("a", |balance| Ok::<_, Infallible>(balance + 1)).await.unwrap());
    count!(counted, pool, "deduct", 2, first.deduct("a", 1).await.unwrap());
    count!(counted, pool, "deposit", 2, first.deposit("a", 1).await.unwrap());
    count!(counted, pool, "an insufficient balance", 1, first.deduct("a", 1000).await.unwrap_err());
    let mut calls = 0;
    let conflict = first.update("a", |balance| {
        calls += 1;
        if calls == 1 {
            between(outside(&db, "version = version + 1"));
        }
        Ok::<_, Infallible>(balance + 1)
    });
    count!(counted, pool, "a conflict", 4 + others, assert_eq!(conflict.await.unwrap().attempts, 2));
    count!(counted, pool, "first use of a clone", 1, first.clone().read("a").await.unwrap());
    count!(counted, pool, "first use of another", 3, table().deduct("a", 1).await.unwrap());
    for (what, count, stated) in counted {
        assert_eq!(count, stated, "{what}");
    }
}

/// In a table of other programs the column may have any collation.
async fn a_reader_finds_the_name_by_its_index<DB: TestDatabase>(db: TestDb<DB>) {
    if db.number("SELECT COUNT(*) FROM pg_proc WHERE proname = 'pg_stat_force_next_flush'").await == Some(0) {
        return; // its counts come later
    }
    db.execute("ALTER TABLE t_resource_lock ALTER key_resource TYPE varchar(255) COLLATE \"default\"").await;
    db.execute("INSERT INTO t_resource_lock (key_resource) SELECT 'row ' || n FROM generate_series(1, 9999) n").await;
    db.execute("ANALYZE t_resource_lock").await;
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    acquired(lock.read_write("k").readers().acquire(PATIENCE).await).release().await.unwrap();
    let scans = async || {
        DB::execute(&pool, "SELECT pg_stat_force_next_flush()").await.unwrap();
        let scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 't_resource_lock'";
        DB::number(&pool, scans).await.unwrap()
    };
    // What other sessions did before may be counted in between.
    eventually("it reads no whole table", async || {
        let before = scans().await;
        let reader = acquired(lock.read_write("k").readers().try_acquire().await);
        let after = scans().await;
        reader.release().await.unwrap();
        after == before
    })
    .await;
}
