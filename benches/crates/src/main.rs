//! Acquires and releases by the locks of other crates. Arguments: the lock, the server's URL, and a
//! prefix for its keys.
//!
//! Each line of the input is a round: how many tasks, and for how many milliseconds. Its answer is
//! one line: `round`, the nanoseconds that the round took, and those of each cycle.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use distributed_lock_core::traits::{DistributedLock, LockHandle, LockProvider};
use distributed_lock_mysql::MySqlLockProvider;
use distributed_lock_postgres::PostgresLockProvider;
use pg_lease::{LeaseContext, LeaseLooper, LeaseLooperOptions};
use rslock::LockManager;
use sqlx::{Database, PgPool, Pool, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt, BufReader, stdin},
    sync::Notify,
    task::JoinSet,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

const LEASE: Duration = Duration::from_secs(30);

enum Lock {
    /// The server's advisory locks.
    Postgres(PostgresLockProvider),
    /// `GET_LOCK`.
    MySql(MySqlLockProvider),
    /// Redlock, of one server.
    Redis(LockManager),
    /// Loops, of which one process runs each.
    PgLease { pool: PgPool, processes: AtomicU64 },
}

impl Lock {
    async fn open(name: &str, url: &str) -> Result<Self, Error> {
        Ok(match name {
            "distributed-lock-postgres" => {
                Self::Postgres(PostgresLockProvider::builder().pool(pool(url).await?).build().await?)
            }
            "distributed-lock-mysql" => Self::MySql(MySqlLockProvider::builder().pool(pool(url).await?).build().await?),
            "rslock" => Self::Redis(LockManager::new(vec![url])),
            "pg_lease" => Self::PgLease { pool: pool(url).await?, processes: AtomicU64::new(0) },
            other => return Err(format!("no lock is named {other}").into()),
        })
    }

    async fn cycle(&self, key: &str) -> Result<(), Error> {
        match self {
            Self::Postgres(provider) => once(&provider.create_lock(key)).await,
            Self::MySql(provider) => once(&provider.create_lock(key)).await,
            Self::Redis(manager) => {
                let lock = manager.lock(key, LEASE).await?;
                manager.unlock(&lock).await;
                Ok(())
            }
            Self::PgLease { pool, processes } => {
                let process = processes.fetch_add(1, Ordering::Relaxed).to_string();
                lead(pool.clone(), key.to_owned(), process).await
            }
        }
    }
}

/// With as many connections as the other contenders have, and no ping.
async fn pool<DB: Database>(url: &str) -> sqlx::Result<Pool<DB>> {
    let patience = Duration::from_secs(60);
    PoolOptions::new().max_connections(16).test_before_acquire(false).acquire_timeout(patience).connect(url).await
}

async fn once<L: DistributedLock>(lock: &L) -> Result<(), Error> {
    let held = lock.try_acquire().await?.ok_or_else(|| format!("{} is not free", lock.name()))?;
    held.release().await?;
    Ok(())
}

/// Starts a loop as a new process would, whose work ends at once. The lease is dropped after that,
/// so the next process waits for it.
async fn lead(pool: PgPool, key: String, process: String) -> Result<(), Error> {
    let options = LeaseLooperOptions {
        loop_interval: Duration::from_millis(1),
        loop_interval_jitter: Duration::ZERO,
        lease_duration: LEASE,
        lease_heartbeat_interval: LEASE / 3,
    };
    let leads = Arc::new(Notify::new());
    let work = |_: LeaseContext, leads: Arc<Notify>| async move {
        leads.notify_one();
        Ok(())
    };
    LeaseLooper::new(key, work, process, pool, options, leads.clone()).start().await?;
    leads.notified().await;
    Ok(())
}

/// Returns the nanoseconds of each cycle.
async fn cycles(lock: Arc<Lock>, key: String, until: Instant) -> Result<Vec<u128>, Error> {
    let mut cycles = Vec::new();
    while cycles.is_empty() || Instant::now() < until {
        let from = Instant::now();
        lock.cycle(&key).await?;
        cycles.push(from.elapsed().as_nanos());
    }
    Ok(cycles)
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut arguments = env::args().skip(1);
    let mut argument = || arguments.next().ok_or("arguments: the lock, the server's URL, a prefix");
    let (name, url, prefix) = (argument()?, argument()?, argument()?);
    let lock = Arc::new(Lock::open(&name, &url).await?);
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let (tasks, millis) = line.split_once(' ').ok_or("a round is its tasks and milliseconds")?;
        let (tasks, span): (usize, _) = (tasks.parse()?, Duration::from_millis(millis.parse()?));
        let from = Instant::now();
        let mut running = JoinSet::new();
        for task in 0..tasks {
            running.spawn(cycles(lock.clone(), format!("{prefix}/{task}"), from + span));
        }
        let mut answer = Vec::new();
        while let Some(ended) = running.join_next().await {
            answer.extend(ended??);
        }
        answer.insert(0, from.elapsed().as_nanos());
        let answer: Vec<String> = answer.iter().map(u128::to_string).collect();
        println!("round {}", answer.join(" "));
    }
    Ok(())
}
