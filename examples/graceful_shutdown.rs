//! A job on the timer of every instance, run by one of them at each tick. A service that is asked
//! to stop (SIGTERM) in the middle of it lets short work end, and abandons long work.
//!
//!     cargo run --example graceful_shutdown -- locks.db &    # stop it: kill -TERM %1
//!     cargo run --example graceful_shutdown -- locks.db 1    # ends after one tick

#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    time::{Duration, SystemTime},
};

use rowlock::LeaseLock;
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{Instant, Interval, MissedTickBehavior, interval_at, sleep, timeout},
};

const PERIOD: Duration = Duration::from_secs(2);
/// How long the job may continue after the request to stop. Kubernetes gives 30 s in all, systemd
/// 90 s.
const GRACE: Duration = Duration::from_millis(500);

/// Runs the service.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().unwrap_or_else(|| "locks.db".into());
    let ticks = arguments.next().map_or(Ok(u32::MAX), |ticks| ticks.parse())?;
    let work = arguments.next().map_or(Ok(1000), |millis| millis.parse())?;
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(file).create_if_missing(true)).await?;
    rowlock::migrate(&pool).await?;
    // The minimum interval is half of the period, not all of it. A tick may come slightly less than
    // a period after the last start, and has to run. The tick of another instance comes a moment
    // later, and is refused.
    let lock = LeaseLock::new(pool).min_interval(PERIOD / 2);

    let mut stop = signal(SignalKind::terminate())?;
    let mut timer = on_the_clock(PERIOD);
    for _ in 0..ticks {
        tokio::select! {
            _ = stop.recv() => break,
            () = tick(&mut timer) => {}
        }
        let mut tick = std::pin::pin!(on_tick(&lock, Duration::from_millis(work)));
        tokio::select! {
            () = &mut tick => continue,
            _ = stop.recv() => {}
        }
        println!("asked to stop");
        // A job that ends in time is released. A job that is dropped with this block is abandoned,
        // and another instance takes over at once.
        if timeout(GRACE, tick).await.is_err() {
            println!("stopped half-way");
        }
        break;
    }
    // The claim is abandoned in the background. Without this call the process would end first, and
    // other instances would wait for the end of the lease.
    lock.shutdown(GRACE).await;
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

async fn on_tick(lock: &LeaseLock<Sqlite>, work: Duration) {
    let ran = lock.run("report", Duration::ZERO, async |held| {
        println!("begun under token {}", held.token());
        sleep(work).await;
        Ok::<_, std::io::Error>(())
    });
    match ran.await {
        Ok(()) => println!("done"),
        Err(error) => println!("{error}"),
    }
}
