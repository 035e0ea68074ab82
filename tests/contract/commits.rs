//! A transaction whose requests or replies are lost: it is committed once, or not at all, or its
//! outcome is unknown and reported as such.

use std::{
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{
    Error, LeaseLock, ResourceLock, Retry, RunError, VersionLock,
    errors::{Certainty, DatabaseFault, TransactionFault},
    strategy::ResourceLockExt,
};
use tokio::time::timeout;

use crate::{
    bank::{LEASE, OPENING, VERSION, accounts, balance, balance_in, deduct, version, version_lock, write_in},
    line::{LIMIT, Line, WAYS},
};

harness::tests!(
    servers(
        a_lease_finds_out_about_a_commit_that_is_answered_too_late,
        a_commit_before_a_takeover_is_unknown,
        a_begin_that_is_not_answered_is_sent_again,
        a_confirmation_or_check_that_is_not_answered_changes_nothing
    ),
    servers[DIRECT](a_commit_that_may_still_arrive_is_unknown),
    mysql_and_mariadb(what_is_committed_before_the_connection_is_lost_is_told),
    servers.each(
        a_commit_under_a_version_that_is_not_answered_is_unknown,
        a_lease_finds_out_that_its_commit_was_done,
        a_lease_finds_out_that_its_commit_was_not_done
    )
);

/// How many round trips lie between the work's last statement and the `COMMIT`: the check, and
/// under a version the confirmation.
fn before_commit(account: &str) -> usize {
    if account == LEASE { 1 } else { 2 }
}

/// How many round trips precede the `BEGIN`.
const BEFORE_BEGIN: usize = 1;

/// Returns both strategies behind a proxy, with the statements of a transaction prepared on the
/// only connection.
async fn line<DB: TestDatabase>(db: &TestDb<DB>, within: Duration) -> (Line<DB>, LeaseLock<DB>, VersionLock<DB>) {
    let line = Line::new(db, PATIENCE, PATIENCE).await;
    let (lease, version) = (line.lock.clone(), version_lock(&line.pool).share_pool());
    for lock in [&lease as &dyn ResourceLock<DB>, &version] {
        deduct(lock, if lock.terms().confirm_last { VERSION } else { LEASE }, 0).await.unwrap();
    }
    eventually("the connection is idle", || async { line.pool.num_idle() == 1 }).await;
    let retry = Retry { attempts: 100, within };
    (line, lease.retry(retry), version.retry(retry))
}

/// The result of a transaction, and how often its work was run.
type Done = (Result<(), RunError<sqlx::Error>>, u32);

/// Deducts one from an account. After the work's last statement in its first run, this many chunks
/// pass this way and the next is held. The last argument runs while it is held.
async fn deduct_held<DB: TestDatabase, L: ResourceLock<DB>>(
    line: &Line<DB>,
    lock: &L,
    account: &'static str,
    (way, after): (Way, usize),
    between: impl AsyncFnOnce(&Proxy),
) -> Done {
    let runs = AtomicU32::new(0);
    let done = lock.transaction(account, |mut tx| {
        let first = runs.fetch_add(1, SeqCst) == 0;
        async move {
            let left = balance_in::<DB>(&mut tx, account).await? - 1;
            write_in::<DB>(&mut tx, account, left).await?;
            if first {
                line.proxy.hold_after(way, after);
            }
            Ok(())
        }
    });
    let between = async {
        line.proxy.held(way).await;
        between(&line.proxy).await;
    };
    let both = async { tokio::join!(done, between).0 };
    let done = timeout(3 * PATIENCE, both).await.expect("it ends");
    (done, runs.into_inner())
}

#[track_caller]
fn is_unknown<T: std::fmt::Debug>(done: &Result<T, RunError<sqlx::Error>>) {
    assert!(
        matches!(done, Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { .. })))),
        "{done:?}"
    );
}

async fn has<DB: TestDatabase>(db: &TestDb<DB>, account: &str, taken: i64) {
    assert_eq!(balance(db, account).await, OPENING - taken, "{account}");
}

