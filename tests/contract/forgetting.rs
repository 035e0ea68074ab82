//! `forget` deletes keys in steps, and delays no claim. `forget_after` does so in the background.

use std::time::Duration;

use harness::{DIRECT, PATIENCE, Table, TestDatabase, TestDb, acquired, eventually};
use rowlock::{Error, errors::Setup};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::article::shapes;

harness::tests!(
    everywhere(
        a_step_that_fails_leaves_those_before_it_done,
        minutes_of_any_size_are_counted,
        old_rows_are_forgotten_in_the_background,
        one_instance_forgets_at_a_time,
        what_cannot_be_forgotten_is_reported
    ),
    everywhere.each(a_token_ahead_of_the_clock_is_kept),
    servers[DIRECT](keys_of_other_steps_can_be_acquired_between_steps)
);

const HOUR: Duration = Duration::from_secs(3600);

/// Inserts this many keys that are old enough for `forget`.
async fn old<DB: TestDatabase>(db: &TestDb<DB>, count: usize) {
    let rows: Vec<String> = (0..count).map(|number| format!("('old {number:04}')")).collect();
    db.execute(&format!("INSERT INTO t_resource_lock (key_resource) VALUES {}", rows.join(","))).await;
}

async fn rows<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number("SELECT COUNT(*) FROM t_resource_lock").await.unwrap()
}

async fn a_step_that_fails_leaves_those_before_it_done<DB: TestDatabase>(db: TestDb<DB>) {
    old(&db, 1203).await;
    let refuse: &[&str] = match db.server.name {
        "sqlite" => &["CREATE TRIGGER refuse BEFORE DELETE ON t_resource_lock WHEN OLD.key_resource = 'old 1100'
             BEGIN SELECT RAISE(ABORT, 'not this one'); END"],
        "postgres" => &[
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$",
            "CREATE TRIGGER refuse BEFORE DELETE ON t_resource_lock FOR EACH ROW WHEN (OLD.key_resource = 'old 1100') EXECUTE FUNCTION refuse()",
        ],
        _ => &["CREATE TRIGGER refuse BEFORE DELETE ON t_resource_lock FOR EACH ROW
             IF OLD.key_resource = 'old 1100' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"],
    };
    for sql in refuse {
        db.execute(sql).await;
    }
    let error = db.lock().forget(HOUR).await.unwrap_err();
    assert!(format!("{error:?}").contains("not this one"), "{error:?}");
    assert!(error.to_string().contains("it may have been carried out"), "{error}");
    assert_eq!(rows(&db).await, 203, "two steps of 500 are done");
    db.execute(if db.server.name == "postgres" {
        "DROP TRIGGER refuse ON t_resource_lock"
    } else {
        "DROP TRIGGER refuse"
    })
    .await;
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 203);
}

/// Without its row, the next token of the key would be the clock's, which is lower.
async fn a_token_ahead_of_the_clock_is_kept<DB: TestDatabase>(db: TestDb<DB>) {
    const AHEAD: i64 = 4_000_000_000_000_000;
    old(&db, 3).await;
    db.set("old 0001", &format!("token = {AHEAD}")).await;
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 2);
    let lease = acquired(db.lock().try_acquire("old 0001").await);
    assert!(lease.token().get() > AHEAD, "{}", lease.token());
    lease.release().await.unwrap();
}

/// The article's programs may have given the columns any integer type, and leave them without a
/// value.
async fn minutes_of_any_size_are_counted<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("DROP TABLE t_resource_lock").await;
    db.execute(&shapes(db.server.name)[0].replace("NOT NULL DEFAULT", "NULL DEFAULT")).await;
    match db.server.name {
        "sqlite" => 0,
        "postgres" => db.execute("ALTER TABLE t_resource_lock ALTER COLUMN time TYPE bigint").await,
        _ => db.execute("ALTER TABLE t_resource_lock MODIFY time BIGINT NULL DEFAULT 60").await,
    };
    rowlock::migrate(&db.pool).await.unwrap();
    for (key, minutes) in [
        ("usual", "60"),
        ("none", "NULL"),
        ("negative", "-9223372036854775808"),
        ("long", "3000000000"),
        ("longest", "9223372036854775807"),
    ] {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
        let ago = DB::begun(Table::Articles, 2 * 3_600_000);
        db.set(key, &format!("begin_time = {ago}, end_time = {ago}, time = {minutes}")).await;
    }
    db.set("none", "lock_flag = NULL").await;
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 3);
    assert_eq!(rows(&db).await, 2);
    assert_eq!(
        db.number("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource IN ('long', 'longest')").await,
        Some(2)
    );
}

