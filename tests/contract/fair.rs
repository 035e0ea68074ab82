//! Grants in the order of arrival, across processes.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Attempt, LeaseLock, LeaseSet, Reason};
use rustix::process::Signal;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::waiters::{Process, Turn, now, places, seconds};

harness::tests!(
    everywhere(
        grants_come_in_the_order_of_arrival,
        no_waiter_is_overtaken_or_starves,
        the_waiters_of_a_killed_process_are_skipped,
        no_attempt_overtakes_those_with_tickets,
        a_waiter_that_goes_away_leaves_its_place,
        queues_have_the_lengths_of_the_waiters_that_live
    ),
    everywhere.each(a_try_in_order_looks_at_the_queue)
);

/// How long a ticket without heartbeats stays alive, and the interval between heartbeats.
pub const KEPT: Duration = Duration::from_secs(12);
const SIGN: Duration = Duration::from_secs(4);
/// How much longer a slow machine may take.
const SLACK: Duration = Duration::from_secs(3);

async fn processes<DB: TestDatabase>(db: &TestDb<DB>, count: usize) -> Vec<Process> {
    let mut processes = Vec::new();
    for number in 0..count {
        processes.push(Process::start(db, number, "wait in order", "k").await);
    }
    processes
}

/// Waits until the queue has this many tickets.
async fn tickets_in_queue<DB: TestDatabase>(db: &TestDb<DB>, count: usize) {
    let started = Instant::now();
    while places(db).await != i64::try_from(count).unwrap() {
        assert!(started.elapsed() < PATIENCE, "{} places, not {count}", places(db).await);
        sleep(Duration::from_millis(1)).await;
    }
}

async fn the_queue_is_empty<DB: TestDatabase>(db: &TestDb<DB>) {
    eventually("the queue is empty", || async { places(db).await == 0 }).await;
}

/// Sorts by tokens, which never fall. Checks that no two grants overlap.
fn in_order_of_grants(mut turns: Vec<Turn>) -> Vec<Turn> {
    turns.sort_by_key(|turn| turn.tokens[0]);
    for pair in turns.windows(2) {
        assert!(pair[0].freed <= pair[1].granted, "two at a time: {pair:?}");
    }
    turns
}

/// Another holder has the key while the tasks arrive, one after the other, and then releases it.
/// Without notifications the next waiter polls at its own pace, hence fewer tasks on databases
/// other than PostgreSQL.
async fn grants_come_in_the_order_of_arrival<DB: TestDatabase>(db: TestDb<DB>) {
    let tasks = if db.server.name == "postgres" { 50 } else { 12 };
    let mut processes = processes(&db, 8).await;
    let holder = acquired(db.lock().try_acquire("k").await);
    let mut arrivals: Vec<usize> = (0..8 * tasks).map(|task| task % 8).collect();
    fastrand::shuffle(&mut arrivals);
    for (before, process) in arrivals.iter().enumerate() {
        processes[*process].ask(Duration::from_millis(1)).await;
        tickets_in_queue(&db, before + 1).await;
    }
    holder.release().await.unwrap();
    let mut turns = Vec::new();
    for process in processes {
        turns.extend(process.ended(6 * PATIENCE).await);
    }
    let turns = in_order_of_grants(turns);
    assert_eq!(turns.iter().map(|turn| turn.process).collect::<Vec<_>>(), arrivals);
    let mut calls = [const { Vec::new() }; 8];
    turns.iter().for_each(|turn| calls[turn.process].push(turn.called));
    assert!(calls.iter().all(|calls| calls.is_sorted()), "in order within each process too");
    the_queue_is_empty(&db).await;
}

/// A waiter whose ticket the test has seen in the queue.
struct Probe {
    tickets_in_queue: Duration,
    token: i64,
}

/// Waits for `k` and for a key of its own, whose ticket shows when the waiter is in the queue.
async fn probe<DB: TestDatabase>(db: &TestDb<DB>, lock: &LeaseLock<DB>, number: usize) -> Option<Probe> {
    let own = format!("probe {number}");
    let waiting: JoinHandle<LeaseSet<DB>> = harness::spawn({
        let (lock, own) = (lock.clone(), own.clone());
        async move { lock.acquire_all(["k", &own], Duration::MAX).await.unwrap() }
    });
    let sql = format!("SELECT COUNT(*) FROM t_resource_lock_queue WHERE key_resource = '{own}'");
    let mut tickets_in_queue = None;
    while tickets_in_queue.is_none() && !waiting.is_finished() {
        if db.number(&sql).await == Some(1) {
            tickets_in_queue = Some(now());
        }
        sleep(Duration::from_millis(1)).await;
    }
    let set = timeout(6 * PATIENCE, waiting).await.expect("it is granted").unwrap();
    let token = set.token("k").unwrap().get();
    set.release().await.unwrap();
    tickets_in_queue.map(|tickets_in_queue| Probe { tickets_in_queue, token })
}

