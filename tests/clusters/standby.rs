//! PostgreSQL with a standby: the primary is killed, the standby is promoted, and clients continue
//! there.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{
    Error, LeaseLock, Reason, ResourceLock as _, Retry, RunError, Tx,
    errors::{Certainty, DatabaseFault, TransactionFault},
    migration::Migration,
};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{PgPool, Postgres, postgres::PgPoolOptions};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    relay::Relay,
    ticks::{TABLE, Ticking},
    watch::{Watch, everything, renew},
};

crate::suite::tests!(
    SYNCHRONOUS(no_claim_is_lost_when_a_synchronous_standby_takes_over),
    ASYNCHRONOUS(a_migration_reaches_the_standby_and_a_grant_that_it_never_saw_is_fenced)
);

const LEASE: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(90);

/// The tables of [`payments`].
pub const PAYMENTS: &str =
    "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL); INSERT INTO account VALUES (1, 0);
     CREATE TABLE payment (token bigint NOT NULL)";

struct Pair {
    folder: PathBuf,
    primary: String,
    standby: String,
    relay: Relay,
}

impl Pair {
    async fn new(folder: PathBuf) -> Self {
        let url = |name: &str| fs::read_to_string(folder.join(name).join("url")).unwrap().trim().to_owned();
        let (primary, standby) = (url("primary"), url("standby"));
        let relay = Relay::before(std::slice::from_ref(&primary)).await;
        let pair = Self { folder, primary, standby, relay };
        let pool = pair.pool();
        rowlock::migrate(&pool).await.unwrap();
        sqlx::raw_sql(PAYMENTS).execute(&pool).await.unwrap();
        pair
    }

    /// A pool of connections to the current primary.
    fn pool(&self) -> PgPool {
        pool(&self.relay.url(&self.primary))
    }

    fn lock(&self) -> LeaseLock<Postgres> {
        LeaseLock::builder(self.pool()).time_limit(LEASE).build().unwrap().lease(LEASE)
    }

    /// Kills the primary with SIGKILL, promotes the standby, and directs clients to it.
    async fn fail_over(&self) {
        self.relay.turn_to(&[]);
        let pid = fs::read_to_string(self.folder.join("primary/data/postmaster.pid")).unwrap();
        let pid = Pid::from_raw(pid.lines().next().unwrap().parse().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        let standby = pool(&self.standby);
        assert!(sqlx::query_scalar::<_, bool>("SELECT pg_promote()").fetch_one(&standby).await.unwrap());
        self.relay.turn_to(std::slice::from_ref(&self.standby));
    }
}

pub fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(8).connect_lazy(url).unwrap()
}

