//! Many readers or one writer: who is let in beside whom, in which order, and under which tokens.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, SESSION, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, Lease, LeaseLock, ReadWriteLock, Reason, Rules, admin::ListOptions};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::waiters::seconds;

harness::tests!(
    everywhere(
        no_reader_is_beside_a_writer,
        readers_run_together_and_are_listed,
        a_writer_that_waits_keeps_new_readers_out,
        readers_that_find_the_name_held_do_not_delay_the_writer,
        no_side_starves,
        the_token_of_the_last_writer_fences_a_reader,
        a_plain_claim_on_the_name_closes_it,
        a_name_that_was_never_claimed_is_claimed_once,
        a_refused_attempt_leaves_no_claim,
        terms_that_do_not_fit_are_refused
    ),
    everywhere.alone(a_release_wakes_the_writer),
    postgres[SESSION](a_writer_requests_a_notification_of_every_reader),
    everywhere.long(all_numbers_are_used_and_no_more)
);

pub const SHORT: Duration = Duration::from_secs(1);
pub const LONG: Duration = Duration::from_secs(60);

pub fn on<DB: TestDatabase>(lock: &LeaseLock<DB>) -> ReadWriteLock<DB> {
    lock.read_write("k")
}

/// Returns a lock that shares nothing with others but the database, as that of another process.
pub fn other<DB: TestDatabase>(db: &TestDb<DB>) -> ReadWriteLock<DB> {
    on(&db.lock_for(LONG))
}

/// Writes once, so that the name has a row with a token.
pub async fn written<DB: TestDatabase>(db: &TestDb<DB>) {
    acquired(other(db).writer().acquire(PATIENCE).await).release().await.unwrap();
}

/// The times between which a holder certainly held the lock.
#[derive(Clone, Debug)]
struct Visit {
    writes: bool,
    /// The writer's token, or the one that fences the reader.
    token: i64,
    began: Instant,
    ended: Instant,
}

/// Checks that no visit overlaps that of a writer, and that the tokens tell their order.
fn check(visits: &[Visit]) {
    let (writers, readers): (Vec<&Visit>, Vec<&Visit>) = visits.iter().partition(|visit| visit.writes);
    assert!(!writers.is_empty() && !readers.is_empty(), "{} writers, {} readers", writers.len(), readers.len());
    for writer in &writers {
        let overlap = |visit: &&Visit| visit.began < writer.ended && writer.began < visit.ended;
        assert_eq!(writers.iter().copied().filter(overlap).count(), 1, "{writer:?} is the only writer");
        let reader = readers.iter().copied().find(overlap);
        assert!(reader.is_none(), "{reader:?} is beside {writer:?}");
        for visit in visits.iter().filter(|visit| visit.began >= writer.ended) {
            assert!(visit.token >= writer.token + i64::from(visit.writes), "{visit:?} after {writer:?}");
        }
        for visit in visits.iter().filter(|visit| visit.ended <= writer.began) {
            assert!(visit.token < writer.token, "{visit:?} before {writer:?}");
        }
    }
}

