//! The time limit bounds each statement of a change, and the time of the retries bounds all of
//! them.

use std::{convert::Infallible, time::Duration};

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, eventually, proxy::Way};
use rowlock::{
    Error, Retry, RunError, VersionedTable,
    balances::UpdateError,
    errors::{Certainty, DatabaseFault},
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    bank::{VERSION, accounts, version_lock, write_in},
    ledger::{COLUMNS, ledger, outside, row, updated},
    line::WAYS,
    versioned_lost::{READING, WRITING, distant},
};

harness::tests!(
    everywhere(
        a_write_that_waits_for_a_row_ends_with_the_limit,
        a_write_that_was_sent_in_time_is_waited_for_up_to_its_own_limit,
        no_write_is_sent_after_the_time_of_the_retries,
        a_transaction_waits_for_a_connection_within_the_time_of_the_retries,
        a_connection_that_comes_within_the_time_of_the_retries_is_taken
    ),
    servers[DIRECT](a_write_that_is_not_answered_within_the_limit_is_unknown_and_not_sent_again),
    servers(
        a_read_that_is_not_answered_within_the_limit_is_sent_over_another_connection,
        in_a_transaction_each_statement_has_the_limit,
        a_begin_that_is_not_answered_within_the_limit_is_sent_over_another_connection
    )
);

/// Long for a statement on a busy machine, and short compared with the 10 s of the retries.
const LIMIT: Duration = Duration::from_secs(2);

const CHANGES: [&str; 3] = ["update", "deduct", "deposit"];

/// The changes, each with a way in which it is held. The client does not know which it was.
fn changes_and_ways() -> impl Iterator<Item = (&'static str, Way)> {
    CHANGES.into_iter().zip(WAYS.into_iter().cycle())
}

/// Makes one of the changes: one less, or one more.
async fn change<DB: TestDatabase>(
    table: &VersionedTable<DB>,
    name: &str,
) -> Result<rowlock::balances::Updated<i64>, Error> {
    let failed = |error| match error {
        UpdateError::Other(error) => error,
        other => panic!("{other:?}"),
    };
    match name {
        "update" => table.update("a", |balance| Ok::<_, Infallible>(balance - 1)).await.map_err(|error| match error {
            UpdateError::Other(error) => error,
            UpdateError::Computation(never) => match never {},
        }),
        "deduct" => table.deduct("a", 1).await.map_err(failed),
        _ => table.deposit("a", 1).await,
    }
}

/// Asserts the error of a write that timed out: returned in time, with a message about a write.
#[track_caller]
fn is_unknown(result: Result<rowlock::balances::Updated<i64>, Error>, since: Instant, what: &str) {
    let error = result.expect_err(what);
    assert!(
        matches!(error, Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })),
        "{what}: {error:?}"
    );
    let text = error.to_string();
    assert!(text.contains("may have been") && !text.contains("lease"), "{what}: {text}");
    assert!(!error.is_retryable(), "{what}: {text}");
    assert!(since.elapsed() < 4 * LIMIT, "{what}: after {:?}", since.elapsed());
}

async fn a_write_that_is_not_answered_within_the_limit_is_unknown_and_not_sent_again<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for (name, way) in changes_and_ways() {
        let (proxy, pool, table) = distant(&db).await;
        let version = row(&db).await.1;
        let table = table.time_limit(LIMIT);
        let since = Instant::now();
        is_unknown(proxy.during(way, WRITING, change(&table, name), async |_| {}).await, since, name);
        assert_eq!(pool.size(), 0, "the connection is closed");
        proxy.open();
        eventually("it arrives, once", || async { row(&db).await.1 == version + 1 }).await;
    }
}

/// Another transaction has the row locked (on SQLite: the file).
async fn a_write_that_waits_for_a_row_ends_with_the_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await.time_limit(LIMIT);
    for name in CHANGES {
        let mut conn = db.pool.acquire().await.unwrap();
        DB::execute_on(&mut conn, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut conn, "UPDATE account SET balance = balance WHERE id = 'a'").await.unwrap();
        let since = Instant::now();
        is_unknown(change(&table, name).await, since, name);
        DB::execute_on(&mut conn, "ROLLBACK").await.unwrap();
    }
}

/// The time of the retries ends while the write waits for the row.
async fn a_write_that_was_sent_in_time_is_waited_for_up_to_its_own_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    for (place, name) in CHANGES.into_iter().enumerate() {
        let table = table.clone().time_limit(2 * PATIENCE).retry(Retry { within: LIMIT, ..Retry::default() });
        let mut conn = db.pool.acquire().await.unwrap();
        DB::execute_on(&mut conn, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut conn, "UPDATE account SET balance = balance WHERE id = 'a'").await.unwrap();
        let later = async {
            sleep(LIMIT * 3 / 2).await;
            DB::execute_on(&mut conn, "ROLLBACK").await.unwrap();
        };
        let (changed, ()) = tokio::join!(change(&table, name), later);
        assert_eq!(changed.unwrap().version, place as i64 + 1, "{name}");
    }
}

