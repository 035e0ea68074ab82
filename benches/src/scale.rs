//! Instances with pools of their own in this process, as the simulation `tests/scale` has them:
//! their statements a second, and how long they wait. `docs/scale.md` compares the two.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use clap::{Args, ValueEnum};
use rowlock::{Attempt, LeaseLock};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    database::{Bench, Kind, Observer, at_own_site, on, pool},
    error::Error,
    options::seconds,
    report::shown,
    statistics::{Summary, millis},
};

/// How long a waiter holds its key, and how long it rests on average before it waits again.
const HOLD: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Each instance holds a hundred keys.
    Held,
    /// Each instance waits for one of few keys, holds it for two seconds, and waits again.
    Waiting,
    /// Candidates of one election, whose leaders stop to renew after a while.
    Successions,
}

#[derive(Args)]
pub struct Options {
    /// A database to measure; PostgreSQL and MySQL unless given.
    #[arg(long = "database", value_name = "NAME")]
    databases: Vec<Kind>,
    /// What to measure; all parts unless given.
    #[arg(long = "part", value_enum)]
    parts: Vec<Part>,
    #[arg(long, default_value_t = 30)]
    instances: usize,
    /// The keys of `waiting`.
    #[arg(long, default_value_t = 3)]
    keys: usize,
    /// Keys are granted in the order of arrival.
    #[arg(long)]
    fair: bool,
    #[arg(long, default_value = "6", value_parser = seconds)]
    lease: Duration,
    /// How long each part is measured, in seconds.
    #[arg(long, default_value = "20", value_parser = seconds)]
    seconds: Duration,
    /// The most connections of an instance's pool.
    #[arg(long, default_value_t = 2)]
    connections: u32,
}

/// What the instances of a part measured.
#[derive(Clone, Default)]
struct Measured(Arc<Mutex<Record>>);

#[derive(Default)]
struct Record {
    /// How long tasks waited.
    waits: Vec<Duration>,
    /// From a release, or the end of a leader, to the next grant.
    gaps: Vec<Duration>,
    /// When each key was released or its leader stopped.
    freed: Vec<Option<Instant>>,
}

impl Measured {
    fn change<T>(&self, change: impl FnOnce(&mut Record) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn granted(&self, key: usize, since: Instant) {
        self.change(|record| {
            record.waits.push(since.elapsed());
            let freed = record.freed[key].take().filter(|freed| since < *freed);
            record.gaps.extend(freed.map(|freed| freed.elapsed()));
        });
    }

    fn freed(&self, key: usize) {
        self.change(|record| record.freed[key] = Some(Instant::now()));
    }
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let kinds = if options.databases.is_empty() { &[Kind::Postgres, Kind::Mysql][..] } else { &options.databases };
    let parts = if options.parts.is_empty() { Part::value_variants() } else { &options.parts };
    println!("{} instances; waits and gaps: p50 / p99 / longest, s", options.instances);
    println!("| server | part | statements/s | waits | gaps |\n|---|---|---:|---|---|");
    for kind in kinds {
        let Some(server) = kind.url() else { continue };
        for part in parts {
            eprintln!("{} {part:?}", kind.name());
            on!(*kind, measure(*kind, &server, *part, options))?;
        }
    }
    Ok(())
}

async fn measure<DB: Bench>(kind: Kind, server: &str, part: Part, options: &Options) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        let measured = Measured::default();
        measured.change(|record| record.freed = vec![None; options.keys]);
        let mut instances = JoinSet::new();
        for number in 0..options.instances {
            let pool = pool::<DB>(&site.url, options.connections).await?;
            let lock = LeaseLock::new(pool).fair(options.fair).lease(options.lease);
            let measured = measured.clone();
            match part {
                Part::Held => drop(instances.spawn(hold(lock, number))),
                Part::Waiting => drop(instances.spawn(wait(lock, number % options.keys, measured))),
                Part::Successions => drop(instances.spawn(lead(lock, options.lease, measured))),
            }
        }
        // All have begun, and the first renewals are over.
        sleep(2 * options.lease).await;
        let observer = Observer::<DB>::new(site).await?;
        let (before, began) = (observer.statements().await?, Instant::now());
        tokio::select! {
            () = sleep(options.seconds) => {}
            Some(ended) = instances.join_next() => ended??,
        }
        let sent = observer.since(before).await?;
        let rate = shown(sent.map(|count| count as f64 / began.elapsed().as_secs_f64()), 1);
        let (waits, gaps) = measured.change(|record| (percentiles(&record.waits), percentiles(&record.gaps)));
        println!("| {} | {part:?} | {rate} | {waits} | {gaps} |", kind.name());
        instances.shutdown().await;
        Ok(())
    })
    .await
}

fn percentiles(durations: &[Duration]) -> String {
    let summary = Summary::of(durations.iter().map(|duration| duration.as_nanos() as i64).collect());
    let at =
        |percent| summary.percentile(percent).map_or("-".to_owned(), |nanos| format!("{:.3}", millis(nanos) / 1e3));
    format!("{} / {} / {}", at(50), at(99), at(100))
}

/// A random part of about this time.
fn about(time: Duration) -> Duration {
    time.mul_f64(0.5 + fastrand::f64())
}

async fn hold<DB: Bench>(lock: LeaseLock<DB>, number: usize) -> Result<(), Error> {
    let mut leases = Vec::new();
    for key in 0..100 {
        match lock.try_acquire(&format!("{number} {key}")).await? {
            Attempt::Acquired(lease) => leases.push(lease),
            Attempt::Refused(refusal) => return Err(format!("refused: {refusal}").into()),
        }
    }
    loop {
        sleep(Duration::from_secs(1)).await;
        if leases.iter().any(|lease| !lease.is_held()) {
            return Err("a lease is lost".into());
        }
    }
}

async fn wait<DB: Bench>(lock: LeaseLock<DB>, key: usize, measured: Measured) -> Result<(), Error> {
    loop {
        sleep(about(HOLD)).await;
        let since = Instant::now();
        let lease = lock.acquire(&format!("key {key}"), Duration::MAX).await?;
        measured.granted(key, since);
        sleep(HOLD).await;
        measured.freed(key);
        lease.release().await?;
    }
}

/// A leader that stops to renew, as if its process had died.
async fn lead<DB: Bench>(lock: LeaseLock<DB>, lease: Duration, measured: Measured) -> Result<(), Error> {
    loop {
        let since = Instant::now();
        let leadership = lock.acquire("leader", Duration::MAX).await?;
        measured.granted(0, since);
        sleep(2 * lease).await;
        measured.freed(0);
        leadership.detach();
        sleep(about(2 * lease)).await;
    }
}
