//! The statements that many tasks send while they wait for one key that another lock holds.

use std::time::Duration;

use clap::Args;
use rowlock::{Attempt, LeaseLock};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    Error,
    database::{Bench, Kind, Observer, Site, on, pool, site},
    report::shown,
    statistics::ratio,
};

const KEY: &str = "waiting";
/// How long all tasks may take to acquire the key, one after the other.
const PATIENCE: Duration = Duration::from_secs(300);

#[derive(Args)]
pub struct Options {
    /// A database to measure; all four unless given.
    #[arg(long = "database", value_name = "NAME")]
    databases: Vec<Kind>,
    /// How long the key is held.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// How many tasks wait for the key.
    #[arg(long, default_value_t = 1000)]
    tasks: usize,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let kinds = if options.databases.is_empty() { &Kind::ALL[..] } else { &options.databases };
    println!(
        "{} tasks wait for a key that is held for {} s. Statements of all of them and the holder, as the server counts them (of the whole server on MySQL and MariaDB; SQLite counts none): in each second, and a second in the last half;",
        options.tasks, options.seconds
    );
    println!("then each takes the key and releases it: seconds until all had it, statements for each.");
    for kind in kinds {
        if let Some(server) = kind.url() {
            for fair in [false, true] {
                eprintln!("{} fair={fair}", kind.name());
                on!(*kind, measure(*kind, &server, fair, options))?;
            }
        }
    }
    Ok(())
}

async fn measure<DB: Bench>(kind: Kind, server: &str, fair: bool, options: &Options) -> Result<(), Error> {
    let own = site::<DB>(server).await?;
    let held = hold::<DB>(&own, fair, options).await;
    DB::drop_database(server, own).await?;
    let Held { seconds, all, each } = held?;
    let half = &seconds[seconds.len() / 2..];
    let calm = shown(ratio(half.iter().sum::<i64>() as f64, half.len() as f64), 2);
    let order = if fair { "fair" } else { "-" };
    println!(
        "{:<9}{order:<6}{calm:>8} a second; all had it in {:.1} s, {} statements each; {seconds:?}",
        kind.name(),
        all.as_secs_f64(),
        shown(each, 2)
    );
    Ok(())
}

struct Held {
    /// Statements in each second of the hold.
    seconds: Vec<i64>,
    all: Duration,
    each: Option<f64>,
}

async fn hold<DB: Bench>(site: &Site, fair: bool, options: &Options) -> Result<Held, Error> {
    let (url, observer) = (&site.url, Observer::<DB>::new(site).await?);
    let holder = LeaseLock::new(pool::<DB>(url, 10).await?).fair(fair);
    let waiting = LeaseLock::new(pool::<DB>(url, 10).await?).fair(fair);
    let Attempt::Acquired(lease) = holder.try_acquire(KEY).await? else { return Err("the key is not free".into()) };
    let mut before = observer.served().await?;
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..options.tasks {
        let waiting = waiting.clone();
        tasks.spawn(async move { Ok::<_, Error>(waiting.acquire(KEY, Duration::MAX).await?.release().await?) });
    }
    let mut seconds = Vec::new();
    for second in 1..=options.seconds {
        sleep((begin + Duration::from_secs(second)).saturating_duration_since(Instant::now())).await;
        let so_far = observer.served().await?;
        seconds.extend(so_far.since(before).statements);
        before = so_far;
    }
    let released = Instant::now();
    lease.release().await?;
    let all = async {
        while let Some(ended) = tasks.join_next().await {
            ended??;
        }
        Ok::<_, Error>(())
    };
    timeout(PATIENCE, all).await.map_err(|_| "a waiter did not get the key")??;
    let each = observer.served().await?.since(before).statements;
    let each = each.map(|count| count as f64 / options.tasks.max(1) as f64);
    Ok(Held { seconds, all: released.elapsed(), each })
}
