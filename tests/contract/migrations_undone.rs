//! What died long ago does not keep the tables from being taken away, and nothing of the functions
//! stays behind.

use std::time::Duration;

use harness::{DIRECT, TestDatabase, TestDb};
use rowlock::{
    Error,
    errors::Setup,
    migration::{Migration, migrate_functions},
};

use crate::ticks::due;

harness::tests!(
    everywhere.each(what_died_long_ago_does_not_keep_the_tables),
    servers[DIRECT].each(a_removal_without_a_reply_is_told),
    mysql_and_mariadb(the_check_of_an_installation_is_taken_away)
);

const MINUTE: i64 = 60_000;

/// A run and an instance whose processes were killed leave their rows behind.
async fn what_died_long_ago_does_not_keep_the_tables<DB: TestDatabase>(db: TestDb<DB>) {
    let migration = Migration::new(db.pool.clone());
    let used = async || match migration.undo().await {
        Err(Error::Setup(Setup::StillUsed { by, .. })) => by,
        other => panic!("{other:?}"),
    };
    let id = DB::uuid("0123456789abcdef0123456789abcdef");
    let _schedule = due(&db, "k").await;
    db.execute("DELETE FROM t_resource_schedule_instance").await;
    let run = async |millis: i64| {
        let due = DB::ago(millis);
        let set = format!("UPDATE t_resource_schedule SET holder = {id}, client_ip = 'a killed run', due_at = {due}");
        assert_eq!(db.execute(&set).await, 1);
    };
    run(-60 * MINUTE).await;
    let by = used().await;
    assert!(by.contains("a killed run"), "{by}");
    run(MINUTE).await;

    let now = DB::ago(0);
    db.execute(&format!(
        "INSERT INTO t_resource_schedule_instance (id, label, since, beat_at, lives, declares_id, declares)
         VALUES ({id}, 'a killed instance', {now}, {now}, 3600000000, 1, '')"
    ))
    .await;
    let by = used().await;
    assert!(by.contains("a killed instance"), "its run is over: {by}");
    db.execute(&format!("UPDATE t_resource_schedule_instance SET beat_at = {}", DB::ago(61 * MINUTE))).await;
    assert!(!migration.undo().await.unwrap().is_empty());
    assert!(migration.undo().await.unwrap().is_empty(), "nothing is left");
}

/// The tables have gone, and the connection is cut before the reply arrives.
async fn a_removal_without_a_reply_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, migration) = (db.proxy().await, Migration::new(db.pool.clone()));
    let planned = migration.plan_undo().await.unwrap();
    proxy.delay_each(Duration::from_millis(300));
    let cut = async {
        while DB::execute(&db.pool, "DELETE FROM t_resource_schedule_instance WHERE 1 = 0").await.is_ok() {}
        proxy.cut_off().await;
        proxy.delay_each(Duration::ZERO);
    };
    let through = Migration::new(proxy.pool::<DB>(2));
    let (undone, ()) = tokio::join!(through.undo(), cut);
    assert!(undone.unwrap().steps().eq(planned.steps()));
    assert!(migration.undo().await.unwrap().is_empty(), "nothing is left");
}

/// On MySQL, an installation that is refused ends before it drops this procedure.
async fn the_check_of_an_installation_is_taken_away<DB: TestDatabase>(db: TestDb<DB>) {
    migrate_functions(&db.pool).await.unwrap();
    db.execute("CREATE PROCEDURE rowlock_check() SELECT 1").await;
    Migration::new(db.pool.clone()).undo().await.unwrap();
    let left = "SELECT COUNT(*) FROM information_schema.routines WHERE routine_schema = DATABASE()";
    assert_eq!(db.number(left).await, Some(0));
}
