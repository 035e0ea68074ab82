//! Connections are kept between statements that follow each other, and return to their pool soon
//! after.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rowlock::{Attempt, Lease, LeaseLock, Status, VersionedTable};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    join,
    runtime::Builder,
    task::{JoinSet, block_in_place},
    time::{Instant, sleep, timeout},
};

use crate::ledger::{COLUMNS, ledger};

harness::tests!(
    everywhere(
        a_connection_is_kept_for_the_next_statement,
        a_connection_is_kept_for_a_second_at_most,
        locks_of_one_pool_share_what_is_kept,
        the_hooks_run_for_each_statement_on_the_applications_tables,
        a_kept_connection_returns_to_the_applications_pool,
        the_applications_only_connection_is_not_kept
    ),
    servers(
        a_connection_returns_if_a_request_waits,
        a_connection_whose_statement_failed_is_not_kept,
        connections_of_a_runtime_that_stood_still_are_not_used
    ),
    sqlite(a_request_that_is_given_up_before_its_turn_closes_no_connection)
);

const CYCLES: usize = 20;

/// A pool that counts how often a connection returns to it, or to a pool made like it.
struct Counted<DB: TestDatabase> {
    pool: Pool<DB>,
    returned: Arc<AtomicUsize>,
}

impl<DB: TestDatabase> Counted<DB> {
    /// Opens all connections of the pool.
    async fn of(db: &TestDb<DB>, connections: u32) -> Self {
        let returned = Arc::new(AtomicUsize::new(0));
        let counted = returned.clone();
        let options = PoolOptions::<DB>::new().max_connections(connections).test_before_acquire(false);
        let options = options.after_release(move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            Box::pin(async { Ok(true) })
        });
        let pool = options.connect(&db.url).await.unwrap();
        let mut opened = Vec::new();
        for _ in 0..connections {
            opened.push(pool.acquire().await.unwrap());
        }
        Self { pool, returned }
    }

    /// Returns a lock that uses this pool.
    fn sharing(&self) -> LeaseLock<DB> {
        LeaseLock::builder(self.pool.clone()).share_pool().build().unwrap()
    }

    fn locks(&self) -> [LeaseLock<DB>; 2] {
        [LeaseLock::new(self.pool.clone()), self.sharing()]
    }

    /// Counts the connections that return while the work runs.
    async fn while_running(&self, work: impl Future<Output = ()>) -> usize {
        let before = self.returned.load(Ordering::Relaxed);
        work.await;
        self.returned.load(Ordering::Relaxed) - before
    }

    async fn eventually_returned(&self, count: usize) {
        eventually("every statement returned its connection", async || self.returned.load(Ordering::Relaxed) >= count)
            .await;
    }
}

async fn cycle<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str) {
    acquired(lock.try_acquire(key).await).release(Status::Succeeded).await.unwrap();
}

async fn cycles<DB: TestDatabase>(lock: &LeaseLock<DB>) {
    cycles_of(lock.clone(), "k".into()).await;
}

async fn cycles_of<DB: TestDatabase>(lock: LeaseLock<DB>, key: String) {
    for _ in 0..CYCLES {
        cycle(&lock, &key).await;
    }
}

/// A busy machine may leave a connection unused for longer than it is kept, so the cycles are
/// repeated.
async fn a_connection_is_kept_for_the_next_statement<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 4).await;
    for lock in counted.locks() {
        let few = async || counted.while_running(cycles(&lock)).await < CYCLES;
        eventually("few of the statements return their connection", few).await;
    }
}

async fn a_connection_is_kept_for_a_second_at_most<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 4).await;
    for lock in counted.locks() {
        let started = Instant::now();
        let returned = counted.while_running(async {
            while started.elapsed() < Duration::from_millis(1500) {
                cycle(&lock, "k").await;
            }
        });
        assert_ne!(returned.await, 0);
    }
}

/// Eight tasks share two connections, so that one always waits.
async fn a_connection_returns_if_a_request_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 2).await;
    let lock = LeaseLock::builder(counted.pool.clone()).batching(false).build().unwrap();
    let tasks: JoinSet<()> = (0..8).map(|number| cycles_of(lock.clone(), number.to_string())).collect();
    let returned = counted.while_running(async { drop(tasks.join_all().await) }).await;
    assert!(returned > 8 * CYCLES, "half of the statements returned their connection, not {returned}");
}

/// An application may make a lock for each request.
async fn locks_of_one_pool_share_what_is_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 4).await;
    let first = counted.sharing();
    let of_new_locks = async || {
        for _ in 0..CYCLES {
            cycle(&counted.sharing(), "k").await;
        }
    };
    let few = async || counted.while_running(of_new_locks()).await < CYCLES / 2;
    eventually("few of the locks return their connection", few).await;
    drop(first);
}

