//! The application's table in the tests of versions: accounts with a balance and a version.

use std::{
    fmt::{Debug, Display},
    future::poll_fn,
    pin::{Pin, pin},
    task::Poll,
};

use rowlock::{
    Error, VersionedTable,
    balances::{Columns, UpdateError, Updated},
};

use harness::{PATIENCE, TestDatabase, TestDb};
use tokio::time::Instant;

pub const COLUMNS: Columns<'static> = Columns { table: "account", key: "id", value: "balance", version: "version" };

/// Creates the table with the accounts `a`, whose balance is 100, and `other`, which no test may
/// change.
pub async fn ledger<DB: TestDatabase>(db: &TestDb<DB>) -> VersionedTable<DB> {
    create(db, COLUMNS.table, "varchar(40)", "bigint", "bigint").await;
    insert(db, COLUMNS.table, "'a'", 100).await;
    insert(db, COLUMNS.table, "'other'", 1).await;
    VersionedTable::new(db.pool.clone(), COLUMNS)
}

pub async fn create<DB: TestDatabase>(db: &TestDb<DB>, table: &str, key: &str, value: &str, version: &str) {
    let columns = format!("id {key} PRIMARY KEY, balance {value}, version {version}");
    db.execute(&format!("CREATE TABLE {table} ({columns})")).await;
}

/// Inserts a row with version 0.
pub async fn insert<DB: TestDatabase>(db: &TestDb<DB>, table: &str, key: &str, value: impl Display) {
    db.execute(&format!("INSERT INTO {table} VALUES ({key}, {value}, 0)")).await;
}

/// Returns the balance and version of the account `a`. Checks that `other` is unchanged.
pub async fn row<DB: TestDatabase>(db: &TestDb<DB>) -> (i64, i64) {
    let number = async |column, key| {
        let cell = db.cell(column, &format!("account WHERE id = '{key}'")).await;
        cell.unwrap_or_else(|| panic!("{column} is NULL")).parse::<i64>().unwrap()
    };
    assert_eq!((number("balance", "other").await, number("version", "other").await), (1, 0), "another row was changed");
    (number("balance", "a").await, number("version", "a").await)
}

/// Changes the account `a` as another program does.
pub async fn outside<DB: TestDatabase>(db: &TestDb<DB>, set: &str) {
    assert_eq!(db.execute(&format!("UPDATE account SET {set} WHERE id = 'a'")).await, 1);
}

/// Runs `act` repeatedly, and each time runs the third argument at another point of it: after `act`
/// was woken once, twice, ... and before it is polled again. By then its requests so far have been
/// answered. Returns when `look`, which receives the result of `act`, returns `true`.
pub async fn at_every_point<T>(
    prepare: impl AsyncFn(),
    act: impl AsyncFn() -> T,
    between: impl AsyncFn(),
    mut look: impl AsyncFnMut(T) -> bool,
) {
    let (started, mut polls) = (Instant::now(), 0);
    loop {
        assert!(started.elapsed() < PATIENCE, "what was to be seen did not happen");
        polls += 1;
        prepare().await;
        let mut act = pin!(act());
        if woken_after(polls, act.as_mut()).await {
            between().await;
            if look(act.await).await {
                return;
            }
        } else {
            polls = 0; // it completed: start again from the first point
        }
    }
}

/// Polls the future this many times, and waits until it is woken again. Returns `false` if it
/// completes before.
async fn woken_after<T>(most: usize, mut future: Pin<&mut impl Future<Output = T>>) -> bool {
    let mut polls = 0;
    poll_fn(|context| {
        if polls == most {
            return Poll::Ready(true);
        }
        polls += 1;
        future.as_mut().poll(context).map(|_| false)
    })
    .await
}

pub fn updated<V>(value: V, version: i64, attempts: u32) -> Updated<V> {
    Updated { value, version, attempts }
}

/// Checks that nothing was changed, that nothing may have been, and that the same call does not
/// help.
#[track_caller]
pub fn changed_nothing<T: Debug>(result: Result<T, impl Into<UpdateError<Error>>>) -> Error {
    let error = match result.map_err(Into::into) {
        Err(UpdateError::Other(error)) => error,
        other => panic!("{other:?}"),
    };
    let text = error.to_string();
    assert!(!text.contains("may have been"), "{text}");
    assert!(!error.is_retryable(), "{text}");
    error
}
