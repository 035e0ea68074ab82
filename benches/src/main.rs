//! Benchmarks of rowlock and its alternatives, on the servers that are available. Figures go to
//! stdout, progress to stderr.
//!
//! `handover` measures tasks that wait for one key. `cycles`, `crates`, `refusals`, `deduct`,
//! `million`, `once`, `permits` and `functions` compare: all contenders run alternately in short
//! rounds on one server, whose settings are printed above the table, and medians of the rounds are
//! shown. `held` measures a process that holds many keys, `schedules` ticks, `scale` many
//! instances. `all` does all of that but `scale`; `plot` draws what `cycles` wrote to a file.

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod all;
mod chart;
mod contender;
mod contest;
mod crates;
mod cycles;
mod database;
mod deduct;
mod dialect;
mod durability;
mod error;
mod functions;
mod handover;
mod held;
mod holder;
mod million;
mod once;
mod options;
mod permits;
mod plot;
mod refusals;
mod renewals;
mod report;
mod scale;
mod schedules;
mod speak;
mod statistics;
mod ticker;
mod ways;

use clap::{Parser, Subcommand};

use crate::{error::Error, renewals::Renewals};

/// Measures rowlock and its alternatives.
///
/// Servers are read from variables; a server whose variable is not set is skipped, with a message:
///
/// POSTGRES_URL, MYSQL_URL, MARIADB_URL: each run creates a database of its own there and drops it.
///
/// REDIS_URL, REDIS_DURABLE_URL: a Redis that does not write through, and one with `appendfsync
/// always`; keys begin with `rowlock_bench/`.
///
/// ETCD_URL: http://HOST:PORT; keys begin with `rowlock_bench/`, leases end after half an hour.
///
/// SQLite's file is in TMPDIR, which should be on a disk.
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
    /// From the call of `release` to the return of the next holder's `acquire`, within a process
    /// and across processes.
    Handover(handover::Options),
    /// Acquire and release by tasks with a key each: rowlock and its alternatives.
    ///
    /// rowlock, rowlock-unbatched: with batching and without. article: its statements by hand,
    /// SELECT FOR UPDATE and UPDATE in a transaction, then UPDATE. single: one prepared guarded
    /// UPDATE, then another, of the columns that rowlock writes. advisory: the server's own locks
    /// of a connection. limit: two plain updates of a row of its own for each task. redis,
    /// redis-durable: SET NX PX, and a script. etcd: its lock, over gRPC.
    Cycles(cycles::Options),
    /// Acquire and release by the locks of other crates, by tasks with a key each.
    ///
    /// distributed-lock-postgres, distributed-lock-mysql: the advisory locks of a connection.
    /// pg_lease: a loop that starts, and ends at once. rslock: Redlock, of the Redis that
    /// REDIS_DURABLE_URL names. They are in the program that BENCH_CRATES names: it is built from
    /// benches/crates.
    Crates(crates::Options),
    /// Deductions from accounts under contention from many tasks; balances are checked at the end.
    ///
    /// rowlock: VersionedTable::deduct, with as many attempts as it takes. single: one UPDATE that
    /// deducts if the balance is sufficient. for-update: SELECT FOR UPDATE and UPDATE in a
    /// transaction.
    Deduct(deduct::Options),
    /// Many keys that are held, in a process of its own: connections, memory, and the statements
    /// that renew them.
    Held(held::Options),
    /// Tries for a key that another client holds, and what they write to PostgreSQL's log.
    ///
    /// Contenders as in `cycles`, except limit and etcd. For contenders that write nothing to that
    /// log the figure is what other work wrote at the same time.
    Refusals(refusals::Options),
    /// Acquire and release in a table with a thousand rows, and with a million.
    Million(million::Options),
    /// Acquire and release of keys that come once, while their table grows, and of keys whose rows
    /// exist.
    Once(once::Options),
    /// Acquire and release by tasks that share permits, and by tasks that read together.
    ///
    /// keys: task t has the key t modulo N. permits: a semaphore of N. redis-semaphore: one by that
    /// client for Node, in a folder that REDIS_SEMAPHORE names; the crates with a semaphore in
    /// Redis are first releases. one-key: all tasks have one key. readers: a read-write lock.
    Permits(permits::Options),
    /// Claims by the functions in SQL, and by the crate, by one task. Releases are not timed.
    ///
    /// Beside other load, many short rounds compare better than few long ones:
    /// `--rounds 200 --seconds 0.1`.
    Functions(functions::Options),
    /// Schedules: runs with nothing to do, idling, and starts beside kills.
    ///
    /// The machine runs the servers too, because a start is timed by its clock.
    Schedules(schedules::Options),
    /// Instances with pools of their own, as the simulation `tests/scale` has them.
    Scale(scale::Options),
    /// Every scenario above but `scale` with its default settings, one after the other.
    All(all::Options),
    /// Draws cycles per second over tasks, from the figures that `cycles --csv` wrote.
    Plot(plot::Options),
    /// The process of `held`.
    #[command(hide = true)]
    Holder(holder::Options),
    /// One process of `schedules`.
    #[command(hide = true)]
    Ticker(ticker::Options),
    /// One process of `handover`.
    #[command(hide = true)]
    Contender(contender::Options),
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let arguments = Arguments::parse();
    let counting = matches!(arguments.scenario, Scenario::Holder(_));
    let renewals = Renewals::install(arguments.log.as_deref(), counting)?;
    match arguments.scenario {
        Scenario::Handover(options) => handover::run(&options, arguments.log.as_deref()).await,
        Scenario::Cycles(options) => cycles::run(&options).await,
        Scenario::Crates(options) => crates::run(&options).await,
        Scenario::Deduct(options) => deduct::run(&options).await,
        Scenario::Held(options) => held::run(&options).await,
        Scenario::Refusals(options) => refusals::run(&options).await,
        Scenario::Million(options) => million::run(&options).await,
        Scenario::Once(options) => once::run(&options).await,
        Scenario::Permits(options) => permits::run(&options).await,
        Scenario::Functions(options) => functions::run(&options).await,
        Scenario::Schedules(options) => schedules::run(&options).await,
        Scenario::Scale(options) => scale::run(&options).await,
        Scenario::Ticker(options) => ticker::run(&options).await,
        Scenario::All(options) => all::run(&options, arguments.log.as_deref()).await,
        Scenario::Plot(options) => plot::run(&options),
        Scenario::Holder(options) => holder::run(&options, &renewals).await,
        Scenario::Contender(options) => contender::run(options).await,
    }
}
