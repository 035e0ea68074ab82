//! Acquire and release of a semaphore's permits, beside plain claims on as many keys, and by
//! readers, beside plain claims on one key.

use clap::Args;

use crate::{
    contest::{Contest, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::{Rounds, url},
    report::{Report, Shown},
    speak::Speak,
    ways::{
        Pick, cycle,
        program::Program,
        rowlock::{Places, Rowlock},
    },
};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many tasks.
    #[arg(long, value_delimiter = ',', default_values_t = [16, 64])]
    tasks: Vec<usize>,
    /// How many permits, and how many keys.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=100))]
    permits: u32,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "cycles", size: Some("permits"), base: "plain claims", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!("Acquire and release of permits and by readers: medians of {} rounds.", options.rounds.rounds);
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        for &tasks in &options.tasks {
            let (entries, rounds) = (entries::<DB>(site, options).await?, &options.rounds);
            Contest { scenario: "permits", server: kind.name(), tasks, entries, rounds, wal: None }.run(report).await?;
        }
        Ok(())
    })
    .await
}

async fn entries<DB: Speak>(site: &Site, options: &Options) -> Result<Vec<Entry>, Error> {
    let Options { rounds, permits, .. } = options;
    let (permits, size) = (*permits, usize::try_from(*permits)?);
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    let mut entries = Vec::new();
    let mut enter = |name, size, base, contender| {
        if rounds.wants(name) {
            entries.push(Entry { name, size, base: (base, size), contender });
        }
    };
    let keys: Pick = Box::new(move |task| format!("keys/{}", task % size));
    enter("keys", size, "keys", cycle(Rowlock::new(pool.clone(), true, PATIENCE)?, keys));
    let one = |name: &'static str| -> Pick { Box::new(|_| name.to_owned()) };
    enter("permits", size, "keys", cycle(Places::permits(pool.clone(), permits, PATIENCE)?, one("permits")));
    for (name, variable) in [("redis-semaphore", "REDIS_URL"), ("redis-semaphore-durable", "REDIS_DURABLE_URL")] {
        let Some(server) = url(variable) else { continue };
        if let Some(contender) = Program::redis_semaphore(&server, permits)? {
            enter(name, size, "keys", contender);
        }
    }
    enter("one-key", 1, "one-key", cycle(Rowlock::new(pool.clone(), true, PATIENCE)?, one("one")));
    enter("readers", 1, "one-key", cycle(Places::readers(pool, PATIENCE)?, one("readers")));
    Ok(entries)
}
