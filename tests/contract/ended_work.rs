//! Work whose transaction ends behind its back: it takes effect once, or not at all, or the error
//! says what may stand.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{
    Error, ResourceLock, Retry, RunError, Tx,
    errors::{Certainty, TransactionFault},
    strategy::ResourceLockExt,
};
use tokio::time::timeout;

use crate::{
    bank::{LEASE, Lock, OPENING, VERSION, accounts, balance, locks, locks_with, version, write_in},
    completion,
    contention::contention,
    ended::{deadlock, endings, prepare},
};

harness::tests!(
    everywhere(
        work_whose_transaction_has_ended_does_not_run_again,
        work_that_fails_after_its_transaction_has_ended_is_told,
        an_aborted_transaction_changed_nothing
    ),
    sqlite(a_conflict_that_rolls_back_is_told),
    mysql_and_mariadb(
        work_that_goes_on_after_a_deadlock_is_done_once,
        work_that_goes_on_after_a_deadlock_and_gives_up_changed_nothing,
        what_follows_a_deadlock_and_is_committed_is_told,
        a_deadlock_that_the_work_keeps_to_itself_changed_nothing,
        nothing_is_written_after_a_commit_by_the_work,
        a_transaction_of_the_works_own_is_not_called_undone,
        what_is_committed_on_a_session_that_the_work_lets_write_is_told
    )
);

/// The error of a database in work, or one of the work's own.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("the database failed")]
    Database(#[from] sqlx::Error),
    #[error("the work failed by itself")]
    ByItself,
}

/// Creates the accounts, and rows `r0` to `r3` for the work's updates.
async fn rows<DB: TestDatabase>(db: &TestDb<DB>) {
    accounts(db).await;
    for row in 0..4 {
        db.execute(&format!("INSERT INTO account VALUES ('r{row}', 0, 0)")).await;
    }
}

/// Returns both strategies on sessions of each `completion_type`.
async fn under_any_completion_type<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<(&'static str, Lock<DB>)> {
    let mut all = Vec::from(locks(&db.pool));
    for completion in completion::TYPES {
        all.extend(locks(&completion::pool(db, completion).await));
    }
    all
}

async fn balances<DB: TestDatabase>(db: &TestDb<DB>) -> [i64; 4] {
    let mut balances = [0; 4];
    for (row, balance) in balances.iter_mut().enumerate() {
        *balance = self::balance(db, &format!("r{row}")).await;
    }
    balances
}

async fn add<DB: TestDatabase>(tx: &mut DB::Connection, row: &str) -> Result<u64, sqlx::Error> {
    DB::execute_on(tx, &format!("UPDATE account SET balance = balance + 100 WHERE id = '{row}'")).await
}

/// Adds to all rows, goes on after every error, and returns the last one. The transaction is the
/// victim of a deadlock after the first row.
async fn add_to_all<DB: TestDatabase>(
    db: &TestDb<DB>,
    tx: &mut DB::Connection,
    in_deadlock: bool,
) -> Result<(), sqlx::Error> {
    let mut last = add::<DB>(tx, "r0").await.map(drop);
    if in_deadlock {
        last = Err(deadlock(db, tx, "r0").await);
    }
    for row in ["r1", "r2", "r3"] {
        if let Err(error) = add::<DB>(tx, row).await {
            last = Err(error);
        }
    }
    last
}

async fn work_that_goes_on_after_a_deadlock_is_done_once<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (time, (name, lock)) in (1..).zip(under_any_completion_type(&db).await) {
        let runs = AtomicU32::new(0);
        let done = lock.transaction(name, |mut tx| {
            let (db, first) = (&db, runs.fetch_add(1, SeqCst) == 0);
            async move { add_to_all(db, &mut tx, first).await }
        });
        timeout(PATIENCE, done).await.unwrap().unwrap();
        assert_eq!((runs.load(SeqCst), balances(&db).await), (2, [100 * time; 4]), "{name}");
    }
    assert_eq!(version(&db, VERSION).await, 3);
}

async fn work_that_goes_on_after_a_deadlock_and_gives_up_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    let once = Retry { attempts: 1, within: PATIENCE };
    for (name, lock) in locks_with(&db.pool, once) {
        let done = lock.transaction(name, async |mut tx| add_to_all(&db, &mut tx, true).await);
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        assert!(matches!(error, RunError::Other(Error::Conflict { attempts: 1, .. })), "{error:?}");
        assert_eq!(balances(&db).await, [0; 4], "{name}");
        // An error of the work's own is returned as it is.
        let done = lock.transaction(name, async |mut tx| {
            add_to_all(&db, &mut tx, true).await.unwrap_err();
            Err::<(), _>(Failed::ByItself)
        });
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        assert!(matches!(error, RunError::Work(Failed::ByItself)), "{error:?}");
        assert_eq!(balances(&db).await, [0; 4], "{name}");
    }
    assert_eq!(version(&db, VERSION).await, 0);
}

