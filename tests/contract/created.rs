//! Keys that come for the first time: their rows are created in few statements, and an obstacle to
//! one of them is none to the others.

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use rowlock::{Attempt, Certainty, Error, Lease, LeaseLock};
use sqlx::Pool;
use tokio::{task::JoinSet, time::timeout};

use crate::batched::{counted, names, numbered, together, tries};

harness::tests!(
    everywhere(
        many_new_keys_take_few_statements,
        each_of_many_new_keys_has_one_holder,
        a_row_that_the_server_refuses_to_create_harms_no_other
    ),
    servers(an_uncommitted_insert_delays_no_other_new_key),
    mysql_and_mariadb(a_session_keeps_its_own_limit_of_waits)
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
            tasks.spawn(async move { lock.try_acquire(&key).await.unwrap().acquired() });
        }
    }
    let leases: Vec<Lease<DB>> = tasks.join_all().await.into_iter().flatten().collect();
    assert_eq!(leases.len(), 40);
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(40));
}

async fn a_row_that_the_server_refuses_to_create_harms_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let (pool, lock) = set_up(&db).await;
    let raise: &[&str] = match db.server.name {
        "postgres" => &["ALTER TABLE t_resource_lock ADD CHECK (key_resource <> 'bad')"],
        "sqlite" => &[
            "CREATE TRIGGER refuse BEFORE INSERT ON t_resource_lock WHEN NEW.key_resource = 'bad' BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        ],
        _ => &[
            "CREATE TRIGGER refuse BEFORE INSERT ON t_resource_lock FOR EACH ROW BEGIN IF NEW.key_resource = 'bad' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF; END",
        ],
    };
    for sql in raise {
        db.execute(sql).await;
    }
    let answers = together(&pool, tries(&lock, ["first", "good", "bad", "fine"])).await;
    let [first, good, bad, fine] = <[_; 4]>::try_from(answers).unwrap_or_else(|_| panic!("four answers"));
    drop([acquired(first), acquired(good), acquired(fine)]);
    let error = bad.unwrap_err();
    assert!(matches!(error, Error::Database { outcome: Certainty::NothingChanged, .. }), "{error:?}");
}

/// The transaction ends only after all the other keys have been acquired.
async fn an_uncommitted_insert_delays_no_other_new_key<DB: TestDatabase>(db: TestDb<DB>) {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, "INSERT INTO t_resource_lock (key_resource) VALUES ('key 7')").await.unwrap();
    let lock = LeaseLock::builder(db.pool_of(4).await).time_limit(PATIENCE).build().unwrap();
    let mut tasks = JoinSet::new();
    for key in numbered(16) {
        let lock = lock.clone();
        tasks.spawn(async move { lock.try_acquire(&key).await.unwrap() });
    }
    let mut leases = Vec::new();
    while leases.len() < 15 {
        let next = timeout(PATIENCE, tasks.join_next()).await.expect("the others are acquired");
        leases.push(acquired(next.unwrap().map_err(|error| panic!("{error}"))));
    }
    assert!(leases.iter().all(|lease: &Lease<DB>| lease.key().as_str() != "key 7"));
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
    let last = timeout(PATIENCE, tasks.join_next()).await.expect("the last one is too").unwrap().unwrap();
    assert!(matches!(last, Attempt::Acquired(lease) if lease.key().as_str() == "key 7"));
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
