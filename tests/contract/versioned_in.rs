//! Values changed in the caller's transaction.

use std::convert::Infallible;

use harness::{DIRECT, TestDatabase, TestDb, between, eventually};
use rowlock::{
    Error, VersionedTable,
    balances::{Insufficient, UpdateError, Updated},
    errors::NotFound,
    strategy::ResourceLockExt,
};

use crate::{
    bank::locks,
    ledger::{COLUMNS, changed_nothing, insert, ledger, outside, row, updated},
};

harness::tests!(
    everywhere(
        what_the_caller_commits_or_rolls_back_goes_with_the_rest,
        what_is_dropped_is_not_there,
        a_faster_one_is_a_conflict_after_one_attempt,
        a_snapshot_that_is_too_old_is_a_conflict,
        an_error_leaves_the_transaction_to_the_caller,
        outside_a_transaction_nothing_is_changed,
        a_pool_of_one_is_enough_from_the_first_use_on,
        a_balance_is_changed_under_a_claim_from_the_first_use_on,
        a_transfer_is_made_as_a_whole_or_not_at_all
    ),
    everywhere[DIRECT](a_row_that_another_transaction_has_locked_is_a_conflict),
    servers(a_deadlock_is_a_conflict_for_one_of_the_two)
);

async fn less<DB: TestDatabase>(
    table: &VersionedTable<DB>,
    tx: &mut DB::Connection,
) -> Result<Updated<i64>, UpdateError<Infallible>> {
    table.update_in(tx, "a", |balance| Ok(balance - 10)).await
}

#[track_caller]
fn is_conflict<T: std::fmt::Debug, E: std::fmt::Debug>(result: Result<T, UpdateError<E>>) {
    assert!(matches!(result, Err(UpdateError::Other(Error::Conflict { attempts: 1, .. }))), "{result:?}");
}

async fn what_the_caller_commits_or_rolls_back_goes_with_the_rest<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    db.execute("CREATE TABLE booking (amount int)").await;
    for (commits, after) in [(false, (100, 0)), (true, (80, 2)), (false, (80, 2))] {
        let (balance, version) = row(&db).await;
        let mut tx = db.pool.begin().await.unwrap();
        assert_eq!(less(&table, &mut tx).await.unwrap(), updated(balance - 10, version + 1, 1));
        // The transaction sees its own change.
        assert_eq!(less(&table, &mut tx).await.unwrap(), updated(balance - 20, version + 2, 1));
        DB::execute_on(&mut tx, "INSERT INTO booking VALUES (20)").await.unwrap();
        if commits { tx.commit().await } else { tx.rollback().await }.unwrap();
        assert_eq!(row(&db).await, after);
        let booked = db.cell("COALESCE(SUM(amount), 0)", "booking").await.unwrap();
        assert_eq!(booked, (100 - after.0).to_string());
    }
}

/// Dropping the transaction rolls it back.
async fn what_is_dropped_is_not_there<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let pool = db.pool_of(1).await;
    let mut tx = pool.begin().await.unwrap();
    less(&table, &mut tx).await.unwrap();
    drop(tx);
    assert_eq!(DB::number(&pool, "SELECT balance FROM account WHERE id = 'a'").await, Some(100));
    assert_eq!(row(&db).await, (100, 0));
}

async fn a_faster_one_is_a_conflict_after_one_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    db.execute("CREATE TABLE booking (amount int)").await;
    let mut tx = db.pool.begin().await.unwrap();
    DB::execute_on(&mut tx, "SELECT 1").await.unwrap();
    let mut calls = 0;
    let update = table.update_in(&mut tx, "a", |balance| {
        calls += 1;
        between(outside(&db, "balance = 40, version = version + 1"));
        Ok::<_, Infallible>(balance - 10)
    });
    is_conflict(update.await);
    tx.rollback().await.unwrap();
    assert_eq!((calls, row(&db).await), (1, (40, 1)));
    // A new transaction succeeds.
    let mut tx = db.pool.begin().await.unwrap();
    assert_eq!(less(&table, &mut tx).await.unwrap(), updated(30, 2, 1));
    tx.commit().await.unwrap();
    assert_eq!(row(&db).await, (30, 2));
}

