//! A worker that adds to a counter under a lock of distributed-lock-postgres.

use std::{
    env,
    error::Error,
    time::{Duration, SystemTime},
};

use distributed_lock_core::traits::{DistributedLock as _, LockHandle as _, LockProvider as _};
use distributed_lock_postgres::PostgresLockProvider;
use sqlx::{PgPool, postgres::PgPoolOptions};
use tokio::time::sleep;

const HALF: Duration = Duration::from_millis(50);
const WAIT: Duration = Duration::from_secs(60);

fn tell(event: &str, value: Option<i64>) {
    let at = SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64());
    let value = value.map_or(String::new(), |value| format!(", \"value\": {value}"));
    println!("{{\"event\": \"{event}\", \"at\": {at:.6}{value}}}");
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = env::var("DATABASE_URL")?;
    let pool = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect(&url).await?;
    let lock = PostgresLockProvider::new(url).await?.create_lock("counter");
    tell("ask", None);
    loop {
        match lock.acquire(Some(WAIT)).await {
            Ok(handle) => {
                tell("got", None);
                if let Err(error) = hold(&pool, || !*handle.lost_token().borrow()).await {
                    eprintln!("{error}");
                    tell("refused", None);
                }
                if let Err(error) = handle.release().await {
                    eprintln!("{error}");
                }
                tell("ask", None);
            }
            Err(error) => {
                eprintln!("{error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// An error: nothing was written.
async fn hold(pool: &PgPool, stands: impl Fn() -> bool) -> sqlx::Result<()> {
    let n: i64 = sqlx::query_scalar("SELECT n FROM chaos_counter").fetch_one(pool).await?;
    sleep(HALF).await;
    if !stands() {
        tell("refused", None);
        return Ok(());
    }
    tell("checked", None);
    sleep(HALF).await;
    match sqlx::query("UPDATE chaos_counter SET n = $1").bind(n + 1).execute(pool).await {
        Ok(_) => tell("done", Some(n + 1)),
        Err(_) => tell("unknown", None),
    }
    Ok(())
}
