//! Handles of one lock: each has terms of its own, and all share the lock's connections, batches
//! and background work.

use std::time::Duration;

use chrono::TimeDelta;
use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{LeaseLock, Reason, RunError};
use tokio::time::{Instant, sleep, timeout};

use crate::batched::{assert_statements, counted, numbered, set_up, together, tries};

harness::tests!(everywhere(
    a_lease_has_the_duration_of_its_handle,
    a_shutdown_waits_for_all_handles,
    claims_on_equal_terms_go_together,
    a_lock_made_from_a_url_works,
    a_url_that_is_wrong_is_an_error_without_its_password,
    a_tick_whose_instance_dies_runs_elsewhere,
    a_wait_that_could_outlast_the_interval_is_refused,
    a_run_within_the_interval_of_another_is_refused_at_once,
    a_renewal_of_another_handle_shortens_no_lease,
    forgetting_keeps_to_the_longest_interval
));

const SHORT: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Each lease is renewed at its own pace, by the duration of its handle.
async fn a_lease_has_the_duration_of_its_handle<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let handles = [SHORT, 20 * SHORT, 3000 * SHORT].map(|lease| lock.clone().lease(lease));
    let mut leases = Vec::new();
    for (number, handle) in handles.iter().enumerate() {
        leases.push(acquired(handle.try_acquire(&format!("key {number}")).await));
    }
    let since = Instant::now();
    while since.elapsed() < 3 * SHORT {
        assert!(leases.iter().all(|lease| lease.is_held()), "after {:?}", since.elapsed());
        sleep(SHORT / 50).await;
    }
    for (number, lease) in [SHORT, 20 * SHORT, 3000 * SHORT].into_iter().enumerate() {
        let info = lock.inspect(&format!("key {number}")).await.unwrap().unwrap();
        let left = info.until.unwrap() - info.since.unwrap();
        let (lease, since) = (TimeDelta::from_std(lease).unwrap(), TimeDelta::from_std(since.elapsed()).unwrap());
        assert!(left >= lease && left <= lease + since + TimeDelta::seconds(1), "{left} of {lease}");
    }
    for lease in leases {
        lease.release().await.unwrap();
    }
}

/// The first handle's shutdown ends the dropped leases of all handles.
async fn a_shutdown_waits_for_all_handles<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let others = [lock.clone().lease(HOUR), lock.clone().min_interval(HOUR), lock.clone().fair(true)];
    let mut leases = Vec::new();
    for (number, other) in others.into_iter().enumerate() {
        leases.push(acquired(other.try_acquire(&format!("key {number}")).await));
    }
    drop(leases);
    assert!(lock.shutdown(PATIENCE).await);
    for number in 0..3 {
        let lease = acquired(db.lock().try_acquire(&format!("key {number}")).await);
        assert!(lease.taken_over_from().is_some(), "it was abandoned");
    }
}

/// Handles that are made one by one, on equal terms, share statements. A handle on other terms
/// does not take part, and is granted its keys all the same.
async fn claims_on_equal_terms_go_together<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(9);
    let (pool, lock) = set_up(&db, &keys).await;
    let one = lock.clone().lease(7 * SHORT);
    let other = lock.clone().lease(9 * SHORT).lease(7 * SHORT);
    let apart = lock.clone().lease(HOUR);
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut wanted = tries(&one, names[..4].iter().copied());
    wanted.extend(tries(&other, names[4..8].iter().copied()));
    wanted.extend(tries(&apart, [names[8]]));
    let (answers, count) = counted(&pool, together(&pool, wanted)).await;
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    assert_statements(&db, count, 2, 2, "eight from both handles, and the one on other terms");
    let (last, others) = leases.split_last().unwrap();
    assert!(last.time_left() > HOUR / 2 && others.iter().all(|lease| lease.time_left() <= 7 * SHORT));
}

async fn a_lock_made_from_a_url_works<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::<DB>::connect(&db.url).await.unwrap();
    rowlock::migrate(lock.pool()).await.unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Held);
    lease.release().await.unwrap();
}

async fn a_url_that_is_wrong_is_an_error_without_its_password<DB: TestDatabase>(_: TestDb<DB>) {
    let nowhere = if DB::NAME == "SQLite" { "sqlite:no/such/folder/f.db" } else { "127.0.0.1:1/x" };
    let scheme = if DB::NAME == "PostgreSQL" { "postgres" } else { "mysql" };
    for url in [nowhere.to_owned(), format!("{scheme}://me:secret@{nowhere}"), "secret".to_owned()] {
        let error = LeaseLock::<DB>::connect(&url).await.unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains("connecting to") && !text.contains("secret"), "{url}: {text}");
    }
}

