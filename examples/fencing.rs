//! Why a lease alone does not protect resources outside the database, and how its token does.
//!
//!     cargo run --example fencing
//!
//! A worker checks that it holds the key, and is stopped (SIGSTOP) before it writes. Its lease
//! expires, and another worker takes over and writes. The first worker is then continued and sends
//! its write. A storage service that remembers the highest token refuses that write; a service that
//! does not lets it overwrite the newer one. docs/fencing.md describes the method.

#![allow(clippy::print_stdout)]

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    path::Path,
    process::Stdio,
    sync::Mutex,
    time::Duration,
};

use rowlock::LeaseLock;
use sqlx::{SqlitePool, sqlite::SqliteConnectOptions};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, Lines},
    net::TcpListener,
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const KEY: &str = "report";
const LEASE: Duration = Duration::from_secs(2);
/// How long any step may take before the example fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A resource outside the database: an object store, a device, another service.
struct Storage {
    checks_tokens: bool,
    objects: Mutex<HashMap<String, Object>>,
}

#[derive(Clone, Default, PartialEq, Debug)]
struct Object {
    text: String,
    /// The highest token that was presented for the object.
    token: i64,
}

impl Storage {
    /// Compares the tokens and stores the object in one step, so that no other write intervenes.
    fn put(&self, name: &str, text: &str, token: i64) -> String {
        let mut objects = self.objects.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let object = objects.entry(name.to_owned()).or_default();
        if self.checks_tokens && token < object.token {
            return format!("refused: token {token} is lower than {}", object.token);
        }
        *object = Object { text: text.to_owned(), token };
        format!("stored under token {token}")
    }

    fn get(&self, name: &str) -> Object {
        let objects = self.objects.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        objects.get(name).cloned().unwrap_or_default()
    }

    /// Serves one request per connection: name, token and text in one line. The reply ends the
    /// connection.
    async fn serve(&self, listener: TcpListener) -> Result<()> {
        loop {
            let (mut client, _) = listener.accept().await?;
            let mut request = String::new();
            client.read_to_string(&mut request).await?;
            let mut fields = request.splitn(3, '\t');
            let (Some(name), Some(token), Some(text)) = (fields.next(), fields.next(), fields.next()) else {
                return Err("a request of another kind".into());
            };
            client.write_all(self.put(name, text, token.parse()?).as_bytes()).await?;
        }
    }
}

/// Sends a write to the storage service, as a worker does.
fn put(storage: SocketAddr, name: &str, text: &str, token: i64) -> Result<String> {
    let mut connection = TcpStream::connect(storage)?;
    connection.write_all(format!("{name}\t{token}\t{text}").as_bytes())?;
    connection.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    Ok(answer)
}

async fn open(file: &Path) -> Result<SqlitePool> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    Ok(SqlitePool::connect_with(options.journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)).await?)
}

/// Runs a worker. Between its check and its write, each worker waits for a line of input; the first
/// one is stopped there.
async fn worker(file: &Path, storage: SocketAddr, name: &str) -> Result<()> {
    let lock = LeaseLock::builder(open(file).await?).label(name).build()?.lease(LEASE);
    let lease = lock.acquire(KEY, PATIENCE).await?;
    let token = lease.token().get();
    let from = lease.taken_over_from().map(|prior| format!(", taken over from {}", prior.label));
    println!("acquired the key under token {token}{}", from.unwrap_or_default());
    // The block cannot be cancelled. It does not block the runtime, which continues to renew the
    // lease.
    tokio::task::block_in_place(|| {
        println!("looked: held = {}", lease.is_held());
        BufReader::new(std::io::stdin()).read_line(&mut String::new())?;
        println!("wrote: {}", put(storage, KEY, &format!("written by {name}"), token)?);
        println!("looked again: held = {}", lease.is_held());
        Result::Ok(())
    })?;
    match lease.release().await {
        Ok(()) => println!("released the key"),
        Err(error) => println!("could not release: {error}"),
    }
    Ok(())
}

/// A worker in a process of its own, and its output.
struct Process {
    name: &'static str,
    child: Child,
    stdin: ChildStdin,
    lines: Lines<tokio::io::BufReader<ChildStdout>>,
}

