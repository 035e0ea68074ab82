//! A job in an application that has a scheduler already (tokio-cron-scheduler), on every instance.
//! The scheduler says when to look. The schedule's row says whether a tick is due and who runs it.
//!
//!     cargo run --example cron -- jobs.db           # start it several times, and kill one
//!     cargo run --example cron -- jobs.db 3         # ends after three ticks
//!     cargo run --example cron -- jobs.db 3 1500    # whose work takes 1500 ms

#![allow(clippy::print_stdout)]

use std::{convert::Infallible, error::Error, time::Duration};

use rowlock::{Schedule, Schedules, Tick, jobs::TickOutcome};
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{sync::mpsc, time::sleep};
use tokio_cron_scheduler::{Job, JobScheduler};

/// Every other second. The scheduler and the schedule have the same pattern.
const PATTERN: &str = "*/2 * * * * *";
/// Shorter than the period, so that a tick is finished before the next one.
const LEASE: Duration = Duration::from_secs(1);

/// Runs the tick that is due, when the scheduler fires. docs/jobs.md shows this function.
async fn fired(jobs: &Schedules<Sqlite>) -> Result<TickOutcome, rowlock::Error> {
    loop {
        match jobs.try_tick("report").await? {
            // It is due in a moment, by the database's clock. Or another instance runs it.
            TickOutcome::NotDue { retry_after: Some(left) } if left <= LEASE => {
                sleep(left + Duration::from_millis(10)).await;
            }
            // Succeeded, Failed, Missed, Lost, HandedBack, NotDue.
            outcome => return Ok(outcome),
        }
    }
}

/// Runs the job on its schedule.
#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_else(|| "jobs.db".into());
    let ticks = arguments.next().map_or(Ok(usize::MAX), |ticks| ticks.parse())?;
    let work = Duration::from_millis(arguments.next().map_or(Ok(0), |millis| millis.parse())?);
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(file).create_if_missing(true)).await?;
    rowlock::migrate(&pool).await?;
    let report = move |tick: Tick<Sqlite>| async move {
        println!("tick {}, attempt {}, under token {}", tick.slot().format("%H:%M:%S"), tick.attempt(), tick.token());
        sleep(work).await;
        Ok::<_, Infallible>(())
    };
    let jobs = Schedules::new(pool).lease(LEASE).on(Schedule::cron("report", PATTERN), report);
    // The first call registers the schedule.
    println!("{:?}", jobs.try_tick("report").await?);

    let (ticked, mut ticking) = mpsc::unbounded_channel();
    let mut scheduler = JobScheduler::new().await?;
    // The scheduler fires even while the last tick runs. The row prevents an overlap.
    let job = Job::new_async(PATTERN, move |_, _| {
        let (jobs, ticked) = (jobs.clone(), ticked.clone());
        Box::pin(async move {
            println!("{:?}", fired(&jobs).await);
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
