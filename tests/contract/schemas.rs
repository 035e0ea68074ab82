//! The location of the tables: the schema in which the connection finds them, and no other. A
//! lookup waits for no other table.

use harness::{DIRECT, TestDatabase, TestDb, acquired, eventually, pool, refused};
use rowlock::{Error, LeaseLock, VersionedTable, errors::Setup};
use sqlx::{Pool, pool::PoolOptions};

use crate::{
    article::shapes,
    ledger::{COLUMNS, ledger},
};

harness::tests!(
    sqlite(a_table_in_an_attached_file_is_another),
    mariadb(a_table_that_is_being_created_holds_up_no_first_call),
    postgres[DIRECT](
        a_table_along_the_path_is_completed_where_it_is,
        where_there_is_none_both_are_made_in_the_first_schema,
        a_queue_that_is_not_beside_the_table_is_refused,
        the_tables_of_another_application_are_not_used,
        the_copied_file_leaves_the_path_as_it_was
    )
);

const OURS: &str = "public.t_resource_lock, public.t_resource_lock_queue";

/// A pool whose connections have this `search_path`, set as an application would set it.
async fn on_path<DB: TestDatabase>(db: &TestDb<DB>, path: &str) -> Pool<DB> {
    let mark = if db.url.contains('?') { '&' } else { '?' };
    pool(&format!("{}{mark}options[search_path]={path}", db.url), 4).await
}

async fn tables<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let sql = "SELECT coalesce(string_agg(schemaname || '.' || tablename, ', ' ORDER BY schemaname, tablename), '')
               FROM pg_tables WHERE tablename LIKE 't_resource_lock%'";
    db.text(sql).await.unwrap()
}

/// MariaDB opens the tables that it describes, and waits for one that is being created.
async fn a_table_that_is_being_created_holds_up_no_first_call<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let mut gate = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut gate, "DO GET_LOCK(DATABASE(), 0)").await.unwrap();
    let (pool, create) = (db.pool.clone(), "CREATE TABLE slow AS SELECT GET_LOCK(DATABASE(), 60) AS waited");
    let creating = harness::spawn(async move { DB::execute(&pool, create).await });
    let waits = "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock'";
    eventually("it is being created", async || db.number(waits).await == Some(1)).await;
    acquired(LeaseLock::new(db.pool.clone()).try_acquire("k").await).release().await.unwrap();
    let read = VersionedTable::new(db.pool.clone(), COLUMNS).read("a").await.unwrap().unwrap();
    assert_eq!(read.value, 100);
    assert!(!creating.is_finished(), "it was being created all the time");
    DB::execute_on(&mut gate, "DO RELEASE_LOCK(DATABASE())").await.unwrap();
    creating.await.unwrap().unwrap();
}

/// A key that is held through one of the two pools is refused through the other.
async fn assert_same_table<DB: TestDatabase>(one: &Pool<DB>, other: &Pool<DB>) {
    for (holder, rival) in [(one, other), (other, one)] {
        let lease = acquired(LeaseLock::new(holder.clone()).try_acquire("k").await);
        refused(LeaseLock::new(rival.clone()).try_acquire("k").await);
        lease.release().await.unwrap();
    }
}

async fn a_table_along_the_path_is_completed_where_it_is<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE SCHEMA app").await;
    let articles = format!("DROP TABLE t_resource_lock; {}", shapes("postgres")[0]);
    for path in ["app,public", "public,app"] {
        let pool = on_path(&db, path).await;
        for lack in [
            "",
            "ALTER TABLE t_resource_lock DROP COLUMN prior_client_ip",
            "DROP TABLE t_resource_lock_queue",
            "ALTER TABLE t_resource_lock DROP COLUMN awaited; DROP TABLE t_resource_lock_queue",
        ] {
            let lease = acquired(db.lock().try_acquire("held").await);
            db.execute(lack).await;
            rowlock::migrate(&pool).await.unwrap();
            assert_eq!(tables(&db).await, OURS, "{path}: {lack}");
            refused(LeaseLock::new(pool.clone()).try_acquire("held").await);
            lease.release().await.unwrap();
            assert_same_table(&db.pool, &pool).await;
        }
        db.execute(&articles).await;
        rowlock::migrate(&pool).await.unwrap();
        assert_eq!(tables(&db).await, OURS, "{path}: another program's table");
        assert_same_table(&db.pool, &pool).await;
    }
}

async fn where_there_is_none_both_are_made_in_the_first_schema<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("DROP TABLE t_resource_lock, t_resource_lock_queue; CREATE SCHEMA \"An app\"").await;
    let pool = on_path(&db, "\"An app\",public").await;
    rowlock::migrate(&pool).await.unwrap();
    assert_eq!(tables(&db).await, "An app.t_resource_lock, An app.t_resource_lock_queue");
    acquired(LeaseLock::new(pool).try_acquire("k").await);
    let error = rowlock::migrate(&on_path(&db, "nowhere").await).await.unwrap_err();
    assert!(format!("{error:?}").contains("no schema has been selected"), "{error:?}");
    rowlock::migrate(&db.pool).await.unwrap();
    assert!(tables(&db).await.ends_with(OURS));
    acquired(db.lock().try_acquire("k").await);
}

