//! The outcomes of work in a transaction: its errors, its misbehaviour, its retries.

use std::{
    convert::Infallible,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::{
    Attempt, Error, LeaseLock, Reason, ResourceLock, Retry, Rules, RunError, Token, Tx,
    errors::{Certainty, DatabaseFault, TransactionFault},
    strategy::ResourceLockExt,
};
use sqlx::{Connection as _, Pool};
use tokio::time::{Instant, timeout};

use crate::{
    bank::{LEASE, Lock, OPENING, accounts, balance, balance_in, deduct, locks, locks_with, version, write_in},
    contention::contention,
    ended::deadlock,
};

harness::tests!(
    everywhere(
        the_works_own_error_comes_back_and_rolls_back,
        work_that_ignores_an_error_is_found_out,
        work_that_rolls_back_is_found_out,
        work_that_commits_is_found_out,
        work_that_commits_and_begins_anew_is_found_out,
        work_that_rolls_back_and_fails_leaves_the_pool_clean,
        work_that_forgets_an_inner_transaction_is_found_out,
        work_that_forgets_an_inner_transaction_and_fails_leaves_the_pool_clean,
        inner_transactions_are_the_works_own,
        work_that_keeps_the_transaction_is_found_out,
        a_key_that_stays_held_is_refused_after_the_time,
        a_lease_with_a_min_interval_is_kept_for_the_next_attempt,
        a_transaction_of_conflicts_leaves_the_key_open,
        a_panic_in_the_work_rolls_back_and_abandons_the_key
    ),
    everywhere.alone(retries_that_are_used_up_are_a_conflict),
    servers(a_transaction_that_does_not_begin_leaves_the_key_open),
    mysql_and_mariadb(work_that_commits_implicitly_is_found_out)
);

/// Longer than a test waits.
const HOUR: Duration = Duration::from_secs(3600);

#[derive(Debug, PartialEq, thiserror::Error)]
enum Reply {
    #[error("code {0}")]
    Code(u8),
}

/// Runs `check` under both strategies, each on a pool of one connection, and then checks that the
/// transaction left the pool clean.
async fn on_both<DB: TestDatabase>(db: &TestDb<DB>, check: impl AsyncFn(&'static str, Lock<DB>)) {
    accounts(db).await;
    for strategy in 0..2 {
        let pool = db.pool_of(1).await;
        let (name, lock) = locks(&pool)[strategy].clone();
        check(name, lock.clone()).await;
        is_clean(&pool, lock.as_ref(), name).await;
    }
}

/// The pool's only connection works and is in no transaction, and the next transaction succeeds.
async fn is_clean<DB: TestDatabase>(pool: &Pool<DB>, lock: &dyn ResourceLock<DB>, account: &str) {
    let mut conn = timeout(PATIENCE, pool.acquire()).await.unwrap().unwrap();
    assert!(!conn.is_in_transaction(), "{account}: the connection counts a transaction that is over");
    DB::execute_on(&mut conn, DB::BEGIN).await.unwrap(); // on SQLite an error if there is a transaction
    DB::execute_on(&mut conn, "ROLLBACK").await.unwrap();
    drop(conn);
    timeout(PATIENCE, deduct(lock, account, 1)).await.unwrap().unwrap();
}

/// The transaction changed nothing.
async fn nothing_happened<DB: TestDatabase>(db: &TestDb<DB>, account: &str) {
    assert_eq!((balance(db, account).await, version(db, account).await), (OPENING, 0), "{account}");
}

async fn the_works_own_error_comes_back_and_rolls_back<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let runs = AtomicU32::new(0);
        let failed = lock.transaction(name, |mut tx| {
            runs.fetch_add(1, SeqCst);
            async move {
                write_in::<DB>(&mut tx, name, 1).await.unwrap();
                Err::<(), _>(Reply::Code(7))
            }
        });
        let error = failed.await.unwrap_err();
        assert!(matches!(error, RunError::Work(Reply::Code(7))), "{error:?}");
        assert_eq!(runs.load(SeqCst), 1);
        nothing_happened(&db, name).await;
        if name == LEASE {
            assert_eq!(db.column(name, "status").await.as_deref(), Some("F"));
            assert_eq!(acquired(db.lock().try_acquire(name).await).taken_over_from(), None);
        }
    })
    .await;
}

