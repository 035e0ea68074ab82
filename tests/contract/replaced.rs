//! Claims that were replaced or whose grant was never received, and grants that were never
//! committed.

use std::{
    task::{Context, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{Error, LeaseLock, Reason, Rules, Status, errors::DatabaseFault};
use tokio::time::timeout;

harness::tests!(
    everywhere(a_claim_that_the_same_lock_replaced_is_told_lost, a_claim_whose_caller_was_dropped_is_no_crash),
    sqlite(a_grant_that_cannot_be_committed_is_none, a_full_disk_grants_nothing_and_takes_nothing)
);

/// Both claims are renewed in one statement, and the row matches only one of them.
async fn a_claim_that_the_same_lock_replaced_is_told_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(Duration::from_secs(3));
    let replaced = acquired(lock.try_acquire("k").await);
    lock.force_release("k", Status::Succeeded).await.unwrap();
    let next = acquired(lock.try_acquire("k").await);
    timeout(PATIENCE, replaced.lost()).await.expect("it is told");
    assert!(next.is_held());
    next.renew().await.unwrap();
    next.release().await.unwrap();
}

/// No caller worked under the claim. The article's rules would treat it as a crash, and would
/// refuse all callers for ever.
async fn a_claim_whose_caller_was_dropped_is_no_crash<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().rules(Rules::Article);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    for polls in 1..9 {
        let mut attempt = Box::pin(lock.acquire("k", PATIENCE));
        for _ in 0..polls {
            if attempt.as_mut().poll(&mut Context::from_waker(Waker::noop())).map(drop).is_ready() {
                // The caller has received this grant.
                assert!(lock.shutdown(PATIENCE).await);
                lock.force_release("k", Status::Succeeded).await.unwrap();
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(attempt);
        assert!(lock.shutdown(PATIENCE).await);
        acquired(lock.try_acquire("k").await).release().await.unwrap();
    }
}

/// With a rollback journal, SQLite can commit only when no connection reads, and the statement
/// returns its row before the commit.
async fn a_grant_that_cannot_be_committed_is_none<DB: TestDatabase>(db: TestDb<DB>) {
    let url = db.url.replace("locks.db", "with-a-journal.db");
    let (mine, readers) = (pool::<DB>(&url, 1).await, pool::<DB>(&url, 1).await);
    rowlock::migrate(&mine).await.unwrap();
    let lock = LeaseLock::new(mine);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let mut reader = readers.acquire().await.unwrap();
    DB::execute_on(&mut reader, "BEGIN").await.unwrap();
    DB::text_on(&mut reader, "SELECT status FROM t_resource_lock").await.unwrap();
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Busy);
    DB::execute_on(&mut reader, "ROLLBACK").await.unwrap();
    drop(reader);
    eventually("the key is had", || async {
        match LeaseLock::new(readers.clone()).try_acquire("k").await.unwrap().acquired() {
            Some(lease) => lease.release().await.is_ok(),
            None => false,
        }
    })
    .await;
}

/// A file that may not grow simulates a full disk.
async fn a_full_disk_grants_nothing_and_takes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let only = db.over(db.pool_of(1).await);
    let lock = only.lock();
    let held = acquired(lock.try_acquire("held").await);
    let pages = only.number("SELECT page_count FROM pragma_page_count").await.unwrap();
    only.execute(&format!("PRAGMA max_page_count = {pages}")).await;
    let key = |number: usize| format!("{number} {}", "x".repeat(200));
    let mut leases = Vec::new();
    let error = loop {
        match lock.try_acquire(&key(leases.len())).await {
            Ok(attempt) => leases.push(attempt.acquired().expect("no other task wants it")),
            Err(error) => break error,
        }
        assert!(leases.len() < 1000, "the disk is full at some time");
    };
    assert!(
        matches!(&error, Error::Database(DatabaseFault::Failed { .. })) && format!("{error:?}").contains("full"),
        "{error}"
    );
    held.renew().await.unwrap();
    let locked = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1";
    assert_eq!(only.number(locked).await, Some(i64::try_from(leases.len() + 1).unwrap()));
    only.execute("PRAGMA max_page_count = 1000000").await;
    leases.push(acquired(lock.try_acquire(&key(leases.len())).await));
    for lease in leases {
        lease.release().await.unwrap();
    }
    held.release().await.unwrap();
}
