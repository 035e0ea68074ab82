//! Tries for a key that another client holds: the cost of a refusal.

use std::time::Duration;

use clap::Args;
use rowlock::{Attempt, LeaseLock};
use sqlx::PgPool;

use crate::{
    contest::{Contest, Ending, Entry},
    database::{Kind, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::{Rounds, url},
    report::{Report, Shown},
    speak::Speak,
    ways::{
        Ask, Lock, advisory::Advisory, article::Article, own_prefix, redis::Redis, refusal, rowlock::Rowlock,
        single::Single,
    },
};

const KEY: &str = "held";
/// Longer than any measurement, because a key of Redis is not renewed.
const HOUR: Duration = Duration::from_secs(3600);

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many tasks try.
    #[arg(long, default_value_t = 64)]
    tasks: usize,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "refusals", wal: true, base: "rowlock", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!("Tries for a key that another lock holds: medians of {} rounds.", options.rounds.rounds);
    println!("WAL bytes: by which PostgreSQL's log grew, for each refusal. Other writers count too.");
    durability::show_redis().await?;
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        let Options { rounds, tasks } = options;
        let wal = if kind == Kind::Postgres { Some(PgPool::connect(&site.url).await?) } else { None };
        let holder = LeaseLock::new(patient_pool::<DB>(&site.url, 1).await?);
        let Attempt::Acquired(lease) = holder.try_acquire(KEY).await? else { return Err("the key is not free".into()) };
        let (entries, held) = entries::<DB>(site, rounds).await?;
        Contest { scenario: "refusals", server: kind.name(), tasks: *tasks, entries, rounds, wal }.run(report).await?;
        for giving_back in held {
            giving_back.await?;
        }
        // The release fails if the key was not held all the time.
        Ok(lease.release().await?)
    })
    .await
}

const ASK: Ask<'static> = Ask { task: 0, key: KEY };

/// Holds a key that is not in the table, until the returned future is awaited.
async fn hold<L: Lock>(lock: L) -> Result<Ending<()>, Error> {
    let held = lock.acquire(&ASK).await?.ok_or("the key is not free")?;
    Ok(Box::pin(async move { lock.release(&ASK, held).await }))
}

async fn entries<DB: Speak>(site: &Site, rounds: &Rounds) -> Result<(Vec<Entry>, Vec<Ending<()>>), Error> {
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    let mut held = Vec::new();
    let mut entries = Vec::new();
    let mut enter = |name, contender| entries.push(Entry::new(name, 0, contender));
    for (name, batching) in [("rowlock", true), ("rowlock-unbatched", false)] {
        if rounds.wants(name) {
            enter(name, refusal(Rowlock::new(pool.clone(), batching, Duration::ZERO)?, KEY));
        }
    }
    if rounds.wants("article") {
        enter("article", refusal(Article(pool.clone()), KEY));
    }
    if rounds.wants("single") {
        enter("single", refusal(Single(pool.clone()), KEY));
    }
    let own = patient_pool::<DB>(&site.url, 1).await?;
    if let Some((holder, other)) = Advisory::new(own).zip(Advisory::new(pool)).filter(|_| rounds.wants("advisory")) {
        held.push(hold(holder).await?);
        enter("advisory", refusal(other, KEY));
    }
    for (name, variable) in [("redis", "REDIS_URL"), ("redis-durable", "REDIS_DURABLE_URL")] {
        if let Some(url) = url(variable).filter(|_| rounds.wants(name)) {
            let prefix = own_prefix();
            held.push(hold(Redis::new(&url, &prefix).await?.lasting(HOUR)).await?);
            enter(name, refusal(Redis::new(&url, &prefix).await?, KEY));
        }
    }
    Ok((entries, held))
}