/// Misbehaves once in a transaction that has written. This must be detected.
async fn is_found_out<DB: TestDatabase, W, F>(lock: &Lock<DB>, name: &'static str, misbehave: W)
where
    W: Fn(Tx<DB>) -> F,
    F: Future<Output = ()>,
{
    let done = lock.transaction(name, |mut tx| {
        let misbehave = &misbehave;
        async move {
            write_in::<DB>(&mut tx, name, 1).await?;
            misbehave(tx).await;
            Ok::<_, sqlx::Error>(())
        }
    });
    let error = timeout(PATIENCE, done).await.unwrap().unwrap_err();
    assert!(matches!(error, RunError::Other(Error::Transaction(TransactionFault::Over { .. }))), "{name}: {error:?}");
}

/// After this error the transaction is over, even if the work ignores the error.
async fn work_that_ignores_an_error_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        is_found_out(&lock, name, |tx| end_by_an_error(&db, tx)).await;
        nothing_happened(&db, name).await;
    })
    .await;
}

/// Meets an error after which the transaction is over.
pub async fn end_by_an_error<DB: TestDatabase>(db: &TestDb<DB>, mut tx: Tx<DB>) {
    match db.server.name {
        "postgres" => drop(DB::execute_on(&mut tx, "SELECT 1/0").await.unwrap_err()),
        "sqlite" => {
            let sql = "INSERT OR ROLLBACK INTO account VALUES ('other', 0, 0)";
            DB::execute_on(&mut tx, sql).await.unwrap_err();
        }
        _ => {
            let account = DB::text_on(&mut tx, "SELECT id FROM account WHERE balance = 1").await.unwrap().unwrap();
            deadlock(db, &mut tx, &account).await;
        }
    }
}

async fn work_that_rolls_back_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        is_found_out(&lock, name, async |mut tx| assert!(DB::execute_on(&mut tx, "ROLLBACK").await.is_ok())).await;
        nothing_happened(&db, name).await;
    })
    .await;
}

/// What the work committed itself remains. The version, which is confirmed last, does not change.
async fn work_that_commits_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        is_found_out(&lock, name, async |mut tx| assert!(DB::execute_on(&mut tx, "COMMIT").await.is_ok())).await;
        assert_eq!((balance(&db, name).await, version(&db, name).await), (1, 0));
    })
    .await;
}

async fn work_that_commits_and_begins_anew_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let anew = async |mut tx: Tx<DB>| {
            DB::execute_on(&mut tx, "COMMIT").await.unwrap();
            DB::execute_on(&mut tx, DB::BEGIN).await.unwrap();
            // MySQL and MariaDB refuse it.
            let written = write_in::<DB>(&mut tx, name, 2).await;
            assert_eq!(written.is_ok(), ["postgres", "sqlite"].contains(&db.server.name), "{written:?}");
        };
        is_found_out(&lock, name, anew).await;
        assert_eq!((balance(&db, name).await, version(&db, name).await), (1, 0));
    })
    .await;
}

/// The work ends the transaction and also fails: the error tells both, because a COMMIT looks the
/// same, and the pool stays clean.
async fn work_that_rolls_back_and_fails_leaves_the_pool_clean<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let failed = lock.transaction(name, |mut tx| async move {
            write_in::<DB>(&mut tx, name, 1).await.unwrap();
            DB::execute_on(&mut tx, "ROLLBACK").await.unwrap();
            Err::<(), _>(Reply::Code(8))
        });
        let error = timeout(PATIENCE, failed).await.unwrap().unwrap_err();
        assert!(matches!(error, RunError::Other(Error::Transaction(TransactionFault::Over { .. }))), "{error:?}");
        assert!(error.to_string().contains("code 8"), "{error}");
        nothing_happened(&db, name).await;
    })
    .await;
}

async fn work_that_forgets_an_inner_transaction_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        is_found_out(&lock, name, async |mut tx| std::mem::forget(tx.begin().await.unwrap())).await;
        nothing_happened(&db, name).await;
    })
    .await;
}