/// The work commits what follows the deadlock. The count of confirmations shows only that what
/// preceded it was rolled back.
async fn what_follows_a_deadlock_and_is_committed_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (time, (name, lock)) in (1..).zip(under_any_completion_type(&db).await) {
        for end in ["COMMIT", "CREATE OR REPLACE VIEW one AS SELECT 1 AS n"] {
            let runs = AtomicU32::new(0);
            let done = lock.transaction(name, |mut tx| {
                let db = &db;
                runs.fetch_add(1, SeqCst);
                async move {
                    add::<DB>(&mut tx, "r0").await.unwrap();
                    let error = deadlock(db, &mut tx, "r0").await;
                    add::<DB>(&mut tx, "r1").await.unwrap();
                    drop(DB::execute_on(&mut tx, end).await);
                    Err::<(), _>(error)
                }
            });
            let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
            is_over(&error, Certainty::Unknown);
            assert_eq!(runs.load(SeqCst), 1, "{name}, {end}");
        }
        assert_eq!(balances(&db).await, [0, 200 * time, 0, 0], "{name}");
    }
}

#[track_caller]
fn is_over<E: std::fmt::Debug>(error: &RunError<E>, expected: Certainty) {
    match error {
        RunError::Other(error @ Error::Transaction(TransactionFault::Over { outcome, .. })) if *outcome == expected => {
            let asks = error.to_string().contains("read it before you repeat the work");
            assert_eq!(asks, expected != Certainty::NothingChanged, "{error}");
        }
        other => panic!("{expected:?}: {other:?}"),
    }
}

/// The work's first part was committed, or it may have been: the work does not run again, although
/// its error means contention. A lease's row tells which.
async fn work_whose_transaction_has_ended_does_not_run_again<DB: TestDatabase>(db: TestDb<DB>) {
    prepare(&db).await;
    for (ending, _) in endings(db.server.name).iter().filter(|(_, fails)| !fails) {
        let pool = db.pool_of(1).await;
        for (name, lock) in locks(&pool) {
            db.execute(&format!("UPDATE account SET balance = {OPENING}")).await;
            let runs = AtomicU32::new(0);
            let done = lock.transaction(name, |mut tx| {
                let (db, key) = (&db, tx.claim().key.clone());
                runs.fetch_add(1, SeqCst);
                async move {
                    write_in::<DB>(&mut tx, name, 1).await.unwrap();
                    // MySQL and MariaDB commit, and then refuse a statement that writes.
                    let ended = DB::execute_on(&mut tx, ending).await;
                    assert!(ended.is_ok() || !["postgres", "sqlite"].contains(&db.server.name), "{ended:?}");
                    Err::<(), _>(Error::conflict(key, 1))
                }
            });
            let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
            let stands = *ending != "ROLLBACK";
            is_over(&error, if stands && name == LEASE { Certainty::InPart } else { Certainty::Unknown });
            assert_eq!(runs.load(SeqCst), 1, "{name}, {ending}");
            assert_eq!(balance(&db, name).await, if stands { 1 } else { OPENING }, "{name}, {ending}");
            is_usable(&db, lock.as_ref(), name).await;
        }
        pool.close().await;
    }
    assert_eq!(version(&db, VERSION).await, endings(db.server.name).iter().filter(|(_, fails)| !fails).count() as i64);
}

/// The pool's only connection commits and writes by itself.
async fn is_usable<DB: TestDatabase>(db: &TestDb<DB>, lock: &dyn ResourceLock<DB>, account: &str) {
    let write = async |balance| {
        DB::execute(lock.pool(), &format!("UPDATE account SET balance = {balance} WHERE id = '{account}'"))
            .await
            .unwrap()
    };
    write(7).await;
    assert_eq!(balance(db, account).await, 7);
    let done = lock.transaction(account, |mut tx: Tx<DB>| async move { write_in::<DB>(&mut tx, account, 8).await });
    timeout(PATIENCE, done).await.unwrap().unwrap();
    assert_eq!(balance(db, account).await, 8);
    write(9).await;
    assert_eq!(balance(db, account).await, 9);
}

async fn work_that_fails_after_its_transaction_has_ended_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let done = lock.transaction(name, async |mut tx| {
            write_in::<DB>(&mut tx, name, 1).await?;
            DB::execute_on(&mut tx, "COMMIT").await?;
            Err::<(), _>(Failed::ByItself)
        });
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        is_over(&error, if name == LEASE { Certainty::InPart } else { Certainty::Unknown });
        assert!(error.to_string().contains("the work failed by itself"), "{error}");
        assert_eq!(balance(&db, name).await, 1);
    }
}

