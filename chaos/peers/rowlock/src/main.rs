//! An instance of an application with rowlock, for scripts/chaos.
//!
//!     chaos-rowlock migrate
//!     chaos-rowlock jobs
//!     chaos-rowlock plain|token|transaction

use std::{env, error::Error, str::FromStr as _, time::Duration};

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

mod jobs;
mod locks;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    // docs/operating.md, "Server settings": a process that is stopped in a transaction loses it.
    let server = PgConnectOptions::from_str(&env::var("DATABASE_URL")?)?
        .options([("idle_in_transaction_session_timeout", "5s")]);
    let pool = PgPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_with(server).await?;
    match env::args().nth(1).as_deref() {
        Some("migrate") => Ok(rowlock::migrate(&pool).await?),
        Some("jobs") => jobs::run(pool).await,
        Some(way @ ("plain" | "token" | "transaction")) => locks::run(pool, way).await,
        _ => Err("usage: chaos-rowlock migrate|jobs|plain|token|transaction".into()),
    }
}

/// A duration that scripts/chaos tells.
fn told(variable: &str, unit: Duration) -> Result<Duration> {
    let number: u32 = env::var(variable)?.parse()?;
    Ok(unit * number)
}
