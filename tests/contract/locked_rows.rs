//! Rows that a transaction of the application has locked: requests for other keys do not wait for
//! them.

use std::time::Duration;

use harness::{COUNTED, PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, LeaseLock, Reason, Status};
use tokio::time::timeout;

use crate::batched::{all, counted, names, numbered, releases, set_up, together, tries};

harness::tests!(
    // Behind Pgpool-II a statement may take as long as a claim is tried again.
    servers[COUNTED](a_row_locked_by_a_transaction_delays_no_other_request),
    servers(a_locked_row_delays_nothing_in_a_table_of_few_rows, a_renewal_is_not_repeated_after_the_loss)
);

async fn a_row_locked_by_a_transaction_delays_no_other_request<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "k", "other"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    let mut sitting = db.row_locked().await;
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, ["first", "k", "other"]))).await;
    // The count if each key is requested once, alone and in a batch. MySQL reads the row in
    // addition, and MariaDB first tries a plain update.
    let once = if db.server.name == "postgres" { 3 } else { 4 };
    assert!(count.is_none_or(|count| count > once), "the one is asked for again, for a while: {count:?}");
    DB::execute_on(&mut sitting, "ROLLBACK").await.unwrap();
    let [first, busy, other] = <[_; 3]>::try_from(answers).unwrap_or_else(|_| panic!("three answers"));
    drop((acquired(first), acquired(other)));
    assert_eq!(refused(busy).reason, Reason::Busy);
}

/// A server may read the whole of a small table where it reads a few rows of a larger one. It then
/// locks all of them, and waits for the one that a transaction has locked.
async fn a_locked_row_delays_nothing_in_a_table_of_few_rows<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(PATIENCE).build().unwrap();
    let lock = lock.lease(Duration::from_secs(3));
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    for count in 1..=4 {
        db.execute("DELETE FROM t_resource_lock").await;
        let keys = [numbered(count), vec!["k".to_owned()]].concat();
        for key in &keys {
            db.execute(&format!("INSERT INTO t_resource_lock (key_resource) VALUES ('{key}')")).await;
        }
        db.execute(if db.server.name == "postgres" { "ANALYZE" } else { "ANALYZE TABLE t_resource_lock" }).await;
        let mut other = db.row_locked().await;

        let mut answers = timeout(PATIENCE, all(tries(&lock, names(&keys)))).await.expect("no claim waits");
        assert_eq!(refused(answers.pop().unwrap()).reason, Reason::Busy);
        let leases: Vec<_> = answers.into_iter().map(acquired).collect();
        let ends = "SELECT CAST(MIN(expires_at) AS char(40)) FROM t_resource_lock WHERE lock_flag = 1";
        let before = db.text(ends).await;
        eventually("all are renewed", || async { db.text(ends).await > before }).await;
        let released = timeout(PATIENCE, all(releases(leases, |_| Status::Succeeded))).await.expect("no release waits");
        released.into_iter().for_each(Result::unwrap);
        DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    }
}

/// It would close the key of a lease that is over, once the other transaction has ended.
async fn a_renewal_is_not_repeated_after_the_loss<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(PATIENCE).build().unwrap();
    let lease = acquired(lock.lease(Duration::from_secs(2)).try_acquire("k").await);
    let _other = db.row_locked().await;
    let renewed = lease.renew().await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
}
