//! Keys that come for the first time: their rows are created in few statements, and an obstacle to
//! one of them is none to the others.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{
    Error, Lease, LeaseLock,
    errors::{Certainty, DatabaseFault},
};
use sqlx::{
    Pool,
    pool::{PoolConnection, PoolOptions},
};
use tokio::{task::JoinSet, time::timeout};

use crate::batched::{Answer, counted, names, numbered, together, tries};

harness::tests!(
    everywhere(
        many_new_keys_take_few_statements,
        each_of_many_new_keys_has_one_holder,
        a_row_that_the_server_refuses_to_create_harms_no_other
    ),
    servers(an_uncommitted_insert_delays_no_other_new_key, an_uncommitted_insert_and_a_refused_row_harm_no_other),
    servers.alone(an_uncommitted_insert_costs_no_other_its_time),
    mysql_and_mariadb(a_session_keeps_its_own_limit_of_waits, a_session_keeps_its_own_limit_after_a_wait)
);

/// A pool of one connection, and a lock that has used its table.
async fn set_up<DB: TestDatabase>(db: &TestDb<DB>) -> (Pool<DB>, LeaseLock<DB>) {
    crate::batched::set_up(db, &[]).await
}

async fn many_new_keys_take_few_statements<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(64);
    let (pool, lock) = set_up(&db).await;
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, names(&keys)))).await;
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    assert_eq!(leases.len(), 64);
    // Each of the two batches claims, creates and claims, and MySQL reads after the first claim.
    // Twice as many are allowed on a stalled machine.
    assert!(count.is_none_or(|count| count <= 16), "{count:?}");
}

/// Tasks of several locks want the same new keys at the same moment.
async fn each_of_many_new_keys_has_one_holder<DB: TestDatabase>(db: TestDb<DB>) {
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let lock = db.over(db.pool_of(4).await).lock();
        for key in numbered(40).into_iter().rev() {
            let lock = lock.clone();
            tasks.spawn(harness::task(async move { lock.try_acquire(&key).await.unwrap().acquired() }));
        }
    }
    let leases: Vec<Lease<DB>> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(leases.len(), 40);
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(40));
}

/// Makes the server refuse to create the row of this key.
async fn refuse<DB: TestDatabase>(db: &TestDb<DB>, key: &str) {
    let sql = match db.server.name {
        "postgres" => format!("ALTER TABLE t_resource_lock ADD CHECK (key_resource <> '{key}')"),
        "sqlite" => format!(
            "CREATE TRIGGER refuse BEFORE INSERT ON t_resource_lock WHEN NEW.key_resource = '{key}' BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        ),
        _ => format!(
            "CREATE TRIGGER refuse BEFORE INSERT ON t_resource_lock FOR EACH ROW BEGIN IF NEW.key_resource = '{key}' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF; END"
        ),
    };
    db.execute(&sql).await;
}

async fn a_row_that_the_server_refuses_to_create_harms_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, lock) = set_up(&db).await;
    refuse(&db, "bad").await;
    let answers = together(&pool, tries(&lock, ["first", "good", "bad", "fine"])).await;
    let [first, good, bad, fine] = <[_; 4]>::try_from(answers).unwrap_or_else(|_| panic!("four answers"));
    drop([acquired(first), acquired(good), acquired(fine)]);
    let error = bad.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
        "{error:?}"
    );
}

/// Inserts a key in a transaction that stays open.
async fn inserted<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> PoolConnection<DB> {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    let insert = format!("INSERT INTO t_resource_lock (key_resource) VALUES ('{key}')");
    DB::execute_on(&mut other, insert.leak()).await.unwrap();
    other
}