/// Three instances begin a tick together. The first one dies at work, and one of the others runs
/// the tick again. When it has succeeded, the third is refused.
async fn a_tick_whose_instance_dies_runs_elsewhere<DB: TestDatabase>(db: TestDb<DB>) {
    let (began, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let (finish, _) = tokio::sync::broadcast::channel::<()>(1);
    let mut instances: Vec<_> = (0..3)
        .map(|number| {
            let lock = db.lock().min_interval(HOUR);
            let (began, mut finish) = (began.clone(), finish.subscribe());
            harness::spawn(async move {
                let work = async |_held| {
                    began.send(number).unwrap();
                    finish.recv().await
                };
                lock.run("report", HOUR / 2, work).await
            })
        })
        .collect();
    let first: usize = timeout(PATIENCE, starts.recv()).await.unwrap().unwrap();
    instances[first].abort();
    let second = timeout(PATIENCE, starts.recv()).await.expect("the tick runs again").unwrap();
    assert_ne!(first, second);
    finish.send(()).unwrap();
    let third = 3 - first - second;
    let (done, refused) = (instances.remove(second.max(third)), instances.remove(second.min(third)));
    let (done, refused) = if second > third { (done, refused) } else { (refused, done) };
    let done = timeout(PATIENCE, done).await.unwrap().unwrap();
    done.unwrap();
    let refused = timeout(PATIENCE, refused).await.expect("it does not wait for the interval").unwrap();
    assert!(matches!(&refused, Err(RunError::Refused(why)) if why.reason == Reason::WithinMinInterval), "{refused:?}");
    assert!(starts.try_recv().is_err(), "the tick ran once more");
}

async fn a_wait_that_could_outlast_the_interval_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().min_interval(SHORT);
    for wait in [SHORT, HOUR, Duration::MAX] {
        let run = lock.run("k", wait, async |_| -> Result<(), ()> { panic!("it does not start") });
        let Err(RunError::Other(error)) = run.await else { panic!("{wait:?} is possible") };
        assert!(error.to_string().contains("shorter than the minimum interval"), "{error}");
    }
    assert!(lock.inspect("k").await.unwrap().is_none(), "nothing was sent");
    lock.run("k", SHORT / 2, async |_| Ok::<_, ()>(())).await.unwrap();
    eventually("without an interval any wait is possible", || async {
        let free = db.lock().run("l", Duration::MAX, async |_| Ok::<_, ()>(())).await;
        free.is_ok()
    })
    .await;
    acquired(db.lock().acquire("k", HOUR).await);
}

/// The second instance begins the tick a little later, with a wait that ends after the interval.
async fn a_run_within_the_interval_of_another_is_refused_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let spaced = |lock: LeaseLock<DB>| lock.min_interval(8 * SHORT);
    spaced(db.lock()).run("k", SHORT, async |_| Ok::<_, ()>(())).await.unwrap();
    sleep(SHORT / 2).await;
    let since = Instant::now();
    let late = spaced(db.lock()).run("k", 8 * SHORT - SHORT / 10, async |_| Ok::<_, ()>(())).await;
    assert!(matches!(&late, Err(RunError::Refused(why)) if why.reason == Reason::WithinMinInterval), "{late:?}");
    assert!(since.elapsed() < 6 * SHORT, "{:?}", since.elapsed());
}

/// A claim may be renewed under a handle of a shorter lease, and may be taken up under one by
/// another process, which then leaves it.
async fn a_renewal_of_another_handle_shortens_no_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let (quick, slow) = (lock.clone().lease(10 * SHORT), lock.clone().lease(HOUR));
    let first = acquired(quick.try_acquire("k").await);
    let lease = slow.attach("k", first.claim().holder).await.unwrap();
    let until = async || lock.inspect("k").await.unwrap().unwrap().until.unwrap();
    let before = until().await;
    first.renew().await.unwrap();
    first.detach();
    db.lock().lease(SHORT).attach("k", lease.claim().holder).await.unwrap().detach();
    assert!(lease.is_held());
    assert!(until().await >= before, "its holder counts on it");
    lease.release().await.unwrap();
}

async fn forgetting_keeps_to_the_longest_interval<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for key in ["k", "l"] {
        acquired(lock.try_acquire(key).await).release().await.unwrap();
        let ago = DB::ago(2 * 3_600_000);
        db.set(key, &format!("begin_time = {ago}, end_time = {ago}")).await;
    }
    {
        let _rare = lock.clone().min_interval(3 * HOUR);
        assert_eq!(lock.forget(HOUR).await.unwrap(), 0, "a handle has an interval of three hours");
    }
    assert_eq!(db.lock().forget(HOUR).await.unwrap(), 2);
}
