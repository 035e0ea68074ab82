//! Never more holders of a name than are allowed: one writer, or as many as a semaphore has
//! permits.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
    refused,
};
use rowlock::{Access, Error, Held as HeldLease, Lease, LeaseLock, Reason, ResourceLock, RunError, Tx};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    cancelled::{Stage, at_every_stop_between},
    waiters::seconds,
};

harness::tests!(
    everywhere(
        no_more_than_allowed_and_as_many_as_allowed,
        no_more_than_allowed_beside_crashes_and_losses,
        as_many_are_granted_anew_after_crashes,
        a_dropped_wait_takes_no_place,
        every_holder_can_commit_and_none_that_was_replaced,
        work_runs_under_each
    ),
    servers(a_lost_reply_takes_no_second_place, a_lost_request_takes_no_place),
    everywhere.long(a_dropped_attempt_takes_no_place)
);

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

/// How many writers hold a name at a time.
const WRITERS: usize = 1;
const PERMITS: usize = 3;
const LIMITS: [usize; 2] = [WRITERS, PERMITS];

/// Returns the access to a name that this many may hold at a time: as its writer, or with a permit.
fn limited<DB: TestDatabase>(lock: &LeaseLock<DB>, name: &str, most: usize) -> Access<DB> {
    match most {
        WRITERS => lock.read_write(name).writer().clone(),
        most => lock.semaphore(name, u32::try_from(most).unwrap()),
    }
}

async fn each<DB: TestDatabase>(limited: &Access<DB>, most: usize) -> Vec<Lease<DB>> {
    let mut leases = Vec::new();
    for _ in 0..most {
        leases.push(acquired(limited.acquire(PATIENCE).await));
    }
    leases
}

/// Returns as many grants as are allowed, and checks that there is no other one.
async fn fill<DB: TestDatabase>(limited: &Access<DB>, most: usize) -> Vec<Lease<DB>> {
    let leases = each(limited, most).await;
    let refusal = refused(limited.try_acquire().await);
    assert_eq!(refusal.reason, Reason::Held, "{refusal}");
    leases
}

async fn release_all<DB: TestDatabase>(leases: Vec<Lease<DB>>) {
    for lease in leases {
        lease.release().await.unwrap();
    }
}

/// Counts holders, and the most at any moment.
#[derive(Default)]
struct Count {
    now: AtomicUsize,
    highest: AtomicUsize,
}

impl Count {
    fn begin(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.highest.fetch_max(now, Ordering::SeqCst);
    }