/// An error that the work returns ends nothing that could stand.
async fn an_aborted_transaction_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let runs = AtomicU32::new(0);
        let done = lock.transaction(name, |mut tx| {
            let (db, first) = (&db, runs.fetch_add(1, SeqCst) == 0);
            async move {
                write_in::<DB>(&mut tx, name, 1).await?;
                DB::execute_on(&mut tx, "SELECT no_column FROM account").await.unwrap_err();
                if first {
                    Err::<(), _>(Failed::Database(contention(db, &mut tx).await))
                } else {
                    Err(Failed::ByItself)
                }
            }
        });
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        // PostgreSQL answers every statement of an aborted transaction with the same error.
        assert!(matches!(error, RunError::Work(_)), "{error:?}");
        assert_eq!((balance(&db, name).await, version(&db, name).await), (OPENING, 0));
    }
}

/// The deadlock undid the work's first part, and the last ROLLBACK the second. Under a version, a
/// transaction of the work's own might have taken its place.
async fn a_deadlock_that_the_work_keeps_to_itself_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (name, lock) in locks(&db.pool) {
        let done = lock.transaction(name, async |mut tx| {
            add_to_all(&db, &mut tx, true).await.unwrap_err();
            Ok::<_, sqlx::Error>(())
        });
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        is_over(&error, if name == LEASE { Certainty::NothingChanged } else { Certainty::Unknown });
        assert_eq!(balances(&db).await, [0; 4], "{name}");
    }
    assert_eq!(version(&db, VERSION).await, 0);
}

async fn nothing_is_written_after_a_commit_by_the_work<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (time, (name, lock)) in (1..).zip(locks(&db.pool)) {
        for begins in [false, true] {
            let done = lock.transaction(name, async |mut tx| {
                add::<DB>(&mut tx, "r0").await?;
                DB::execute_on(&mut tx, "COMMIT").await?;
                if begins {
                    DB::execute_on(&mut tx, "BEGIN").await?;
                }
                add::<DB>(&mut tx, "r1").await.map(drop)
            });
            let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
            is_over(&error, if name == LEASE { Certainty::InPart } else { Certainty::Unknown });
        }
        assert_eq!(balances(&db).await, [200 * time, 0, 0, 0], "{name}");
    }
}

/// Such a transaction writes, as after a rollback by the server.
async fn a_transaction_of_the_works_own_is_not_called_undone<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (time, (name, lock)) in (1..).zip(locks(&db.pool)) {
        for end in ["COMMIT AND CHAIN", "START TRANSACTION READ WRITE"] {
            let done = lock.transaction(name, async |mut tx| {
                add::<DB>(&mut tx, "r0").await?;
                DB::execute_on(&mut tx, end).await?;
                add::<DB>(&mut tx, "r1").await.map(drop)
            });
            let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
            is_over(&error, if name == LEASE { Certainty::InPart } else { Certainty::Unknown });
        }
        assert_eq!(balances(&db).await, [200 * time, 0, 0, 0], "{name}");
    }
}

/// After a rollback of its own, the work can write only if it lets the session write again.
async fn what_is_committed_on_a_session_that_the_work_lets_write_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    rows(&db).await;
    for (name, lock) in locks(&db.pool) {
        let done = lock.transaction(name, async |mut tx| {
            DB::execute_on(&mut tx, "ROLLBACK").await?;
            DB::execute_on(&mut tx, "SET SESSION TRANSACTION READ WRITE").await?;
            add::<DB>(&mut tx, "r0").await?;
            DB::execute_on(&mut tx, "COMMIT").await?;
            Err::<(), _>(Failed::ByItself)
        });
        is_over(&timeout(PATIENCE, done).await.unwrap().unwrap_err(), Certainty::Unknown);
    }
    assert_eq!(balances(&db).await, [200, 0, 0, 0]);
}

/// SQLite rolls back, and commits each later statement by itself.
async fn a_conflict_that_rolls_back_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (name, lock) in locks(&db.pool) {
        let done = lock.transaction(name, async |mut tx| {
            write_in::<DB>(&mut tx, name, 1).await?;
            let inserted = DB::execute_on(&mut tx, "INSERT OR ROLLBACK INTO account VALUES ('other', 0, 0)").await;
            write_in::<DB>(&mut tx, "other", 2).await?;
            inserted.map(drop)
        });
        let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
        is_over(&error, Certainty::Unknown);
        assert_eq!((balance(&db, name).await, balance(&db, "other").await), (OPENING, 2));
    }
}
