//! Never more holders than a lock allows: the promises of every lock under the one trait, with one
//! permit (a lease) and with several (a semaphore).

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
};
use rowlock::{Access, Attempt, Error, Held as HeldLease, Lease, LeaseLock, Reason, ResourceLock, RunError, Tx};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    cancelled::{Stage, at_every_stop_between},
    child::{self, say},
    waiters::seconds,
};

harness::tests!(
    everywhere(
        no_more_than_allowed_and_as_many_as_allowed,
        no_more_than_allowed_beside_crashes_and_losses,
        as_many_are_granted_anew_after_crashes,
        a_killed_process_gives_its_place_to_another,
        a_dropped_wait_takes_no_place,
        every_holder_can_commit_and_none_that_was_replaced,
        work_runs_under_each
    ),
    servers(a_lost_reply_takes_no_second_place, a_lost_request_takes_no_place),
    everywhere.long(a_dropped_attempt_takes_no_place)
);

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

/// The limit that stands for the writers of a read-write lock: one at a time.
const WRITERS: usize = 0;

/// A lock, and how many holders it allows.
pub struct Limited<DB: TestDatabase> {
    pub lock: LeaseLock<DB>,
    pub most: usize,
    writes: bool,
}

impl<DB: TestDatabase> Limited<DB> {
    /// Returns the access to a name, unless it is that of a key.
    fn access(&self, name: &str) -> Option<Access<DB>> {
        match self.most {
            _ if self.writes => Some(self.lock.read_write(name).writer().clone()),
            1 => None,
            most => Some(self.lock.semaphore(name, u32::try_from(most).unwrap())),
        }
    }

    pub async fn acquire(&self, name: &str, wait: Duration) -> Result<Lease<DB>, Error> {
        match self.access(name) {
            Some(access) => access.acquire(wait).await,
            None => self.lock.acquire(name, wait).await,
        }
    }

    async fn try_acquire(&self, name: &str) -> Attempt<Lease<DB>> {
        match self.access(name) {
            Some(access) => access.try_acquire().await.unwrap(),
            None => self.lock.try_acquire(name).await.unwrap(),
        }
    }
}

/// Returns a lock that allows this many holders of a key, for the jobs of processes.
fn limits() -> [usize; 4] {
    [WRITERS, 1, 3, 8]
}

/// Returns a lock that this many may hold at a time.
fn limited<DB: TestDatabase>(lock: &LeaseLock<DB>, most: usize) -> Limited<DB> {
    Limited { lock: lock.clone(), most: most.max(1), writes: most == WRITERS }
}

fn every_lock<DB: TestDatabase>(lock: &LeaseLock<DB>) -> Vec<Limited<DB>> {
    limits().map(|most| limited(lock, most)).into()
}