/// The hooks of the application's pool may prepare a connection for the caller.
async fn the_hooks_run_for_each_statement_on_the_applications_tables<DB: TestDatabase>(db: TestDb<DB>) {
    drop(ledger(&db).await);
    let counted = Counted::of(&db, 4).await;
    let table = || VersionedTable::<DB>::new(counted.pool.clone(), COLUMNS).unwrap();
    for table in [table(), table().share_pool()] {
        let before = counted.returned.load(Ordering::Relaxed);
        for _ in 0..CYCLES {
            table.read("a").await.unwrap();
        }
        counted.eventually_returned(before + CYCLES).await;
    }
}

async fn a_connection_whose_statement_failed_is_not_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 4).await;
    for lock in counted.locks() {
        cycle(&lock, "k").await;
        db.execute("ALTER TABLE t_resource_lock RENAME TO away").await;
        let before = counted.returned.load(Ordering::Relaxed);
        for _ in 0..CYCLES {
            lock.try_acquire("k").await.expect_err("there is no table");
        }
        counted.eventually_returned(before + CYCLES).await;
        db.execute("ALTER TABLE away RENAME TO t_resource_lock").await;
    }
}

async fn a_kept_connection_returns_to_the_applications_pool<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 2).await;
    let (pool, lock) = (&counted.pool, counted.sharing());
    cycles(&lock).await;
    eventually("all are idle", async || pool.num_idle() == pool.size() as usize).await;
    cycles(&lock).await;
    timeout(PATIENCE, pool.close()).await.expect("nothing is kept from a pool that is closed");
}

/// The application waits for no more than one statement, though there is always a next one.
async fn the_applications_only_connection_is_not_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 1).await;
    let (pool, lock) = (&counted.pool, counted.sharing());
    let application = async {
        for _ in 0..CYCLES {
            drop(pool.acquire().await.unwrap());
        }
    };
    timeout(PATIENCE, async { join!(cycles(&lock), application) }).await.expect("both go on");
    counted.eventually_returned(3 * CYCLES).await;
    timeout(PATIENCE, pool.close()).await.expect("nothing is kept from a pool that is closed");
}

/// A runtime that is not driven returns no connection, and the server or a firewall may have
/// dropped all connections without a word by the time it is driven again. On a busy machine some
/// have returned to the pool before, so the attempt is repeated.
async fn connections_of_a_runtime_that_stood_still_are_not_used<DB: TestDatabase>(db: TestDb<DB>) {
    eventually("new connections are used", async || is_granted_after_a_standstill(&db).await).await;
}

/// Returns whether two requests, which use all connections, are granted after their runtime stood
/// still and the connections were lost.
async fn is_granted_after_a_standstill<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    let proxy = db.proxy().await;
    let builder = LeaseLock::<DB>::builder(proxy.pool(2)).batching(false);
    let lock = builder.time_limit(PATIENCE / 10).build().unwrap();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let cycles = || async { join!(cycles_of(lock.clone(), "one".into()), cycles_of(lock.clone(), "other".into())) };
    block_in_place(|| runtime.block_on(cycles()));
    sleep(Duration::from_millis(1100)).await;
    proxy.silence();
    let tries = async { join!(lock.try_acquire("one"), lock.try_acquire("other")) };
    let (one, other) = block_in_place(|| runtime.block_on(tries));
    runtime.shutdown_background();
    let leases = [one, other].map(|attempt| attempt.ok().and_then(Attempt::acquired).map(Lease::detach));
    db.execute("DELETE FROM t_resource_lock").await;
    leases.iter().all(Option::is_some)
}

/// One request creates rows, waits for another program's transaction, and has the turn. Others are given
/// up while they wait for the turn with a connection.
async fn a_request_that_is_given_up_before_its_turn_closes_no_connection<DB: TestDatabase>(db: TestDb<DB>) {
    let counted = Counted::of(&db, 4).await;
    let lock = LeaseLock::new(counted.pool.clone());
    let set = lock.try_acquire_all(["c", "d"]).await.unwrap().acquired().unwrap();
    set.release(Status::Succeeded).await.unwrap();
    let mut writer = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut writer, "BEGIN IMMEDIATE").await.unwrap();
    let first = lock.clone();
    let first = tokio::spawn(async move { first.acquire_all(["a", "b"], PATIENCE).await });
    sleep(Duration::from_millis(50)).await;
    for _ in 0..20 {
        let given_up = timeout(Duration::from_millis(5), lock.try_acquire_all(["c", "d"])).await;
        assert!(given_up.is_err(), "it waits for the other program");
    }
    DB::execute_on(&mut writer, "ROLLBACK").await.unwrap();
    first.await.unwrap().unwrap().acquired().unwrap().release(Status::Succeeded).await.unwrap();
    assert_eq!(counted.pool.size(), 4);
}