async fn until(what: &str, pool: &PgPool, sql: &'static str) {
    let since = Instant::now();
    while !sqlx::query_scalar::<_, bool>(sql).fetch_one(pool).await.unwrap() {
        assert!(since.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

pub async fn pay(mut tx: Tx<Postgres>) -> Result<(), sqlx::Error> {
    let balance: i64 = sqlx::query_scalar("SELECT balance FROM account WHERE id = 1").fetch_one(&mut *tx).await?;
    sqlx::query("UPDATE account SET balance = $1 WHERE id = 1").bind(balance + 1).execute(&mut *tx).await?;
    let token = tx.claim().token.get();
    sqlx::query("INSERT INTO payment VALUES ($1)").bind(token).execute(&mut *tx).await?;
    Ok(())
}

/// Two tasks that pay.
pub struct Payers {
    tasks: Vec<JoinHandle<()>>,
    paid: Arc<Paid>,
}

#[derive(Default)]
struct Paid {
    sure: AtomicI64,
    /// Their outcome is unknown.
    unknown: AtomicI64,
    over: AtomicBool,
}

impl Payers {
    pub fn start(lock: impl Fn() -> LeaseLock<Postgres>) -> Self {
        let (retry, paid) = (Retry { attempts: 100_000, within: PATIENCE }, Arc::<Paid>::default());
        let pays = |_| tokio::spawn(payments(lock().retry(retry), paid.clone()));
        Self { tasks: (0..2).map(pays).collect(), paid: paid.clone() }
    }

    /// Waits for a few more payments.
    pub async fn go_on(&self, when: &str) {
        let (before, since) = (self.paid.sure.load(SeqCst), Instant::now());
        while self.paid.sure.load(SeqCst) < before + 3 {
            assert!(since.elapsed() < PATIENCE, "no payments {when}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the tasks. The table has what they reported.
    pub async fn end(self, pool: &PgPool) {
        self.paid.over.store(true, SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        assert_paid(pool, self.paid.sure.load(SeqCst), self.paid.unknown.load(SeqCst)).await;
    }
}

async fn payments(lock: LeaseLock<Postgres>, paid: Arc<Paid>) {
    while !paid.over.load(SeqCst) {
        match lock.transaction("account", pay).await {
            Ok(()) => drop(paid.sure.fetch_add(1, SeqCst)),
            Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { .. }))) => {
                paid.unknown.fetch_add(1, SeqCst);
            }
            Err(RunError::Other(error)) if error.is_retryable() => {}
            // The connection was lost within the work, and so was the server that has the count of
            // confirmations. The work commits nothing by itself.
            Err(RunError::Other(Error::Transaction(TransactionFault::Over {
                outcome: Certainty::Unknown, ..
            }))) => {}
            // The server is not the primary any more.
            Err(RunError::Other(Error::Database(DatabaseFault::ReadOnly { .. }))) => {}
            Err(RunError::Work(_)) => {} // its own statement failed, and it was rolled back
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// The table has the payments that were reported, and perhaps those in doubt.
pub async fn assert_paid(pool: &PgPool, sure: i64, unknown: i64) {
    let balance: i64 = sqlx::query_scalar("SELECT balance FROM account").fetch_one(pool).await.unwrap();
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM payment").fetch_one(pool).await.unwrap();
    println!("{sure} payments, {unknown} in doubt, a balance of {balance}");
    assert_eq!(balance, count);
    assert!((sure..=sure + unknown).contains(&balance), "{sure} payments and {unknown} in doubt, but {balance}");
}

async fn no_claim_is_lost_when_a_synchronous_standby_takes_over(folder: PathBuf) {
    let pair = Pair::new(folder).await;
    until(
        "a synchronous standby",
        &pool(&pair.primary),
        "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'",
    )
    .await;
    let lease = pair.lock().try_acquire("held").await.unwrap().acquired().unwrap();
    let watch = Watch::default();
    let workers = everything(|| pair.lock(), &watch);
    let payers = Payers::start(|| pair.lock());
    sqlx::raw_sql(TABLE).execute(&pair.pool()).await.unwrap();
    let ticking = Ticking::start(&[pair.pool(), pair.pool(), pair.pool()]).await;
    watch.all_go_on("at the primary").await;
    payers.go_on("at the primary").await;
    pair.fail_over().await;
    watch.all_go_on("at the standby").await;
    payers.go_on("at the standby").await;
    watch.end(workers).await;
    ticking.ends(&pair.pool(), "schedules, the primary was killed").await;
    watch.tell("the primary was killed");
    watch.assert_right();
    payers.end(&pair.pool()).await;
    // A key that was held before the failover is still held.
    let other = pair.lock();
    assert_eq!(other.try_acquire("held").await.unwrap().refused().unwrap().reason, Reason::Held);
    renew(&lease).await;
    let token = lease.token();
    lease.release().await.unwrap();
    assert!(other.try_acquire("held").await.unwrap().acquired().unwrap().token() > token);
}

/// The standby has what the primary was given, and changes nothing by itself.
async fn a_migration_reaches(pair: &Pair) {
    let (primary, standby) = (pair.pool(), pool(&pair.standby));
    until("the standby has the tables", &standby, "SELECT to_regclass('t_resource_schedule_times') IS NOT NULL").await;
    assert!(Migration::new(standby.clone()).plan().await.unwrap().is_empty());
    rowlock::migrate(&standby).await.unwrap();
    sqlx::raw_sql("ALTER TABLE t_resource_lock DROP COLUMN confirms").execute(&primary).await.unwrap();
    const LACKS: &str =
        "SELECT count(*) = 0 FROM pg_attribute WHERE attrelid = 't_resource_lock'::regclass AND attname = 'confirms'";
    until("the standby lacks the column", &standby, LACKS).await;
    let planned = Migration::new(standby.clone()).plan().await.unwrap();
    let error = rowlock::migrate(&standby).await.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::ReadOnly { .. }))
            && error.to_string().contains("nothing was changed"),
        "{error}"
    );

    // A query on the standby holds up neither the primary nor the migration.
    let mut query = standby.begin().await.unwrap();
    sqlx::query("SELECT * FROM t_resource_lock").execute(&mut *query).await.unwrap();
    let done = Migration::new(primary.clone()).functions(true).run().await.unwrap();
    assert!(planned.steps().all(|step| done.steps().any(|other| other == step)), "{done}");
    query.rollback().await.unwrap();
    until("the standby has the functions", &standby, "SELECT to_regproc('rowlock_version') IS NOT NULL").await;
    assert!(Migration::new(standby.clone()).functions(true).plan().await.unwrap().is_empty());
    let claim = "SELECT granted FROM rowlock_try_acquire('k')";
    let refused = sqlx::query(claim).execute(&standby).await.unwrap_err();
    assert_eq!(refused.as_database_error().unwrap().code().as_deref(), Some("25006"), "{refused}");
    assert!(sqlx::query_scalar::<_, bool>(claim).fetch_one(&primary).await.unwrap());
}

/// Shows what an asynchronous standby can lose, and what still holds.
async fn a_migration_reaches_the_standby_and_a_grant_that_it_never_saw_is_fenced(folder: PathBuf) {
    let pair = Pair::new(folder).await;
    a_migration_reaches(&pair).await;
    sqlx::raw_sql("DELETE FROM t_resource_lock").execute(&pair.pool()).await.unwrap();
    let first = pair.lock();
    first.try_acquire("k").await.unwrap().acquired().unwrap().release().await.unwrap();
    let standby = pool(&pair.standby);
    until("the standby has the row", &standby, "SELECT count(*) = 1 FROM t_resource_lock WHERE end_time IS NOT NULL")
        .await;
    sqlx::raw_sql("ALTER SYSTEM SET primary_conninfo = ''").execute(&standby).await.unwrap();
    sqlx::raw_sql("SELECT pg_reload_conf()").execute(&standby).await.unwrap();
    until("the standby hears nothing more", &pool(&pair.primary), "SELECT count(*) = 0 FROM pg_stat_replication").await;

    let lost = first.try_acquire("k").await.unwrap().acquired().unwrap();
    pair.fail_over().await;
    let second = pair.lock();
    let next = timeout(PATIENCE, second.acquire("k", PATIENCE)).await.unwrap().unwrap();
    assert!(lost.is_held() && next.is_held(), "this is what is lost: two holders, until the first one finds out");
    assert!(next.taken_over_from().is_none(), "nor does the new claim know of it");
    assert!(next.token() > lost.token(), "but what is written to can tell them apart");

    let pool = pair.pool();
    let mut tx = pool.begin().await.unwrap();
    let error = first.confirm(lost.claim(), &mut tx).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "and no commit under the first goes through: {error:?}");
    tx.rollback().await.unwrap();
    let since = Instant::now();
    while !matches!(lost.renew().await, Err(Error::Lost { .. })) {
        assert!(since.elapsed() < PATIENCE, "it finds out as soon as it reaches the new primary");
    }
    assert!(!lost.is_held());
    next.release().await.unwrap();
    first.transaction("k", pay).await.unwrap();
}