/// Some holders crash, some are paused until their leases are over, and some renew.
async fn no_reader_is_beside_a_writer<DB: TestDatabase>(db: TestDb<DB>) {
    let (visits, mut tasks) = (Arc::new(Mutex::new(Vec::new())), JoinSet::new());
    let until = Instant::now() + seconds();
    // A busy machine takes longer for the first ones.
    let is_over = move |visits: &[Visit]| {
        let writers = visits.iter().filter(|visit| visit.writes).count();
        let now = Instant::now();
        now >= until && writers.min(visits.len() - writers) >= 10 || now >= until + PATIENCE
    };
    for process in 0..3 {
        let lock = on(&db.lock_for(SHORT).fair(process == 0));
        for task in 0..4 {
            let (lock, visits) = (lock.clone(), visits.clone());
            tasks.spawn(harness::task(async move {
                let mut turn = task;
                while !is_over(&visits.lock().unwrap()) {
                    turn += 1;
                    let writes = turn % 3 == 0;
                    let wait = if turn % 7 == 0 { Duration::ZERO } else { SHORT };
                    let attempt =
                        if writes { lock.writer().acquire(wait).await } else { lock.readers().acquire(wait).await };
                    let lease = match attempt {
                        Ok(lease) => lease,
                        Err(Error::Refused(_)) => {
                            sleep(Duration::from_millis(2)).await;
                            continue;
                        }
                        // A busy machine takes longer than the wait, or than the lease.
                        Err(error) if error.is_retryable() || matches!(error, Error::Lost { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    let visit = visit(lease, writes, fastrand::u32(0..25)).await;
                    visits.lock().unwrap().push(visit);
                }
            }));
        }
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    check(&visits.lock().unwrap());
    // Nothing is left behind.
    acquired(other(&db).writer().acquire(PATIENCE).await).release().await.unwrap();
}

async fn visit<DB: TestDatabase>(lease: Lease<DB>, writes: bool, fate: u32) -> Visit {
    let (began, token) = (Instant::now(), if writes { lease.token() } else { lease.writer_token().unwrap() });
    let mut trusted = began;
    let work = match fate {
        0 => Duration::ZERO,
        1 => 2 * SHORT,
        _ => Duration::from_millis(fastrand::u64(1..15)),
    };
    if fate == 0 {
        trusted = began + lease.time_left();
        lease.detach();
        tokio::time::sleep_until(trusted).await;
        return Visit { writes, token: token.get(), began, ended: trusted };
    }
    while began.elapsed() < work {
        let (now, left) = (Instant::now(), lease.time_left());
        if !left.is_zero() {
            trusted = now + left;
        }
        sleep(work.min(Duration::from_millis(10))).await;
    }
    let ended = trusted.min(Instant::now());
    if fate.is_multiple_of(2) {
        let _ = lease.release().await; // it may be lost
    }
    Visit { writes, token: token.get(), began, ended }
}

async fn readers_run_together_and_are_listed<DB: TestDatabase>(db: TestDb<DB>) {
    let locks = [other(&db), other(&db)];
    let mut readers = Vec::new();
    for number in 0..10 {
        readers.push(acquired(locks[number % 2].readers().try_acquire().await));
    }
    let mut listed = Vec::new();
    for row in db.lock().list(&ListOptions::default().claimed()).await.unwrap() {
        listed.push(row.key);
    }
    let mut keys: Vec<&str> = readers.iter().map(|reader| reader.key().as_str()).collect();
    keys.sort_unstable();
    listed.sort_unstable();
    assert_eq!(listed, keys, "each reader has a key of its own");
    let refusal = refused(locks[0].writer().try_acquire().await);
    assert!(refusal.reason == Reason::Held && keys.contains(&refusal.key.as_str()), "{refusal}");
    for reader in readers {
        reader.release().await.unwrap();
    }
    let writer = acquired(locks[0].writer().acquire(PATIENCE).await);
    assert_eq!(writer.key(), locks[0].name());
    for lock in &locks {
        assert_eq!(refused(lock.readers().try_acquire().await).reason, Reason::Held);
        assert_eq!(refused(lock.writer().try_acquire().await).reason, Reason::Held);
    }
}

/// Returns once the task holds the name and waits for readers.
async fn waits_as_writer<DB: TestDatabase>(db: &TestDb<DB>) {
    let held = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND lock_flag = 1";
    eventually("the writer holds the name", || async { db.number(held).await == Some(1) }).await;
}

async fn a_writer_that_waits_keeps_new_readers_out<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let reader = acquired(other(&db).readers().try_acquire().await);
    let writing = other(&db);
    let writer = harness::spawn(async move { acquired(writing.writer().acquire(PATIENCE).await) });
    waits_as_writer(&db).await;
    for _ in 0..3 {
        assert_eq!(refused(other(&db).readers().try_acquire().await).key.as_str(), "k");
    }
    let behind = other(&db);
    let behind = harness::spawn(async move { acquired(behind.readers().acquire(PATIENCE).await) });
    sleep(SHORT).await;
    assert!(!writer.is_finished() && !behind.is_finished() && reader.is_held());
    reader.release().await.unwrap();
    let writer = timeout(PATIENCE, writer).await.unwrap().unwrap();
    sleep(SHORT).await;
    assert!(!behind.is_finished(), "the reader waits for the writer");
    writer.release().await.unwrap();
    timeout(PATIENCE, behind).await.unwrap().unwrap();
}

/// A reader that finds the name held has claimed a key, and gives it back. Such keys come and go
/// all the time, and the writer waits for none of them.
async fn readers_that_find_the_name_held_do_not_delay_the_writer<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let reader = acquired(other(&db).readers().try_acquire().await);
    let writing = other(&db);
    let writer = harness::spawn(async move { acquired(writing.writer().acquire(PATIENCE).await) });
    waits_as_writer(&db).await;
    // A claim on a reader's key that was made after the writer's, and after its first look.
    sleep(2 * SHORT).await;
    let late = acquired(db.lock_for(LONG).try_acquire("k#r777").await);
    reader.release().await.unwrap();
    timeout(PATIENCE, writer).await.unwrap().unwrap();
    assert!(late.is_held());
}

/// Readers overlap without a pause, or writers follow one another in order. Each of the others is
/// let in.
async fn no_side_starves<DB: TestDatabase>(db: TestDb<DB>) {
    for crowd_writes in [false, true] {
        let lock = || on(&db.lock_for(LONG).fair(crowd_writes));
        let (mut crowd, granted) = (JoinSet::new(), Arc::new(AtomicU32::new(0)));
        for _ in 0..4 {
            let (lock, granted) = (lock(), granted.clone());
            crowd.spawn(harness::task(async move {
                loop {
                    let attempt = if crowd_writes {
                        lock.writer().acquire(PATIENCE).await
                    } else {
                        lock.readers().acquire(PATIENCE).await
                    };
                    let lease = acquired(attempt);
                    granted.fetch_add(1, Ordering::Relaxed);
                    sleep(Duration::from_millis(40)).await;
                    lease.release().await.unwrap();
                }
            }));
        }
        let lock = lock();
        for wait in 0..=3 {
            // Each of the crowd is at it before each wait, and after the last one.
            let before = granted.load(Ordering::Relaxed);
            eventually("the crowd goes on", || {
                let ended = crowd.try_join_next();
                assert!(ended.is_none(), "one of the crowd has ended: {ended:?}");
                let goes_on = granted.load(Ordering::Relaxed) >= before + 8;
                async move { goes_on }
            })
            .await;
            if wait == 3 {
                break;
            }
            let attempt = if crowd_writes {
                lock.readers().acquire(PATIENCE).await
            } else {
                lock.writer().acquire(PATIENCE).await
            };
            acquired(attempt).release().await.unwrap();
        }
        crowd.shutdown().await;
        db.execute("DELETE FROM t_resource_lock").await;
    }
}

async fn the_token_of_the_last_writer_fences_a_reader<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = other(&db);
    let mut last = acquired(lock.writer().try_acquire().await);
    for _ in 0..3 {
        let written = last.token();
        assert_eq!(last.writer_token(), None);
        last.release().await.unwrap();
        let readers =
            [acquired(lock.readers().try_acquire().await), acquired(other(&db).readers().try_acquire().await)];
        for reader in readers {
            let fence = reader.writer_token().unwrap();
            assert!(fence >= written, "a system that has seen the writer before it lets it in");
            assert_eq!(reader.reenter().unwrap().writer_token(), Some(fence));
            reader.release().await.unwrap();
        }
        last = acquired(lock.writer().try_acquire().await);
        assert!(last.token() > written);
    }
}

async fn all_numbers_are_used_and_no_more<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let (lock, mut held) = (db.lock_for(10 * LONG), Vec::new());
    for first in (1..=1024).step_by(100) {
        let keys = (first..(first + 100).min(1025)).map(|number: u32| format!("k#r{number}"));
        held.push(lock.acquire_all(keys, 6 * PATIENCE).await.unwrap());
    }
    // On a busy machine a look at so many rows may take longer than the default limit.
    let patient = on(&db.builder().time_limit(3 * PATIENCE).build().unwrap());
    let refusal = refused(patient.readers().try_acquire().await);
    assert!(refusal.reason == Reason::Held && refusal.key.as_str().starts_with("k#r"), "{refusal}");
    let refusal = loop {
        match patient.readers().acquire(6 * SHORT).await {
            Err(Error::Refused(refusal)) => break refusal,
            Err(error) if error.is_retryable() => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal.reason, Reason::Held, "{refusal}");
    held.remove(fastrand::usize(..held.len())).release().await.unwrap();
    let reader = acquired(other(&db).readers().acquire(PATIENCE).await);
    assert!(reader.is_held());
}

/// An operator's claim on the name keeps both sides from being let in, and those that are in stay.
async fn a_plain_claim_on_the_name_closes_it<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let reader = acquired(other(&db).readers().try_acquire().await);
    let operator = acquired(db.lock_for(LONG).try_acquire("k").await);
    assert_eq!(refused(other(&db).readers().try_acquire().await).key.as_str(), "k");
    assert_eq!(refused(other(&db).writer().try_acquire().await).key.as_str(), "k");
    assert!(reader.is_held());
    operator.release().await.unwrap();
    acquired(other(&db).readers().acquire(PATIENCE).await);
}