/// The transaction sees the row as it was before another client changed it, and each server reports
/// this in its own way.
async fn a_snapshot_that_is_too_old_is_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let levels: &[&str] = match db.server.name {
        "postgres" => {
            &["SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"]
        }
        "mariadb" => &["SET SESSION innodb_snapshot_isolation = 0", "SET SESSION innodb_snapshot_isolation = 1"],
        _ => &["SELECT 1"],
    };
    let pool = db.pool_of(1).await;
    for level in levels {
        let (balance, version) = row(&db).await;
        let mut conn = pool.acquire().await.unwrap();
        if db.server.name == "mariadb" {
            DB::execute_on(&mut conn, level).await.unwrap();
        }
        let mut tx = sqlx::Connection::begin(&mut *conn).await.unwrap();
        if db.server.name != "mariadb" {
            DB::execute_on(&mut tx, level).await.unwrap();
        }
        let seen = DB::text_on(&mut tx, "SELECT CAST(balance AS char(20)) FROM account WHERE id = 'a'").await.unwrap();
        assert_eq!(seen.unwrap().trim(), balance.to_string());
        outside(&db, "balance = balance - 1, version = version + 1").await;
        is_conflict(less(&table, &mut tx).await);
        tx.rollback().await.unwrap();
        assert_eq!(row(&db).await, (balance - 1, version + 1), "{level}");
    }
}

/// The row stays locked for longer than the session's lock timeout.
async fn a_row_that_another_transaction_has_locked_is_a_conflict<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let impatient = match db.server.name {
        "sqlite" => "PRAGMA busy_timeout = 20",
        "postgres" => "SET lock_timeout = 20",
        _ => "SET SESSION innodb_lock_wait_timeout = 1",
    };
    let pool = db.pool_of(1).await;
    DB::execute(&pool, impatient).await.unwrap();
    let mut other = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, "UPDATE account SET balance = 1, version = 1 WHERE id = 'a'").await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    is_conflict(less(&table, &mut tx).await);
    tx.rollback().await.unwrap();
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    assert_eq!(row(&db).await, (100, 0));
}

/// Each transaction waits for the other's row: the server ends one of them, and the other succeeds.
async fn a_deadlock_is_a_conflict_for_one_of_the_two<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    db.execute("INSERT INTO account VALUES ('b', 100, 0)").await;
    let less = async |tx: &mut DB::Connection, key| {
        table.update_in(tx, key, |balance| Ok::<_, Infallible>(balance - 10)).await
    };
    let (mut one, mut two) = (db.pool.begin().await.unwrap(), db.pool.begin().await.unwrap());
    less(&mut one, "a").await.unwrap();
    less(&mut two, "b").await.unwrap();
    let first = async {
        let result = less(&mut one, "b").await;
        if result.is_ok() { one.commit().await } else { one.rollback().await }.unwrap();
        result
    };
    let second = async {
        let result = less(&mut two, "a").await;
        if result.is_ok() { two.commit().await } else { two.rollback().await }.unwrap();
        result
    };
    let both = tokio::join!(first, second);
    let (won, lost) = if both.0.is_ok() { both } else { (both.1, both.0) };
    assert_eq!(won.unwrap(), updated(90, 1, 1));
    is_conflict(lost);
    assert_eq!(row(&db).await, (90, 1));
}

async fn an_error_leaves_the_transaction_to_the_caller<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let mut tx = db.pool.begin().await.unwrap();
    let refused = table.update_in(&mut tx, "a", |balance| Err::<i64, _>(balance + 1)).await;
    assert!(matches!(refused, Err(UpdateError::Computation(101))));
    let missing = table.update_in(&mut tx, "absent", |balance| Ok::<_, Infallible>(*balance)).await;
    assert!(matches!(missing, Err(UpdateError::Other(Error::NotFound(NotFound::Row { .. })))));
    less(&table, &mut tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(row(&db).await, (90, 1));
}

