//! Changes of one row by one process: they run one after the other, and each passes its result and
//! its connection to the next.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    VersionedTable,
    balances::{Insufficient, UpdateError, Updated},
};
use sqlx::Pool;
use tokio::time::{sleep, timeout};

use crate::ledger::{COLUMNS, insert, ledger, row, updated};

harness::tests!(
    everywhere(
        four_deductions_one_after_the_other_read_the_row_once,
        what_is_passed_to_a_dropped_call_is_passed_to_the_next,
        the_only_connection_is_never_kept,
        what_a_trigger_made_of_a_balance_counts_and_not_what_was_written
    ),
    servers(a_connection_that_was_closed_while_idle_costs_no_outcome, two_keys_do_not_keep_both_connections)
);

type Deduction<'a> = Pin<Box<dyn Future<Output = Result<Updated<i64>, UpdateError<Insufficient<i64>>>> + Send + 'a>>;

/// Lets each deduction enter the local queue, in this order, while all connections of the pool are
/// in use.
async fn queue<DB: TestDatabase>(pool: &Pool<DB>, deductions: &mut [Deduction<'_>]) {
    let connections = pool.options().get_max_connections();
    let mut taken = Vec::new();
    for _ in 0..connections {
        taken.push(pool.acquire().await.unwrap());
    }
    poll_fn(|context| {
        for deduction in &mut *deductions {
            assert!(deduction.as_mut().poll(context).is_pending(), "it waits");
        }
        Poll::Ready(())
    })
    .await;
    drop(taken);
    // The first deduction has one of them.
    eventually("they are back", async || pool.num_idle().saturating_add(1) >= connections as usize).await;
}

/// The table on a pool of its own, after a first use.
async fn set_up<DB: TestDatabase>(db: &TestDb<DB>, connections: u32) -> (Pool<DB>, VersionedTable<DB>) {
    ledger(db).await;
    let pool = db.pool_of(connections).await;
    let table = VersionedTable::new(pool.clone(), COLUMNS).share_pool();
    table.deduct("a", 1).await.unwrap();
    (pool, table)
}

fn ones<DB: TestDatabase>(table: &VersionedTable<DB>, count: usize) -> Vec<Deduction<'_>> {
    (0..count).map(|_| Box::pin(table.deduct("a", 1)) as Deduction<'_>).collect()
}

/// How many times the work reads the balance, where the server counts that.
async fn reads<DB: TestDatabase>(db: &TestDb<DB>, work: impl Future<Output = ()>) -> Option<i64> {
    if db.server.name != "postgres" {
        work.await;
        return None;
    }
    DB::statements(&db.pool).await; // installs the counter
    let count = async || {
        db.number(
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = current_database() AND query LIKE 'SELECT \"balance\"%'",
        )
        .await
    };
    let before = count().await;
    work.await;
    count().await.zip(before).map(|(now, before)| now - before)
}

async fn four_deductions_one_after_the_other_read_the_row_once<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, table) = set_up(&db, 2).await;
    for (count, version, expected) in [(4, 2, 1), (5, 6, 2)] {
        let mut deductions = ones(&table, count);
        let work = async {
            queue(&pool, &mut deductions).await;
            for (deduction, version) in deductions.into_iter().zip(version..) {
                assert_eq!(deduction.await.unwrap(), updated(100 - version, version, 1));
            }
        };
        let reads = reads(&db, work).await;
        assert!(reads.is_none_or(|reads| reads == expected), "{reads:?} reads for {count}");
    }
    assert_eq!(row(&db).await, (90, 10));
}

async fn what_is_passed_to_a_dropped_call_is_passed_to_the_next<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, table) = set_up(&db, 2).await;
    let mut deductions = ones(&table, 3);
    let work = async {
        queue(&pool, &mut deductions).await;
        let mut deductions = deductions.into_iter();
        let [first, gone, last] = std::array::from_fn(|_| deductions.next().unwrap());
        assert_eq!(first.await.unwrap(), updated(98, 2, 1));
        drop(gone);
        assert_eq!(last.await.unwrap(), updated(97, 3, 1));
    };
    let reads = reads(&db, work).await;
    assert!(reads.is_none_or(|reads| reads == 1), "{reads:?} reads");
    assert_eq!(row(&db).await, (97, 3));
}

