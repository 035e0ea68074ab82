//! Releases of other processes on SQLite, which waiters notice by the database's files.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, events};
use rowlock::{Lease, LeaseLock, Status};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

harness::tests!(
    sqlite(commits_of_others_are_no_flood_of_requests, a_database_in_memory_is_polled),
    sqlite.alone(a_release_of_another_process_is_noticed_before_the_next_poll)
);

/// Waiters that have waited for so long that they poll only once a second.
const LONG: Duration = Duration::from_secs(3);
const QUICK: Duration = Duration::from_millis(150);

fn waiting<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str) -> JoinHandle<(Lease<DB>, Instant)> {
    let (lock, key) = (lock.clone(), key.to_owned());
    tokio::spawn(async move { (acquired(lock.acquire(&key, Duration::MAX).await), Instant::now()) })
}

/// The lock that waits knows nothing of the other one but its commits.
async fn a_release_of_another_process_is_noticed_before_the_next_poll<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::new(db.pool_of(2).await);
    let mut pairs = Vec::new();
    for number in 0..10 {
        let key = format!("key {number}");
        pairs.push((acquired(db.lock().try_acquire(&key).await), waiting(&lock, &key)));
    }
    sleep(LONG).await;
    let mut took = Vec::new();
    for (holder, next) in pairs {
        let freed = Instant::now();
        holder.release(Status::Succeeded).await.unwrap();
        took.push(timeout(PATIENCE, next).await.expect("it is granted its key").unwrap().1 - freed);
        // The waiters that this release has woken send their requests.
        sleep(4 * QUICK).await;
    }
    assert!(took.iter().filter(|took| **took < QUICK).count() >= 8, "{took:?}");
}

/// Ten keys are waited for while the file changes all the time.
async fn commits_of_others_are_no_flood_of_requests<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::new(db.pool_of(2).await);
    let mut pairs = Vec::new();
    for number in 0..10 {
        let key = format!("flooded {number}");
        pairs.push((acquired(db.lock().try_acquire(&key).await), waiting(&lock, &key)));
    }
    db.execute("CREATE TABLE other (value INTEGER)").await;
    let (began, mut commits) = (Instant::now(), 0);
    while began.elapsed() < LONG {
        db.execute("INSERT INTO other VALUES (1)").await;
        commits += 1;
    }
    let requests = events::with("key=flooded").iter().filter(|event| event.contains("refused")).count();
    let most = usize::try_from(began.elapsed().as_millis()).unwrap() * 6 / 10;
    assert!(commits > 200 && requests > 20, "{commits} commits, {requests} requests");
    assert!(requests < most, "{requests} requests, of at most {most}");
    pairs.iter().for_each(|(_, waiter)| waiter.abort());
}

/// There is no file, so a wait ends at the next poll, at most a second later.
async fn a_database_in_memory_is_polled<DB: TestDatabase>(db: TestDb<DB>) {
    let _ = db;
    let pool = harness::pool::<DB>("sqlite:file:noticed?mode=memory&cache=shared", 3).await;
    rowlock::migrate(&pool).await.unwrap();
    let (one, other) = (LeaseLock::new(pool.clone()), LeaseLock::new(pool));
    let holder = acquired(one.try_acquire("k").await);
    let next = waiting(&other, "k");
    sleep(Duration::from_millis(500)).await;
    holder.release(Status::Succeeded).await.unwrap();
    timeout(PATIENCE, next).await.expect("it is granted its key").unwrap();
}
