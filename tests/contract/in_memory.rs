//! A database in memory is gone with its last connection. No call that is dropped, times out or
//! fails closes that connection.
//!
//! Each test uses one pool of one connection throughout. Its operation is dropped after its first,
//! second, ... poll until it completes, each time on a new key. After each drop, all data is still
//! there, and no transaction is open.

use std::{convert::Infallible, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{Error, Lease, LeaseLock, Retry, VersionedTable};
use sqlx::{Connection as _, Sqlite, SqlitePool, sqlite::SqlitePoolOptions};
use tokio::time::timeout;

use crate::{bank::version_lock, cancelled::dropped_after, ledger::COLUMNS};

harness::tests!(sqlite(
    the_pool_of_connect_keeps_its_connection,
    it_outlives_a_claim,
    it_outlives_a_claim_of_several_keys,
    it_outlives_a_renewal,
    it_outlives_a_release,
    it_outlives_an_update,
    it_outlives_a_deduction,
    it_outlives_a_transaction,
    it_outlives_what_times_out,
    it_outlives_work_that_ends_its_transaction
));

/// The URLs of databases in memory.
const URLS: [&str; 2] = ["sqlite::memory:", "sqlite:file?mode=memory&cache=private"];

/// How long a slow change takes at least, on an idle machine.
const SLOW: Duration = Duration::from_millis(300);

/// By default a pool closes a connection that was idle for ten minutes, or is half an hour old.
async fn the_pool_of_connect_keeps_its_connection<DB: TestDatabase>(db: TestDb<DB>) {
    for url in URLS {
        let lock = LeaseLock::<Sqlite>::connect(url).await.unwrap();
        let options = lock.pool().options();
        assert_eq!((options.get_idle_timeout(), options.get_max_lifetime()), (None, None), "{url}");
        assert_eq!((options.get_max_connections(), options.get_test_before_acquire()), (1, false), "{url}");
    }
    let lock = LeaseLock::<DB>::connect(&db.url).await.unwrap();
    assert!(lock.pool().options().get_max_connections() > 1, "a file is not lost");
}

struct Memory {
    pool: SqlitePool,
    lock: LeaseLock<Sqlite>,
    table: VersionedTable<Sqlite>,
}

impl Memory {
    /// `test`: the pool pings a connection before it hands it out, which is the default of pools.
    async fn new(url: &str, test: bool) -> Self {
        let options = SqlitePoolOptions::new().max_connections(1).test_before_acquire(test);
        let pool = options.connect(url).await.unwrap();
        rowlock::migrate(&pool).await.unwrap();
        let create = "CREATE TABLE account (id varchar(40) PRIMARY KEY, balance bigint NOT NULL, version int NOT NULL);
                      CREATE TABLE numbers (n int NOT NULL);
                      WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 250) INSERT INTO numbers SELECT n FROM c";
        Sqlite::execute(&pool, create).await.unwrap();
        let lock = LeaseLock::new(pool.clone());
        let table = VersionedTable::new(pool.clone(), COLUMNS);
        Self { pool, lock, table }
    }

    async fn execute(&self, sql: &str) {
        timeout(PATIENCE, Sqlite::execute(&self.pool, sql)).await.expect("the pool serves").unwrap();
    }

    async fn account(&self, key: &str) {
        self.execute(&format!("INSERT INTO account VALUES ('{key}', 100, 0)")).await;
    }

    async fn held(&self, lock: &LeaseLock<Sqlite>, key: &str) -> Lease<Sqlite> {
        loop {
            match lock.acquire(key, PATIENCE).await {
                Ok(lease) => return lease,
                Err(Error::Refused(refusal)) => panic!("{key}: {refusal}"),
                // The request waited behind a dropped operation, or exceeded a short limit.
                Err(error) => assert!(error.is_retryable(), "{key}: {error:?}"),
            }
        }
    }

    /// Checks that all data is there and no transaction is open.
    async fn is_whole(&self, what: &str) {
        let look = async {
            let mut conn = self.pool.acquire().await?;
            for table in ["t_resource_lock", "account"] {
                Sqlite::text_on(&mut conn, &format!("SELECT CAST(COUNT(*) AS text) FROM {table}")).await?;
            }
            let numbers = Sqlite::text_on(&mut conn, "SELECT CAST(COUNT(*) AS text) FROM numbers").await?;
            assert_eq!(numbers.as_deref(), Some("250"), "{what}");
            // Fails if a transaction is open.
            Sqlite::execute_on(&mut conn, "BEGIN IMMEDIATE; ROLLBACK").await?;
            assert!(!conn.is_in_transaction(), "{what}: the driver counts a transaction");
            // A transaction that the application drops is rolled back.
            let mut tx = conn.begin().await?;
            Sqlite::execute_on(&mut tx, "DELETE FROM numbers").await?;
            drop(tx);
            let numbers = Sqlite::text_on(&mut conn, "SELECT CAST(COUNT(*) AS text) FROM numbers").await?;
            assert_eq!(numbers.as_deref(), Some("250"), "{what}: a rollback was left out");
            Sqlite::execute_on(&mut conn, "BEGIN IMMEDIATE; ROLLBACK").await
        };
        match timeout(PATIENCE, look).await {
            Ok(Ok(_)) => {}
            other => panic!("{what}: {other:?}"),
        }
    }

    /// Makes each change of these tables take about [`SLOW`].
    async fn slow(&self) {
        for table in ["t_resource_lock", "account"] {
            let work = "SELECT COUNT(*) FROM numbers a, numbers b, numbers c";
            self.execute(&format!("CREATE TRIGGER slow_{table} AFTER UPDATE ON {table} BEGIN {work}; END")).await;
        }
    }
}