async fn work_that_forgets_an_inner_transaction_and_fails_leaves_the_pool_clean<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let failed = lock.transaction(name, |mut tx| async move {
            write_in::<DB>(&mut tx, name, 1).await.unwrap();
            std::mem::forget(tx.begin().await.unwrap());
            Err::<(), _>(Reply::Code(9))
        });
        let error = timeout(PATIENCE, failed).await.unwrap().unwrap_err();
        assert!(matches!(error, RunError::Work(Reply::Code(9))), "{error:?}");
        nothing_happened(&db, name).await;
    })
    .await;
}

/// An inner transaction that is dropped is rolled back. One that is committed is part of the whole.
async fn inner_transactions_are_the_works_own<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let done = lock.transaction(name, |mut tx| async move {
            write_in::<DB>(&mut tx, name, 900).await?;
            write_in::<DB>(&mut *tx.begin().await?, name, 1).await?;
            let mut inner = tx.begin().await?;
            let left = balance_in::<DB>(&mut inner, name).await? - 50;
            write_in::<DB>(&mut inner, name, left).await?;
            inner.commit().await
        });
        timeout(PATIENCE, done).await.unwrap().unwrap();
        assert_eq!(balance(&db, name).await, 850);
    })
    .await;
}

/// When the work finally drops the transaction, its connection is closed, and so is what was open
/// on it.
async fn work_that_keeps_the_transaction_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let kept = Mutex::new(None);
        is_found_out(&lock, name, async |tx| drop(kept.lock().unwrap().replace(tx))).await;
        assert!(kept.lock().unwrap().take().is_some());
        nothing_happened(&db, name).await;
        let failed = lock.transaction(name, async |tx| {
            drop(kept.lock().unwrap().replace(tx));
            Err::<(), _>(Reply::Code(7))
        });
        let error = timeout(PATIENCE, failed).await.unwrap().unwrap_err();
        let RunError::Other(error @ Error::Transaction(TransactionFault::Over { outcome: Certainty::Unknown, .. })) =
            error
        else {
            panic!("{name}: {error:?}")
        };
        assert!(error.to_string().contains("code 7"), "{error}");
        assert!(kept.lock().unwrap().take().is_some());
        nothing_happened(&db, name).await;
    })
    .await;
}

/// MySQL and MariaDB commit before a statement that changes the schema. The statement itself is
/// refused.
async fn work_that_commits_implicitly_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let shape = format!("CREATE TABLE by_{name} (id int)");
        is_found_out(&lock, name, async |mut tx| assert!(DB::execute_on(&mut tx, &shape).await.is_err())).await;
        assert_eq!((balance(&db, name).await, version(&db, name).await), (1, 0));
    })
    .await;
}

async fn retries_that_are_used_up_are_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let few = Retry { attempts: 3, within: PATIENCE };
    let short = Retry { attempts: 1_000_000, within: Duration::from_millis(500) };
    for retry in [few, short] {
        for (name, lock) in locks_with(&db.pool, retry) {
            let (since, runs) = (Instant::now(), AtomicU32::new(0));
            let done = lock.transaction(name, |mut tx| {
                runs.fetch_add(1, SeqCst);
                let db = &db;
                async move {
                    write_in::<DB>(&mut tx, name, 1).await?;
                    Err::<(), _>(contention(db, &mut tx).await)
                }
            });
            let (done, runs) = (timeout(PATIENCE, done).await.unwrap(), runs.load(SeqCst));
            match done {
                Err(RunError::Other(Error::Conflict { attempts, key, .. })) => {
                    assert_eq!((attempts, key.as_str()), (runs, name));
                }
                // The time was over in the middle of an attempt.
                Err(RunError::Other(Error::Database(DatabaseFault::TimedOut {
                    outcome: Certainty::NothingChanged,
                    ..
                }))) if retry == short => {}
                Err(RunError::Other(Error::Database(DatabaseFault::NoConnection { .. }))) if retry == short => {}
                other => panic!("{name}: {other:?}"),
            }
            assert!(if retry == few { runs == 3 } else { since.elapsed() >= short.within }, "{runs}");
            nothing_happened(&db, name).await;
        }
    }
}

