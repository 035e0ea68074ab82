//! The properties of a SQLite file: its encoding, its collations, and its single writer.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{Error, LeaseLock, Reason, VersionedTable, balances::Columns, errors::Setup};
use sqlx::pool::PoolOptions;
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

harness::tests!(sqlite(
    a_file_in_utf_16_is_refused_unchanged,
    the_collation_that_counts_is_that_of_the_key,
    a_lock_that_is_older_than_its_file_has_sessions_of_its_own,
    a_write_transaction_longer_than_a_lease_loses_it_in_time,
    requests_of_one_kind_keep_the_session_from_no_others
));

/// The driver does not read text from such a file.
async fn a_file_in_utf_16_is_refused_unchanged<DB: TestDatabase>(_: TestDb<DB>) {
    for encoding in ["UTF-16le", "UTF-16be"] {
        let folder = tempfile::tempdir().unwrap();
        let pool = pool::<DB>(&format!("sqlite://{}?mode=rwc", folder.path().join("wide.db").display()), 1).await;
        let account = "CREATE TABLE account (id TEXT PRIMARY KEY, balance INTEGER, version INTEGER)";
        for sql in [&format!("PRAGMA encoding = '{encoding}'"), account] {
            let mut first = pool.acquire().await.unwrap();
            DB::execute_on(&mut first, sql).await.unwrap();
        }
        assert_refused(rowlock::migrate(&pool).await.unwrap_err(), encoding);
        assert_eq!(
            DB::number(&pool, "SELECT count(*) FROM sqlite_schema WHERE name LIKE 't_resource%'").await,
            Some(0)
        );
        let ours = include_str!("../../migrations/sqlite/20260101000000_rowlock.sql");
        DB::execute(&pool, ours).await.unwrap();
        assert_refused(rowlock::migrate(&pool).await.unwrap_err(), encoding);
        assert_refused(LeaseLock::new(pool.clone()).try_acquire("k").await.unwrap_err(), encoding);
        let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
        let accounts = VersionedTable::new(pool.clone(), columns);
        let error = accounts.read("alice").await.unwrap_err();
        assert!(error.to_string().contains("UTF-16"), "{error}");
        assert_eq!(DB::number(&pool, "SELECT count(*) FROM t_resource_lock").await, Some(0));
    }
}

async fn the_collation_that_counts_is_that_of_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    let table = db.text("SELECT sql FROM sqlite_schema WHERE name = 't_resource_lock'").await.unwrap();
    db.execute("ALTER TABLE t_resource_lock ADD COLUMN note TEXT COLLATE NOCASE").await;
    rowlock::migrate(&db.pool).await.unwrap();
    let lock = db.lock();
    let _both = [acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("K").await)];
    let unique = "CREATE UNIQUE INDEX only ON t_resource_lock (key_resource, lower(status))";
    let inexact = "CREATE UNIQUE INDEX inexact ON t_resource_lock (key_resource COLLATE NOCASE)";
    let exact = "CREATE UNIQUE INDEX exact ON t_resource_lock (key_resource COLLATE BINARY)";
    for binary in ["COLLATE BINARY)", "COLLATE \"BINARY\")", "COLLATE[binary])"] {
        db.execute("DROP TABLE t_resource_lock").await;
        let (columns, _) = table.rsplit_once(')').unwrap();
        let columns = columns.replacen("key_resource    TEXT    NOT NULL PRIMARY KEY,", "", 1);
        db.execute(&format!("{columns}, key_resource TEXT NOT NULL PRIMARY KEY {binary}")).await;
        acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    }
    // Comparisons use the collation of the column.
    let column = "COLLATE NOCASE NOT NULL";
    for (index, of_key, told) in
        [(unique, "NOT NULL", "not unique"), (inexact, "NOT NULL", "NOCASE"), (exact, column, "NOCASE")]
    {
        db.execute("DROP TABLE t_resource_lock").await;
        db.execute(&table.replacen("NOT NULL PRIMARY KEY", of_key, 1)).await;
        db.execute(index).await;
        let error = db.lock().try_acquire("k").await.unwrap_err();
        assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains(told), "{error}");
    }
}