/// Tasks arrive at any time. A task that calls when another has a ticket already is granted the key
/// after it. No task waits for more than two grants of each of the others: one of those that were
/// there before, and one of those that arrived while it drew its ticket.
async fn no_waiter_is_overtaken_or_starves<DB: TestDatabase>(db: TestDb<DB>) {
    const TASKS: usize = 48;
    let mut processes = processes(&db, 8).await;
    let began = Instant::now();
    for number in 0..TASKS {
        processes[number % 8].go_on(seconds(), Duration::from_millis(2), Duration::from_millis(30)).await;
    }
    let (lock, mut probes) = (db.lock().fair(true), Vec::new());
    let mut number = 0;
    while began.elapsed() < seconds() {
        probes.extend(probe(&db, &lock, number).await);
        number += 1;
    }
    let mut turns = Vec::new();
    for process in processes {
        turns.extend(process.ended(6 * PATIENCE).await);
    }
    let turns = in_order_of_grants(turns);
    for Probe { tickets_in_queue, token } in &probes {
        let late = turns.iter().find(|turn| turn.called > *tickets_in_queue && turn.tokens[0] < *token);
        assert!(late.is_none(), "in line at {tickets_in_queue:?} for {token}, overtaken by {late:?}");
    }
    let ahead = |(place, turn): (usize, &Turn)| {
        turns[..place].iter().rev().take_while(|other| other.granted > turn.called).count()
    };
    let most_ahead = turns.iter().enumerate().map(ahead).max().unwrap();
    let longest = turns.iter().map(Turn::waited).max().unwrap();
    println!(
        "{}: {} turns of {TASKS} tasks in {:?}, {} probes, at most {most_ahead} turns ahead, the longest wait {longest:?}",
        db.server.name,
        turns.len(),
        began.elapsed(),
        probes.len(),
    );
    assert!(!probes.is_empty() && turns.len() >= TASKS, "{} probes, {} turns", probes.len(), turns.len());
    assert!(most_ahead <= 2 * TASKS, "{most_ahead} turns ahead of one");
    the_queue_is_empty(&db).await;
}

/// All tickets of a dead process lapse within 12 s of its last heartbeat. In each process that
/// waits, one task polls, at least once a second.
async fn the_waiters_of_a_killed_process_are_skipped<DB: TestDatabase>(db: TestDb<DB>) {
    const TASKS: usize = 8;
    let mut processes = processes(&db, 3).await;
    let holder = acquired(db.lock().try_acquire("k").await);
    let arrivals: Vec<usize> = [0, 0, 0].into_iter().chain((0..2 * TASKS).map(|task| 1 + task % 2)).collect();
    for (before, process) in arrivals.iter().enumerate() {
        processes[*process].ask(Duration::ZERO).await;
        tickets_in_queue(&db, before + 1).await;
    }
    let victim = processes.remove(0);
    victim.signal(Signal::KILL);
    let (killed, since) = (now(), Instant::now());
    holder.release().await.unwrap();
    let before = counted(&db).await;
    sleep(KEPT / 2).await;
    assert_eq!(places(&db).await, i64::try_from(arrivals.len()).unwrap(), "no ticket is skipped too early");
    if let (Some(before), Some(after)) = (before, counted(&db).await) {
        // Each process polls at most twice a second, and sends three heartbeats of two statements.
        // The rest are the test's own statements.
        let most = 2 * (2 * since.elapsed().as_secs() + 6 + 6) + 4;
        assert!(after - before <= most.try_into().unwrap(), "{} statements within 6 s", after - before);
    }
    let mut turns = Vec::new();
    for process in processes {
        turns.extend(process.ended(4 * PATIENCE).await);
    }
    let turns = in_order_of_grants(turns);
    let took = turns[0].granted - killed;
    assert!(took > KEPT - SIGN - SLACK && took < 2 * KEPT, "{took:?}");
    assert_eq!(turns.iter().map(|turn| turn.process).collect::<Vec<_>>(), arrivals[3..]);
    the_queue_is_empty(&db).await;
    drop(victim);
}

/// Returns the number of statements in the test's database, from all connections. Only PostgreSQL
/// counts them.
async fn counted<DB: TestDatabase>(db: &TestDb<DB>) -> Option<i64> {
    if db.server.name == "postgres" { DB::statements(&db.pool).await } else { None }
}

