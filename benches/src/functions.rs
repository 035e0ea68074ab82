//! A claim by the function in SQL, beside the crate's own, by one task.

use clap::Args;

use crate::{
    contest::{Contest, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::Rounds,
    report::{Report, Shown},
    speak::Speak,
    ways::{claim, functions::Functions, rowlock::Rowlock},
};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "claims", base: "rowlock", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!("Claims by one task; the releases are not timed: medians of {} rounds.", options.rounds.rounds);
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    let Some(statements) = DB::FUNCTIONS else {
        println!("{}: skipped, it has no stored functions", kind.name());
        return Ok(());
    };
    at_own_site::<DB>(server, async |site| {
        durability::show::<DB>(kind, site).await?;
        report.head();
        let (entries, rounds) = (entries::<DB>(site, statements, &options.rounds).await?, &options.rounds);
        Contest { scenario: "functions", server: kind.name(), tasks: 1, entries, rounds, wal: None }.run(report).await
    })
    .await
}

async fn entries<DB: Speak>(
    site: &Site,
    statements: (&'static str, &'static str),
    rounds: &Rounds,
) -> Result<Vec<Entry>, Error> {
    let pool = patient_pool::<DB>(&site.url, 1).await?;
    rowlock::migration::migrate_functions(&pool).await?;
    let mut entries = Vec::new();
    if rounds.wants("rowlock") {
        entries.push(Entry::new("rowlock", 0, claim(Rowlock::new(pool.clone(), true, PATIENCE)?, "rowlock")));
    }
    if rounds.wants("functions") {
        entries.push(Entry::new("functions", 0, claim(Functions::new(pool, statements), "functions")));
    }
    Ok(entries)
}
