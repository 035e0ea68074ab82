//! Which changes of a claim wait for the disk (PostgreSQL). A trigger records the setting of each
//! change at its commit.

use std::time::Duration;

use chrono::FixedOffset;
use harness::{DIRECT, TestDatabase, TestDb, acquired, eventually};
use rowlock::{LeaseLock, ResourceLock, Rules, Status};
use sqlx::{Pool, pool::PoolOptions};

use crate::batched::{released, together, tries};

harness::tests!(postgres[DIRECT](
    a_release_that_nothing_hangs_on_does_not_wait_for_the_disk,
    a_release_that_others_hang_on_waits_for_the_disk,
    releases_beside_the_deletion_of_old_rows_do_not_wait_for_the_disk,
    what_keeps_a_claim_waits_for_the_disk,
    what_follows_a_release_on_its_connection_waits_for_the_disk
));

/// The session's setting: neither the default nor the value that a release may set.
const WAITS: &str = "local";
const DOES_NOT: &str = "off";

/// Records how the last change of each row was committed. The trigger is deferred to the commit.
pub const TRIGGER: [&str; 3] = [
    "CREATE TABLE committed (key_resource text PRIMARY KEY, how text)",
    "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO committed VALUES (NEW.key_resource, current_setting('synchronous_commit'))
        ON CONFLICT (key_resource) DO UPDATE SET how = EXCLUDED.how;
        RETURN NULL;
    END $$",
    "CREATE CONSTRAINT TRIGGER note AFTER UPDATE ON t_resource_lock DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()",
];

/// Creates the trigger. Returns a pool of one connection.
async fn bed<DB: TestDatabase>(db: &TestDb<DB>) -> Pool<DB> {
    for sql in TRIGGER {
        db.execute(sql).await;
    }
    let options = PoolOptions::new().max_connections(1).test_before_acquire(false).after_connect(|conn, _| {
        Box::pin(async move { DB::execute_on(conn, "SET synchronous_commit = 'local'").await.map(drop) })
    });
    options.connect(&db.url).await.unwrap()
}

/// Checks how the last change of each of these rows was committed, since the previous check.
pub async fn assert_committed<DB: TestDatabase>(db: &TestDb<DB>, keys: &[&str], how: &str, what: &str) {
    for key in keys {
        let last = db.text(&format!("DELETE FROM committed WHERE key_resource = '{key}' RETURNING how")).await;
        assert_eq!(last.as_deref(), Some(how), "{what}: {key}");
    }
}

const KEYS: [&str; 3] = ["first", "k", "other"];

/// Checks that claims wait for the disk, and that releases, alone and in a batch, are committed in
/// this way.
async fn assert_releases<DB: TestDatabase>(
    db: &TestDb<DB>,
    pool: &Pool<DB>,
    lock: &LeaseLock<DB>,
    how: &str,
    what: &str,
) {
    db.execute("DELETE FROM t_resource_lock").await;
    db.execute("INSERT INTO t_resource_lock (key_resource) VALUES ('alone'), ('first'), ('k'), ('other')").await;
    let lease = acquired(lock.try_acquire("alone").await);
    assert_committed(db, &["alone"], WAITS, "a claim").await;
    lease.fail().await.unwrap();
    assert_committed(db, &["alone"], how, what).await;
    let leases = together(pool, tries(lock, KEYS)).await.into_iter().map(acquired).collect();
    assert_committed(db, &KEYS, WAITS, "claims").await;
    released(pool, leases, |_| Status::Succeeded).await;
    assert_committed(db, &KEYS, how, what).await;
}

async fn a_release_that_nothing_hangs_on_does_not_wait_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = bed(&db).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    assert_releases(&db, &pool, &lock, DOES_NOT, "no minimum interval").await;
    let set = lock.try_acquire_all(["first", "k"]).await.unwrap().acquired().unwrap();
    assert_committed(&db, &["first", "k"], WAITS, "the claims of a set").await;
    set.release().await.unwrap();
    assert_committed(&db, &["first", "k"], DOES_NOT, "a set").await;
}

async fn a_release_that_others_hang_on_waits_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = bed(&db).await;
    let lock = || LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let others = LeaseLock::builder(pool.clone()).share_pool().article_clients(FixedOffset::east_opt(0).unwrap());
    let others = others.build().unwrap();
    let interval = Duration::from_secs(3600);
    let handle = lock();
    let _sibling = handle.clone().min_interval(interval);
    for (what, lock) in [
        ("a minimum interval of another handle", handle),
        ("a minimum interval", lock().min_interval(interval)),
        ("a minimum interval for those that succeed", lock().min_interval(interval).retry_failed_at_once()),
        ("the rules of the article", lock().rules(Rules::Article)),
        ("other programs", others),
    ] {
        assert_releases(&db, &pool, &lock, WAITS, what).await;
    }
}

async fn releases_beside_the_deletion_of_old_rows_do_not_wait_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = bed(&db).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let forgetting = lock.clone();
    let forgetting = harness::spawn(async move { forgetting.forget_after(Duration::from_millis(10_001)).await });
    let passes = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'rowlock/forget' AND status = 'S'";
    eventually("a pass has been made", || async { db.number(passes).await == Some(1) }).await;
    assert_releases(&db, &pool, &lock, DOES_NOT, "beside the deletion").await;
    forgetting.abort();
}

async fn what_keeps_a_claim_waits_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = bed(&db).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    assert_committed(&db, &["k"], WAITS, "the claim").await;
    lease.renew().await.unwrap();
    assert_committed(&db, &["k"], WAITS, "the renewal").await;
    let mut tx = pool.begin().await.unwrap();
    lock.confirm(lease.claim(), &mut tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_committed(&db, &["k"], WAITS, "the confirmation").await;
    lease.abandon().await.unwrap();
    assert_committed(&db, &["k"], DOES_NOT, "the abandonment").await;
    let lease = acquired(lock.try_acquire("k").await);
    assert_committed(&db, &["k"], WAITS, "the takeover").await;
    lease.release().await.unwrap();
}

/// The setting ends with the statement that made it.
async fn what_follows_a_release_on_its_connection_waits_for_the_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = bed(&db).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let setting = || DB::text(&pool, "SHOW synchronous_commit");
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    assert_committed(&db, &["k"], DOES_NOT, "the release").await;
    assert_eq!(setting().await.as_deref(), Some(WAITS), "after a release");
    let leases = together(&pool, tries(&lock, KEYS)).await.into_iter().map(acquired).collect();
    released(&pool, leases, |_| Status::Succeeded).await;
    assert_committed(&db, &KEYS, DOES_NOT, "the release").await;
    assert_eq!(setting().await.as_deref(), Some(WAITS), "after several");
    acquired(lock.try_acquire("k").await).abandon().await.unwrap();
    assert_committed(&db, &["k"], DOES_NOT, "the abandonment").await;
    assert_eq!(setting().await.as_deref(), Some(WAITS), "after an abandonment");
    let lease = acquired(lock.try_acquire("k").await);
    db.take_from("k").await;
    lease.release().await.unwrap_err();
    assert_eq!(setting().await.as_deref(), Some(WAITS), "after one that was lost");
    DB::execute(&pool, "UPDATE t_resource_lock SET status = status WHERE key_resource = 'other'").await.unwrap();
    assert_committed(&db, &["other"], WAITS, "the application's own change").await;
}
