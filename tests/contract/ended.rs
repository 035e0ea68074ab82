//! Transactions that end behind the client's back: by the server, by a statement that commits by
//! itself, or by one that the driver does not understand. The driver counts them as open.

use std::{convert::Infallible, time::Duration};

use harness::{TestDatabase, TestDb, acquired};
use rowlock::{Error, VersionedTable, balances::UpdateError, errors::TransactionFault};

use crate::{
    bank::{LEASE, OPENING, VERSION, accounts, balance, locks, version, write_in},
    ledger::COLUMNS,
};

harness::tests!(
    everywhere(a_confirmation_in_a_transaction_that_has_ended_is_refused),
    everywhere(a_balance_in_a_transaction_that_has_ended_is_not_changed),
    mysql_and_mariadb(a_deadlock_ends_the_transaction_of_a_confirmation)
);

/// Creates the accounts, and a table that may be emptied.
pub async fn prepare<DB: TestDatabase>(db: &TestDb<DB>) {
    accounts(db).await;
    db.execute("CREATE TABLE staging (n int)").await;
}

/// Returns statements that end a transaction, and whether they fail.
pub fn endings(server: &str) -> &'static [(&'static str, bool)] {
    match server {
        "postgres" => &[("COMMIT", false), ("ROLLBACK", false), ("SELECT 1/0", true)],
        "sqlite" => {
            &[("COMMIT", false), ("ROLLBACK", false), ("INSERT OR ROLLBACK INTO account VALUES ('other', 0, 0)", true)]
        }
        _ => &[
            ("COMMIT", false),
            ("ROLLBACK", false),
            ("CREATE OR REPLACE VIEW one AS SELECT 1 AS n", false),
            ("TRUNCATE TABLE staging", false),
            ("SET autocommit = 0; SET autocommit = 1", false),
            ("ANALYZE TABLE account", false),
            ("LOCK TABLES account WRITE, t_resource_lock WRITE", false),
        ],
    }
}

/// Makes the transaction the victim of a deadlock, because it has written less than the other one.
/// It has written `account`.
pub async fn deadlock<DB: TestDatabase>(db: &TestDb<DB>, tx: &mut DB::Connection, account: &str) -> sqlx::Error {
    let mut other = db.pool.begin_with(DB::BEGIN).await.unwrap();
    for row in 0..20 {
        DB::execute_on(&mut other, &format!("INSERT INTO account VALUES ('row {row}', 0, 0)")).await.unwrap();
    }
    write_in::<DB>(&mut other, "other", 1).await.unwrap();
    let theirs = write_in::<DB>(&mut other, account, 2);
    let ours = write_in::<DB>(tx, "other", 2);
    let (theirs, ours) = tokio::join!(theirs, ours);
    assert!(theirs.is_ok() && ours.is_err(), "{theirs:?} {ours:?}");
    other.rollback().await.unwrap();
    ours.unwrap_err()
}

#[track_caller]
fn is_over<T: std::fmt::Debug>(result: Result<T, Error>, how: &str) {
    match result {
        Err(error @ Error::Transaction(TransactionFault::Over { .. })) => {
            assert!(!error.is_retryable(), "{how}: {error}")
        }
        other => panic!("{how}: {other:?}"),
    }
}

async fn confirms<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number(&format!("SELECT confirms FROM t_resource_lock WHERE key_resource = '{LEASE}'")).await.unwrap()
}

async fn a_confirmation_in_a_transaction_that_has_ended_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    prepare(&db).await;
    for (name, lock) in locks(&db.pool) {
        let grant = acquired(lock.acquire(name, Duration::ZERO).await);
        for (ending, fails) in endings(db.server.name) {
            let pool = db.pool_of(1).await;
            let mut tx = pool.begin_with(DB::BEGIN).await.unwrap();
            assert_eq!(DB::execute_on(&mut tx, ending).await.is_err(), *fails, "{ending}");
            is_over(lock.confirm(grant.claim(), &mut tx).await, ending);
            drop(tx);
            pool.close().await;
        }
        let mut tx = db.pool.begin_with(DB::BEGIN).await.unwrap();
        lock.confirm(grant.claim(), &mut tx).await.unwrap();
        tx.rollback().await.unwrap();
    }
    assert_eq!((confirms(&db).await, version(&db, VERSION).await), (0, 0));
}

async fn a_balance_in_a_transaction_that_has_ended_is_not_changed<DB: TestDatabase>(db: TestDb<DB>) {
    prepare(&db).await;
    let table = VersionedTable::<DB>::new(db.pool.clone(), COLUMNS);
    for (ending, fails) in endings(db.server.name) {
        let pool = db.pool_of(1).await;
        let mut tx = pool.begin_with(DB::BEGIN).await.unwrap();
        assert_eq!(DB::execute_on(&mut tx, ending).await.is_err(), *fails, "{ending}");
        is_over(table.deposit_in(&mut tx, VERSION, 1).await, ending);
        let deducted = table.deduct_in(&mut tx, VERSION, 1).await;
        is_over(deducted.map_err(|error| if let UpdateError::Other(error) = error { error } else { panic!() }), ending);
        let updated = table.update_in(&mut tx, VERSION, |balance| Ok::<_, Infallible>(balance + 1)).await;
        is_over(updated.map_err(|UpdateError::Other(error)| error), ending);
        drop(tx);
        pool.close().await;
    }
    assert_eq!((balance(&db, VERSION).await, version(&db, VERSION).await), (OPENING, 0));
}

async fn a_deadlock_ends_the_transaction_of_a_confirmation<DB: TestDatabase>(db: TestDb<DB>) {
    prepare(&db).await;
    for (name, lock) in locks(&db.pool) {
        let grant = acquired(lock.acquire(name, Duration::ZERO).await);
        let mut tx = db.pool.begin_with(DB::BEGIN).await.unwrap();
        write_in::<DB>(&mut tx, name, 1).await.unwrap();
        deadlock(&db, &mut tx, name).await;
        is_over(lock.confirm(grant.claim(), &mut tx).await, "a deadlock");
        tx.rollback().await.unwrap();
    }
    assert_eq!((confirms(&db).await, version(&db, VERSION).await), (0, 0));
}
