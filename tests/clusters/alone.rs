//! A single server that is killed and restarted, and one whose clock is stepped.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{
    Database, Error, LeaseLock, Retry, RunError, Tx,
    errors::{Certainty, TransactionFault},
};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AssertSqlSafe, Executor, Pool, pool::PoolOptions};
use tokio::time::{Instant, sleep, timeout};

use crate::watch::{Wanted, Watch, renew, work};

crate::suite::tests!(
    MARIADB(a_mariadb_that_is_killed_loses_nothing, a_mariadb_whose_clock_is_stepped_fences),
    POSTGRES(a_postgres_that_is_killed_loses_nothing, a_postgres_whose_clock_is_stepped_fences)
);

const KEYS: [&str; 3] = ["one", "two", "three"];
/// Longer than a server takes to restart.
const LEASE: Duration = Duration::from_secs(60);
/// Longer than a lease: a release that did not reach the disk is waited for.
const PATIENCE: Duration = Duration::from_secs(90);
const TABLE: &str = "CREATE TABLE payment (id SERIAL PRIMARY KEY, token bigint NOT NULL)";

/// Tokens of all payments, in the order in which they were made.
const TOKENS: &str = "SELECT token FROM payment ORDER BY id";

/// A server that is restarted whenever it has ended.
struct Alone<DB: Database> {
    folder: std::path::PathBuf,
    pool: Pool<DB>,
}

