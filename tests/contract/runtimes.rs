//! One lock on two runtimes: neither waits for requests in flight on the other, and neither
//! fails with the other.
//!
//! The other runtime has one thread, and is driven only for as long as a test wants: it stops at
//! one point of its work after another.

use std::{future::poll_fn, task::Poll, time::Duration};

use harness::{
    COUNTED, PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{LeaseLock, Reason, Status};
use sqlx::Pool;
use tokio::{
    runtime::{Builder, Runtime},
    task::{block_in_place, spawn_blocking},
    time::{Instant, sleep, timeout},
};

use crate::batched::{
    Asking, all, assert_statements, begin, counted, names, numbered, released, releases, together, tries,
};

harness::tests!(
    everywhere.alone(a_runtime_that_stands_still_holds_up_no_other),
    everywhere[COUNTED](a_runtime_that_ends_leaves_no_request_waiting),
    servers.alone(a_runtime_that_stands_still_delays_no_other_request)
);

/// A runtime, and work that only this runtime drives.
struct Elsewhere<T> {
    runtime: Runtime,
    work: Asking<'static, T>,
}

impl<T: Send + 'static> Elsewhere<T> {
    fn new(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { runtime: Builder::new_current_thread().enable_all().build().unwrap(), work: Box::pin(work) }
    }

    /// Polls the work at most this many times, and stops driving the runtime. Returns the result of
    /// the work if it completed.
    async fn driven(mut self, polls: usize) -> (Self, Option<T>) {
        let drive = move || {
            let mut left = polls;
            let Self { runtime, work } = &mut self;
            let result = runtime.block_on(poll_fn(|context| match work.as_mut().poll(context) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending if left <= 1 => Poll::Ready(None),
                Poll::Pending => {
                    left -= 1;
                    Poll::Pending
                }
            }));
            (self, result)
        };
        timeout(PATIENCE, spawn_blocking(drive)).await.expect("it gets there").unwrap()
    }

    /// Drives the work until the proxy holds a reply to it, and stops driving the runtime.
    fn driven_until_held(mut self, proxy: &Proxy) -> Self {
        block_in_place(|| {
            let Self { runtime, work } = &mut self;
            runtime.block_on(async {
                tokio::select! {
                    _ = work => panic!("it was answered"),
                    () = proxy.held(Way::Replies) => {}
                }
            });
        });
        self
    }

    /// Drives for a moment what the work has left to the runtime.
    async fn driven_on(self) -> Self {
        let drive = move || {
            self.runtime.block_on(sleep(Duration::from_millis(50)));
            self
        };
        spawn_blocking(drive).await.unwrap()
    }

    /// Ends the runtime, and drops the work before or after it.
    async fn ended(self, work_first: bool) {
        let Self { runtime, work } = self;
        let end = move || {
            if work_first {
                drop(work);
                drop(runtime);
            } else {
                drop(runtime);
                drop(work);
            }
        };
        spawn_blocking(end).await.unwrap();
    }
}

/// Claims all of these keys at once, and then releases them at once.
async fn cycle<DB: TestDatabase>(lock: LeaseLock<DB>, keys: Vec<String>) {
    let leases = all(tries(&lock, names(&keys))).await.into_iter().map(acquired).collect();
    all(releases(leases, |_| Status::Succeeded)).await.into_iter().for_each(Result::unwrap);
}

/// Returns a pool whose connections were all opened on this runtime: a connection is driven by the
/// runtime that opened it.
async fn opened<DB: TestDatabase>(db: &TestDb<DB>, connections: u32) -> Pool<DB> {
    let pool = db.pool_of(connections).await;
    let mut taken = Vec::new();
    for _ in 0..connections {
        taken.push(pool.acquire().await.unwrap());
    }
    drop(taken);
    eventually("they are idle", || async { pool.num_idle() == connections as usize }).await;
    pool
}

async fn free_rows<DB: TestDatabase>(db: &TestDb<DB>, keys: &[String]) {
    let rows: Vec<_> = keys.iter().map(|key| format!("('{key}')")).collect();
    db.execute("DELETE FROM t_resource_lock").await;
    db.execute(&format!("INSERT INTO t_resource_lock (key_resource) VALUES {}", rows.join(", "))).await;
}

const THEIRS: [&str; 3] = ["their first", "their second", "their third"];

/// Returns the keys for the other runtime. On SQLite a batch is a transaction: while the runtime is
/// stopped in it, no other connection writes.
///
/// They differ from round to round: SQLite may carry a statement out after its runtime has ended.
fn theirs<DB: TestDatabase>(db: &TestDb<DB>, round: usize) -> Vec<String> {
    THEIRS[..if db.server.name == "sqlite" { 1 } else { 3 }].iter().map(|key| format!("{key}, {round}")).collect()
}

