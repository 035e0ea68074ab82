//! Many workers deduct from a few accounts, and no update is lost. The same closure runs under two
//! strategies, and is compared with a single call.
//!
//!     cargo run --example deduct
//!     cargo run --example deduct --features postgres -- --database-url postgres://postgres@127.0.0.1/postgres
//!     cargo run --example deduct -- --help
//!
//! The example creates its own table of accounts and drops it at the end. In a database given by
//! URL, `t_resource_lock` remains, with a row for each account.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rowlock::{
    LeaseLock, ResourceLock, Retry, VersionLock, VersionedTable, balances::Columns, strategy::ResourceLockExt,
};
use sqlx::{AssertSqlSafe, Pool, pool::PoolOptions};
use tokio::{task::JoinSet, time::sleep};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const START: i64 = 1_000_000;
/// Under high contention a worker may wait for long. The limits are high enough that no worker of
/// the example gives up.
const PATIENT: Retry = Retry { attempts: 100_000, within: Duration::from_secs(300) };

/// Reads, works, and writes a balance computed from the one that was read, under either strategy.
/// Returns how often the work ran until it was committed.
async fn deduct<DB: Bank>(lock: &dyn ResourceLock<DB>, account: &str, work: Duration) -> Result<u32> {
    let ran = &AtomicU32::new(0);
    let deducting = lock.transaction(account, |mut tx| async move {
        ran.fetch_add(1, Relaxed);
        let balance = DB::balance(&mut tx, account).await?;
        sleep(work).await;
        DB::set(&mut tx, account, balance - 1).await
    });
    deducting.await?;
    Ok(ran.load(Relaxed))
}

enum Way<DB: Bank> {
    Transaction(Arc<dyn ResourceLock<DB>>, Duration),
    OneCall(VersionedTable<DB>),
}

impl<DB: Bank> Way<DB> {
    async fn deduct(&self, account: &str) -> Result<u32> {
        match self {
            Self::Transaction(lock, work) => deduct(&**lock, account, *work).await,
            Self::OneCall(table) => DB::deduct(table, account).await,
        }
    }
}

