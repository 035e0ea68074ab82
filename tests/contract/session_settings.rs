//! Settings of sessions under which a change would not last: it waits for the disk all the same
//! (PostgreSQL), or is refused (MySQL and MariaDB).

use std::convert::Infallible;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, database_of};
use rowlock::{LeaseLock, RunError, VersionedTable, strategy::ResourceLockExt};
use sqlx::{Pool, pool::PoolOptions};
use tokio::time::timeout;

use crate::{
    bank::{OPENING, VERSION, accounts, balance, locks, write_in},
    durability::{TRIGGER, assert_committed},
    hooks::cause,
    ledger::COLUMNS,
};

harness::tests!(
    postgres[DIRECT](a_claim_of_an_own_session_waits_for_the_disk),
    mysql_and_mariadb.each(
        nothing_is_granted_where_autocommit_is_off,
        nothing_is_granted_after_autocommit_was_switched_off,
        no_transaction_begins_where_autocommit_is_off,
        a_completion_type_of_the_works_own_ends_with_its_connection
    )
);

/// A pool whose sessions have this setting.
async fn pool_with<DB: TestDatabase>(db: &TestDb<DB>, connections: u32, setting: &'static str) -> Pool<DB> {
    let options = PoolOptions::<DB>::new()
        .max_connections(connections)
        .after_connect(move |conn, _| Box::pin(async move { DB::execute_on(conn, setting).await.map(drop) }));
    options.connect(&db.url).await.unwrap()
}

/// Otherwise a second holder could be granted the key after a crash of the server.
async fn a_claim_of_an_own_session_waits_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    for sql in TRIGGER {
        db.execute(sql).await;
    }
    db.execute("INSERT INTO t_resource_lock (key_resource) VALUES ('k')").await;
    let waits = async |pool: Pool<DB>, what: &str| {
        let lock = LeaseLock::new(pool);
        for _ in 0..2 {
            let lease = acquired(lock.try_acquire("k").await);
            assert_committed(&db, &["k"], "on", &format!("the claim, {what}")).await;
            lease.renew().await.unwrap();
            assert_committed(&db, &["k"], "on", &format!("the renewal, {what}")).await;
            lease.release().await.unwrap();
        }
    };
    waits(pool_with(&db, 2, "SET synchronous_commit = off").await, "off by a hook").await;
    db.execute(&format!("ALTER DATABASE {} SET synchronous_commit = off", database_of(&db.url))).await;
    // Only new sessions have it.
    waits(db.pool_of(2).await, "off by the database").await;
}

const OFF: &str = "autocommit is off";

/// What is claimed or written over such a connection would never be committed.
async fn nothing_is_granted_where_autocommit_is_off<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let pool = pool_with(&db, 1, "SET autocommit = 0").await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(cause(&error).contains(OFF), "{error:?}");
    let table = VersionedTable::new(pool, COLUMNS).share_pool();
    let error = table.deposit(VERSION, 1).await.unwrap_err();
    assert!(cause(&error).contains(OFF), "{error:?}");
    assert_eq!(balance(&db, VERSION).await, OPENING);
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1").await, Some(0));
}

/// The lock has used the connection before, and looks at each one that it borrows.
async fn nothing_is_granted_after_autocommit_was_switched_off<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    DB::execute(&pool, "SET autocommit = 0").await.unwrap();
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(cause(&error).contains(OFF), "{error:?}");
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    DB::execute(&pool, "SET autocommit = 1").await.unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}

/// The claim is made over a session of the lock's own, and the work would run over the
/// application's.
async fn no_transaction_begins_where_autocommit_is_off<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = pool_with(&db, 1, "SET autocommit = 0").await;
    let lock = LeaseLock::new(pool);
    let done = lock.transaction("k", async |_| -> Result<(), Infallible> { panic!("it does not begin") }).await;
    let Err(RunError::Other(error)) = done else { panic!("{done:?}") };
    assert!(cause(&error).contains(OFF), "{error:?}");
    acquired(db.lock().acquire("k", PATIENCE).await).release().await.unwrap();
}

/// The driver's own ROLLBACK would begin the next transaction, in which another caller's change
/// would be lost.
async fn a_completion_type_of_the_works_own_ends_with_its_connection<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let pool = db.pool_of(1).await;
    for (name, lock) in locks(&pool) {
        for fails in [false, true] {
            let done = lock.transaction(name, async |mut tx| {
                DB::execute_on(&mut tx, "SET completion_type = 'CHAIN'").await?;
                write_in::<DB>(&mut tx, name, 1).await?;
                if fails { Err(sqlx::Error::RowNotFound) } else { Ok(()) }
            });
            assert_eq!(timeout(PATIENCE, done).await.unwrap().is_err(), fails, "{name}");
            assert_eq!(balance(&db, name).await, if fails { 5 } else { 1 }, "{name}");
            DB::execute(&pool, &format!("UPDATE account SET balance = 5 WHERE id = '{name}'")).await.unwrap();
            assert_eq!(balance(&db, name).await, 5, "{name}, {fails}");
        }
    }
}
