//! Both strategies under each isolation level that an application may have set for its sessions.

use std::sync::Arc;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{Attempt, LeaseLock, Reason, VersionedTable, balances::Columns};
use sqlx::{Pool, pool::PoolOptions};
use tokio::time::timeout;

use crate::{
    bank::{LEASE, Lock, PATIENT, VERSION, accounts, locks},
    batched::{together, tries},
    both_strategies::{commits_no_stale_claim, loses_no_update},
    ticks_serializable,
};

harness::tests!(
    mariadb(snapshot_isolation, assignments_at_once),
    postgres[DIRECT](a_balance_is_changed_at_the_level_of_the_application),
    servers(read_committed, repeatable_read, serializable, a_set_does_not_wait_for_a_locked_row_at_serializable)
);

/// Returns a pool whose sessions have this setting. The statements differ between servers.
pub async fn pool_at<DB: TestDatabase>(db: &TestDb<DB>, level: &str) -> Pool<DB> {
    pool_of_at(db, 10, level).await
}

/// The same, with this many connections.
pub async fn pool_of_at<DB: TestDatabase>(db: &TestDb<DB>, connections: u32, level: &str) -> Pool<DB> {
    let sql: &'static str = match (db.server.name, level) {
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
    options.connect(&db.url).await.unwrap()
}

/// Returns a lock whose statements have the setting too.
fn shared<DB: TestDatabase>(pool: &Pool<DB>) -> LeaseLock<DB> {
    LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap()
}

/// Checks that no update is lost, no stale claim commits, and no contention is reported as a
/// database error. In sessions of a lock's own, the level is that of the transaction alone.
async fn holds_at<DB: TestDatabase>(db: TestDb<DB>, level: &str) {
    accounts(&db).await;
    let db = db.over(pool_at(&db, level).await);
    let shared: Lock<DB> = Arc::new(shared(&db.pool).retry(PATIENT));
    for (name, lock) in locks(&db.pool).into_iter().chain([(LEASE, shared)]) {
        loses_no_update(&db, name, std::slice::from_ref(&lock)).await.unwrap();
        commits_no_stale_claim(&db, name, &*lock).await.unwrap();
    }
}

async fn read_committed<DB: TestDatabase>(db: TestDb<DB>) {
    holds_at(db, "read committed").await;
}

async fn repeatable_read<DB: TestDatabase>(db: TestDb<DB>) {
    holds_at(db, "repeatable read").await;
}

async fn serializable<DB: TestDatabase>(db: TestDb<DB>) {
    holds_at(db, "serializable").await;
}

/// The library's own sessions for locks have a level of their own. The application's tables are
/// changed at the application's level, which its other transactions rely on.
async fn a_balance_is_changed_at_the_level_of_the_application<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    db.execute("CREATE TABLE seen (level text)").await;
    db.execute(
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN INSERT INTO seen VALUES (current_setting('transaction_isolation')); RETURN NEW; END $$",
    )
    .await;
    for table in ["account", "t_resource_lock"] {
        db.execute(&format!("CREATE TRIGGER see AFTER UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION see()")).await;
    }
    let (db, reader) = (ticks_serializable::serializable(&db).await, db);
    let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
    let accounts = VersionedTable::new(db.pool.clone(), columns);
    accounts.deduct(VERSION, 1).await.unwrap();
    assert_eq!(reader.text("SELECT level FROM seen").await.as_deref(), Some("serializable"));
    let lease = acquired(db.lock().try_acquire("k").await);
    reader.execute("DELETE FROM seen").await;
    lease.release().await.unwrap();
    assert_eq!(reader.text("SELECT level FROM seen").await.as_deref(), Some("read committed"));
}

/// On MySQL and MariaDB, a plain read within a transaction locks what it reads at this level, and
/// waits for a row that another transaction has locked.
async fn a_set_does_not_wait_for_a_locked_row_at_serializable<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::builder(pool_at(&db, "serializable").await).share_pool().time_limit(2 * PATIENCE);
    let lock = lock.build().unwrap();
    let set = lock.try_acquire_all(["a", "k", "z"]).await.unwrap().acquired().unwrap();
    set.release().await.unwrap();
    let mut other = db.row_locked().await;
    for other in ["a", "z"] {
        let attempt = timeout(PATIENCE, lock.try_acquire_all([other, "k"])).await.expect("it does not wait").unwrap();
        let Attempt::Refused(refusal) = attempt else { panic!("{attempt:?}") };
        assert_eq!((refusal.reason, refusal.key.as_str()), (Reason::Busy, "k"));
    }
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
}

/// With this setting, MariaDB has an error of its own for a row that another transaction changed.
async fn snapshot_isolation<DB: TestDatabase>(db: TestDb<DB>) {
    holds_at(db, "snapshot isolation").await;
}

/// With this setting, MariaDB's assignments see the original row, not what the assignments before
/// them wrote.
async fn assignments_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = pool_of_at(&db, 1, "assignments at once").await;
    let lock = shared(&pool);
    let lease = acquired(lock.try_acquire("k").await);
    let token = lease.token();
    lease.abandon().await.unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(lease.taken_over_from().map(|prior| prior.token), Some(token));
    assert!(lease.token() > token && lease.renew().await.is_ok());
    lease.release().await.unwrap();
    assert!(acquired(lock.try_acquire("k").await).taken_over_from().is_none());
    // The statement for several keys.
    for _ in 0..2 {
        for lease in together(&pool, tries(&lock, ["a", "b", "c"])).await.into_iter().map(acquired) {
            lease.renew().await.unwrap();
            lease.release().await.unwrap();
        }
    }
    holds_at(db, "assignments at once").await;
}