/// Its limit would have passed when it is sent, and its outcome would be unknown.
async fn no_write_is_sent_after_the_time_of_the_retries<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await.retry(Retry { within: LIMIT, ..Retry::default() });
    let mut calls = 0;
    let slow = table.update("a", |balance| {
        calls += 1;
        std::thread::sleep(LIMIT);
        Ok::<_, Infallible>(balance - 1)
    });
    let error = slow.await.unwrap_err();
    assert!(matches!(error, UpdateError::Other(Error::Conflict { attempts: 1, .. })), "{error:?}");
    assert_eq!((calls, row(&db).await), (1, (100, 0)));
}

/// The version is read over a connection of the pool, which has none.
async fn a_transaction_waits_for_a_connection_within_the_time_of_the_retries<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let pool = db.pool_of(1).await;
    let _used_up = pool.acquire().await.unwrap();
    let within = Duration::from_millis(200);
    let lock = version_lock::<DB>(&pool).share_pool().time_limit(2 * PATIENCE);
    let lock = lock.retry(Retry { within, ..Retry::default() });
    let done = timeout(PATIENCE, lock.transaction(VERSION, async |_| Ok::<_, sqlx::Error>(()))).await.expect("it ends");
    let Err(RunError::Other(Error::Database(DatabaseFault::NoConnection { limit, .. }))) = done else {
        panic!("{done:?}")
    };
    assert!(limit <= within, "{limit:?}");
}

/// No statement that changes anything was sent by then: another connection is used, within the time
/// of the retries.
async fn a_read_that_is_not_answered_within_the_limit_is_sent_over_another_connection<DB: TestDatabase>(
    db: TestDb<DB>,
) {
    ledger(&db).await;
    for (name, way) in changes_and_ways() {
        let (proxy, _, table) = distant(&db).await;
        let (balance, version) = row(&db).await;
        let table = table.time_limit(LIMIT);
        let changed = proxy.during(way, READING, change(&table, name), async |proxy| proxy.let_others_pass()).await;
        let balance = if name == "deposit" { balance + 1 } else { balance - 1 };
        assert_eq!(changed.unwrap(), updated(balance, version + 1, 1), "{way:?} {name}");
        assert_eq!(row(&db).await, (balance, version + 1), "{way:?} {name}");
    }
}

/// Waiting for a connection is part of the retries: a connection that is available after the limit
/// and within the time of the retries is used.
async fn a_connection_that_comes_within_the_time_of_the_retries_is_taken<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let pool = db.pool_of(1).await;
    let table = VersionedTable::new(pool.clone(), COLUMNS).share_pool().time_limit(LIMIT);
    for (place, name) in CHANGES.into_iter().enumerate() {
        let conn = pool.acquire().await.unwrap();
        let later = async {
            sleep(LIMIT * 3 / 2).await;
            drop(conn);
        };
        let (changed, ()) = tokio::join!(change(&table, name), later);
        assert_eq!(changed.unwrap().version, place as i64 + 1, "{name}");
    }
}

/// In the caller's transaction each statement has the limit too. The caller rolls back what has
/// failed there.
async fn in_a_transaction_each_statement_has_the_limit<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for after in [READING, WRITING] {
        let (proxy, pool, table) = distant(&db).await;
        let table = table.time_limit(LIMIT);
        let before = row(&db).await;
        let mut tx = pool.begin().await.unwrap();
        let since = Instant::now();
        let update = table.update_in(&mut tx, "a", |balance| Ok::<_, Infallible>(balance - 1));
        let error = proxy.during(Way::Replies, after, update, async |_| {}).await.unwrap_err();
        assert!(matches!(&error, UpdateError::Other(Error::Database(DatabaseFault::TimedOut { .. }))), "{error:?}");
        assert!(!error.to_string().contains("lease") && since.elapsed() < 4 * LIMIT, "{error}");
        proxy.cut();
        drop(tx);
        eventually("it is rolled back", || async {
            outside(&db, "balance = balance").await;
            row(&db).await == before
        })
        .await;
    }
}

/// The same holds for BEGIN, which has no effect to lose either.
async fn a_begin_that_is_not_answered_within_the_limit_is_sent_over_another_connection<DB: TestDatabase>(
    db: TestDb<DB>,
) {
    accounts(&db).await;
    for way in WAYS {
        let proxy = db.proxy().await;
        let pool = proxy.pool(1);
        let lock = version_lock::<DB>(&pool).time_limit(PATIENCE);
        let write = async |lock: &rowlock::VersionLock<DB>| {
            lock.transaction(VERSION, |mut tx| async move { write_in::<DB>(&mut tx, VERSION, 7).await }).await
        };
        write(&lock).await.unwrap();
        eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
        let lock = lock.time_limit(LIMIT);
        // After the read of the version.
        let since = Instant::now();
        proxy.during(way, 1, write(&lock), async |proxy| proxy.let_others_pass()).await.unwrap();
        assert!(since.elapsed() < 4 * LIMIT, "{way:?}: after {:?}", since.elapsed());
    }
}
