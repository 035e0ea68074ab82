//! Indexes on the key column that do not keep a key to one row: without the primary key, the table
//! is refused all the same.

use harness::{TestDatabase, TestDb};
use rowlock::{Error, errors::Setup};

harness::tests!(everywhere.each(a_plain_index_is_no_key), postgres(a_key_that_is_checked_at_the_commit_is_none));

/// Takes the primary key away.
async fn without_key<DB: TestDatabase>(db: &TestDb<DB>) {
    let without = match db.server.name {
        "postgres" => "ALTER TABLE t_resource_lock DROP CONSTRAINT t_resource_lock_pkey".to_owned(),
        "sqlite" => {
            let columns = db.text("SELECT sql FROM sqlite_schema WHERE name = 't_resource_lock'").await.unwrap();
            db.execute("DROP TABLE t_resource_lock").await;
            columns.replacen("NOT NULL PRIMARY KEY", "NOT NULL", 1)
        }
        _ => "ALTER TABLE t_resource_lock DROP PRIMARY KEY".to_owned(),
    };
    db.execute(&without).await;
}

async fn is_refused<DB: TestDatabase>(db: &TestDb<DB>) {
    let migrated = rowlock::migrate(&db.pool).await.unwrap_err();
    let claimed = db.lock().try_acquire("k").await.unwrap_err();
    for error in [migrated, claimed] {
        assert!(
            matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("key_resource"),
            "{error:?}"
        );
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
}

/// A key could have several rows, and each of them a holder.
async fn a_plain_index_is_no_key<DB: TestDatabase>(db: TestDb<DB>) {
    without_key(&db).await;
    db.execute("CREATE INDEX plain ON t_resource_lock (key_resource)").await;
    is_refused(&db).await;
}

/// The server refuses such a constraint as the target of ON CONFLICT.
async fn a_key_that_is_checked_at_the_commit_is_none<DB: TestDatabase>(db: TestDb<DB>) {
    without_key(&db).await;
    db.execute("ALTER TABLE t_resource_lock ADD CONSTRAINT late UNIQUE (key_resource) DEFERRABLE").await;
    is_refused(&db).await;
}