/// A row that is missing has no token by which a reader could be fenced.
async fn a_name_that_was_never_claimed_is_claimed_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = other(&db);
    let first = acquired(lock.readers().try_acquire().await);
    let fence = first.writer_token().unwrap();
    assert!(fence.get() > 0);
    assert_eq!(acquired(lock.readers().try_acquire().await).writer_token(), Some(fence), "the next one finds the row");
    first.release().await.unwrap();
    db.execute("DELETE FROM t_resource_lock").await;
    assert!(
        acquired(lock.readers().try_acquire().await).writer_token().unwrap() > fence,
        "above the tokens of a deleted row"
    );
}

/// Not even for a moment: a process that is refused may end at once.
async fn a_refused_attempt_leaves_no_claim<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, operator) = (other(&db), db.lock());
    let held = async || {
        let held = operator.list(&ListOptions::default().claimed().prefix("k")).await.unwrap();
        held.into_iter().map(|entry| entry.key).collect::<BTreeSet<_>>()
    };
    let readers = [acquired(lock.readers().try_acquire().await), acquired(lock.readers().try_acquire().await)];
    let of_readers: BTreeSet<_> = readers.iter().map(|reader| reader.key().as_str().to_owned()).collect();
    for _ in 0..5 {
        refused(other(&db).writer().try_acquire().await);
        assert_eq!(held().await, of_readers);
        refused(lock.try_upgrade(&readers[0]).await);
        assert_eq!(held().await, of_readers);
    }
    drop(readers);
    let _writer = acquired(lock.writer().acquire(PATIENCE).await);
    for _ in 0..5 {
        refused(other(&db).readers().try_acquire().await);
        assert_eq!(held().await, BTreeSet::from(["k".to_owned()]));
    }
}

