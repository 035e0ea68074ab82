//! A job on the timer of every instance, run by one of them at each tick.
//!
//!     cargo run --example interval -- locks.db      # start it several times
//!     cargo run --example interval -- locks.db 3    # ends after three ticks

#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    time::{Duration, SystemTime},
};

use rowlock::{Held, LeaseLock, RunError};
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

const PERIOD: Duration = Duration::from_secs(2);

/// Runs the job at each tick.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_else(|| "locks.db".into());
    let ticks = arguments.next().map_or(Ok(u32::MAX), |ticks| ticks.parse())?;
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(file).create_if_missing(true)).await?;
    rowlock::migrate(&pool).await?;
    // The minimum interval is half of the period, not all of it. A tick may come slightly less than
    // a period after the last start, and has to run. The tick of another instance comes a moment
    // later, and is refused.
    let lock = LeaseLock::new(pool).min_interval(PERIOD / 2);

    let mut timer = on_the_clock(PERIOD);
    for _ in 0..ticks {
        tick(&mut timer).await;
        on_tick(&lock).await;
    }
    Ok(())
}

/// Ticks at the same moments of the clock on every instance. Timers that begin with their process
/// would tick anywhere in the period, and half of the period would not keep them apart. A missed
/// tick does not move the ticks after it.
fn on_the_clock(period: Duration) -> Interval {
    let past =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() % period.as_nanos();
    let first = Instant::now() + period - Duration::from_nanos(past as u64);
    let mut timer = interval_at(first, period);
    timer.set_missed_tick_behavior(MissedTickBehavior::Skip);
    timer
}

/// Waits for the next tick. A tick that is late by half of the period or more (the process was
/// stopped, the last run took long) is skipped: its run would cause the next tick to be refused.
async fn tick(timer: &mut Interval) {
    while timer.tick().await.elapsed() >= timer.period() / 2 {}
}

/// Runs one tick. An error is printed, and does not prevent the next tick.
async fn on_tick(lock: &LeaseLock<Sqlite>) {
    match lock.run("report", Duration::ZERO, report).await {
        Ok(()) => {}
        Err(RunError::Work(error)) => println!("failed: {error}"),
        Err(RunError::Refused(refusal)) => println!("not now: {refusal}"),
        Err(RunError::Lost { key, .. }) => println!("lost {key}, and cancelled the work"),
        Err(RunError::Other(error)) => println!("the database: {error}"),
    }
}

async fn report(held: Held) -> Result<(), std::io::Error> {
    println!("ran {} under token {}", held.key(), held.token());
    Ok(())
}