async fn a_connection_that_was_closed_while_idle_costs_no_outcome<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(2);
    let table = VersionedTable::new(pool.clone(), COLUMNS).share_pool();
    table.deduct("a", 1).await.unwrap();
    let mut deductions = ones(&table, 2);
    queue(&pool, &mut deductions).await;
    let [first, second] = <[_; 2]>::try_from(deductions).unwrap_or_else(|_| panic!("two"));
    first.await.unwrap();
    // The second deduction has the permit and the connection, and is not polled for longer than a
    // connection is kept.
    sleep(Duration::from_secs(1)).await;
    proxy.cut();
    assert_eq!(second.await.unwrap(), updated(97, 3, 1));
    assert_eq!(row(&db).await, (97, 3));
}

async fn the_only_connection_is_never_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, table) = set_up(&db, 1).await;
    let mut deductions = ones(&table, 3);
    queue(&pool, &mut deductions).await;
    let mut deductions = deductions.into_iter();
    deductions.next().unwrap().await.unwrap();
    // The others have not been polled since, so another caller can acquire the connection.
    drop(timeout(PATIENCE, pool.acquire()).await.expect("it is in the pool").unwrap());
    for deduction in deductions {
        deduction.await.unwrap();
    }
    assert_eq!(row(&db).await, (96, 4));
}

/// The connections are those of the pool for values, which has as many as the application's.
async fn two_keys_do_not_keep_both_connections<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    insert(&db, COLUMNS.table, "'b'", 100).await;
    let table = VersionedTable::new(db.pool_of(2).await, COLUMNS);
    table.deduct("a", 1).await.unwrap();
    let mut deductions: Vec<Deduction<'_>> =
        ["a", "a", "b", "b"].iter().map(|key| Box::pin(table.deduct(key, 1)) as Deduction<'_>).collect();
    // No deduction completes before all of them have begun.
    let mut rows = db.pool.begin().await.unwrap();
    DB::execute_on(&mut rows, "SELECT 1 FROM account FOR UPDATE").await.unwrap();
    poll_fn(|context| {
        for deduction in &mut deductions {
            assert!(deduction.as_mut().poll(context).is_pending(), "it waits");
        }
        Poll::Ready(())
    })
    .await;
    rows.rollback().await.unwrap();
    for first in [0, 2] {
        deductions[first].as_mut().await.unwrap();
    }
    // The others have not been polled since. Each of them may have been left a connection.
    table.read("other").await.unwrap();
    for second in [1, 3] {
        deductions[second].as_mut().await.unwrap();
    }
    assert_eq!(row(&db).await, (97, 3));
}

async fn what_a_trigger_made_of_a_balance_counts_and_not_what_was_written<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, table) = set_up(&db, 2).await;
    let top_up: &[&str] = match db.server.name {
        "postgres" => &[
            "CREATE FUNCTION top_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.balance := NEW.balance + 100; RETURN NEW; END $$",
            "CREATE TRIGGER top_up BEFORE UPDATE ON account FOR EACH ROW WHEN (NEW.balance < 50) EXECUTE FUNCTION top_up()",
        ],
        "sqlite" => &[
            "CREATE TRIGGER top_up AFTER UPDATE ON account WHEN NEW.balance < 50 BEGIN UPDATE account SET balance = balance + 100 WHERE id = NEW.id; END",
        ],
        _ => &[
            "CREATE TRIGGER top_up BEFORE UPDATE ON account FOR EACH ROW SET NEW.balance = IF(NEW.balance < 50, NEW.balance + 100, NEW.balance)",
        ],
    };
    for sql in top_up {
        db.execute(sql).await;
    }
    let amounts = [59, 60, 60, 10];
    let mut deductions: Vec<Deduction<'_>> =
        amounts.iter().map(|&amount| Box::pin(table.deduct("a", amount)) as Deduction<'_>).collect();
    queue(&pool, &mut deductions).await;
    // 40 becomes 140, which covers the second; 20 becomes 120, from which the last is deducted.
    for (deduction, (value, version)) in deductions.into_iter().zip([(40, 2), (80, 3), (20, 4), (110, 5)]) {
        assert_eq!(deduction.await.unwrap(), updated(value, version, 1));
    }
    assert_eq!(row(&db).await, (110, 5));
}