/// Drops `act` at each of its polls. `act` receives the result of `prepare`.
async fn outlives<P>(prepare: impl AsyncFn(&Memory, &str) -> P, act: impl AsyncFn(&Memory, &str, P)) {
    for (url, test) in URLS.into_iter().flat_map(|url| [(url, true), (url, false)]) {
        let memory = Memory::new(url, test).await;
        let (mut polls, mut rounds) = (1, 0..300);
        loop {
            let key = format!("k{}", rounds.next().expect("it is dropped, and ends"));
            let prepared = prepare(&memory, &key).await;
            let ended = dropped_after(polls, act(&memory, &key, prepared)).await.is_some();
            memory.is_whole(&format!("{url}, tested: {test}, dropped after {polls}")).await;
            match ended {
                false => polls += 1 + polls / 8,
                // The driver's thread may be so fast that each answer is there at the first poll.
                true if polls == 1 => {}
                true => break,
            }
        }
    }
}

async fn it_outlives_a_claim<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |memory: &Memory, key: &str, ()| drop(acquired(memory.lock.try_acquire(key).await));
    outlives(async |_, _| {}, act).await;
}

async fn it_outlives_a_claim_of_several_keys<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |memory: &Memory, key: &str, ()| {
        let keys = [format!("{key} and"), format!("{key} more")];
        drop(memory.lock.acquire_all(keys.each_ref().map(String::as_str), PATIENCE).await.unwrap());
    };
    outlives(async |_, _| {}, act).await;
}

async fn it_outlives_a_renewal<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |_: &Memory, _: &str, lease: Lease<Sqlite>| drop(lease.renew().await);
    outlives(async |memory, key| memory.held(&memory.lock, key).await, act).await;
}

async fn it_outlives_a_release<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |_: &Memory, _: &str, lease: Lease<Sqlite>| drop(lease.release().await);
    outlives(async |memory, key| memory.held(&memory.lock, key).await, act).await;
}

async fn it_outlives_an_update<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |memory: &Memory, key: &str, ()| {
        memory.table.update(key, |balance| Ok::<_, Infallible>(balance - 1)).await.unwrap();
    };
    outlives(async |memory, key| memory.account(key).await, act).await;
}

