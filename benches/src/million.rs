//! The effect of the number of rows in the table, with one task, so that there is no contention.

use std::sync::Arc;

use clap::Args;

use crate::{
    contest::{Contest, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::Rounds,
    report::{Report, Shown},
    speak::{Speak, fill},
    ways::{Pick, cycle, rowlock::Rowlock, single::Single},
};

/// How many rows a small table has.
const FEW: usize = 1000;

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many rows a large table has.
    #[arg(long, default_value_t = 1_000_000)]
    many: usize,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "cycles", size: Some("rows"), base: "few rows", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!("Acquire and release of any of so many rows: medians of {} rounds.", options.rounds.rounds);
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

/// Two databases on one server: one with few rows, one with many.
async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    at_own_site::<DB>(server, async |few| {
        at_own_site::<DB>(server, async |many| {
            durability::show::<DB>(kind, few).await?;
            let rounds = &options.rounds;
            let mut entries = Vec::new();
            for (site, rows) in [(few, FEW), (many, options.many)] {
                enter::<DB>(kind, site, rows, rounds, &mut entries).await?;
            }
            report.head();
            Contest { scenario: "million", server: kind.name(), tasks: 1, entries, rounds, wal: None }.run(report).await
        })
        .await
    })
    .await
}

/// Fills the table, and adds the contenders that work on it.
async fn enter<DB: Speak>(
    kind: Kind,
    site: &Site,
    rows: usize,
    rounds: &Rounds,
    entries: &mut Vec<Entry>,
) -> Result<(), Error> {
    eprintln!("million {}: filling in {rows} rows", kind.name());
    let pool = patient_pool::<DB>(&site.url, rounds.connections).await?;
    fill(&pool, "t_resource_lock (key_resource)", (0..rows).map(|row| format!("('{}')", key(row)))).await?;
    DB::script(&pool, DB::ANALYZE.into()).await?;
    let any = || -> Pick { Box::new(move |_| key(fastrand::usize(..rows))) };
    let mut enter = |name, contender: Arc<_>| {
        entries.push(Entry { name, size: rows, base: (name, FEW), contender });
    };
    if rounds.wants("rowlock") {
        enter("rowlock", cycle(Rowlock::new(pool.clone(), true, PATIENCE)?, any()));
    }
    if rounds.wants("single") {
        enter("single", cycle(Single(pool), any()));
    }
    Ok(())
}

fn key(row: usize) -> String {
    format!("row/{row}")
}