async fn outside_a_transaction_nothing_is_changed<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let update =
        async |conn: &mut DB::Connection| table.update_in(conn, "a", |balance| Ok::<_, Error>(balance - 10)).await;
    assert!(
        matches!(changed_nothing(update(&mut conn).await), Error::Invalid(ref wrong) if wrong.to_string().contains("not in a transaction"))
    );
    let mut tx = sqlx::Connection::begin(&mut *conn).await.unwrap();
    update(&mut tx).await.unwrap();
    tx.rollback().await.unwrap();
    assert!(
        matches!(changed_nothing(update(&mut conn).await), Error::Invalid(ref wrong) if wrong.to_string().contains("not in a transaction"))
    );
    assert_eq!(row(&db).await, (100, 0));
}

/// The table is checked on the transaction's connection: the pool has no other.
async fn a_pool_of_one_is_enough_from_the_first_use_on<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let pool = db.pool_of(1).await;
    let table = VersionedTable::new(pool.clone(), COLUMNS);
    let mut tx = pool.begin().await.unwrap();
    assert_eq!(less(&table, &mut tx).await.unwrap(), updated(90, 1, 1));
    tx.commit().await.unwrap();
    let table = VersionedTable::new(pool.clone(), COLUMNS);
    assert_eq!(table.deduct("a", 1).await.unwrap(), updated(89, 2, 1));
    eventually("it has come back", || async { pool.num_idle() == 1 }).await;
    assert_eq!(row(&db).await, (89, 2));
}

/// The table is checked on a session of `transaction`, whose settings are not the application's.
async fn a_balance_is_changed_under_a_claim_from_the_first_use_on<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    insert(&db, COLUMNS.table, "'version'", 0).await;
    for (time, (name, lock)) in (1..).zip(locks(&db.pool)) {
        let table = VersionedTable::new(db.pool.clone(), COLUMNS);
        let done = lock.transaction(name, async |mut tx| table.deposit_in(&mut tx, "a", 5).await);
        assert_eq!(done.await.unwrap(), updated(100 + 5 * time, time, 1), "{name}");
        assert_eq!(row(&db).await, (100 + 5 * time, time), "{name}");
    }
}

/// A deduction and a deposit in one transaction. A balance that does not suffice leaves the
/// transaction to the caller, and a faster change is a conflict.
async fn a_transfer_is_made_as_a_whole_or_not_at_all<DB: TestDatabase>(db: TestDb<DB>) {
    let table = ledger(&db).await;
    insert(&db, COLUMNS.table, "'b'", 5).await;
    let other = || async { db.number("SELECT balance FROM account WHERE id = 'b'").await.unwrap() };
    let mut tx = db.pool.begin().await.unwrap();
    assert_eq!(table.deduct_in(&mut tx, "a", 30).await.unwrap(), updated(70, 1, 1));
    assert_eq!(table.deposit_in(&mut tx, "b", 30).await.unwrap(), updated(35, 1, 1));
    tx.rollback().await.unwrap();
    assert_eq!((row(&db).await, other().await), ((100, 0), 5));
    let mut tx = db.pool.begin().await.unwrap();
    table.deposit_in(&mut tx, "b", 30).await.unwrap();
    let short = table.deduct_in(&mut tx, "a", 101).await;
    assert!(matches!(short, Err(UpdateError::Computation(Insufficient { balance: 100, amount: 101 }))), "{short:?}");
    table.deduct_in(&mut tx, "a", 30).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!((row(&db).await, other().await), ((70, 1), 35));
    for amount in [0, -1] {
        let mut tx = db.pool.begin().await.unwrap();
        let deducted = table.deduct_in(&mut tx, "a", amount).await;
        assert!(
            matches!(deducted, Err(UpdateError::Other(Error::Invalid(ref wrong))) if wrong.to_string().contains("an amount of")),
            "{deducted:?}"
        );
        let deposited = table.deposit_in(&mut tx, "a", amount).await;
        assert!(
            matches!(deposited, Err(Error::Invalid(ref wrong)) if wrong.to_string().contains("an amount of")),
            "{deposited:?}"
        );
        tx.rollback().await.unwrap();
    }
    let mut conn = db.pool.acquire().await.unwrap();
    let outside = table.deposit_in(&mut conn, "a", 1).await;
    assert!(
        matches!(outside, Err(Error::Invalid(ref wrong)) if wrong.to_string().contains("not in a transaction")),
        "{outside:?}"
    );
}
