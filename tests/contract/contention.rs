//! Real contention inside the work of a transaction, with the error wrapped as applications wrap
//! their errors.

use std::{
    convert::Infallible,
    error::Error as StdError,
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{
    Error, VersionedTable,
    balances::{Columns, UpdateError, Value},
    errors::{AnyError, WorkError},
    strategy::ResourceLockExt,
};
use tokio::{runtime::Handle, task::block_in_place, time::timeout};

use crate::bank::{OPENING, accounts, balance, locks, write_in};

harness::tests!(everywhere(contention_is_known_however_it_is_wrapped, a_conflict_of_an_update_in_the_work_is_known));

/// Returns the server's error for a row that another transaction has locked. On SQLite, that other
/// transaction is `tx`, which writes.
pub async fn contention<DB: TestDatabase>(db: &TestDb<DB>, tx: &mut DB::Connection) -> sqlx::Error {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    if db.server.name == "sqlite" {
        DB::execute_on(&mut other, "PRAGMA busy_timeout = 0").await.unwrap();
        return DB::execute_on(&mut other, DB::BEGIN).await.unwrap_err();
    }
    let lock = "SELECT balance FROM account WHERE id = 'other' FOR UPDATE";
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, lock).await.unwrap();
    let error = DB::execute_on(tx, &format!("{lock} NOWAIT")).await.unwrap_err();
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    error
}

#[derive(Debug, thiserror::Error)]
enum App {
    #[error("converted")]
    Converted(#[from] sqlx::Error),
    #[error(transparent)]
    Transparent(sqlx::Error),
    #[error("boxed")]
    Boxed(#[source] Box<dyn StdError + Send + Sync>),
    #[error("shared")]
    Shared(#[source] Arc<sqlx::Error>),
    #[error("nested")]
    Nested(#[source] Box<App>),
    #[error(transparent)]
    Update(#[from] UpdateError<Infallible>),
    #[error(transparent)]
    Rowlock(#[from] Error),
}

/// Checks that work which meets contention in its first run is run once more and succeeds.
async fn is_tried_again<DB: TestDatabase, E: WorkError + Debug>(
    db: &TestDb<DB>,
    what: &str,
    meet: impl AsyncFn(&mut DB::Connection) -> E,
) {
    for (name, lock) in locks(&db.pool) {
        let runs = AtomicU32::new(0);
        let done = lock.transaction(name, |mut tx| {
            let first = runs.fetch_add(1, SeqCst) == 0;
            let meet = &meet;
            async move {
                write_in::<DB>(&mut tx, name, OPENING - 1).await.unwrap();
                if first { Err(meet(&mut tx).await) } else { Ok(()) }
            }
        });
        let done = timeout(PATIENCE, done).await.unwrap();
        assert!(done.is_ok() && runs.load(SeqCst) == 2, "{name}, {what}: {done:?}");
        assert_eq!(balance(db, name).await, OPENING - 1);
    }
}

async fn contention_is_known_however_it_is_wrapped<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let db = &db;
    macro_rules! wrapped {
        ($($what:literal: $wrap:expr),+ $(,)?) => {
            $(is_tried_again(db, $what, async |tx| $wrap(contention(db, tx).await)).await;)+
        };
    }
    wrapped! {
        "as it is": (|error| error),
        "converted": App::from,
        "transparent": App::Transparent,
        "boxed": (|error: sqlx::Error| App::Boxed(error.into())),
        "boxed twice": (|error| App::Boxed(App::Transparent(error).into())),
        "shared": (|error| App::Shared(Arc::new(error))),
        "shared as it is": Arc::new,
        "nested": (|error| App::Nested(Box::new(App::from(error)))),
        "any": AnyError::from,
        "any, of the application's": (|error| AnyError::from(App::Transparent(error))),
    }
}

async fn a_conflict_of_an_update_in_the_work_is_known<DB: TestDatabase>(db: TestDb<DB>)
where
    i64: Value<DB>,
{
    accounts(&db).await;
    let db = &db;
    macro_rules! wrapped {
        ($($what:literal: $wrap:expr),+ $(,)?) => {
            $(is_tried_again(db, $what, async |tx| $wrap(overtaken(db, tx).await)).await;)+
        };
    }
    wrapped! {
        "as it is": (|error| error),
        "converted": App::from,
        "any": AnyError::from,
        "its cause": cause,
        "its cause, converted": (|error| App::from(cause(error))),
    }
}

fn cause(error: UpdateError<Infallible>) -> Error {
    match error {
        UpdateError::Computation(never) => match never {},
        UpdateError::Other(error) => error,
    }
}

/// Returns the error of an update in the transaction, between whose read and write another
/// transaction changes the row. On SQLite only one transaction writes at a time: there the update
/// runs in a second transaction.
async fn overtaken<DB: TestDatabase>(db: &TestDb<DB>, tx: &mut DB::Connection) -> UpdateError<Infallible>
where
    i64: Value<DB>,
{
    let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
    let table = VersionedTable::<DB>::new(db.pool.clone(), columns);
    let pool = db.pool_of(1).await;
    let updated = if db.server.name == "sqlite" {
        DB::execute(&pool, "PRAGMA busy_timeout = 0").await.unwrap();
        let mut beside = pool.begin().await.unwrap();
        table.update_in(&mut beside, "other", |balance| Ok(balance + 1)).await
    } else {
        let overtake = || DB::execute(&pool, "UPDATE account SET version = version + 1 WHERE id = 'other'");
        let wait = || Handle::current().block_on(overtake()).unwrap();
        let compute = |balance: &i64| {
            assert_eq!(block_in_place(wait), 1);
            Ok(balance + 1)
        };
        table.update_in(tx, "other", compute).await
    };
    updated.unwrap_err()
}