async fn a_lease_finds_out_that_its_commit_was_done<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let (line, lock, _) = line(&db, PATIENCE).await;
    let place = (Way::Replies, before_commit(LEASE));
    let (done, runs) = deduct_held(&line, &lock, LEASE, place, async |proxy| {
        has(&db, LEASE, 1).await; // it is committed, and the caller does not know it yet
        proxy.cut();
    })
    .await;
    assert!(done.is_ok() && runs == 1, "{runs}: {done:?}");
    has(&db, LEASE, 1).await;
    assert_eq!(db.column(LEASE, "status").await.as_deref(), Some("S"));
}

async fn a_lease_finds_out_that_its_commit_was_not_done<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let (line, lock, _) = line(&db, PATIENCE).await;
    let place = (Way::Requests, before_commit(LEASE));
    let (done, runs) = deduct_held(&line, &lock, LEASE, place, async |proxy| {
        has(&db, LEASE, 0).await;
        proxy.cut();
    })
    .await;
    assert!(done.is_ok() && runs == 2, "{runs}: {done:?}");
    has(&db, LEASE, 1).await;
    assert_eq!(db.column(LEASE, "status").await.as_deref(), Some("S"));
}

/// The reply is in transit for longer than any caller waits.
async fn a_lease_finds_out_about_a_commit_that_is_answered_too_late<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let (line, lock, _) = line(&db, 5 * LIMIT).await;
    let place = (Way::Replies, before_commit(LEASE));
    let (done, runs) = deduct_held(&line, &lock, LEASE, place, async |proxy| proxy.let_others_pass()).await;
    assert!(done.is_ok() && runs == 1, "{runs}: {done:?}");
    line.proxy.open();
    has(&db, LEASE, 1).await;
}

/// While the request is in transit, the transaction is open and its outcome is undecided.
async fn a_commit_that_may_still_arrive_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let (line, _, _) = line(&db, 5 * LIMIT).await;
    let lock = LeaseLock::builder(line.pool.clone()).share_pool().time_limit(2 * LIMIT).build().unwrap();
    let lock = lock.lease(PATIENCE).retry(Retry { attempts: 100, within: 5 * LIMIT });
    let place = (Way::Requests, before_commit(LEASE));
    let (done, runs) = deduct_held(&line, &lock, LEASE, place, async |proxy| proxy.let_others_pass()).await;
    is_unknown(&done);
    assert_eq!(runs, 1);
    has(&db, LEASE, 0).await;
    line.proxy.open();
    eventually("it arrives", || async { balance(&db, LEASE).await == OPENING - 1 }).await;
}

/// The row that would show the outcome already belongs to another holder.
async fn a_commit_before_a_takeover_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let (line, lock, _) = line(&db, PATIENCE).await;
    let place = (Way::Replies, before_commit(LEASE));
    let (done, runs) = deduct_held(&line, &lock, LEASE, place, async |proxy| {
        db.set(LEASE, &format!("expires_at = {}", DB::ago(1))).await;
        assert!(acquired(db.lock().try_acquire(LEASE).await).taken_over_from().is_some());
        proxy.cut();
    })
    .await;
    is_unknown(&done);
    assert_eq!(runs, 1);
    has(&db, LEASE, 1).await;
}

/// A version does not record which transaction raised it.
async fn a_commit_under_a_version_that_is_not_answered_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let mut taken = 0;
    for way in WAYS {
        let (line, _, lock) = line(&db, PATIENCE).await;
        let raised = version(&db, VERSION).await;
        let place = (way, before_commit(VERSION));
        let (done, runs) = deduct_held(&line, &lock, VERSION, place, async |proxy| proxy.cut()).await;
        is_unknown(&done);
        assert_eq!(runs, 1, "{way:?}");
        let this = i64::from(way == Way::Replies);
        taken += this;
        has(&db, VERSION, taken).await;
        assert_eq!(version(&db, VERSION).await, raised + this, "{way:?}");
    }
}

/// Before the commit is sent, nothing can have changed. Checks that the error says so.
fn changed_nothing<T: std::fmt::Debug>(done: &Result<T, RunError<sqlx::Error>>) {
    let nothing = matches!(
        done,
        Err(RunError::Other(Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })))
    );
    assert!(nothing, "{done:?}");
}