async fn a_runtime_that_stands_still_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let ours = numbered(8);
    for polls in 1.. {
        let theirs = theirs(&db, polls);
        let all_keys: Vec<_> = theirs.iter().chain(&ours).cloned().collect();
        free_rows(&db, &all_keys).await;
        let pool = opened(&db, 6).await;
        let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
        acquired(lock.try_acquire(&ours[0]).await).release().await.unwrap();
        let (elsewhere, ended) = Elsewhere::new(cycle(lock.clone(), theirs.clone())).driven(polls).await;
        let since = Instant::now();
        for _ in 0..2 {
            timeout(PATIENCE, cycle(lock.clone(), ours.clone())).await.expect("it waits for no other request");
        }
        assert!(since.elapsed() < PATIENCE / 8, "after {polls}: {:?}", since.elapsed());
        elsewhere.ended(true).await;
        if ended.is_some() {
            assert!(polls > 1, "it never stood still");
            return;
        }
    }
}

/// A statement of the other runtime contains no request of this one, which would have to wait until
/// the other runtime is driven again.
async fn a_runtime_that_stands_still_delays_no_other_request<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let keys = ["first", "k"].map(String::from);
    free_rows(&db, &keys).await;
    let pool = proxy.pool::<DB>(2);
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    drop((pool.acquire().await.unwrap(), pool.acquire().await.unwrap()));
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    eventually("both are idle", || async { pool.num_idle() == 2 }).await;
    proxy.hold(Way::Replies);
    let theirs = lock.clone();
    let elsewhere = Elsewhere::new(async move { theirs.try_acquire("first").await }).driven_until_held(&proxy);
    proxy.let_others_pass();
    let mut wanted = tries(&lock, ["k"]);
    begin(&mut wanted).await;
    proxy.open();
    let (elsewhere, first) = elsewhere.driven(usize::MAX).await;
    // The other runtime sends its next request, and the reply is held until the runtime has
    // stopped.
    proxy.hold(Way::Replies);
    let elsewhere = elsewhere.driven_on().await;
    proxy.open();
    let answers = timeout(PATIENCE / 2, all(wanted)).await.expect("it is under way on no other caller's runtime");
    for answer in answers {
        drop(acquired(answer));
    }
    drop(acquired(first.unwrap()));
    elsewhere.ended(true).await;
}

async fn a_runtime_that_ends_leaves_no_request_waiting<DB: TestDatabase>(db: TestDb<DB>) {
    let (theirs, ours) = (THEIRS.map(String::from), numbered(16));
    let all_keys: Vec<_> = theirs.iter().chain(&ours).cloned().collect();
    for polls in 1.. {
        let mut ended = None;
        for work_first in [true, false] {
            free_rows(&db, &all_keys).await;
            let pool = opened(&db, 1).await;
            let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
            acquired(lock.try_acquire(&ours[0]).await).release().await.unwrap();
            let elsewhere = Elsewhere::new(cycle(lock.clone(), theirs.to_vec()));
            let (elsewhere, did) = elsewhere.driven(polls).await;
            ended = ended.or(did);
            let mut wanted = tries(&lock, names(&ours));
            begin(&mut wanted).await;
            elsewhere.ended(work_first).await;
            for answer in timeout(PATIENCE, all(wanted)).await.expect("each is answered") {
                match answer.unwrap() {
                    rowlock::Attempt::Acquired(lease) => lease.release().await.unwrap(),
                    // The transaction of a connection that is just being closed holds the database.
                    rowlock::Attempt::Refused(refusal) => {
                        assert_eq!((db.server.name, refusal.reason), ("sqlite", Reason::Busy), "{refusal}");
                    }
                }
            }
            assert_travel_together(&db, &pool, &lock, &ours).await;
        }
        if ended.is_some() {
            assert!(polls > 1, "it never ended in the middle");
            return;
        }
    }
}

/// Checks that requests are still batched: no worker is left behind that accepts none.
async fn assert_travel_together<DB: TestDatabase>(
    db: &TestDb<DB>,
    pool: &Pool<DB>,
    lock: &LeaseLock<DB>,
    keys: &[String],
) {
    let (answers, count) = counted(pool, together(pool, tries(lock, names(keys)))).await;
    assert_statements(db, count, 1, 1, "all of them");
    let leases = answers.into_iter().map(acquired).collect();
    let ((), count) = counted(pool, released(pool, leases, |_| Status::Succeeded)).await;
    assert_statements(db, count, 1, 1, "all of them");
}
