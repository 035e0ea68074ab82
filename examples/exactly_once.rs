//! The work of a tick commits together with its tick. One process is killed before its transaction,
//! and one right after the commit, before its run has ended. The tick has its effect once.
//!
//!     cargo run --example exactly_once

#![allow(clippy::print_stdout)]

use std::{path::Path, process::Stdio, time::Duration};

use rowlock::{RunError, Schedule, Schedules, Tick, admin::RunStatus};
use sqlx::{Sqlite, SqlitePool};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
};

type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

const PERIOD: Duration = Duration::from_secs(2);
const LEASE: Duration = Duration::from_secs(1);

/// docs/jobs.md shows this function.
async fn pay_interest(tick: Tick<Sqlite>, pool: SqlitePool) -> Result<(), RunError<sqlx::Error>> {
    let paid = tick.transaction(&pool, async |mut tx| {
        sqlx::query("UPDATE account SET balance = balance + 1").execute(&mut *tx).await?;
        Ok(())
    });
    paid.await // fails if another instance has the tick
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [file, node, stays] => instance(Path::new(file), node, stays).await,
        _ => show().await,
    }
}

async fn open(file: &Path) -> Result<SqlitePool> {
    Ok(SqlitePool::connect(&format!("sqlite://{}?mode=rwc", file.display())).await?)
}

/// Runs ticks. `stays` says where the work goes on for ever.
async fn instance(file: &Path, node: &str, stays: &str) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let pool = open(file).await?;
    let (accounts, stays) = (pool.clone(), stays.to_owned());
    let schedules = Schedules::new(pool).label(node).lease(LEASE);
    let schedules = schedules.on(Schedule::every("interest", PERIOD), move |tick: Tick<Sqlite>| {
        let (accounts, stays) = (accounts.clone(), stays.clone());
        async move {
            println!("runs\ttick {}, attempt {}", tick.slot().format("%H:%M:%S"), tick.attempt());
            if stays == "before" {
                std::future::pending().await
            }
            pay_interest(tick, accounts).await?;
            println!("paid\t");
            if stays == "after" {
                std::future::pending().await
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }
    });
    let running = schedules.start().await?;
    terminate.recv().await;
    running.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

/// The parent's side of an instance.
struct Node {
    name: &'static str,
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Node {
    fn start(file: &Path, name: &'static str, stays: &str) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut process = command.arg(file).args([name, stays]).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        Ok(Self { name, process, lines })
    }

    /// Prints what the instance says, up to a line of this kind.
    async fn until(&mut self, kind: &str) -> Result<()> {
        loop {
            let line = self.lines.next_line().await?.ok_or("the instance has ended")?;
            let (what, detail) = line.split_once('\t').unwrap_or((&line, ""));
            println!("{}  {what:<6}  {detail}", self.name);
            if what == kind {
                return Ok(());
            }
        }
    }
}

async fn show() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("bank.db");
    let pool = open(&file).await?;
    rowlock::migrate(&pool).await?;
    sqlx::raw_sql("CREATE TABLE account (balance); INSERT INTO account VALUES (0)").execute(&pool).await?;

    for (name, stays, last) in [("node-1", "before", "runs"), ("node-2", "after", "paid")] {
        let mut node = Node::start(&file, name, stays)?;
        node.until(last).await?;
        node.process.kill().await?;
        println!("{name}  killed  {stays} its transaction");
    }
    let mut node = Node::start(&file, "node-3", "nowhere")?;
    node.until("paid").await?;
    let id = node.process.id().ok_or("it has ended")?.to_string();
    Command::new("kill").arg(id).status().await?;
    node.process.wait().await?;

    let balance: i64 = sqlx::query_scalar("SELECT balance FROM account").fetch_one(&pool).await?;
    let runs = Schedules::new(pool).history("interest", 100).await?;
    let succeeded = runs.iter().filter(|run| run.status == RunStatus::Succeeded).count();
    println!("\n{} runs, {succeeded} ticks that succeeded, a balance of {balance}", runs.len());
    if usize::try_from(balance)? == succeeded { Ok(()) } else { Err("a tick has not had its effect once".into()) }
}
