//! One process of `schedules`: it runs schedules, or cycles of a lock by hand, and reports on
//! stdout.
//!
//! It reads commands on stdin: `count`, and the end of the input, which ends it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use clap::{Args, ValueEnum};
use rowlock::{Attempt, LeaseLock, Schedule, Schedules, Tick, jobs::CatchUp};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, stdin},
    time::sleep,
};

use crate::{
    contender::{URL, tell},
    database::{Bench, Kind, on, patient_pool},
    error::Error,
};

pub const LEASE: Duration = Duration::from_millis(1500);

/// What the process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// Schedules with nothing to do, each due again at once.
    Busy,
    /// Schedules that are not due.
    Idle,
    /// Schedules with a tick each second, whose work takes 5 to 100 ms and tells when it starts.
    Ticking,
    /// Acquire and release, one after the other.
    Cycles,
}

#[derive(Args)]
pub struct Options {
    #[arg(long)]
    database: Kind,
    #[arg(long, env = URL, hide_env_values = true)]
    url: String,
    #[arg(long)]
    job: Job,
    /// The numbers of the first schedule and of the one after the last.
    #[arg(long)]
    from: usize,
    #[arg(long)]
    to: usize,
}

/// The reports of a process, one per line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    Ready,
    /// A run begins this many microseconds after its tick, which is in milliseconds.
    Begins {
        schedule: usize,
        slot: i64,
        late: i64,
    },
    /// This many runs have begun.
    Counted {
        runs: i64,
    },
}

/// The schedule of this number.
pub fn schedule(job: Job, number: usize) -> Schedule {
    let period = match job {
        Job::Busy => Duration::from_millis(100),
        Job::Idle => Duration::from_secs(24 * 3600),
        Job::Ticking | Job::Cycles => Duration::from_secs(1),
    };
    Schedule::every(&format!("s{number}"), period).catch_up(CatchUp::All(1_000))
}

pub async fn run(options: &Options) -> Result<(), Error> {
    on!(options.database, work(options))
}

async fn work<DB: Bench>(options: &Options) -> Result<(), Error> {
    let pool = patient_pool::<DB>(&options.url, 8).await?;
    let runs = Arc::new(AtomicI64::new(0));
    let mut schedules = Schedules::new(pool.clone()).lease(LEASE);
    let mut cycling = None;
    if options.job == Job::Cycles {
        cycling = Some(tokio::spawn(cycles(LeaseLock::new(pool.clone()), runs.clone())));
    } else {
        for number in options.from..options.to {
            let (runs, job) = (runs.clone(), options.job);
            schedules = schedules.on(schedule(job, number), move |tick| tick_of(job, number, runs.clone(), tick));
        }
    }
    let running = if cycling.is_none() { Some(schedules.start().await?) } else { None };
    tell(&Word::Ready)?;
    let mut lines = BufReader::new(stdin()).lines();
    while lines.next_line().await?.is_some() {
        tell(&Word::Counted { runs: runs.load(Relaxed) })?;
    }
    if let Some(running) = running {
        running.shutdown(Duration::from_secs(10)).await;
    }
    cycling.inspect(|cycling| cycling.abort());
    Ok(())
}

async fn tick_of<DB: Bench>(job: Job, schedule: usize, runs: Arc<AtomicI64>, tick: Tick<DB>) -> Result<(), Error> {
    runs.fetch_add(1, Relaxed);
    if job == Job::Ticking {
        // The servers are on this machine, so this is their clock.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_micros();
        let late = i64::try_from(now)? - tick.slot().timestamp_micros();
        tell(&Word::Begins { schedule, slot: tick.slot().timestamp_millis(), late })?;
        sleep(Duration::from_millis(fastrand::u64(5..100))).await;
    }
    Ok(())
}

async fn cycles<DB: Bench>(lock: LeaseLock<DB>, runs: Arc<AtomicI64>) -> Result<(), Error> {
    loop {
        let Attempt::Acquired(lease) = lock.try_acquire("by-hand").await? else {
            return Err("the key is not free".into());
        };
        lease.release().await?;
        runs.fetch_add(1, Relaxed);
    }
}