/// While `forget` waits at one row, keys of other steps can be claimed.
async fn keys_of_other_steps_can_be_acquired_between_steps<DB: TestDatabase>(db: TestDb<DB>) {
    old(&db, 1203).await;
    let mut gate = db.pool_of(1).await.acquire().await.unwrap();
    let (create, close, waits, open): (&[&str], _, _, _) = match db.server.name {
        "postgres" => (
            &[
                "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN OLD; END $$",
                "CREATE TRIGGER gate BEFORE DELETE ON t_resource_lock FOR EACH ROW WHEN (OLD.key_resource = 'old 0700') EXECUTE FUNCTION gate()",
            ],
            "SELECT pg_advisory_lock(1)",
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'",
            "SELECT pg_advisory_unlock(1)",
        ),
        server => (
            &["CREATE TRIGGER gate BEFORE DELETE ON t_resource_lock FOR EACH ROW
                 IF OLD.key_resource = 'old 0700' THEN DO GET_LOCK(DATABASE(), 60); DO RELEASE_LOCK(DATABASE()); END IF"],
            "SELECT GET_LOCK(DATABASE(), 0)",
            if server == "mysql" {
                "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE() AND processlist_state = 'User lock'"
            } else {
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock'"
            },
            "SELECT RELEASE_LOCK(DATABASE())",
        ),
    };
    for sql in create {
        db.execute(sql).await;
    }
    DB::execute_on(&mut gate, close).await.unwrap();
    let lock = db.builder().time_limit(2 * PATIENCE).build().unwrap();
    let forgetting = harness::spawn({
        let lock = lock.clone();
        async move { lock.forget(HOUR).await }
    });
    eventually("it waits", || async { db.number(waits).await == Some(1) }).await;
    for key in ["old 0000", "old 0499", "old 1000", "old 1202"] {
        acquired(lock.try_acquire(key).await).release().await.unwrap();
    }
    DB::execute_on(&mut gate, open).await.unwrap();
    // The keys that were just used are kept.
    assert_eq!(forgetting.await.unwrap().unwrap(), 1201);
    assert_eq!(rows(&db).await, 4);
}

/// With this age, an instance tries once a second to begin a pass.
const AGE: Duration = Duration::from_secs(8);

/// Three instances, one of which is dropped in its first pass. What is held or recent stays.
async fn old_rows_are_forgotten_in_the_background<DB: TestDatabase>(db: TestDb<DB>) {
    let held = acquired(db.lock().try_acquire("held").await);
    acquired(db.lock().try_acquire("recent").await).release().await.unwrap();
    old(&db, 1203).await;
    let mut instances = JoinSet::new();
    for _ in 0..3 {
        let lock = db.over(db.pool_of(3).await).lock();
        instances.spawn(harness::task(async move { lock.forget_after(AGE).await.map(drop) }));
        if instances.len() == 1 {
            eventually("the first step is done", || async { rows(&db).await < 1203 }).await;
            instances.abort_all();
        }
    }
    eventually("the old rows are gone", || async { db.number(OLD).await == Some(0) }).await;
    assert!(held.is_held());
    assert_eq!(
        db.number("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource IN ('held', 'recent')").await,
        Some(2)
    );
}

const OLD: &str = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource LIKE 'old%'";
/// While another instance holds the key, nothing is deleted.
async fn one_instance_forgets_at_a_time<DB: TestDatabase>(db: TestDb<DB>) {
    old(&db, 3).await;
    let other = acquired(db.lock().try_acquire("rowlock/forget").await);
    let lock = db.over(db.pool_of(3).await).lock();
    let forgetting = harness::spawn(async move { lock.forget_after(AGE).await.map(drop) });
    // Its attempts come at every second.
    sleep(Duration::from_millis(2500)).await;
    assert_eq!(db.number(OLD).await, Some(3));
    other.release().await.unwrap();
    eventually("the old rows are gone", || async { db.number(OLD).await == Some(0) }).await;
    forgetting.abort();
}

async fn what_cannot_be_forgotten_is_reported<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    // An age that is refused is refused on each instance, also while another one forgets.
    let other = acquired(lock.try_acquire("rowlock/forget").await);
    let forgetting = timeout(PATIENCE, lock.forget_after(11 * 365 * 24 * HOUR));
    let error = forgetting.await.expect("it returns").unwrap_err();
    assert!(matches!(error, Error::Invalid(_)), "{error:?}");
    other.release().await.unwrap();
    db.execute("DROP TABLE t_resource_lock").await;
    let error = timeout(PATIENCE, lock.forget_after(HOUR)).await.expect("it returns").unwrap_err();
    assert!(matches!(error, Error::Setup(Setup::TableMissing)), "{error:?}");
}
