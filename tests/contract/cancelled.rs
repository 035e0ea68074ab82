//! Any future may be dropped at any await. No claim outlives its lease, and no connection returns
//! to the pool with an open transaction or a running statement.
//!
//! Each test drops its operation at one point after another, until the operation completes. On a
//! server, the points are those at which the first, second, ... request or reply is in transit: the
//! proxy holds it there. They are counted from the operation's first byte on a warm stage, and from
//! the connection's first byte on a cold one. SQLite has no network; there the future is dropped a
//! little later each time.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
    refused,
};
use rowlock::{Attempt, LeaseLock, ResourceLock, strategy::ResourceLockExt};
use sqlx::Pool;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

use crate::bank::{OPENING, accounts, balance, balance_in, version, version_lock, write_in};

harness::tests!(
    everywhere(
        a_takeover,
        a_refused_try,
        a_renewal,
        a_release,
        an_abandonment,
        a_run,
        a_shutdown,
        a_migration,
        a_transaction_under_a_lease
    ),
    servers(an_open_transaction_is_seen),
    everywhere.long(a_try_on_a_missing_row, a_transaction_under_a_version),
    everywhere.each(a_try_on_a_free_row)
);

const LEASE: Duration = Duration::from_millis(500);

/// Where the operation is dropped.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// After this many steps of time.
    After(usize),
    Held(Way, usize),
}

/// The environment of one operation: a pool of one connection and a lock on it, both unused unless
/// the stage is warmed, and a key of its own.
pub struct Stage<'a, DB: TestDatabase> {
    db: &'a TestDb<DB>,
    proxy: Option<Proxy>,
    pub pool: Pool<DB>,
    pub lock: LeaseLock<DB>,
    pub key: String,
}

impl<'a, DB: TestDatabase> Stage<'a, DB> {
    async fn new(db: &'a TestDb<DB>, stop: Stop) -> Self {
        let (proxy, pool) = match stop {
            Stop::After(_) => (None, db.pool_of(1).await),
            Stop::Held(..) => {
                let proxy = db.proxy().await;
                let pool = proxy.pool(1);
                (Some(proxy), pool)
            }
        };
        let lock = LeaseLock::builder(pool.clone()).share_pool().label("dropped").build().unwrap().lease(LEASE);
        Self { db, proxy, pool, lock, key: format!("{stop:?}") }
    }

    /// Opens the connection and looks at the table, so that the operation begins with its own first
    /// statement.
    pub async fn warm(&self) {
        self.lock.inspect("no-one's").await.unwrap();
        eventually("the connection is idle", async || self.pool.num_idle() == 1).await;
    }

    /// Checks that the pool's only connection answers at once and is in no transaction.
    async fn pool_is_clean(&self) {
        let clean = async {
            // A transaction that is just ending may still be seen. One that was left open does not
            // end.
            while open_transactions(self.db, &self.pool).await > 0 {
                sleep(LEASE / 50).await;
            }
            let mut conn = self.pool.acquire().await?;
            DB::execute_on(&mut conn, DB::BEGIN).await?; // fails on SQLite if a transaction is open
            DB::execute_on(&mut conn, "ROLLBACK").await
        };
        match timeout(PATIENCE, clean).await {
            Ok(Ok(_)) => {}
            other => panic!("{}: the pool does not serve, or serves a transaction: {other:?}", self.key),
        }
    }

    /// Checks that the pool serves. Nothing more is guaranteed until the server learns that a
    /// connection was closed in the middle of a transaction.
    pub async fn pool_serves(&self) {
        timeout(PATIENCE, DB::number(&self.pool, "SELECT COUNT(*) FROM t_resource_lock")).await.unwrap();
    }

    pub async fn can_be_had(&self, key: &str) {
        let since = Instant::now();
        rowlock::migrate(&self.db.pool).await.unwrap();
        let other = self.db.lock_for(60 * LEASE);
        let lease = loop {
            match other.try_acquire(key).await.unwrap() {
                Attempt::Acquired(lease) => break lease,
                Attempt::Refused(refusal) => {
                    // A short stall of the server delays background work.
                    let most = LEASE + PATIENCE / 2;
                    assert!(since.elapsed() < most, "{}: not to be had within {most:?}: {refusal}", self.key);
                    sleep(LEASE / 50).await;
                }
            }
        };
        lease.release().await.unwrap();
    }
}