/// The first waiter is stopped while the key is free, just after a heartbeat.
async fn no_attempt_overtakes_those_with_tickets<DB: TestDatabase>(db: TestDb<DB>) {
    let mut first = processes(&db, 1).await.remove(0);
    let lock = db.lock().fair(true);
    let holder = acquired(lock.try_acquire("k").await);
    first.ask(Duration::ZERO).await;
    tickets_in_queue(&db, 1).await;
    let alive = || async { db.cell("alive_until", "t_resource_lock_queue").await };
    let before = alive().await;
    eventually("a heartbeat is sent", || async { alive().await != before }).await;
    // On SQLite, no process can access the file while another is stopped during an access.
    sleep(SIGN / 8).await;
    first.signal(Signal::STOP);
    let stopped = Instant::now();
    // The server completes the requests that were sent before.
    sleep(SIGN / 4).await;
    holder.release().await.unwrap();
    let other = LeaseLock::new(db.pool_of(1).await).fair(true);
    let short = Duration::from_millis(1500);
    let reasons = [
        refused(lock.try_acquire("k").await).reason,
        refused(other.try_acquire("k").await).reason,
        refused(other.acquire("k", short).await).reason,
        other.try_acquire_all(["j", "k"]).await.unwrap().refused().unwrap().reason,
    ];
    assert_eq!(reasons, [Reason::Queued; 4]);
    acquired(other.try_acquire("j").await).release().await.unwrap();
    let lease = loop {
        match other.try_acquire("k").await.unwrap() {
            Attempt::Acquired(lease) => break lease,
            Attempt::Refused(refusal) => {
                assert_eq!(refusal.reason, Reason::Queued, "{refusal}");
                assert!(stopped.elapsed() < KEPT + SLACK, "{refusal}");
                sleep(Duration::from_millis(20)).await;
            }
        }
    };
    assert!(stopped.elapsed() > KEPT - SIGN, "{:?}", stopped.elapsed());
    first.signal(Signal::CONT);
    lease.release().await.unwrap();
    first.turn().await;
    assert_eq!(first.ended(PATIENCE).await.len(), 0);
    the_queue_is_empty(&db).await;
}

/// Starts a waiter in this process, with a lock of its own. Returns when its ticket is
/// drawn.
async fn waiting<DB: TestDatabase>(db: &TestDb<DB>) -> JoinHandle<Duration> {
    let before = usize::try_from(places(db).await).unwrap();
    let lock = db.lock().fair(true);
    let waiting = harness::spawn(async move {
        let lease = acquired(lock.acquire("k", Duration::MAX).await);
        let granted = now();
        lease.release().await.unwrap();
        granted
    });
    tickets_in_queue(db, before + 1).await;
    waiting
}

async fn a_waiter_that_goes_away_leaves_its_place<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let [first, second, third, fourth] =
        [waiting(&db).await, waiting(&db).await, waiting(&db).await, waiting(&db).await];
    third.abort();
    tickets_in_queue(&db, 3).await;
    // The first waiter is dropped just when the key becomes free for it.
    first.abort();
    let freed = now();
    holder.release().await.unwrap();
    let [second, fourth] = [second, fourth].map(|waiting| timeout(PATIENCE, waiting));
    let (second, fourth) = (second.await.unwrap().unwrap(), fourth.await.unwrap().unwrap());
    assert!(second < fourth);
    assert!(fourth - freed < KEPT - SIGN - SLACK, "well before a place lapses: {:?}", fourth - freed);
    the_queue_is_empty(&db).await;
}

/// Inserts a ticket without further heartbeats.
async fn a_place<DB: TestDatabase>(db: &TestDb<DB>) {
    let alive = DB::ago(-60_000);
    db.execute(&format!(
        "INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES ('k', -1, {alive})"
    ))
    .await;
}

async fn a_try_in_order_looks_at_the_queue<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock().fair(true);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    a_place(&db).await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Queued);
    assert_eq!(lock.try_acquire_all(["j", "k"]).await.unwrap().refused().unwrap().reason, Reason::Queued);
    db.execute("DELETE FROM t_resource_lock_queue").await;
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}

async fn queues_have_the_lengths_of_the_waiters_that_live<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let lengths = async || {
        let mut lengths = lock.queue_lengths().await.unwrap();
        lengths.sort();
        lengths
    };
    assert!(lengths().await.is_empty());
    let (_k, _l) = (acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await));
    let died = format!("('k', 1, {}), ('m', 2, {})", DB::ago(1), DB::ago(60_000));
    db.execute(&format!("INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until) VALUES {died}")).await;
    let _unseen = harness::spawn({
        let lock = db.lock();
        async move { lock.acquire("l", PATIENCE).await.map(drop) }
    });
    let waiters: Vec<_> = ["k", "l", "k", "k"]
        .map(|key| {
            let lock = db.lock().fair(true);
            harness::spawn(async move { lock.acquire(key, 9 * PATIENCE).await.map(drop) })
        })
        .into();
    eventually("four wait in order", async || lengths().await == [("k".to_owned(), 3), ("l".to_owned(), 1)]).await;
    waiters[1].abort();
    waiters[2].abort();
    eventually("two wait", async || lengths().await == [("k".to_owned(), 2)]).await;
    waiters.iter().for_each(JoinHandle::abort);
    eventually("none waits", async || lengths().await.is_empty()).await;
}
