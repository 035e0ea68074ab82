//! The application's table of the tests about versions: accounts with a balance and a version.

use std::{
    fmt::{Debug, Display},
    future::poll_fn,
    pin::{Pin, pin},
    task::Poll,
};

use rowlock::{Columns, Error, UpdateError, Updated, VersionedTable};

use tokio::time::Instant;

use crate::bed::{Bed, PATIENCE, Site};

pub const COLUMNS: Columns<'static> = Columns { table: "account", key: "id", value: "balance", version: "version" };

/// The table with the accounts `a`, of 100, and `other`, which nobody is to touch.
pub async fn ledger<DB: Bed>(site: &Site<DB>) -> VersionedTable<DB> {
    create(site, COLUMNS.table, "varchar(40)", "bigint", "bigint").await;
    insert(site, COLUMNS.table, "'a'", 100).await;
    insert(site, COLUMNS.table, "'other'", 1).await;
    VersionedTable::new(site.pool.clone(), COLUMNS).unwrap()
}

pub async fn create<DB: Bed>(site: &Site<DB>, table: &str, key: &str, value: &str, version: &str) {
    let columns = format!("id {key} PRIMARY KEY, balance {value}, version {version}");
    site.execute(&format!("CREATE TABLE {table} ({columns})")).await;
}

/// A row of version 0.
pub async fn insert<DB: Bed>(site: &Site<DB>, table: &str, key: &str, value: impl Display) {
    site.execute(&format!("INSERT INTO {table} VALUES ({key}, {value}, 0)")).await;
}

/// Balance and version of the account `a`, as they stand there; `other` is as it was.
pub async fn row<DB: Bed>(site: &Site<DB>) -> (i64, i64) {
    let number = async |column, key| {
        let cell = site.cell(column, &format!("account WHERE id = '{key}'")).await;
        cell.unwrap_or_else(|| panic!("{column} is NULL")).parse::<i64>().unwrap()
    };
    assert_eq!((number("balance", "other").await, number("version", "other").await), (1, 0), "another row was changed");
    (number("balance", "a").await, number("version", "a").await)
}

/// What somebody else does to the account `a`.
pub async fn outside<DB: Bed>(site: &Site<DB>, set: &str) {
    assert_eq!(site.execute(&format!("UPDATE account SET {set} WHERE id = 'a'")).await, 1);
}

/// Does `act` again and again, each time with `meanwhile` at another point of it: when it was woken once, twice, ... and has not seen
/// why. What it had asked for by then has been answered. Ends when `look`, which is shown what became of it, has seen enough.
pub async fn at_every_point<T>(
    prepare: impl AsyncFn(),
    act: impl AsyncFn() -> T,
    meanwhile: impl AsyncFn(),
    mut look: impl AsyncFnMut(T) -> bool,
) {
    let (started, mut polls) = (Instant::now(), 0);
    loop {
        assert!(started.elapsed() < PATIENCE, "what was to be seen did not happen");
        polls += 1;
        prepare().await;
        let mut act = pin!(act());
        if woken_after(polls, act.as_mut()).await {
            meanwhile().await;
            if look(act.await).await {
                return;
            }
        } else {
            polls = 0; // it came to its end: from the start again
        }
    }
}

/// Polls so many times, and waits until it is to be polled again; `false` if it came to its end before.
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

/// Nothing was changed, nothing may have been, and the same call does not help.
#[track_caller]
pub fn changed_nothing<T: Debug>(result: Result<T, impl Into<UpdateError<Error>>>) -> Error {
    let error = match result.map_err(Into::into) {
        Err(UpdateError::Failed(error)) => error,
        other => panic!("{other:?}"),
    };
    let text = error.to_string();
    assert!(!text.contains("may have been"), "{text}");
    assert!(!error.is_retryable(), "{text}");
    error
}