/// Returns all variants with their names.
fn ways<DB: Bank>(pool: &Pool<DB>, work: Duration) -> Result<[(&'static str, Way<DB>); 3]> {
    let lease: Arc<dyn ResourceLock<DB>> = Arc::new(LeaseLock::new(pool.clone()).retry(PATIENT));
    let version = Arc::new(VersionLock::new(pool.clone(), "rowlock_example", "id", "version").retry(PATIENT));
    let columns = Columns { table: "rowlock_example", key: "id", value: "balance", version: "version" };
    let table = VersionedTable::new(pool.clone(), columns).retry(PATIENT);
    Ok([
        ("lease", Way::Transaction(lease, work)),
        ("version", Way::Transaction(version, work)),
        ("VersionedTable::deduct", Way::OneCall(table)),
    ])
}

/// Creates the table, runs each variant, and drops the table even after an error.
async fn show<DB: Bank>(url: &str, options: &Options) -> Result<()> {
    // The pool's ping is disabled, since it costs a round trip for each statement.
    let pool: Pool<DB> = PoolOptions::new().test_before_acquire(false).connect(url).await?;
    rowlock::migrate(&pool).await?;
    let columns = "id varchar(40) PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL";
    let hint = |error| format!("{error} (if an earlier run was killed, drop its table rowlock_example)");
    DB::execute(&pool, format!("CREATE TABLE rowlock_example ({columns})")).await.map_err(hint)?;
    // The comparison runs in a task of its own, so that even a panic (an output that is closed)
    // does not leave the table behind.
    let shown = tokio::select! {
        shown = tokio::spawn(compare(pool.clone(), options.clone())) => shown.unwrap_or_else(|panic| Err(panic.into())),
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    };
    let dropped = DB::execute(&pool, "DROP TABLE rowlock_example".into()).await;
    shown.and(dropped.map_err(Into::into))
}

async fn compare<DB: Bank>(pool: Pool<DB>, options: Options) -> Result<()> {
    let Options { workers, accounts, deductions, work, .. } = options;
    let database = if DB::NAME == "MySQL" { "MySQL or MariaDB" } else { DB::NAME };
    println!("{database}: {workers} workers, accounts: {accounts}, deductions by each worker: {deductions},");
    println!("{} ms of work in each transaction, between reading and writing.\n", work.as_millis());
    println!("{:<22}  committed  work ran  in vain  seconds  commits/s  balances", "");
    let rows: Vec<_> = (0..accounts).map(|account| format!("('{}', {START}, 0)", id(account))).collect();
    let mut exact = true;
    let mut ways = Vec::from(ways(&pool, work)?);
    ways.retain(|(name, _)| options.strategy.as_ref().is_none_or(|only| only == name));
    for (name, way) in ways {
        let insert = format!("INSERT INTO rowlock_example VALUES {}", rows.join(", "));
        DB::execute(&pool, format!("DELETE FROM rowlock_example; {insert}")).await?;
        exact &= measure(name, way, &pool, &options).await?;
    }
    println!("\nlease: waits for its turn before it works, so that no work is done twice.");
    println!("version: all work at once, the first one commits, and the others work again.");
    println!("VersionedTable::deduct: as version, in one call, for a change that needs no work of its own.");
    if exact { Ok(()) } else { Err("a balance is wrong".into()) }
}

/// Runs the workers, prints the result, and returns whether every balance is exact.
async fn measure<DB: Bank>(name: &str, way: Way<DB>, pool: &Pool<DB>, options: &Options) -> Result<bool> {
    let Options { accounts, deductions, .. } = *options;
    let (way, started, mut tasks) = (Arc::new(way), Instant::now(), JoinSet::new());
    for _ in 0..options.workers {
        let way = way.clone();
        tasks.spawn(async move {
            let mut deducted = Vec::new();
            for _ in 0..deductions {
                let account = fastrand::u32(..accounts);
                deducted.push((account, way.deduct(&id(account)).await?));
            }
            Result::Ok(deducted)
        });
    }
    let (mut committed, mut ran, mut expected) = (0, 0, vec![START; accounts as usize]);
    while let Some(deducted) = tasks.join_next().await {
        for (account, attempts) in deducted?? {
            (committed, ran) = (committed + 1, ran + attempts);
            expected[account as usize] -= 1;
        }
    }
    let (seconds, mut verdict) = (started.elapsed().as_secs_f64(), "exact");
    for (account, expected) in (0..).zip(expected) {
        let balance = DB::balance(&mut *pool.acquire().await?, &id(account)).await?;
        verdict = if balance == expected { verdict } else { "WRONG" };
    }
    let (in_vain, rate) = (ran - committed, f64::from(committed) / seconds);
    println!("{name:<22}  {committed:>9}  {ran:>8}  {in_vain:>7}  {seconds:>7.2}  {rate:>9.0}  {verdict}");
    Ok(verdict == "exact")
}

/// Returns the id of the account in the table, which is also the key of its lease.
fn id(account: u32) -> String {
    format!("example-account-{account}")
}

/// The application's own SQL. Only its parameters differ, but sqlx's queries are typed by database.
trait Bank: rowlock::Database {
    fn execute(pool: &Pool<Self>, sql: String) -> impl Future<Output = sqlx::Result<()>> + Send;
    fn balance(conn: &mut Self::Connection, account: &str) -> impl Future<Output = sqlx::Result<i64>> + Send;
    fn set(conn: &mut Self::Connection, account: &str, balance: i64) -> impl Future<Output = sqlx::Result<()>> + Send;
    /// The single call. `VersionedTable::deduct` is generic over the type of number, so that each
    /// database implements this method.
    fn deduct(table: &VersionedTable<Self>, account: &str) -> impl Future<Output = Result<u32>> + Send;
}

macro_rules! bank {
    ($database:ty, $first:literal, $second:literal) => {
        impl Bank for $database {
            async fn execute(pool: &Pool<Self>, sql: String) -> sqlx::Result<()> {
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await.map(drop)
            }
            async fn balance(conn: &mut Self::Connection, account: &str) -> sqlx::Result<i64> {
                let sql = concat!("SELECT balance FROM rowlock_example WHERE id = ", $first);
                sqlx::query_scalar(sql).bind(account).fetch_one(conn).await
            }
            async fn set(conn: &mut Self::Connection, account: &str, balance: i64) -> sqlx::Result<()> {
                let sql = concat!("UPDATE rowlock_example SET balance = ", $first, " WHERE id = ", $second);
                sqlx::query(sql).bind(balance).bind(account).execute(conn).await.map(drop)
            }
            async fn deduct(table: &VersionedTable<Self>, account: &str) -> Result<u32> {
                Ok(table.deduct(account, 1).await?.attempts)
            }
        }
    };
}

bank!(sqlx::Sqlite, "?1", "?2");
#[cfg(feature = "postgres")]
bank!(sqlx::Postgres, "$1", "$2");
#[cfg(feature = "mysql")]
bank!(sqlx::MySql, "?", "?");

const USAGE: &str = "\
Usage: deduct [OPTION]...

  --strategy lease|version  this strategy alone; otherwise both, and VersionedTable::deduct
  --database-url URL        sqlite:, postgres: or mysql: (MariaDB too); otherwise a temporary SQLite file
  --workers N               tasks at once: 32 unless given
  --accounts N              the fewer, the more contention: 3 unless given
  --deductions N            by each worker: 10 unless given
  --work-ms N               work within each transaction: 2 unless given
  -h, --help                this text
";

#[derive(Clone)]
struct Options {
    strategy: Option<String>,
    database_url: Option<String>,
    workers: u32,
    accounts: u32,
    deductions: u32,
    work: Duration,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self> {
        let (strategy, database_url, work) = (None, None, Duration::from_millis(2));
        let mut options = Self { strategy, database_url, workers: 32, accounts: 3, deductions: 10, work };
        let number = |text: String| text.parse::<u32>().map_err(|_| format!("{text} is not such a number"));
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
            match argument.as_str() {
                "--strategy" => options.strategy = Some(value()?),
                "--database-url" => options.database_url = Some(value()?),
                "--workers" => options.workers = number(value()?)?,
                "--accounts" => options.accounts = number(value()?)?,
                "--deductions" => options.deductions = number(value()?)?,
                "--work-ms" => options.work = Duration::from_millis(number(value()?)?.into()),
                "-h" | "--help" => {
                    print!("{USAGE}");
                    std::process::exit(0)
                }
                _ => return Err(format!("unknown argument {argument}").into()),
            }
        }
        match options.strategy.as_deref() {
            _ if options.accounts == 0 => Err("there has to be an account".into()),
            None | Some("lease" | "version") => Ok(options),
            Some(other) => Err(format!("unknown strategy {other}").into()),
        }
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::parse(std::env::args().skip(1)).unwrap_or_else(|error| {
        eprint!("{error}\n\n{USAGE}");
        std::process::exit(2)
    });
    let Some(url) = &options.database_url else {
        let folder = tempfile::tempdir()?;
        let url = format!("sqlite://{}?mode=rwc", folder.path().join("accounts.db").display());
        let pool = sqlx::SqlitePool::connect(&url).await?;
        sqlx::Sqlite::execute(&pool, "PRAGMA journal_mode = WAL".into()).await?;
        return show::<sqlx::Sqlite>(&url, &options).await;
    };
    match url.split(':').next() {
        Some("sqlite") => show::<sqlx::Sqlite>(url, &options).await,
        #[cfg(feature = "postgres")]
        Some("postgres" | "postgresql") => show::<sqlx::Postgres>(url, &options).await,
        #[cfg(feature = "mysql")]
        Some("mysql" | "mariadb") => show::<sqlx::MySql>(url, &options).await,
        _ => Err("this build does not know the database: add --features postgres or --features mysql".into()),
    }
}