/// The `BEGIN` changed nothing, so that it is sent again, over another connection.
async fn a_begin_that_is_not_answered_is_sent_again<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for way in WAYS {
        for account in [LEASE, VERSION] {
            let (line, lease, version) = line(&db, PATIENCE).await;
            let lock: &dyn ResourceLock<DB> = if account == LEASE { &lease } else { &version };
            line.lost(way, BEFORE_BEGIN, deduct(lock, account, 1)).await.unwrap();
            has(&db, account, 1).await;
            db.execute(&format!("UPDATE account SET balance = {OPENING} WHERE id = '{account}'")).await;
            assert!(line.lock.shutdown(PATIENCE).await);
        }
    }
}

async fn a_confirmation_or_check_that_is_not_answered_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for way in WAYS {
        let (line, lock, _) = line(&db, PATIENCE).await;
        // The test begins the transaction itself: the replies to `BEGIN` and to its savepoint may
        // arrive as one chunk or as two.
        let lease = acquired(lock.try_acquire(LEASE).await);
        let mut tx = line.pool.begin().await.unwrap();
        let confirmed = line.lost(way, 0, lock.confirm(lease.claim(), &mut tx)).await;
        changed_nothing(&confirmed.map_err(RunError::Other));
        drop(tx);
        lease.release().await.unwrap();
        is_had_again(&db, &line, &lock, LEASE).await;
        for account in [LEASE, VERSION] {
            for after in 0..before_commit(account) {
                let (line, lease, version) = self::line(&db, PATIENCE).await;
                let place = (way, after);
                let (done, runs) = match account {
                    LEASE => deduct_held(&line, &lease, LEASE, place, async |proxy| proxy.cut()).await,
                    _ => deduct_held(&line, &version, VERSION, place, async |proxy| proxy.cut()).await,
                };
                changed_nothing(&done);
                assert_eq!(runs, 1);
                let lock: &dyn ResourceLock<DB> = if account == LEASE { &lease } else { &version };
                is_had_again(&db, &line, lock, account).await;
            }
        }
    }
}

/// Checks that nothing was deducted, the key was abandoned, and the next transaction succeeds.
async fn is_had_again<DB: TestDatabase>(db: &TestDb<DB>, line: &Line<DB>, lock: &dyn ResourceLock<DB>, account: &str) {
    has(db, account, 0).await;
    timeout(PATIENCE, deduct(lock, account, 1)).await.unwrap().unwrap();
    has(db, account, 1).await;
    db.execute(&format!("UPDATE account SET balance = {OPENING} WHERE id = '{account}'")).await;
    assert!(line.lock.shutdown(PATIENCE).await);
}

/// The work's first part is committed by a statement of its own, and the request that would find
/// that out is lost.
async fn what_is_committed_before_the_connection_is_lost_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    db.execute("CREATE TABLE staging (n int)").await;
    for way in WAYS {
        for fails in [false, true] {
            let (line, lock, _) = line(&db, PATIENCE).await;
            let proxy = &line.proxy;
            let done = lock.transaction(LEASE, async |mut tx| {
                write_in::<DB>(&mut tx, LEASE, 1).await?;
                DB::execute_on(&mut tx, "TRUNCATE TABLE staging").await.unwrap_err();
                proxy.hold_after(way, 0);
                if fails { Err(sqlx::Error::RowNotFound) } else { Ok(()) }
            });
            let cut = async {
                proxy.held(way).await;
                proxy.cut();
            };
            let done = timeout(PATIENCE, async { tokio::join!(done, cut).0 }).await.unwrap();
            let in_part = matches!(
                done,
                Err(RunError::Other(Error::Transaction(TransactionFault::Over { outcome: Certainty::InPart, .. })))
            );
            assert!(in_part, "{way:?}, {fails}: {done:?}");
            assert_eq!(balance(&db, LEASE).await, 1);
            assert!(line.lock.shutdown(PATIENCE).await); // the lease has been abandoned
            db.execute(&format!("UPDATE account SET balance = {OPENING} WHERE id = '{LEASE}'")).await;
        }
    }
}