/// Claims sixteen keys at the same moment, and waits until all of them but these have been granted.
/// Returns what the others wait for.
async fn granted_but<DB: TestDatabase>(lock: &LeaseLock<DB>, obstructed: &[&str]) -> JoinSet<Answer<DB>> {
    let mut tasks = JoinSet::new();
    for key in numbered(16) {
        let lock = lock.clone();
        tasks.spawn(harness::task(async move { lock.try_acquire(&key).await }));
    }
    let mut leases = Vec::new();
    while leases.len() < 16 - obstructed.len() {
        match timeout(PATIENCE, tasks.join_next()).await.expect("the others are acquired").unwrap().unwrap() {
            Ok(attempt) => leases.push(acquired(Ok::<_, Error>(attempt))),
            Err(error) => assert!(obstructed.iter().any(|key| error.to_string().contains(key)), "{error}"),
        }
    }
    assert!(leases.iter().all(|lease| !obstructed.contains(&lease.key().as_str())), "{leases:?}");
    tasks
}

/// The transaction ends only after all the other keys have been acquired.
async fn an_uncommitted_insert_delays_no_other_new_key<DB: TestDatabase>(db: TestDb<DB>) {
    let mut other = inserted(&db, "key 7").await;
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(PATIENCE).build().unwrap();
    let mut tasks = granted_but(&lock, &["key 7"]).await;
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    let last = timeout(PATIENCE, tasks.join_next()).await.expect("the last one is too").unwrap().unwrap();
    assert_eq!(acquired(last).key().as_str(), "key 7");
}

/// With little time, no request waits for the row of another.
async fn an_uncommitted_insert_costs_no_other_its_time<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(Duration::from_millis(1_500)).build().unwrap();
    acquired(lock.acquire("first", PATIENCE).await);
    let _other = inserted(&db, "key 7").await;
    granted_but(&lock, &["key 7"]).await;
}

/// The requests of a batch that the server refuses are sent one after the other.
async fn an_uncommitted_insert_and_a_refused_row_harm_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db, "key 12").await;
    let _other = inserted(&db, "key 7").await;
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(Duration::from_secs(5)).build().unwrap();
    granted_but(&lock, &["key 7", "key 12"]).await;
}

/// A statement that creates rows sets a limit of its own for a session of MySQL, also in the
/// application's pool. It is undone after a success and after a failure.
async fn a_session_keeps_its_own_limit_of_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    let mut only = pool.acquire().await.unwrap();
    DB::execute_on(&mut only, "SET SESSION innodb_lock_wait_timeout = 7").await.unwrap();
    drop(only);
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    acquired(lock.try_acquire("first").await);
    let own = async || db.over(pool.clone()).number("SELECT CAST(@@innodb_lock_wait_timeout AS SIGNED)").await;
    let answers = together(&pool, tries(&lock, ["a", "b", "c"])).await;
    assert_eq!((answers.into_iter().map(acquired).count(), own().await), (3, Some(7)));
    db.execute("CREATE TRIGGER refuse BEFORE INSERT ON t_resource_lock FOR EACH ROW SIGNAL SQLSTATE '45000'").await;
    let answers = together(&pool, tries(&lock, ["d", "e", "f"])).await;
    assert!(answers.iter().all(Result::is_err));
    assert_eq!(own().await, Some(7));
}

/// A wait for another transaction's row ends in the statement that has the shorter limit.
async fn a_session_keeps_its_own_limit_after_a_wait<DB: TestDatabase>(db: TestDb<DB>) {
    let options = PoolOptions::<DB>::new().max_connections(4).after_connect(|conn, _| {
        Box::pin(async { DB::execute_on(conn, "SET SESSION innodb_lock_wait_timeout = 7").await.map(drop) })
    });
    let pool = options.connect(&db.url).await.unwrap();
    let mut other = inserted(&db, "key 7").await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    let mut tasks = granted_but(&lock, &["key 7"]).await;
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    acquired(timeout(PATIENCE, tasks.join_next()).await.expect("the last one is granted").unwrap().unwrap());
    let mut conns = Vec::new();
    for _ in 0..pool.size() {
        let mut conn = pool.acquire().await.unwrap();
        let limit = DB::text_on(&mut conn, "SELECT CAST(@@innodb_lock_wait_timeout AS CHAR)").await.unwrap();
        assert_eq!(limit.as_deref(), Some("7"));
        conns.push(conn);
    }
}
