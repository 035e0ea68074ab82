//! One job on five instances: which instance runs it, which are refused and why, and which takes
//! over when the running one is killed.
//!
//!     cargo run --example scheduled_job
//!
//! The instances are processes (this program, started again) on one SQLite file. With a server, the
//! code is the same with another pool.

#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use rowlock::{Attempt, Grant, LeaseLock, ResourceLockExt, RunOutcome, Status};
use sqlx::{Sqlite, SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::mpsc,
    time::sleep,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const KEY: &str = "nightly-report";
/// The job ticks every 5 s here. Half of that prevents a second run, and never refuses a tick that
/// comes early.
const ONCE_PER: Duration = Duration::from_millis(2500);
/// A killed instance is replaced after this time at most.
const LEASE: Duration = Duration::from_secs(2);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1..) {
        Some([file, name, work_millis, tries]) => instance(Path::new(file), name, work_millis.parse()?, tries).await,
        _ => show().await,
    }
}

async fn open(file: &Path) -> Result<SqlitePool> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    let pool = SqlitePool::connect_with(options.journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)).await?;
    rowlock::migrate(&pool).await?;
    Ok(pool)
}

/// Runs an instance at one tick of its schedule.
async fn instance(file: &Path, name: &str, work_millis: u64, tries: &str) -> Result<()> {
    let lock = LeaseLock::new(open(file).await?).label(name)?.lease(LEASE)?.min_interval(ONCE_PER)?;
    let work = async |lease: &Grant<Sqlite>| {
        let from =
            lease.taken_over_from().map(|prior| format!("taken over from {} (token {})", prior.label, prior.token));
        say("runs", lease.token(), from.as_deref().unwrap_or_default());
        sleep(Duration::from_millis(work_millis)).await;
        Ok::<_, String>(lease.token())
    };
    loop {
        match lock.run(KEY, work).await? {
            RunOutcome::Ended { result: Ok(token), recorded } => {
                recorded?;
                say("done", token, "recorded as S");
            }
            RunOutcome::Ended { result: Err(error), .. } => say("failed", "", &error),
            RunOutcome::Lost(claim) => say("lost", claim.token, "work cancelled"),
            RunOutcome::Refused(refusal) if tries == "once" => {
                let until = refusal.until.map(|until| format!(" until {}", until.format("%H:%M:%S%.3f")));
                say("refused", "", &format!("{}, by {}{}", refusal.reason, refusal.by, until.unwrap_or_default()));
            }
            RunOutcome::Refused(refusal) => {
                sleep(refusal.retry_after.unwrap_or(LEASE).min(Duration::from_millis(100))).await;
                continue;
            }
        }
        return Ok(());
    }
}

/// Prints one line for the parent's table.
fn say(what: &str, token: impl std::fmt::Display, detail: &str) {
    println!("{what}\t{token}\t{detail}");
}

/// The parent process: it starts the instances, kills one, and prints their output.
struct Stage<'a> {
    file: &'a Path,
    started: Instant,
    sender: mpsc::UnboundedSender<(String, String)>,
    lines: mpsc::UnboundedReceiver<(String, String)>,
}

async fn show() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("locks.db");
    let pool = open(&file).await?;
    let (sender, lines) = mpsc::unbounded_channel();
    let mut stage = Stage { file: &file, started: Instant::now(), sender, lines };
    println!("{:>7}  {:<8}  {:<8}  {:<17}  why", "ms", "instance", "what", "token");

    heading("The schedule ticks on four instances at once: one runs the job.");
    let mut tick: Vec<Child> = Vec::new();
    for name in ["node-1", "node-2", "node-3", "node-4"] {
        tick.push(stage.start(name, 500, "once")?);
    }
    stage.until("done").await;
    stage.wait(&mut tick).await?;

    heading("A fifth one ticks a moment later: the window refuses it.");
    let mut late = vec![stage.start("node-5", 500, "once")?];
    stage.wait(&mut late).await?;
    sleep(ONCE_PER).await;

    heading("The next tick. The instance that runs the job is killed in the middle of it (SIGKILL).");
    let mut victim = stage.start("node-1", 60_000, "once")?;
    stage.until("runs").await;
    let mut tick = vec![stage.start("node-2", 500, "once")?, stage.start("node-3", 500, "once")?];
    stage.wait(&mut tick).await?;
    victim.kill().await?;
    stage.print("node-1", "killed\t\tno good-bye: its lease runs out");

    heading("Another one asks until it may: it takes over when the dead one's lease ends.");
    let mut successor = vec![stage.start("node-4", 500, "until it may")?];
    stage.until("done").await;
    stage.wait(&mut successor).await?;

    heading("And what the row says in the end, to anybody who asks:");
    let Attempt::Refused(refusal) = LeaseLock::new(pool).min_interval(ONCE_PER)?.try_acquire(KEY).await? else {
        return Err("the window should have refused this".into());
    };
    println!("         {refusal}  (the last run ended with {})", Status::Succeeded.letter());
    Ok(())
}

fn heading(text: &str) {
    println!("\n{text}");
}

impl Stage<'_> {
    fn start(&self, name: &str, work_millis: u64, tries: &str) -> Result<Child> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(self.file).args([name, &work_millis.to_string(), tries]);
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let (name, sender) = (name.to_owned(), self.sender.clone());
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let _ = sender.send((name.clone(), line));
            }
        });
        Ok(child)
    }

    /// Prints lines up to one of this kind.
    async fn until(&mut self, kind: &str) {
        while let Some((name, line)) = self.lines.recv().await {
            self.print(&name, &line);
            if line.starts_with(kind) {
                break;
            }
        }
    }

    /// Waits for the processes to end, and prints the rest of their output.
    async fn wait(&mut self, children: &mut [Child]) -> Result<()> {
        for child in children {
            if !child.wait().await?.success() {
                return Err("an instance failed".into());
            }
        }
        // Their last lines may still be in the pipe.
        while let Ok(Some((name, line))) = tokio::time::timeout(Duration::from_millis(100), self.lines.recv()).await {
            self.print(&name, &line);
        }
        Ok(())
    }

    fn print(&self, name: &str, line: &str) {
        let mut fields = line.split('\t');
        let mut next = || fields.next().unwrap_or_default();
        let (what, token, detail) = (next(), next(), next());
        println!("{:>7}  {name:<8}  {what:<8}  {token:<17}  {detail}", self.started.elapsed().as_millis());
    }
}