/// Drops `act` at every stop, each time on a new stage that `prepare` has set up.
pub async fn at_every_stop<DB: TestDatabase, P>(
    db: &TestDb<DB>,
    prepare: impl AsyncFn(&Stage<'_, DB>) -> P,
    act: impl AsyncFn(&Stage<'_, DB>, P),
) {
    at_every_stop_between(db, prepare, act, async |stage| stage.pool_is_clean().await, async |_| {}).await;
}

/// The same, with checks of what is left: `before` runs while the last chunk is in transit, `after`
/// when it has arrived.
pub async fn at_every_stop_between<DB: TestDatabase, P>(
    db: &TestDb<DB>,
    prepare: impl AsyncFn(&Stage<'_, DB>) -> P,
    act: impl AsyncFn(&Stage<'_, DB>, P),
    before: impl AsyncFn(&Stage<'_, DB>),
    after: impl AsyncFn(&Stage<'_, DB>),
) {
    let steps: fn(usize) -> Stop = Stop::After;
    let requests: fn(usize) -> Stop = |count| Stop::Held(Way::Requests, count);
    let replies: fn(usize) -> Stop = |count| Stop::Held(Way::Replies, count);
    for stop in if db.server.name == "sqlite" { vec![steps] } else { vec![requests, replies] } {
        let (mut count, mut tries) = (0, 0);
        // A reply may be there at the first poll.
        while count == 0 {
            tries += 1;
            assert!(tries < 20, "it was never dropped");
            while is_dropped(db, stop(count), &prepare, &act, &before, &after).await {
                count += 1 + count / 8;
                assert!(count < 10_000, "it never ends");
            }
        }
    }
}

/// Returns whether `act` was dropped: `false` if it completed before this stop.
async fn is_dropped<DB: TestDatabase, P>(
    db: &TestDb<DB>,
    stop: Stop,
    prepare: &impl AsyncFn(&Stage<'_, DB>) -> P,
    act: &impl AsyncFn(&Stage<'_, DB>, P),
    before: &impl AsyncFn(&Stage<'_, DB>),
    after: &impl AsyncFn(&Stage<'_, DB>),
) -> bool {
    let stage = Stage::new(db, stop).await;
    let prepared = prepare(&stage).await;
    let ended = match (stop, &stage.proxy) {
        (Stop::Held(way, count), Some(proxy)) => {
            proxy.hold_after(way, count);
            tokio::select! {
                biased;
                () = act(&stage, prepared) => true,
                () = proxy.held(way) => false,
            }
        }
        (Stop::After(count) | Stop::Held(_, count), _) => dropped_after(count, act(&stage, prepared)).await.is_some(),
    };
    // The request of the dropped future, or the reply to it, is still in transit.
    stage.proxy.iter().for_each(Proxy::let_others_pass);
    before(&stage).await;
    // Now it arrives, late.
    stage.proxy.iter().for_each(Proxy::open);
    stage.can_be_had(&stage.key).await;
    stage.pool_is_clean().await;
    after(&stage).await;
    !ended
}

/// Returns how many open transactions the pool's only connection sees, and another connection.
async fn open_transactions<DB: TestDatabase>(db: &TestDb<DB>, pool: &Pool<DB>) -> i64 {
    let sql = DB::open_transactions(&db.server);
    db.number(sql).await.unwrap() + DB::number(pool, sql).await.unwrap()
}

/// How much later a future is dropped at each next step.
const STEP: Duration = Duration::from_micros(40);

/// Drops the future after this many steps of time, or returns its output if it completed before.
/// What it does goes on elsewhere, so that the step decides where it is dropped.
pub async fn dropped_after<T>(steps: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    // The first poll begins it.
    if let Poll::Ready(output) = poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
        return Some(output);
    }
    // Timers are coarser than a step.
    let time = spawn_blocking(move || std::thread::sleep(STEP * u32::try_from(steps).unwrap()));
    tokio::select! {
        biased;
        output = future => Some(output),
        _ = time => None,
    }
}

async fn a_try_on_a_free_row<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| {
        acquired(db.lock().try_acquire(&stage.key).await).release().await.unwrap();
        stage.warm().await;
    };
    at_every_stop(&db, prepare, async |stage, ()| drop(acquired(stage.lock.try_acquire(&stage.key).await))).await;
}

async fn a_try_on_a_missing_row<DB: TestDatabase>(db: TestDb<DB>) {
    let act = async |stage: &Stage<'_, DB>, ()| drop(acquired(stage.lock.try_acquire(&stage.key).await));
    at_every_stop(&db, async |_| {}, act).await;
}

async fn a_takeover<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| {
        acquired(db.lock().try_acquire(&stage.key).await).abandon().await.unwrap();
        stage.warm().await;
    };
    let act = async |stage: &Stage<'_, DB>, ()| {
        assert!(acquired(stage.lock.try_acquire(&stage.key).await).taken_over_from().is_some());
    };
    at_every_stop(&db, prepare, act).await;
}

async fn a_refused_try<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| {
        stage.warm().await;
        acquired(db.lock().try_acquire(&stage.key).await)
    };
    let act = async |stage: &Stage<'_, DB>, _holder| drop(refused(stage.lock.try_acquire(&stage.key).await));
    at_every_stop(&db, prepare, act).await;
}

/// The lease is dropped with the future, so that an abandonment runs concurrently with the dropped
/// renewal.
async fn a_renewal<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(stage.lock.try_acquire(&stage.key).await);
    at_every_stop(&db, prepare, async |_, lease| drop(lease.renew().await)).await;
}

async fn a_release<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(stage.lock.try_acquire(&stage.key).await);
    at_every_stop(&db, prepare, async |_, lease| drop(lease.release().await)).await;
}

async fn an_abandonment<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(stage.lock.try_acquire(&stage.key).await);
    at_every_stop(&db, prepare, async |_, lease| drop(lease.abandon().await)).await;
}

/// The work never ends: the run is dropped before the work starts, or when it has started.
async fn a_run<DB: TestDatabase>(db: TestDb<DB>) {
    let act = async |stage: &Stage<'_, DB>, ()| {
        let began = tokio::sync::Notify::new();
        let work = async |_held| -> Result<(), ()> {
            began.notify_one();
            std::future::pending().await
        };
        tokio::select! {
            ran = stage.lock.run(&stage.key, Duration::ZERO, work) => panic!("the work does not end: {ran:?}"),
            () = began.notified() => {}
        }
    };
    at_every_stop(&db, async |stage| stage.warm().await, act).await;
}

async fn a_shutdown<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(stage.lock.try_acquire(&stage.key).await);
    let act = async |stage: &Stage<'_, DB>, lease| {
        drop(lease);
        assert!(stage.lock.shutdown(PATIENCE).await);
    };
    at_every_stop(&db, prepare, act).await;
}

