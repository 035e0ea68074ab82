//! Acquire and release, by tasks without contention: each has a key of its own.

use clap::Args;
use sqlx::Pool;

use crate::{
    contest::{Contest, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::{Rounds, url},
    report::{Report, Shown},
    speak::{Speak, fill},
    ways::{
        Pick, advisory::Advisory, article::Article, cycle, etcd::Etcd, limit, own_prefix, redis::Redis,
        rowlock::Rowlock, single::Single,
    },
};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many tasks.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    tasks: Vec<usize>,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "cycles", base: "rowlock", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    let servers = options.rounds.common.on.servers();
    println!("Acquire and release without contention: medians of {} rounds.", options.rounds.rounds);
    durability::show_redis().await?;
    println!("etcd: {}", if url("ETCD_URL").is_some() { "v3lock over gRPC" } else { "skipped, ETCD_URL is not set" });
    for (kind, server) in servers {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        for &tasks in &options.tasks {
            let entries = entries::<DB>(site, tasks, &options.rounds).await?;
            let rounds = &options.rounds;
            Contest { scenario: "cycles", server: kind.name(), tasks, entries, rounds, wal: None }.run(report).await?;
        }
        Ok(())
    })
    .await
}

/// All contenders share one pool, because they run one after the other.
async fn entries<DB: Speak>(site: &Site, tasks: usize, rounds: &Rounds) -> Result<Vec<Entry>, Error> {
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    let mut entries = Vec::new();
    let mut enter = |name, contender| entries.push(Entry::new(name, 0, contender));
    for (name, batching) in [("rowlock", true), ("rowlock-unbatched", false)] {
        if rounds.wants(name) {
            enter(name, cycle(Rowlock::new(pool.clone(), batching, PATIENCE)?, own_key(name, tasks)));
        }
    }
    if rounds.wants("article") {
        rows(&pool, "article", tasks).await?;
        enter("article", cycle(Article(pool.clone()), own_key("article", tasks)));
    }
    if rounds.wants("single") {
        rows(&pool, "single", tasks).await?;
        enter("single", cycle(Single(pool.clone()), own_key("single", tasks)));
    }
    if let Some(advisory) = Advisory::new(pool.clone()).filter(|_| rounds.wants("advisory")) {
        enter("advisory", cycle(advisory, own_key("advisory", tasks)));
    }
    if rounds.wants("limit") {
        limit::prepare(&pool, tasks).await?;
        enter("limit", limit::limit(pool.clone()));
    }
    for (name, variable) in [("redis", "REDIS_URL"), ("redis-durable", "REDIS_DURABLE_URL")] {
        if let Some(url) = url(variable).filter(|_| rounds.wants(name)) {
            enter(name, cycle(Redis::new(&url, &own_prefix()).await?, own_key(name, tasks)));
        }
    }
    if let Some(url) = url("ETCD_URL").filter(|_| rounds.wants("etcd")) {
        let etcd = Etcd::new(&url, &own_prefix(), tasks).await.map_err(|error| format!("ETCD_URL: {error}"))?;
        enter("etcd", cycle(etcd, own_key("etcd", tasks)));
    }
    Ok(entries)
}

fn key(name: &str, tasks: usize, task: usize) -> String {
    format!("{name}/{tasks}/{task}")
}

/// Picks a key of its own for each task.
pub fn own_key(name: &'static str, tasks: usize) -> Pick {
    Box::new(move |task| key(name, tasks, task))
}

/// Free rows, as rowlock creates its own.
async fn rows<DB: Speak>(pool: &Pool<DB>, name: &str, tasks: usize) -> Result<(), Error> {
    let rows = (0..tasks).map(|task| format!("('{}')", key(name, tasks, task)));
    fill(pool, "t_resource_lock (key_resource)", rows).await
}