/// Under the article's rules, a claim that is not ended closes its key until an operator acts.
async fn a_transaction_that_does_not_begin_leaves_the_key_open<DB: TestDatabase>(db: TestDb<DB>) {
    let few = Retry { attempts: 2, within: Duration::from_secs(3) };
    let pool = db.pool_of(1).await;
    let in_use = pool.acquire().await.unwrap();
    let lock = LeaseLock::new(pool).rules(Rules::Article).retry(few);
    // The look at the table and the opening of a session do not count.
    acquired(lock.try_acquire("other").await).release().await.unwrap();
    let done = lock.transaction("k", async |_| -> Result<(), Infallible> { panic!("it does not begin") }).await;
    assert!(matches!(done, Err(RunError::Other(Error::Database(DatabaseFault::NoConnection { .. })))), "{done:?}");
    drop(in_use);
    eventually("the key is open", || async { matches!(lock.try_acquire("k").await, Ok(Attempt::Acquired(_))) }).await;
}

/// Each attempt was rolled back. Nothing counts the claim: neither the article's rules nor an
/// interval nor a lock-delay.
async fn a_transaction_of_conflicts_leaves_the_key_open<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let few = || db.lock().retry(Retry { attempts: 2, within: PATIENCE });
    for lock in [few().rules(Rules::Article), few().min_interval(HOUR), few().lease(HOUR).lock_delay(HOUR)] {
        let db = &db;
        let work = |mut tx: Tx<DB>| async move { Err::<(), _>(contention(db, &mut tx).await) };
        let done = lock.transaction("k", work).await;
        assert!(matches!(done, Err(RunError::Other(Error::Conflict { .. }))), "{done:?}");
        let open = async || match lock.try_acquire("k").await {
            Ok(Attempt::Acquired(lease)) => lease.release().await.is_ok(),
            _ => false,
        };
        eventually("the key is open", open).await;
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

async fn a_key_that_stays_held_is_refused_after_the_time<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let within = Duration::from_millis(600);
    let lock = db.lock().retry(Retry { attempts: 5, within });
    let since = Instant::now();
    let done = lock.transaction("k", async |_| -> Result<(), Infallible> { panic!("it does not begin") });
    match timeout(PATIENCE, done).await.unwrap() {
        Err(RunError::Refused(refusal)) => assert_eq!(refusal.reason, Reason::Held),
        other => panic!("{other:?}"),
    }
    assert!(since.elapsed() >= within);
}

/// If the lease were released for the second attempt, the attempt would be refused within the
/// minimum interval.
async fn a_lease_with_a_min_interval_is_kept_for_the_next_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let lock = db.lock().min_interval(HOUR);
    let tokens = Mutex::new(Vec::<Token>::new());
    let done = lock.transaction(LEASE, |mut tx| {
        tokens.lock().unwrap().push(tx.claim().token);
        let (db, first) = (&db, tokens.lock().unwrap().len() == 1);
        async move {
            write_in::<DB>(&mut tx, LEASE, 999).await?;
            if first { Err(contention(db, &mut tx).await) } else { Ok(()) }
        }
    });
    timeout(PATIENCE, done).await.unwrap().unwrap();
    let tokens = tokens.into_inner().unwrap();
    assert!(tokens.len() == 2 && tokens[0] == tokens[1], "{tokens:?}");
    assert_eq!((balance(&db, LEASE).await, db.column(LEASE, "status").await.as_deref()), (999, Some("S")));
    let since = Instant::now();
    let again = lock.transaction(LEASE, async |_| -> Result<(), Infallible> { panic!("it does not begin") });
    match again.await {
        Err(RunError::Refused(refusal)) => assert_eq!(refusal.reason, Reason::WithinMinInterval),
        other => panic!("{other:?}"),
    }
    assert!(since.elapsed() < PATIENCE / 4, "refused at once");
}

async fn a_panic_in_the_work_rolls_back_and_abandons_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    on_both(&db, async |name, lock| {
        let panicking = harness::spawn(async move {
            let work = async |mut tx: Tx<DB>| -> Result<(), sqlx::Error> {
                write_in::<DB>(&mut tx, name, 1).await?;
                panic!("in the work")
            };
            lock.transaction(name, work).await
        });
        assert!(timeout(PATIENCE, panicking).await.unwrap().unwrap_err().is_panic());
        if name == LEASE {
            let other = db.lock();
            let taken_over = || async {
                let lease = other.try_acquire(name).await.unwrap().acquired();
                lease.is_some_and(|lease| lease.taken_over_from().is_some())
            };
            eventually("the key is abandoned", taken_over).await;
            assert!(other.shutdown(PATIENCE).await);
        }
        nothing_happened(&db, name).await;
    })
    .await;
}