async fn a_migration<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |_: &Stage<'_, DB>| {
        db.execute("DROP TABLE t_resource_lock").await;
    };
    at_every_stop(&db, prepare, async |stage, ()| rowlock::migrate(&stage.pool).await.unwrap()).await;
}

async fn a_transaction_under_a_lease<DB: TestDatabase>(db: TestDb<DB>) {
    a_transaction(&db, async |stage| stage.warm().await, |stage| Box::new(stage.lock.clone())).await;
}

async fn a_transaction_under_a_version<DB: TestDatabase>(db: TestDb<DB>) {
    a_transaction(&db, async |_| {}, |stage| Box::new(version_lock(&stage.pool).share_pool())).await;
}

/// The transaction takes from one account what it adds to another. Both changes are committed or
/// neither, and the mark of the confirmation with them.
async fn a_transaction<DB: TestDatabase>(
    db: &TestDb<DB>,
    begin: impl AsyncFn(&Stage<'_, DB>),
    lock: impl Fn(&Stage<'_, DB>) -> Box<dyn ResourceLock<DB>>,
) {
    accounts(db).await;
    let prepare = async |stage: &Stage<'_, DB>| {
        // The outcome of the previous operation, a late commit included, is known once its key can
        // be claimed.
        db.execute("DELETE FROM account WHERE id <> 'other'").await;
        db.execute("UPDATE account SET balance = 1000 WHERE id = 'other'").await;
        db.execute(&format!("INSERT INTO account VALUES ('{}', 1000, 0)", stage.key)).await;
        acquired(db.lock().try_acquire(&stage.key).await).release().await.unwrap();
        begin(stage).await;
    };
    let act = async |stage: &Stage<'_, DB>, ()| {
        let (lock, key) = (lock(stage), stage.key.as_str());
        let moved = lock.transaction(key, |mut tx| async move {
            let left = balance_in::<DB>(&mut tx, key).await? - 1;
            write_in::<DB>(&mut tx, key, left).await?;
            let more = balance_in::<DB>(&mut tx, "other").await? + 1;
            write_in::<DB>(&mut tx, "other", more).await
        });
        moved.await.unwrap();
    };
    let before = async |stage: &Stage<'_, DB>| stage.pool_serves().await;
    let after = async |stage: &Stage<'_, DB>| {
        let moved = OPENING - balance(db, &stage.key).await;
        assert!([0, 1].contains(&moved), "{}: {moved}", stage.key);
        assert_eq!(balance(db, "other").await, OPENING + moved, "{}: both or neither", stage.key);
        let confirms = format!("SELECT confirms FROM t_resource_lock WHERE key_resource = '{}'", stage.key);
        let marks = db.number(&confirms).await.unwrap() + version(db, &stage.key).await;
        assert_eq!(marks, moved, "{}: the confirmation goes with it", stage.key);
    };
    at_every_stop_between(db, prepare, act, before, after).await;
}

/// The check of the tests above detects a transaction that was left open.
async fn an_open_transaction_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    assert_eq!(open_transactions(&db, &pool).await, 0);
    let mut conn = pool.acquire().await.unwrap();
    DB::execute_on(&mut conn, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut conn, "INSERT INTO t_resource_lock (key_resource) VALUES ('k')").await.unwrap();
    drop(conn);
    eventually("the pool has it back", || async { pool.num_idle() == 1 }).await;
    assert_eq!(open_transactions(&db, &pool).await, 1);
}
