//! Keys that come once, such as a lock for each order, beside keys whose rows exist.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use clap::Args;

use crate::{
    contest::{Contender, Contest, Entry},
    database::{Kind, PATIENCE, Site, at_own_site, on, patient_pool},
    durability,
    error::Error,
    options::Rounds,
    report::{Report, Shown},
    speak::Speak,
    ways::{Pick, cycle, rowlock::Rowlock},
};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    rounds: Rounds,
    /// How many tasks.
    #[arg(long, default_value_t = 64)]
    tasks: usize,
    /// How many rows the table of new keys has at the end, at least.
    #[arg(long, default_value_t = 100_000)]
    rows: usize,
}

pub async fn run(options: &Options) -> Result<(), Error> {
    let shown = Shown { counted: "cycles", size: Some("rows"), base: "existing keys", ..Shown::default() };
    let mut report = Report::new(options.rounds.common.csv.as_deref(), shown)?;
    println!(
        "A new key in each cycle, while the table grows from nothing: medians of {} rounds, by its rows before them.",
        options.rounds.rounds
    );
    for (kind, server) in options.rounds.common.on.servers() {
        on!(kind, measure(kind, &server, options, &mut report))?;
    }
    Ok(())
}

/// Two databases on one server. The table of the first has few rows, which the planner knows; that
/// of the second begins empty, and is never analyzed by hand.
async fn measure<DB: Speak>(kind: Kind, server: &str, options: &Options, report: &mut Report) -> Result<(), Error> {
    let &Options { ref rounds, tasks, rows } = options;
    at_own_site::<DB>(server, async |few| {
        at_own_site::<DB>(server, async |growing| {
            durability::show::<DB>(kind, few).await?;
            let used = Arc::new(AtomicUsize::new(0));
            let count = used.clone();
            let existing = contender::<DB>(few, options, Box::new(|task| format!("task/{task}"))).await?;
            let next = Box::new(move |_| format!("order/{}", count.fetch_add(1, Ordering::Relaxed)));
            let new = contender::<DB>(growing, options, next).await?;
            existing.clone().round(tasks, rounds.warm_up).await?;
            DB::script(&patient_pool::<DB>(&few.url, 1).await?, DB::ANALYZE.into()).await?;
            report.head();
            loop {
                let size = used.load(Ordering::Relaxed);
                if size >= rows {
                    return Ok(());
                }
                let entry = |name, contender: &Arc<dyn Contender>| {
                    let (base, contender) = (("existing", size), contender.clone());
                    Entry { name, size, base, contender }
                };
                let entries = vec![entry("existing", &existing), entry("new", &new)];
                Contest { scenario: "once", server: kind.name(), tasks, entries, rounds, wal: None }
                    .run(report)
                    .await?;
            }
        })
        .await
    })
    .await
}

async fn contender<DB: Speak>(site: &Site, options: &Options, key: Pick) -> Result<Arc<dyn Contender>, Error> {
    let pool = patient_pool::<DB>(&site.url, options.rounds.connections).await?;
    Ok(cycle(Rowlock::new(pool, true, PATIENCE)?, key))
}