async fn terms_that_do_not_fit_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for refused in [lock.clone().min_interval(LONG), lock.clone().rules(Rules::Article)] {
        let refused = refused.read_write("k").readers().try_acquire().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    for name in ["", &"k".repeat(252)] {
        let refused = lock.read_write(name).writer().try_acquire().await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    acquired(lock.read_write(&"k".repeat(249)).readers().try_acquire().await);
}

/// By then the writer's pauses have grown to between half a second and a second. On a busy machine
/// the same without a wait takes long too.
async fn a_release_wakes_the_writer<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = other(&db);
    let (mut waits, mut at_once) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let began = Instant::now();
        acquired(lock.writer().acquire(PATIENCE).await).release().await.unwrap();
        at_once.push(began.elapsed());
        let readers =
            [acquired(lock.readers().acquire(PATIENCE).await), acquired(lock.readers().acquire(PATIENCE).await)];
        let writing = lock.clone();
        let writer = harness::spawn(async move { acquired(writing.writer().acquire(PATIENCE).await) });
        sleep(Duration::from_millis(1700)).await;
        for reader in readers {
            reader.release().await.unwrap();
        }
        let released = Instant::now();
        let writer = timeout(PATIENCE, writer).await.unwrap().unwrap();
        waits.push(released.elapsed());
        writer.release().await.unwrap();
    }
    waits.sort();
    at_once.sort();
    let most = Duration::from_millis(150).max(4 * at_once[1]);
    assert!(waits[1] < most, "{waits:?}, and without a wait {at_once:?}");
}

async fn a_writer_requests_a_notification_of_every_reader<DB: TestDatabase>(db: TestDb<DB>) {
    let readers = [
        acquired(other(&db).readers().acquire(PATIENCE).await),
        acquired(other(&db).readers().acquire(PATIENCE).await),
    ];
    let writing = other(&db);
    let writer = harness::spawn(async move { acquired(writing.writer().acquire(PATIENCE).await) });
    let awaited = "SELECT COUNT(*) FROM t_resource_lock WHERE awaited AND key_resource LIKE 'k#r%'";
    eventually("every reader's row says that a task waits", || async { db.number(awaited).await == Some(2) }).await;
    for reader in readers {
        reader.release().await.unwrap();
    }
    timeout(PATIENCE, writer).await.unwrap().unwrap();
}