impl<DB: Database> Alone<DB>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    async fn new(folder: &Path, name: &str) -> Self {
        let folder = folder.join(name);
        let url = fs::read_to_string(folder.join("url")).unwrap();
        let pool = PoolOptions::new().max_connections(10).connect_lazy(url.trim()).unwrap();
        let alone = Self { folder, pool };
        alone.step("+0");
        alone.is_back().await;
        let mut conn = alone.pool.acquire().await.unwrap();
        for table in ["payment", "t_resource_lock", "t_resource_lock_queue"] {
            let drop = format!("DROP TABLE IF EXISTS {table}");
            conn.execute(sqlx::raw_sql(AssertSqlSafe(drop))).await.unwrap();
        }
        conn.execute(sqlx::raw_sql(TABLE)).await.unwrap();
        drop(conn);
        rowlock::migrate(&alone.pool).await.unwrap();
        alone
    }

    fn lock(&self) -> LeaseLock<DB> {
        let retry = Retry { attempts: 100_000, within: PATIENCE };
        LeaseLock::new(self.pool.clone()).lease(LEASE).retry(retry)
    }

    /// Kills the server with SIGKILL, and waits until it is available again.
    async fn kill(&self) {
        let before = self.pid().expect("it runs");
        kill_process(Pid::from_raw(before).unwrap(), Signal::KILL).unwrap();
        let since = Instant::now();
        while self.pid().is_none_or(|pid| pid == before) {
            assert!(since.elapsed() < PATIENCE, "the server is not started again");
            sleep(Duration::from_millis(50)).await;
        }
        self.is_back().await;
    }

    fn pid(&self) -> Option<i32> {
        let mut files = ["pid", "data/postmaster.pid"].into_iter();
        let text = files.find_map(|file| fs::read_to_string(self.folder.join(file)).ok())?;
        text.lines().next()?.trim().parse().ok()
    }

    async fn is_back(&self) {
        let since = Instant::now();
        loop {
            if let Ok(mut conn) = self.pool.acquire().await
                && conn.execute(sqlx::raw_sql("SELECT 1")).await.is_ok()
            {
                return;
            }
            assert!(since.elapsed() < PATIENCE, "the server does not come back");
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Sets the offset of the server's clock from now on, in seconds.
    fn step(&self, by: &str) {
        fs::write(self.folder.join("clock"), by).unwrap();
    }

    /// Waits until the clock has this offset, measured by the begin time of a grant.
    async fn is_off(&self, by: &str) {
        let (by, since): (i64, _) = (by.parse().unwrap(), Instant::now());
        loop {
            let lease = match self.lock().acquire("clock", PATIENCE).await {
                Ok(lease) => lease,
                // A server whose clock jumps may delay a statement.
                Err(error) if error.is_retryable() && since.elapsed() < PATIENCE => {
                    sleep(Duration::from_millis(50)).await;
                    continue;
                }
                Err(error) => panic!("{error:?}"),
            };
            let begun = self.lock().inspect("clock").await.unwrap().unwrap().since.unwrap();
            lease.release().await.ok();
            let off = (begun - chrono::Utc::now()).num_seconds();
            if (off - by).abs() < 10 {
                return;
            }
            assert!(since.elapsed() < PATIENCE, "{off} s off, not {by}");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn pay<DB: Database>(mut tx: Tx<DB>) -> Result<(), sqlx::Error>
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    let sql = format!("INSERT INTO payment (token) VALUES ({})", tx.claim().token);
    let conn: &mut DB::Connection = &mut tx;
    conn.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.map(drop)
}

/// Shared state of the continuous tasks: the order to stop, and their progress.
#[derive(Default)]
struct Orders {
    stop: AtomicBool,
    made: AtomicUsize,
}

impl Orders {
    fn stop(&self) {
        self.stop.store(true, SeqCst);
    }

    fn go_on(&self) -> bool {
        !self.stop.load(SeqCst)
    }

    /// Waits until a few more have been made.
    async fn more(&self, when: &str) {
        let (before, since) = (self.made.load(SeqCst), Instant::now());
        while self.made.load(SeqCst) < before + 5 {
            assert!(since.elapsed() < PATIENCE, "it goes on {when}");
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Pays until it is ordered to stop. Returns the number of certain payments, and of those whose
/// outcome is unknown.
async fn payments<DB: Database>(lock: LeaseLock<DB>, orders: Arc<Orders>) -> (usize, usize)
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    let (mut sure, mut unknown) = (0, 0);
    while orders.go_on() {
        match lock.transaction("account", pay::<DB>).await {
            Ok(()) => {
                sure += 1;
                orders.made.fetch_add(1, SeqCst);
            }
            Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { .. }))) => unknown += 1,
            Err(RunError::Lost { .. }) => {}
            // The connection was lost within the work, and so was the server that has the count of
            // confirmations. The work commits nothing by itself.
            Err(RunError::Other(Error::Transaction(TransactionFault::Over {
                outcome: Certainty::Unknown, ..
            }))) => {}
            Err(RunError::Other(error)) if error.is_retryable() => {}
            Err(RunError::Work(_) | RunError::Refused(_)) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    (sure, unknown)
}

/// The reported payments are those in the table, and no payment has a token below that of an
/// earlier one.
fn assert_fenced(tokens: &[i64], sure: usize, unknown: usize) {
    println!("{sure} payments, {unknown} in doubt, {} there", tokens.len());
    assert!(tokens.is_sorted(), "{tokens:?}");
    assert!((sure..=sure + unknown).contains(&tokens.len()), "{sure} and {unknown} in doubt, {} there", tokens.len());
    assert!(sure > 5, "payments go on: {sure}");
}

async fn killed<DB: Database>(server: &Alone<DB>) -> (usize, usize)
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    let watch = Watch::default();
    let held = server.lock().try_acquire("held").await.unwrap().acquired().unwrap();
    let orders = Arc::<Orders>::default();
    let workers =
        (0..4).map(|_| tokio::spawn(work(Wanted::Key(server.lock(), &KEYS), "worker".into(), watch.clone()))).collect();
    let payer = tokio::spawn(payments(server.lock(), orders.clone()));
    for _ in 0..3 {
        sleep(Duration::from_secs(2)).await;
        server.kill().await;
        orders.more("when the server is back").await;
        watch.goes_on("worker", "when the server is back").await;
    }
    orders.stop();
    watch.end(workers).await;
    watch.tell("the server was killed three times");
    watch.assert_right();
    renew(&held).await;
    held.release().await.unwrap();
    payer.await.unwrap()
}

/// For a key whose row remains: each grant has a higher token than the one before, whatever the
/// clock does.
async fn tokens_grow<DB: Database>(lock: LeaseLock<DB>, orders: Arc<Orders>) -> usize {
    let (mut last, mut grants) = (0, 0);
    while orders.go_on() {
        match lock.acquire("k", Duration::from_millis(500)).await {
            Ok(lease) => {
                assert!(lease.token().get() > last, "{} after {last}", lease.token());
                (last, grants) = (lease.token().get(), grants + 1);
                drop(lease.release().await);
            }
            Err(Error::Refused(_)) => {}
            Err(error) => assert!(error.is_retryable() || matches!(error, Error::Lost { .. }), "{error:?}"),
        }
    }
    grants
}

async fn stepped<DB: Database>(server: &Alone<DB>) -> (usize, usize)
where
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
{
    let orders = Arc::<Orders>::default();
    let lookers: Vec<_> = (0..2).map(|_| tokio::spawn(tokens_grow(server.lock(), orders.clone()))).collect();
    let payers: Vec<_> = (0..2).map(|_| tokio::spawn(payments(server.lock(), orders.clone()))).collect();
    for by in ["+3600", "+30", "-3600", "+86400", "-86400", "+0"] {
        sleep(Duration::from_secs(2)).await;
        server.step(by);
        server.is_off(by).await;
        orders.more("when the clock is off").await;
    }
    orders.stop();
    let (mut sure, mut unknown) = (0, 0);
    for payer in payers {
        let (more, doubtful) = timeout(2 * PATIENCE, payer).await.unwrap().unwrap();
        (sure, unknown) = (sure + more, unknown + doubtful);
    }
    for looker in lookers {
        assert!(looker.await.unwrap() > 5, "grants go on");
    }
    (sure, unknown)
}

macro_rules! on {
    ($folder:literal, $database:ty, $killed:ident, $stepped:ident) => {
        pub async fn $killed(folder: std::path::PathBuf) {
            let server = Alone::<$database>::new(&folder, $folder).await;
            let (sure, unknown) = killed(&server).await;
            assert_fenced(&sqlx::query_scalar(TOKENS).fetch_all(&server.pool).await.unwrap(), sure, unknown);
        }

        pub async fn $stepped(folder: std::path::PathBuf) {
            let server = Alone::<$database>::new(&folder, $folder).await;
            let (sure, unknown) = stepped(&server).await;
            assert_fenced(&sqlx::query_scalar(TOKENS).fetch_all(&server.pool).await.unwrap(), sure, unknown);
        }
    };
}

on!("postgres", sqlx::Postgres, a_postgres_that_is_killed_loses_nothing, a_postgres_whose_clock_is_stepped_fences);
on!("mariadb", sqlx::MySql, a_mariadb_that_is_killed_loses_nothing, a_mariadb_whose_clock_is_stepped_fences);