impl Process {
    fn start(name: &'static str, file: &Path, storage: SocketAddr) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(file).args([&storage.to_string(), name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.kill_on_drop(true).spawn()?;
        let (stdin, stdout) = child.stdin.take().zip(child.stdout.take()).ok_or("no pipes")?;
        Ok(Self { name, child, stdin, lines: tokio::io::BufReader::new(stdout).lines() })
    }

    /// Prints the worker's output up to a line that begins with `begin`.
    async fn says(&mut self, begin: &str) -> Result<String> {
        while let Some(line) = timeout(PATIENCE, self.lines.next_line()).await?? {
            say(self.name, &line);
            if line.starts_with(begin) {
                return Ok(line);
            }
        }
        Err(format!("{} ended before it said {begin:?}", self.name).into())
    }

    async fn go_on(&mut self) -> Result<()> {
        Ok(self.stdin.write_all(b"go on\n").await?)
    }

    async fn signal(&self, signal: &str) -> Result<()> {
        let id = self.child.id().ok_or("it has ended")?.to_string();
        let sent = Command::new("kill").args([signal, &id]).status().await?;
        if sent.success() { Ok(()) } else { Err(format!("kill {signal} {id} failed").into()) }
    }

    /// Stops the worker outside of a renewal. A worker that is stopped during one keeps SQLite's
    /// file lock, and no other worker could take over; it is then continued, and stopped again.
    async fn stop(&self, pool: &SqlitePool) -> Result<()> {
        loop {
            self.signal("-STOP").await?;
            if sqlx::raw_sql("BEGIN IMMEDIATE; ROLLBACK").execute(pool).await.is_ok() {
                return Ok(());
            }
            self.signal("-CONT").await?;
        }
    }

    async fn ends_well(mut self, last: &str) -> Result<()> {
        self.says(last).await?;
        let status = timeout(PATIENCE, self.child.wait()).await??;
        if status.success() { Ok(()) } else { Err(format!("{}: {status}", self.name).into()) }
    }
}

/// Runs the sequence of events. Returns the text that the storage has at the end, and the reply
/// that the late write received.
async fn story(file: &Path, checks_tokens: bool) -> Result<(String, String)> {
    let pool = open(file).await?;
    let storage = Storage { checks_tokens, objects: Mutex::default() };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let played = async {
        let mut first = Process::start("first", file, address)?;
        first.says("looked: held = true").await?;
        timeout(PATIENCE, first.stop(&pool)).await??;
        say("", "-- first is stopped; its lease runs out --");
        let mut second = Process::start("second", file, address)?;
        second.says("looked: held = true").await?;
        second.go_on().await?;
        second.says("wrote: stored").await?;
        second.ends_well("released").await?;
        say("", "-- first is woken up --");
        first.go_on().await?;
        first.signal("-CONT").await?;
        let answer = first.says("wrote: ").await?;
        first.says("looked again: held = false").await?;
        first.ends_well("could not release").await?;
        let object = storage.get(KEY);
        say("storage", &format!("has what was {}", object.text));
        Ok((object.text, answer))
    };
    tokio::select! {
        played = played => played,
        failed = storage.serve(listener) => Err(failed.err().unwrap_or_else(|| "the storage service ended".into())),
    }
}

fn say(who: &str, what: &str) {
    println!("  {who:<8}  {what}");
}

async fn show() -> Result<()> {
    if !cfg!(unix) {
        return Err("this stops a process with SIGSTOP, which needs Unix".into());
    }
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("locks.db");
    rowlock::migrate(&open(&file).await?).await?;

    println!("A storage service that refuses a token lower than the highest it has seen:");
    let (left, answer) = story(&file, true).await?;
    if left != "written by second" || !answer.contains("refused") {
        return Err("the late write should have been refused".into());
    }
    println!("  => the late write was refused, the newer one stands.\n");

    println!("The same with a service that does not look at tokens:");
    let (left, answer) = story(&file, false).await?;
    if left != "written by first" || !answer.contains("stored") {
        return Err("without the check, the late write should have overwritten the newer one".into());
    }
    println!("  => the late write overwrote the newer one, though the lock did all it could.");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1..) {
        Some([file, storage, name]) => worker(Path::new(file), storage.parse()?, name).await,
        _ => show().await,
    }
}
