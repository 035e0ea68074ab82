//! Changes that are dropped, cut off, or answered too late.

use std::convert::Infallible;

use rowlock::{
    Error, Retry, VersionedTable,
    balances::UpdateError,
    errors::{Certainty, DatabaseFault},
};

use harness::{
    DIRECT, TestDatabase, TestDb, eventually,
    proxy::{Proxy, Way},
};
use sqlx::Pool;

use crate::{
    cancelled::{Stage, at_every_stop},
    ledger::{COLUMNS, ledger, row, updated},
    line::{LIMIT, WAYS},
};

harness::tests!(
    everywhere(
        an_update_that_is_dropped_was_made_wholly_or_not_at_all,
        a_deduction_that_is_dropped_was_made_wholly_or_not_at_all
    ),
    servers(
        a_write_that_is_not_answered_is_unknown_and_not_tried_again,
        a_read_that_is_not_answered_is_sent_again,
        a_read_that_is_never_answered_has_changed_nothing
    ),
    servers[DIRECT](a_write_that_is_answered_too_late_is_unknown_and_not_tried_again)
);

/// Each account of a dropped change contains the whole change or none of it.
async fn whole_or_not_at_all<DB: TestDatabase>(db: &TestDb<DB>, act: impl AsyncFn(VersionedTable<DB>, &str)) {
    ledger(db).await;
    let prepare = async |stage: &Stage<'_, DB>| {
        // A change that was not dropped at its first stop is tried again.
        db.execute(&format!("DELETE FROM account WHERE id = '{}'", stage.key)).await;
        db.execute(&format!("INSERT INTO account VALUES ('{}', 100, 0)", stage.key)).await;
    };
    let act = async |stage: &Stage<'_, DB>, ()| {
        act(VersionedTable::new(stage.pool.clone(), COLUMNS), &stage.key).await;
    };
    at_every_stop(db, prepare, act).await;
    let count = async |which| db.number(&format!("SELECT COUNT(*) FROM account WHERE id <> 'other' AND {which}")).await;
    let (all, not_at_all) = (count("1 = 1").await.unwrap(), count("balance = 100 AND version = 0").await.unwrap());
    let wholly = count("balance = 90 AND version = 1").await.unwrap();
    assert_eq!(not_at_all + wholly, all);
    assert!(not_at_all > 1 && wholly > 0, "{wholly} of {all}");
}

async fn an_update_that_is_dropped_was_made_wholly_or_not_at_all<DB: TestDatabase>(db: TestDb<DB>) {
    whole_or_not_at_all(&db, async |table, key| {
        table.update(key, |balance| Ok::<_, Infallible>(balance - 10)).await.unwrap();
    })
    .await;
}

async fn a_deduction_that_is_dropped_was_made_wholly_or_not_at_all<DB: TestDatabase>(db: TestDb<DB>) {
    whole_or_not_at_all(&db, async |table, key| assert!(table.deduct(key, 10).await.is_ok())).await;
}

/// A table behind a proxy, on a pool of one connection, on which its statements have been prepared.
pub async fn distant<DB: TestDatabase>(db: &TestDb<DB>) -> (Proxy, Pool<DB>, VersionedTable<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool(1);
    let table = VersionedTable::new(pool.clone(), COLUMNS).share_pool();
    table.update("a", |balance| Ok::<_, Infallible>(*balance)).await.unwrap();
    table.deposit("a", 1).await.unwrap();
    table.deduct("a", 1).await.unwrap();
    eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
    (proxy, pool, table)
}

pub const READING: usize = 0;
pub const WRITING: usize = 1;

async fn a_write_that_is_not_answered_is_unknown_and_not_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for way in WAYS {
        let (proxy, pool, table) = distant(&db).await;
        let (balance, version) = row(&db).await;
        let mut calls = 0;
        let update = table.update("a", |balance| {
            calls += 1;
            Ok::<_, Infallible>(balance - 1)
        });
        let error = proxy.during(way, WRITING, update, async |proxy| proxy.cut()).await.unwrap_err();
        let unknown = matches!(
            error,
            UpdateError::Other(Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. }))
        );
        assert!(unknown && error.to_string().contains("may have been"), "{way:?}: {error:?}");
        assert_eq!(pool.size(), 0, "the connection is closed");
        let made = i64::from(way == Way::Replies);
        assert_eq!((calls, row(&db).await), (1, (balance - made, version + made)), "{way:?}");
        // The table still works.
        assert_eq!(table.deduct("a", 1).await.unwrap(), updated(balance - made - 1, version + made + 1, 1));
    }
}

/// The reply, or the request, arrives when no caller waits for it any more.
async fn a_write_that_is_answered_too_late_is_unknown_and_not_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for way in WAYS {
        let (proxy, pool, table) = distant(&db).await;
        let (balance, version) = row(&db).await;
        let hasty = table.clone().time_limit(LIMIT);
        let error = proxy.during(way, WRITING, hasty.deduct("a", 1), async |_| {}).await.unwrap_err();
        let unknown = matches!(
            error,
            UpdateError::Other(Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. }))
        );
        assert!(unknown, "{way:?}: {error:?}");
        assert_eq!(pool.size(), 0, "the connection is closed");
        assert_eq!(row(&db).await.1, version + i64::from(way == Way::Replies), "{way:?}");
        proxy.open();
        eventually("it arrives", || async { row(&db).await == (balance - 1, version + 1) }).await;
        assert_eq!(table.deduct("a", 1).await.unwrap(), updated(balance - 2, version + 2, 1));
    }
}

/// No statement that changes anything was sent by then: the call continues on another connection,
/// and computes once.
async fn a_read_that_is_not_answered_is_sent_again<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    for way in WAYS {
        let (proxy, _, table) = distant(&db).await;
        let (balance, version) = row(&db).await;
        let read = proxy.during(way, READING, table.read("a"), async |proxy| proxy.cut()).await.unwrap().unwrap();
        assert_eq!((read.value, read.version), (balance, version));

        let (proxy, _, table) = distant(&db).await;
        let version = row(&db).await.1;
        let deducted = proxy.during(way, READING, table.deduct("a", 1), async |proxy| proxy.cut()).await.unwrap();
        assert_eq!(deducted, updated(balance - 1, version + 1, 1));
        assert_eq!(row(&db).await, (balance - 1, version + 1));
        table.deposit("a", 1).await.unwrap();
    }
}

async fn a_read_that_is_never_answered_has_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let nothing = |error: Error| {
        let nothing =
            matches!(error, Error::Database(DatabaseFault::TimedOut { outcome: Certainty::NothingChanged, .. }));
        assert!(nothing && error.is_retryable() && error.to_string().contains("nothing was changed"), "{error:?}");
    };
    for way in WAYS {
        let (proxy, pool, table) = distant(&db).await;
        let read = table.time_limit(LIMIT);
        nothing(proxy.during(way, READING, read.read("a"), async |_| {}).await.unwrap_err());
        assert_eq!(pool.size(), 0, "the connection is closed");

        let (proxy, pool, table) = distant(&db).await;
        let before = row(&db).await;
        let table = table.retry(Retry { within: LIMIT, ..Retry::default() });
        match proxy.during(way, READING, table.deduct("a", 1), async |_| {}).await {
            Err(UpdateError::Other(error)) => nothing(error),
            other => panic!("{other:?}"),
        }
        assert_eq!((pool.size(), row(&db).await), (0, before));
    }
}