/// The pool creates the file when it is first used.
async fn a_lock_that_is_older_than_its_file_has_sessions_of_its_own<DB: TestDatabase>(_: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let options = PoolOptions::<DB>::new()
        .max_connections(2)
        .after_connect(|conn, _| Box::pin(async { DB::execute_on(conn, "PRAGMA journal_mode = WAL").await.map(drop) }));
    let pool = options.connect_lazy(&format!("sqlite://{}?mode=rwc", folder.path().join("new.db").display())).unwrap();
    let lock = LeaseLock::new(pool.clone());
    rowlock::migrate(&pool).await.unwrap();
    let taken = [pool.acquire().await.unwrap(), pool.acquire().await.unwrap()];
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    drop(taken);
}

fn assert_refused(error: Error, encoding: &str) {
    assert!(
        matches!(error, Error::Setup(Setup::Unsupported { .. })) && error.to_string().contains("UTF-16"),
        "{encoding}: {error:?}"
    );
}

/// A file has one writer, and no lease is renewed while another transaction writes. If the write
/// takes longer than the leases, every lease in the file ends. Each holder is notified before
/// another client can acquire its key, and its release afterwards changes no key that another
/// client holds.
async fn a_write_transaction_longer_than_a_lease_loses_it_in_time<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = Duration::from_millis(900);
    let (lock, other) = (db.lock_for(lease), db.lock_for(lease));
    let held = [acquired(lock.try_acquire("taken").await), acquired(lock.try_acquire("left").await)];
    let mut writer = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut writer, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut writer, "CREATE TABLE big (id INTEGER)").await.unwrap();
    let begun = Instant::now();
    let ended = async |key: &str| {
        let sql = format!(
            "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = '{key}' AND expires_at <= {}",
            DB::ago(0)
        );
        db.number(&sql).await == Some(1)
    };
    for lease in &held {
        timeout(PATIENCE, lease.lost()).await.expect("it is lost");
        assert!(!lease.is_held());
    }
    assert!(begun.elapsed() < 2 * lease, "told within the lease: {:?}", begun.elapsed());
    eventually("both leases have ended", || async { ended("taken").await && ended("left").await }).await;
    let tried = other.try_acquire("taken").await;
    assert!(
        matches!(tried, Ok(rowlock::Attempt::Refused(_))),
        "no claim is granted while the file is written: {tried:?}"
    );
    DB::execute_on(&mut writer, "COMMIT").await.unwrap();
    // A renewal that waited for the file may succeed now, for a lease of its own.
    let next = acquired(other.acquire("taken", PATIENCE).await);
    assert_eq!(next.taken_over_from().unwrap().token, held[0].token());
    let [taken, left] = held;
    assert!(matches!(taken.release().await, Err(Error::Lost { .. })));
    // No other client took this key, so the success of its work is recorded.
    left.release().await.unwrap();
    assert_eq!(db.column("left", "status").await.as_deref(), Some("S"));
    next.release().await.unwrap();
}

/// A statement of theirs is followed by those that have come since. A file has one session.
async fn requests_of_one_kind_keep_the_session_from_no_others<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, stopped) = (db.pool_of(2).await, Arc::new(AtomicBool::new(false)));
    let (busy, other) = (LeaseLock::new(pool.clone()), LeaseLock::builder(pool).time_limit(PATIENCE).build().unwrap());
    let held = acquired(busy.try_acquire("k").await);
    let tasks: JoinSet<()> = (0..64)
        .map(|_| {
            let (busy, stopped) = (busy.clone(), stopped.clone());
            async move {
                while !stopped.load(Relaxed) {
                    assert_eq!(refused(busy.try_acquire("k").await).reason, Reason::Held);
                }
            }
        })
        .collect();
    for _ in 0..20 {
        acquired(other.try_acquire("other").await).release().await.unwrap();
    }
    stopped.store(true, Relaxed);
    tasks.join_all().await;
    held.release().await.unwrap();
}
