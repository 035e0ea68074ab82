//! Releases of other processes on SQLite, which waiters notice by the database's files.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, events};
use rowlock::{Lease, LeaseLock};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

harness::tests!(
    sqlite(a_database_in_memory_is_polled),
    sqlite.alone(
        a_release_of_another_process_is_noticed_before_the_next_poll,
        a_release_in_a_file_behind_a_link_is_noticed,
        commits_of_others_are_no_flood_of_requests
    )
);

/// Waiters that have waited for so long that they poll only once a second.
const LONG: Duration = Duration::from_secs(3);
const QUICK: Duration = Duration::from_millis(150);

fn waiting<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str) -> JoinHandle<(Lease<DB>, Instant)> {
    let (lock, key) = (lock.clone(), key.to_owned());
    harness::spawn(async move { (acquired(lock.acquire(&key, Duration::MAX).await), Instant::now()) })
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
        holder.release().await.unwrap();
        took.push(timeout(PATIENCE, next).await.expect("it is granted its key").unwrap().1 - freed);
        // The waiters that this release has woken send their requests.
        sleep(4 * QUICK).await;
    }
    assert!(took.iter().filter(|took| **took < QUICK).count() >= 8, "{took:?}");
}

/// SQLite has its log beside the file to which the link leads.
async fn a_release_in_a_file_behind_a_link_is_noticed<DB: TestDatabase>(db: TestDb<DB>) {
    let file = db.url.trim_start_matches("sqlite:").split('?').next().unwrap();
    let link = format!("{file}-link");
    std::os::unix::fs::symlink(file, &link).unwrap();
    let lock = LeaseLock::new(harness::pool::<DB>(&format!("sqlite:{link}"), 2).await);
    let mut quick = 0;
    for number in 0..5 {
        let key = format!("key {number}");
        let (holder, next) = (acquired(db.lock().try_acquire(&key).await), waiting(&lock, &key));
        sleep(LONG).await;
        let freed = Instant::now();
        holder.release().await.unwrap();
        let granted = timeout(PATIENCE, next).await.expect("it is granted its key").unwrap().1;
        quick += usize::from(granted - freed < QUICK);
    }
    assert!(quick >= 4, "{quick} of 5");
}

/// One key is waited for on fifty terms, each of which sends requests of its own, while the file
/// changes all the time.
async fn commits_of_others_are_no_flood_of_requests<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::new(db.pool_of(2).await);
    let _holder = acquired(db.lock().try_acquire("flooded").await);
    let on_terms = |seconds| waiting(&lock.clone().lease(Duration::from_secs(seconds)), "flooded");
    let waiters: Vec<_> = (30..80).map(on_terms).collect();
    db.execute("CREATE TABLE other (value INTEGER)").await;
    sleep(LONG).await;
    let count = || events::with("key=flooded").iter().filter(|event| event.contains("refused")).count();
    let (before, began, mut commits) = (count(), Instant::now(), 0);
    while began.elapsed() < LONG {
        db.execute("INSERT INTO other VALUES (1)").await;
        commits += 1;
    }
    let (requests, most) = (count() - before, usize::try_from(began.elapsed().as_millis()).unwrap() * 7 / 10);
    assert!(commits > 50, "{commits} commits");
    assert!((100..most).contains(&requests), "{requests} requests, of at most {most}");
    waiters.iter().for_each(JoinHandle::abort);
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
    holder.release().await.unwrap();
    timeout(PATIENCE, next).await.expect("it is granted its key").unwrap();
}