async fn it_outlives_a_deduction<DB: TestDatabase>(_: TestDb<DB>) {
    let act = async |memory: &Memory, key: &str, ()| assert!(memory.table.deduct(key, 1).await.is_ok());
    outlives(async |memory, key| memory.account(key).await, act).await;
}

/// The work opens a savepoint of its own in the transaction.
async fn it_outlives_a_transaction<DB: TestDatabase>(_: TestDb<DB>) {
    for leased in [true, false] {
        let act = async |memory: &Memory, key: &str, ()| {
            let work = async |mut tx: rowlock::Tx<Sqlite>| {
                Sqlite::execute_on(&mut tx, "UPDATE account SET balance = balance - 1").await?;
                let mut inner = tx.begin().await?;
                Sqlite::execute_on(&mut inner, "UPDATE account SET balance = balance + 1").await?;
                inner.commit().await
            };
            match leased {
                true => memory.lock.transaction(key, work).await.unwrap(),
                false => version_lock(&memory.pool).transaction(key, work).await.unwrap(),
            }
        };
        outlives(async |memory, key| memory.account(key).await, act).await;
    }
}

/// The statement is still running when its time limit ends.
async fn it_outlives_what_times_out<DB: TestDatabase>(_: TestDb<DB>) {
    for url in URLS {
        let memory = Memory::new(url, true).await;
        memory.account("a").await;
        let limit = Duration::from_millis(50);
        // A release is retried until its lease ends.
        let lock = LeaseLock::builder(memory.pool.clone()).time_limit(limit).build().unwrap().lease(5 * SLOW);
        let table = memory.table.clone().retry(Retry { within: SLOW, ..Retry::default() });
        let table = table.time_limit(limit);
        memory.held(&memory.lock, "claim").await.release().await.unwrap();
        let (renewed, released) = (memory.held(&lock, "renew").await, memory.held(&lock, "release").await);
        memory.slow().await;

        assert!(lock.try_acquire("claim").await.is_err(), "{url}: it takes longer than its limit");
        memory.is_whole(&format!("{url}: a claim")).await;
        assert!(renewed.renew().await.is_err(), "{url}: it takes longer than its limit");
        memory.is_whole(&format!("{url}: a renewal")).await;
        drop(released.release().await); // done in the end, or unknown
        memory.is_whole(&format!("{url}: a release")).await;
        assert!(table.deduct("a", 1).await.is_err(), "{url}: it takes longer than its limit");
        memory.is_whole(&format!("{url}: a deduction")).await;
        let versions = version_lock(&memory.pool).time_limit(limit);
        assert!(versions.transaction("a", async |_| Ok::<_, sqlx::Error>(())).await.is_err());
        memory.is_whole(&format!("{url}: a transaction")).await;
    }
}

/// Work that ends the transaction itself, or whose error ends it, leads to an error, and nothing
/// else is lost.
async fn it_outlives_work_that_ends_its_transaction<DB: TestDatabase>(_: TestDb<DB>) {
    for (url, inner) in URLS.into_iter().flat_map(|url| [(url, false), (url, true)]) {
        let memory = Memory::new(url, true).await;
        memory.account("a").await;
        memory.execute("CREATE TABLE refusing (n int)").await;
        memory
            .execute("CREATE TRIGGER refuse BEFORE INSERT ON refusing BEGIN SELECT RAISE(ROLLBACK, 'all of it'); END")
            .await;
        for statement in ["COMMIT", "ROLLBACK", "INSERT INTO refusing VALUES (1)"] {
            let work = async |mut tx: rowlock::Tx<Sqlite>| {
                if inner {
                    let mut inner = tx.begin().await?;
                    Sqlite::execute_on(&mut inner, statement).await.map(drop)
                } else {
                    Sqlite::execute_on(&mut tx, statement).await.map(drop)
                }
            };
            version_lock(&memory.pool).transaction("a", work).await.unwrap_err();
            memory.is_whole(&format!("{url}: {statement}, in a savepoint: {inner}")).await;
        }
    }
}
