//! Acquire and release by the locks of other crates, without contention.

use clap::Args;

use crate::{
    contest::{Contest, Entry},
    cycles::own_key,
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::{Rounds, url},
    report::{Report, Shown},
    speak::Speak,
    ways::{
        cycle,
        program::{CRATES, Program},
        rowlock::Rowlock,
    },
};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many tasks.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64])]
    tasks: Vec<usize>,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "cycles", base: "rowlock", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    let Some(program) = url(CRATES) else {
        println!("skipped, {CRATES} is not set");
        return Ok(());
    };
    println!("Acquire and release by the locks of other crates: medians of {} rounds.", options.rounds.rounds);
    durability::show_redis().await?;
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, &program, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(
    kind: Kind,
    server: &str,
    program: &str,
    options: &Options,
    report: &mut Report,
) -> Result<(), Error> {
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        for &tasks in &options.tasks {
            let rounds = &options.rounds;
            let entries = entries::<DB>(kind, site, program, tasks, rounds).await?;
            Contest { scenario: "crates", server: kind.name(), tasks, entries, rounds, wal: None }.run(report).await?;
        }
        Ok(())
    })
    .await
}

async fn entries<DB: Speak>(
    kind: Kind,
    site: &Site,
    program: &str,
    tasks: usize,
    rounds: &Rounds,
) -> Result<Vec<Entry>, Error> {
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    let rowlock = cycle(Rowlock::new(pool, true, PATIENCE)?, own_key("rowlock", tasks));
    let mut entries = vec![Entry::new("rowlock", 0, rowlock)];
    let mut enter = |name, server: &str| {
        if rounds.wants(name) {
            entries.push(Entry::new(name, 0, Program::of_crate(program, name, server)?));
        }
        Ok::<_, Error>(())
    };
    match kind {
        Kind::Postgres => {
            enter("distributed-lock-postgres", &site.url)?;
            enter("pg_lease", &site.url)?;
        }
        Kind::Mysql | Kind::Mariadb => enter("distributed-lock-mysql", &site.url)?,
        Kind::Sqlite => {}
    }
    if let Some(server) = url("REDIS_DURABLE_URL") {
        enter("rslock", &server)?;
    }
    Ok(entries)
}
