//! A claim has no reply, and its repetition is refused for another reason: by a server that takes
//! no writes, as after a fail-over, or because the table is missing. The claim may stand.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way};
use rowlock::{
    Error, LeaseLock,
    errors::{Certainty, DatabaseFault, Setup},
};
use sqlx::pool::PoolOptions;

use crate::line::{Line, SHORT, standing};

harness::tests!(servers(
    a_claim_without_a_reply_is_unknown_at_a_server_that_takes_no_writes,
    a_claim_without_a_reply_is_unknown_where_the_table_is_missing
));

async fn a_claim_without_a_reply_is_unknown_at_a_server_that_takes_no_writes<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let (proxy, is_standby) = (db.proxy().await, Arc::new(AtomicBool::new(false)));
    let read_only = match db.server.name {
        "postgres" => "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        _ => "SET SESSION TRANSACTION READ ONLY",
    };
    let standby = is_standby.clone();
    let options = PoolOptions::<DB>::new().max_connections(1).test_before_acquire(false);
    let options = options.after_connect(move |conn, _| {
        let standby = standby.clone();
        Box::pin(async move {
            if standby.load(Ordering::Relaxed) {
                DB::execute_on(conn, read_only).await?;
            }
            Ok(())
        })
    });
    let pool = options.connect_lazy(&proxy.url).unwrap();
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    let lock = lock.lease(30 * SHORT);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
    let fail_over = async |proxy: &harness::proxy::Proxy| {
        assert_eq!(standing(&db).await, 1);
        is_standby.store(true, Ordering::Relaxed);
        proxy.cut();
    };
    let ended = proxy.during(Way::Replies, 0, lock.try_acquire("k"), fail_over).await;
    assert!(
        matches!(ended, Err(Error::Database(DatabaseFault::ReadOnly { outcome: Certainty::Unknown, .. }))),
        "{ended:?}"
    );
    assert_eq!(standing(&db).await, 1);
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::ReadOnly { outcome: Certainty::NothingChanged, .. })),
        "{error:?}"
    );
}

async fn a_claim_without_a_reply_is_unknown_where_the_table_is_missing<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, 30 * SHORT, PATIENCE).await;
    let (rename, back) = match db.server.name {
        "postgres" => ("ALTER TABLE t_resource_lock RENAME TO away", "ALTER TABLE away RENAME TO t_resource_lock"),
        _ => ("RENAME TABLE t_resource_lock TO away", "RENAME TABLE away TO t_resource_lock"),
    };
    let attempt = line.held(Way::Replies, 0, line.lock.try_acquire("k"), async |proxy| {
        db.execute(rename).await;
        proxy.cut();
    });
    let ended = attempt.await;
    assert!(
        matches!(ended, Err(Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. }))),
        "{ended:?}"
    );
    let error = line.lock.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Setup(Setup::TableMissing)), "{error:?}");
    db.execute(back).await;
    assert_eq!(standing(&db).await, 1);
}