    fn end(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Tasks of two locks, which share nothing but the database, as two processes do.
async fn no_more_than_allowed_and_as_many_as_allowed<DB: TestDatabase>(db: TestDb<DB>) {
    for most in LIMITS {
        let (count, mut tasks) = (Arc::new(Count::default()), JoinSet::new());
        for lock in [db.lock(), db.lock()] {
            for _ in 0..8 {
                let (count, limited) = (count.clone(), limited(&lock, "k", most));
                tasks.spawn(harness::task(async move {
                    for _ in 0..5 {
                        let grant = acquired(limited.acquire(PATIENCE * 3).await);
                        count.begin();
                        eventually("as many as are allowed hold it at once", || async {
                            count.highest.load(Ordering::SeqCst) >= most
                        })
                        .await;
                        sleep(Duration::from_millis(fastrand::u64(5..20))).await;
                        count.end();
                        grant.release().await.unwrap();
                    }
                }));
            }
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        let highest = count.highest.load(Ordering::SeqCst);
        assert!(highest <= most, "{highest} at a time, and {most} are allowed");
        release_all(fill(&limited(&db.lock(), "k", most), most).await).await;
    }
}

/// The times at which each holder certainly held its place.
type Held = Arc<Mutex<Vec<(Instant, Instant)>>>;

/// Works under the grant for this long, and records until when it was certainly held: not past the
/// last deadline that was seen, however long the machine delayed this task.
async fn work_under<DB: TestDatabase>(grant: &Lease<DB>, work: Duration, held: &Held) {
    let began = Instant::now();
    let mut trusted = began;
    while began.elapsed() < work {
        let (now, left) = (Instant::now(), grant.time_left());
        if !left.is_zero() {
            trusted = now + left;
        }
        sleep(work.min(Duration::from_millis(10))).await;
    }
    held.lock().unwrap().push((began, trusted.min(Instant::now())));
}

fn most_at_a_time(held: &Held) -> usize {
    let held = held.lock().unwrap();
    let at = |time: Instant| held.iter().filter(|(began, ended)| *began <= time && time < *ended).count();
    held.iter().map(|(began, _)| at(*began)).max().unwrap_or_default()
}

/// Some holders of permits crash (nothing renews or ends their claims), some are paused until their
/// leases are over, and some renew. `read_write` does the same with writers.
async fn no_more_than_allowed_beside_crashes_and_losses<DB: TestDatabase>(db: TestDb<DB>) {
    let (held, mut tasks) = (Held::default(), JoinSet::new());
    for number in 0..12 {
        let lock = db.lock_for(SHORT / 2);
        let (held, limited) = (held.clone(), limited(&lock, "k", PERMITS));
        tasks.spawn(harness::task(async move {
            let until = Instant::now() + seconds();
            let mut turn = number;
            while Instant::now() < until {
                let grant = match limited.acquire(SHORT / 2).await {
                    Ok(grant) => grant,
                    Err(Error::Refused(_)) => continue,
                    // A busy machine takes longer than the wait.
                    Err(error) if error.is_retryable() => continue,
                    Err(error) => panic!("{error}"),
                };
                turn += 1;
                match turn % 4 {
                    0 => {
                        let began = Instant::now();
                        let trusted = began + grant.time_left();
                        grant.detach();
                        held.lock().unwrap().push((began, trusted));
                        tokio::time::sleep_until(trusted).await;
                    }
                    step => {
                        let work = if step == 1 { SHORT } else { Duration::from_millis(fastrand::u64(1..20)) };
                        work_under(&grant, work, &held).await;
                        grant.release().await.ok(); // it may be lost
                    }
                }
            }
        }));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let highest = most_at_a_time(&held);
    assert!((2..=PERMITS).contains(&highest), "{highest} at a time, and {PERMITS} are allowed");
    // No place is left behind by a holder that crashed.
    release_all(fill(&limited(&db.lock(), "k", PERMITS), PERMITS).await).await;
}

async fn as_many_are_granted_anew_after_crashes<DB: TestDatabase>(db: TestDb<DB>) {
    for most in LIMITS {
        let limited = limited(&db.lock_for(3 * SHORT), "k", most);
        let mut tokens = Vec::new();
        for grant in fill(&limited, most).await {
            tokens.push((grant.key().clone(), grant.token()));
            grant.detach();
        }
        let mut again = Vec::new();
        for grant in each(&limited, most).await {
            let (_, before) = tokens.iter().find(|(key, _)| key == grant.key()).expect("one of the same places");
            assert!(grant.token() > *before && grant.taken_over_from().is_some());
            tokens.retain(|(key, _)| key != grant.key());
            again.push(grant);
        }
        assert!(tokens.is_empty(), "each place was taken over once");
        release_all(again).await;
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

/// Each operation is dropped at one point after another. All places can be had afterwards.
async fn at_each_stop<DB: TestDatabase>(db: TestDb<DB>, wait: Duration) {
    let others = |stage: &Stage<'_, DB>| limited(&db.lock(), &stage.key, PERMITS);
    at_every_stop_between(
        &db,
        async |stage| {
            release_all(each(&others(stage), PERMITS).await).await;
            stage.warm().await;
        },
        async |stage, ()| drop(acquired(limited(&stage.lock, &stage.key, PERMITS).acquire(wait).await)),
        async |_| {},
        async |stage| {
            stage.can_be_had(&format!("{}#1", stage.key)).await;
            let since = Instant::now();
            let grants = each(&others(stage), PERMITS).await;
            assert!(since.elapsed() < PATIENCE, "{}: no place is kept longer than a lease", stage.key);
            release_all(grants).await;
        },
    )
    .await;
}

async fn a_dropped_attempt_takes_no_place<DB: TestDatabase>(db: TestDb<DB>) {
    at_each_stop(db, Duration::ZERO).await;
}

async fn a_dropped_wait_takes_no_place<DB: TestDatabase>(db: TestDb<DB>) {
    at_each_stop(db, PATIENCE).await;
}

async fn confirmed<DB: TestDatabase>(lock: &LeaseLock<DB>, grant: &Lease<DB>) -> Result<(), Error> {
    let mut tx = lock.pool().begin().await.unwrap();
    lock.confirm(grant.claim(), &mut tx).await?;
    tx.commit().await.unwrap();
    Ok(())
}

async fn every_holder_can_commit_and_none_that_was_replaced<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(LONG);
    for most in LIMITS {
        let grants = fill(&limited(&lock, "k", most), most).await;
        for grant in &grants {
            confirmed(&lock, grant).await.unwrap();
        }
        let replaced = &grants[fastrand::usize(..grants.len())];
        db.take_from(replaced.key().as_str()).await;
        for grant in &grants {
            let committed = confirmed(&lock, grant).await;
            match grant.key() == replaced.key() {
                true => assert!(matches!(committed, Err(Error::Lost { .. })), "{committed:?}"),
                false => committed.unwrap(),
            }
        }
        let work = async |tx: Tx<DB>| Ok::<_, sqlx::Error>(tx.claim().key.clone());
        let key = limited(&lock, "other", most).transaction(work).await;
        assert!(key.unwrap().as_str().starts_with("other"));
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

async fn work_runs_under_each<DB: TestDatabase>(db: TestDb<DB>) {
    for most in LIMITS {
        let limited = limited(&db.lock_for(LONG), "k", most);
        let leases = fill(&limited, most).await;
        let work = async |held: HeldLease| Ok::<_, std::io::Error>(held.key().clone());
        let ran = limited.run(Duration::ZERO, work).await;
        assert!(matches!(ran, Err(RunError::Refused(_))), "{ran:?}");
        release_all(leases).await;
        assert!(limited.run(PATIENCE, work).await.unwrap().as_str().starts_with('k'));
        release_all(fill(&limited, most).await).await;
    }
}

/// The reply of each of the statements is lost in turn. The attempt is granted one place, and all
/// the others can be had by others.
async fn a_lost_reply_takes_no_second_place<DB: TestDatabase>(db: TestDb<DB>) {
    lost(&db, Way::Replies).await;
}

async fn a_lost_request_takes_no_place<DB: TestDatabase>(db: TestDb<DB>) {
    lost(&db, Way::Requests).await;
}

async fn lost<DB: TestDatabase>(db: &TestDb<DB>, way: Way) {
    for trip in 0.. {
        let others = limited(&db.lock_for(LONG), "k", PERMITS);
        release_all(fill(&others, PERMITS).await).await;
        let proxy: Proxy = db.proxy().await;
        let lock = LeaseLock::builder(proxy.pool::<DB>(2)).share_pool().build().unwrap().lease(LONG);
        let limited = limited(&lock, "k", PERMITS);
        // The connection is open, and the table's shape is known.
        acquired(limited.try_acquire().await).release().await.unwrap();
        proxy.hold_after(way, trip);
        let attempt = limited.acquire(PATIENCE);
        tokio::pin!(attempt);
        let (grant, was_held) = tokio::select! {
            biased;
            grant = &mut attempt => (grant, false),
            () = proxy.held(way) => {
                proxy.cut();
                (attempt.await, true)
            }
        };
        let grant = acquired(grant);
        let mut others_grants = Vec::new();
        for _ in 1..PERMITS {
            others_grants.push(acquired(others.try_acquire().await));
        }
        refused(others.try_acquire().await); // no place is left over
        proxy.open();
        drop(grant);
        let is_free = async || others.try_acquire().await.unwrap().acquired().is_some();
        eventually("the place is free", is_free).await;
        release_all(others_grants).await;
        db.execute("DELETE FROM t_resource_lock").await;
        if !was_held {
            assert!(trip > 0, "nothing was ever held");
            break;
        }
    }
}
