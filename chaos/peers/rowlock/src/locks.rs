//! A worker that adds to a counter under a lock, in three ways that docs/ has.
//!
//! `plain` (docs/jobs-under-a-lock.md) asks the grant before it writes. `token` (docs/fencing.md)
//! presents its token before it reads, and with its write. `transaction` (docs/transactions.md)
//! reads and writes in a transaction whose commit depends on the claim.

use std::{
    cell::Cell,
    env,
    time::{Duration, SystemTime},
};

use rowlock::{LeaseLock, Retry, RunError, errors::TransactionFault};
use sqlx::{PgPool, Postgres, Row as _};
use tokio::time::sleep;

use crate::{Result, told};

const KEY: &str = "counter";
const HALF: Duration = Duration::from_millis(50);
/// How long a worker waits for the key in one request.
const WAIT: Duration = Duration::from_secs(60);

fn tell(event: &str, value: Option<i64>) {
    let at = SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64());
    let value = value.map_or(String::new(), |value| format!(", \"value\": {value}"));
    println!("{{\"event\": \"{event}\", \"at\": {at:.6}{value}}}");
}

/// How a hold ended.
enum Hold {
    Done(i64),
    Refused,
    Unknown,
}

impl Hold {
    fn tell(self) {
        match self {
            Self::Done(value) => tell("done", Some(value)),
            Self::Refused => tell("refused", None),
            Self::Unknown => tell("unknown", None),
        }
    }
}

pub async fn run(pool: PgPool, way: &str) -> Result<()> {
    let lease = told("CHAOS_LEASE", Duration::from_secs(1))?;
    let lock = LeaseLock::builder(pool.clone()).label(env::var("CHAOS_INSTANCE")?).build()?.lease(lease);
    let lock = lock.retry(Retry { attempts: 1_000_000, within: WAIT });
    tell("ask", None);
    loop {
        let held = match way {
            "transaction" => transaction(&lock).await,
            _ => under_the_lock(&lock, &pool, way == "token").await,
        };
        match held {
            Ok(true) => tell("ask", None),
            Ok(false) => {} // still waiting
            Err(error) => {
                eprintln!("{error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Whether the key was granted.
async fn under_the_lock(lock: &LeaseLock<Postgres>, pool: &PgPool, fenced: bool) -> Result<bool> {
    let sent = Cell::new(false);
    let ran = lock.run(KEY, WAIT, async |held| {
        tell("got", None);
        let token = if fenced { held.token().get() } else { 0 };
        if fenced && write(pool, "token = $1", token, 0).await.ok() != Some(true) {
            Hold::Refused.tell();
            return Ok::<_, sqlx::Error>(());
        }
        let n: i64 = sqlx::query_scalar("SELECT n FROM chaos_counter").fetch_one(pool).await?;
        sleep(HALF).await;
        if !held.is_held() {
            Hold::Refused.tell();
            return Ok(());
        }
        tell("checked", None);
        sleep(HALF).await;
        sent.set(true);
        let hold = match write(pool, "n = $2, token = $1", token, n + 1).await {
            Ok(true) => Hold::Done(n + 1),
            Ok(false) => Hold::Refused,
            Err(_) => Hold::Unknown,
        };
        hold.tell(); // before the key is released
        Ok(())
    });
    match ran.await {
        Ok(()) => {}
        Err(RunError::Refused(_)) => return Ok(false),
        // The work was dropped.
        Err(RunError::Lost { .. }) if sent.get() => Hold::Unknown.tell(),
        Err(RunError::Lost { .. }) => Hold::Refused.tell(),
        Err(RunError::Work(error)) => {
            Hold::Refused.tell();
            eprintln!("{error}");
        }
        Err(RunError::Other(error)) => return Err(error.into()),
    }
    Ok(true)
}

/// A write that a row with a higher token refuses.
async fn write(pool: &PgPool, change: &str, token: i64, n: i64) -> sqlx::Result<bool> {
    let sql = format!("UPDATE chaos_counter SET {change} WHERE token <= $1 AND $2 >= 0");
    let done = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(token).bind(n).execute(pool).await?;
    Ok(done.rows_affected() == 1)
}

async fn transaction(lock: &LeaseLock<Postgres>) -> Result<bool> {
    let granted = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = granted.clone();
    let ran = lock.transaction(KEY, async move |mut tx| {
        told.store(true, std::sync::atomic::Ordering::Relaxed);
        tell("got", None);
        let n: i64 = sqlx::query("SELECT n FROM chaos_counter").fetch_one(&mut *tx).await?.try_get(0)?;
        sleep(HALF).await;
        tell("checked", None); // the commit asks
        sleep(HALF).await;
        sqlx::query("UPDATE chaos_counter SET n = $1").bind(n + 1).execute(&mut *tx).await?;
        tell("left", None); // the commit and the release follow
        Ok::<_, sqlx::Error>(n + 1)
    });
    let ran = ran.await;
    if !granted.load(std::sync::atomic::Ordering::Relaxed) {
        return match ran {
            Err(RunError::Refused(_)) => Ok(false),
            Err(error) => Err(error.into()),
            Ok(_) => Err("no work ran".into()),
        };
    }
    match ran {
        Ok(value) => Hold::Done(value).tell(),
        Err(RunError::Other(rowlock::Error::Transaction(TransactionFault::CommitUnknown { .. }))) => {
            Hold::Unknown.tell()
        }
        Err(error) => {
            eprintln!("{error}");
            Hold::Refused.tell();
        }
    }
    Ok(true)
}