/// Clients with another path would use another queue.
async fn a_queue_that_is_not_beside_the_table_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE SCHEMA app").await;
    db.execute("CREATE TABLE app.t_resource_lock_queue (LIKE t_resource_lock_queue INCLUDING ALL)").await;
    let pool = on_path(&db, "app,public").await;
    for lack in ["", "DROP TABLE t_resource_lock_queue"] {
        db.execute(lack).await;
        let before = tables(&db).await;
        let error = LeaseLock::new(pool.clone()).try_acquire("k").await.unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{error:?}");
        assert!(told.contains("app.t_resource_lock_queue") && told.contains("public.t_resource_lock,"), "{told}");
        assert_eq!(tables(&db).await, before);
    }
}

/// An application whose own tables are of an older version, before another one on its path.
async fn the_tables_of_another_application_are_not_used<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE SCHEMA app").await;
    rowlock::migrate(&on_path(&db, "app").await).await.unwrap();
    let dropped = "t_resource_order, app.t_resource_schedule_detail, app.t_resource_change";
    let pool = on_path(&db, "app,public").await;
    for dropped in [dropped, "t_resource_lock_queue"] {
        db.execute(&format!("DROP TABLE app.{dropped}")).await;
        let claimed = LeaseLock::new(pool.clone()).try_acquire("k").await.map(drop);
        assert_eq!(claimed.is_err(), dropped.ends_with("queue"), "{dropped}: {claimed:?}");
        rowlock::migrate(&pool).await.unwrap();
        let count = "SELECT COUNT(*) FROM pg_tables WHERE schemaname = 'app'";
        assert_eq!(db.number(count).await, Some(9), "{dropped}");
        acquired(LeaseLock::new(pool.clone()).try_acquire("k").await).release().await.unwrap();
    }
    // A schema before both changes nothing.
    db.execute("CREATE SCHEMA empty; DROP TABLE app.t_resource_change").await;
    let behind = on_path(&db, "empty,app,public").await;
    acquired(LeaseLock::new(behind.clone()).try_acquire("k").await).release().await.unwrap();
    rowlock::migrate(&behind).await.unwrap();
    // Before the table's own schema, they would be used.
    db.execute("DROP TABLE app.t_resource_lock, app.t_resource_lock_queue").await;
    for error in [
        rowlock::migrate(&pool).await.unwrap_err(),
        LeaseLock::new(pool.clone()).try_acquire("k").await.map(drop).unwrap_err(),
    ] {
        let told = error.to_string();
        assert!(matches!(error, Error::Setup(Setup::TableUnfit { .. })), "{error:?}");
        assert!(told.contains("app.t_resource_change") && told.contains("public.t_resource_lock,"), "{told}");
    }
}

/// As `sqlx migrate run` does it: within a transaction, which continues afterwards.
async fn the_copied_file_leaves_the_path_as_it_was<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE SCHEMA app; DROP TABLE t_resource_lock_queue").await;
    let mut conn = on_path(&db, "app,public").await.acquire().await.unwrap();
    let file = include_str!("../../migrations/postgres/20260101000000_rowlock.sql");
    for sql in ["BEGIN", file, "CREATE TABLE next_one (id int)", "COMMIT"] {
        DB::execute_on(&mut conn, sql).await.unwrap();
    }
    assert_eq!(tables(&db).await, OURS);
    let next = "SELECT schemaname::text FROM pg_tables WHERE tablename = 'next_one'";
    assert_eq!(db.text(next).await.as_deref(), Some("app"));
    let path = DB::text_on(&mut conn, "SELECT current_setting('search_path')").await.unwrap();
    assert_eq!(path.as_deref(), Some("app,public"));
}

/// SQLite also searches attached files for a name. The lock uses the main file.
async fn a_table_in_an_attached_file_is_another<DB: TestDatabase>(db: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = db.url.trim_start_matches("sqlite://").split('?').next().unwrap().to_owned();
    let attach = format!("ATTACH '{file}' AS other");
    let options = PoolOptions::<DB>::new().after_connect(move |conn, _| {
        let attach = attach.clone();
        Box::pin(async move { DB::execute_on(conn, &attach).await.map(drop) })
    });
    let pool = options.connect(&format!("sqlite://{}?mode=rwc", folder.path().join("own.db").display())).await.unwrap();
    let lock = LeaseLock::new(pool.clone());
    assert!(matches!(lock.try_acquire("k").await, Err(Error::Setup(Setup::TableMissing))));
    rowlock::migrate(&pool).await.unwrap();
    acquired(lock.try_acquire("k").await);
    assert_eq!(db.number("SELECT count(*) FROM t_resource_lock").await, Some(0));
}
