//! A job on a cron schedule (tokio-cron-scheduler) on every instance, run by one of them at each
//! tick.
//!
//!     cargo run --example cron -- locks.db      # start it several times
//!     cargo run --example cron -- locks.db 3    # ends after three ticks

#![allow(clippy::print_stdout)]

use std::{error::Error, time::Duration};

use rowlock::{LeaseLock, ResourceLockExt as _, RunOutcome};
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::sync::mpsc;
use tokio_cron_scheduler::{Job, JobScheduler};

/// Every other second, by each machine's own clock. The ticks of two instances differ by as much as
/// their clocks.
const SCHEDULE: &str = "*/2 * * * * *";
const PERIOD: Duration = Duration::from_secs(2);

/// Runs the job on its schedule.
#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_else(|| "locks.db".into());
    let ticks = arguments.next().map_or(Ok(usize::MAX), |ticks| ticks.parse())?;
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(file).create_if_missing(true)).await?;
    rowlock::migrate(&pool).await?;
    // The minimum interval is half of the period, not all of it. This scheduler checks twice a
    // second, so that some ticks are late and others are not, and two starts may be less than a
    // period apart. Half of the period still refuses the other instances, whose ticks come a moment
    // later.
    let lock = LeaseLock::new(pool).min_interval(PERIOD / 2)?;

    let (ticked, mut ticking) = mpsc::unbounded_channel();
    let mut scheduler = JobScheduler::new().await?;
    // The scheduler starts a tick even while the last one is running. The key prevents an overlap.
    let job = Job::new_async(SCHEDULE, move |_, _| {
        let (lock, ticked) = (lock.clone(), ticked.clone());
        Box::pin(async move {
            println!("{}", on_tick(&lock).await);
            let _ = ticked.send(());
        })
    })?;
    scheduler.add(job).await?;
    scheduler.start().await?;
    for _ in 0..ticks {
        ticking.recv().await;
    }
    Ok(scheduler.shutdown().await?)
}

async fn on_tick(lock: &LeaseLock<Sqlite>) -> String {
    let ran = lock.run("report", async |grant| Ok::<_, std::io::Error>(grant.token()));
    match ran.await {
        Ok(RunOutcome::Ended { result: Ok(token), recorded: Ok(()) }) => format!("ran report under token {token}"),
        Ok(RunOutcome::Refused(refusal)) => format!("not now: {refusal}"),
        Ok(other) => format!("{other:?}"),
        Err(error) => format!("the database: {error}"),
    }
}
