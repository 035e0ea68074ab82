//! How fast rowlock is, on the databases that are at hand. Figures go to stdout, progress to stderr.

mod contender;
mod contest;
mod count;
mod cycles;
mod database;
mod dialect;
mod durability;
mod handover;
mod options;
mod report;
mod speak;
mod statistics;
mod waiting;
mod ways;

use clap::{Parser, Subcommand};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Measures rowlock. Servers come from POSTGRES_URL, MYSQL_URL and MARIADB_URL; each run makes a database of its own there and drops it.
#[derive(Parser)]
#[command(name = "rowlock-bench")]
struct Arguments {
    /// Shows events on stderr, such as `rowlock=debug` or `sqlx::query=debug`.
    #[arg(long, global = true, env = "ROWLOCK_BENCH_LOG")]
    log: Option<String>,
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// From the call of `release` to the return of the next holder's `acquire`, within a process and across processes.
    Handover(handover::Options),
    /// What many tasks that wait for a long-held key ask of the database.
    Waiting(waiting::Options),
    /// Acquire and release by tasks with a key each: rowlock, and what people would use instead.
    Cycles(cycles::Options),
    /// One process of `handover`.
    #[command(hide = true)]
    Contender(contender::Options),
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments = Arguments::parse();
    // Counting would slow down what is compared.
    let queries =
        count::Queries::install(arguments.log.as_deref(), !matches!(arguments.scenario, Scenario::Cycles(_)))?;
    match arguments.scenario {
        Scenario::Cycles(options) => cycles::run(&options).await,
        Scenario::Handover(options) => handover::run(&options, arguments.log.as_deref()).await,
        Scenario::Waiting(options) => waiting::run(&options, &queries).await,
        Scenario::Contender(options) => contender::run(options, queries).await,
    }
}