/// Returns as many grants as are allowed, and checks that there is no other one.
async fn fill<DB: TestDatabase>(limited: &Limited<DB>) -> Vec<Lease<DB>> {
    let mut leases = Vec::new();
    for _ in 0..limited.most {
        leases.push(acquired(limited.acquire("k", PATIENCE).await));
    }
    let refusal = limited.try_acquire("k").await.refused().expect("all places are taken");
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
    for most in limits() {
        let (count, mut tasks) = (Arc::new(Count::default()), JoinSet::new());
        for lock in [db.lock(), db.lock()] {
            for _ in 0..8 {
                let (count, limited) = (count.clone(), limited(&lock, most));
                tasks.spawn(async move {
                    for _ in 0..5 {
                        let grant = acquired(limited.acquire("k", PATIENCE * 3).await);
                        count.begin();
                        eventually("as many as are allowed hold it at once", || async {
                            count.highest.load(Ordering::SeqCst) >= limited.most
                        })
                        .await;
                        sleep(Duration::from_millis(fastrand::u64(5..20))).await;
                        count.end();
                        grant.release().await.unwrap();
                    }
                });
            }
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        let highest = count.highest.load(Ordering::SeqCst);
        assert!(highest <= most.max(1), "{highest} at a time, and {most} are allowed");
        let limited = limited(&db.lock(), most);
        release_all(fill(&limited).await).await;
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

/// Some holders crash (nothing renews or ends their claims), some are paused until their leases are
/// over, and some renew.
async fn no_more_than_allowed_beside_crashes_and_losses<DB: TestDatabase>(db: TestDb<DB>) {
    for most in limits() {
        let (held, mut tasks) = (Held::default(), JoinSet::new());
        for number in 0..12 {
            let lock = db.lock_for(SHORT / 2);
            let (held, limited) = (held.clone(), limited(&lock, most));
            tasks.spawn(async move {
                let until = Instant::now() + seconds();
                let mut turn = number;
                while Instant::now() < until {
                    let grant = match limited.acquire("k", SHORT / 2).await {
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
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        let highest = most_at_a_time(&held);
        assert!(highest <= most.max(1), "{highest} at a time, and {most} are allowed");
        assert!(highest >= most.min(2), "{highest} at a time: nothing was shared");
        // No place is left behind by a holder that crashed.
        let limited = limited(&db.lock(), most);
        release_all(fill(&limited).await).await;
    }
}

async fn as_many_are_granted_anew_after_crashes<DB: TestDatabase>(db: TestDb<DB>) {
    for limited in every_lock(&db.lock_for(3 * SHORT)) {
        let mut tokens = Vec::new();
        for grant in fill(&limited).await {
            tokens.push((grant.key().clone(), grant.token()));
            grant.detach();
        }
        let mut again = Vec::new();
        for _ in 0..limited.most {
            let grant = acquired(limited.acquire("k", PATIENCE).await);
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

/// The job of a process: holds a place until the process is killed.
pub async fn hold<DB: TestDatabase>(pool: sqlx::Pool<DB>, most: &str) {
    let lock = LeaseLock::new(pool).lease(3 * SHORT);
    let limited = limited(&lock, most.parse().unwrap());
    let grant = acquired(limited.acquire("k", PATIENCE).await);
    say(format!("{} {}", grant.key(), grant.token()));
    grant.lost().await;
}

async fn a_killed_process_gives_its_place_to_another<DB: TestDatabase>(db: TestDb<DB>) {
    let most = 3;
    let mut places = Vec::new();
    for _ in 0..most {
        let mut process = child::start(&db, "hold a place", &most.to_string(), std::path::Path::new(""));
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
        places.push((process, line.split_once(' ').unwrap().0.to_owned()));
    }
    let limited = limited(&db.lock(), most);
    // All of them renew: after two leases there is no free place.
    sleep(6 * SHORT).await;
    assert!(limited.try_acquire("k").await.refused().is_some());
    let (mut process, place) = places.swap_remove(fastrand::usize(..most));
    process.kill().await.unwrap();
    let grant = acquired(limited.acquire("k", PATIENCE).await);
    assert_eq!(grant.key().as_str(), place, "the place of the process that was killed");
    assert!(limited.try_acquire("k").await.refused().is_some(), "and no other one");
}

/// Each operation is dropped at one point after another. All places can be had afterwards.
async fn at_each_stop<DB: TestDatabase>(db: TestDb<DB>, wait: Duration) {
    for most in [WRITERS, 1, 3] {
        let place = |stage: &Stage<'_, DB>| if most <= 1 { stage.key.clone() } else { format!("{}#1", stage.key) };
        let prepare = async |stage: &Stage<'_, DB>| {
            let limited = limited(&db.lock(), most);
            let mut grants = Vec::new();
            for _ in 0..limited.most {
                grants.push(acquired(limited.acquire(&stage.key, PATIENCE).await));
            }
            release_all(grants).await;
        };
        let act = async |stage: &Stage<'_, DB>, ()| {
            drop(acquired(limited(&stage.lock, most).acquire(&stage.key, wait).await));
        };
        at_every_stop_between(
            &db,
            prepare,
            act,
            async |_| {},
            async |stage| {
                stage.can_be_had(&place(stage)).await;
                let limited = limited(&db.lock(), most);
                let since = Instant::now();
                let mut grants = Vec::new();
                for _ in 0..limited.most {
                    grants.push(acquired(limited.acquire(&stage.key, PATIENCE).await));
                }
                assert!(since.elapsed() < PATIENCE, "{}: no place is kept longer than a lease", stage.key);
                release_all(grants).await;
            },
        )
        .await;
    }
}

async fn a_dropped_attempt_takes_no_place<DB: TestDatabase>(db: TestDb<DB>) {
    at_each_stop(db, Duration::ZERO).await;
}

async fn a_dropped_wait_takes_no_place<DB: TestDatabase>(db: TestDb<DB>) {
    at_each_stop(db, PATIENCE).await;
}

async fn confirmed<DB: TestDatabase>(limited: &Limited<DB>, grant: &Lease<DB>) -> Result<(), Error> {
    let mut tx = limited.lock.pool().begin().await.unwrap();
    limited.lock.confirm(grant.claim(), &mut tx).await?;
    tx.commit().await.unwrap();
    Ok(())
}

async fn every_holder_can_commit_and_none_that_was_replaced<DB: TestDatabase>(db: TestDb<DB>) {
    for limited in every_lock(&db.lock_for(LONG)) {
        let grants = fill(&limited).await;
        for grant in &grants {
            confirmed(&limited, grant).await.unwrap();
        }
        let replaced = &grants[fastrand::usize(..grants.len())];
        db.take_from(replaced.key().as_str()).await;
        for grant in &grants {
            let committed = confirmed(&limited, grant).await;
            match grant.key() == replaced.key() {
                true => assert!(matches!(committed, Err(Error::Lost { .. })), "{committed:?}"),
                false => committed.unwrap(),
            }
        }
        let work = async |tx: Tx<DB>| Ok::<_, sqlx::Error>(tx.claim().key.clone());
        let key = match limited.access("other") {
            Some(access) => access.transaction(work).await,
            None => limited.lock.transaction("other", work).await,
        };
        assert!(key.unwrap().as_str().starts_with("other"));
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

async fn work_runs_under_each<DB: TestDatabase>(db: TestDb<DB>) {
    for limited in every_lock(&db.lock_for(LONG)) {
        let leases = fill(&limited).await;
        let access = limited.access("k");
        let run = async |wait| {
            let work = async |held: HeldLease| Ok::<_, std::io::Error>(held.key().clone());
            match &access {
                Some(access) => access.run(wait, work).await,
                None => limited.lock.run("k", wait, work).await,
            }
        };
        let ran = run(Duration::ZERO).await;
        assert!(matches!(ran, Err(RunError::Refused(_))), "{ran:?}");
        release_all(leases).await;
        assert!(run(PATIENCE).await.unwrap().as_str().starts_with('k'));
        release_all(fill(&limited).await).await;
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
    for most in [WRITERS, 1, 3] {
        for trip in 0.. {
            let others = limited(&db.lock_for(LONG), most);
            release_all(fill(&others).await).await;
            let proxy: Proxy = db.proxy().await;
            let lock = LeaseLock::builder(proxy.pool::<DB>(2)).share_pool().build().unwrap().lease(LONG);
            let limited = limited(&lock, most);
            // The connection is open, and the table's shape is known.
            limited.try_acquire("k").await.acquired().unwrap().release().await.unwrap();
            proxy.hold_after(way, trip);
            let attempt = limited.acquire("k", PATIENCE);
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
            for _ in 1..most {
                others_grants.push(others.try_acquire("k").await.acquired().unwrap());
            }
            assert!(others.try_acquire("k").await.refused().is_some(), "no place is left over");
            proxy.open();
            drop(grant);
            eventually("the place is free", || async { others.try_acquire("k").await.acquired().is_some() }).await;
            release_all(others_grants).await;
            db.execute("DELETE FROM t_resource_lock").await;
            if !was_held {
                assert!(trip > 0, "nothing was ever held");
                break;
            }
        }
    }
}
