//! A process that runs the schedules, fails now and then, and records what its work does.

use std::{io::Write as _, process::Stdio, sync::Arc, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{Schedules, Tick};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::sleep,
};

use crate::{
    record::now,
    ticks::{
        record::{Entry, How, Step},
        terms::{LEASE, Terms},
    },
    worker::watch,
};

const JOB: &str = "ROWLOCK_TICKS";
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(1);

/// The application's table: a line for each success.
pub async fn tables<DB: TestDatabase>(db: &TestDb<DB>) {
    db.execute("CREATE TABLE work_done (line varchar(100) NOT NULL)").await;
}

pub fn was_asked_for() -> bool {
    std::env::var_os(JOB).is_some()
}

/// Starts this program again as a worker, with its database at this URL.
pub fn start<DB: TestDatabase>(db: &TestDb<DB>, url: &str, number: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(JOB, db.server.name).env("JOB_URL", url).env("JOB_NUMBER", number.to_string());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

pub fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match var(JOB).as_str() {
            "sqlite" => work::<sqlx::Sqlite>().await,
            "postgres" => work::<sqlx::Postgres>().await,
            _ => work::<sqlx::MySql>().await,
        }
    });
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// Runs the schedules until the orders end. Without the order to quit, the process that gave them
/// has died.
async fn work<DB: TestDatabase>() {
    let number: usize = var("JOB_NUMBER").parse().unwrap();
    let options = PoolOptions::new().max_connections(3).test_before_acquire(false).acquire_timeout(LIMIT);
    let pool: Pool<DB> = options.connect_lazy(&var("JOB_URL")).unwrap();
    let schedules = Schedules::new(pool.clone()).lease(LEASE).unwrap().label(&number.to_string()).unwrap();
    let mut schedules = schedules.time_limit(LIMIT).unwrap();
    for terms in Terms::all() {
        let (pool, terms) = (pool.clone(), Arc::new(terms));
        schedules = schedules.on(terms.clone().schedule(), move |tick| run(pool.clone(), terms.clone(), number, tick));
    }
    tokio::spawn(watch(move |since| tell(number, Step::HeldUp { since })));
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    // The server may be busy, or its connections may be cut at this moment.
    let running = loop {
        match schedules.start().await {
            Ok(running) => break running,
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    };
    match orders.next_line().await {
        Ok(Some(order)) if order == "quit" => running.shutdown(PATIENCE).await,
        _ => std::process::exit(1),
    };
}

/// Writes a whole line at a time, so that no line is torn when the process is killed.
fn tell(process: usize, step: Step) {
    let line = format!("{}\n", Entry { at: now(), process, step });
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
}

/// Records that the work was dropped, if it does not say how it ended.
struct Telling {
    process: usize,
    name: String,
    token: i64,
    how: How,
}

impl Drop for Telling {
    fn drop(&mut self) {
        let (name, token, how) = (std::mem::take(&mut self.name), self.token, self.how);
        tell(self.process, Step::End { name, token, how });
    }
}

async fn run<DB: TestDatabase>(
    pool: Pool<DB>,
    terms: Arc<Terms>,
    process: usize,
    tick: Tick<DB>,
) -> Result<(), sqlx::Error> {
    let (name, slot, token) = (tick.name().to_owned(), tick.slot().timestamp(), tick.token().get());
    tell(process, Step::Run { name: name.clone(), slot, attempt: tick.attempt(), token });
    let mut telling = Telling { process, name, token, how: How::Dropped };
    let done = effect(&pool, &terms, process, &tick).await;
    telling.how = if done.is_ok() { How::Succeeded } else { How::Failed };
    done
}

/// The work: some of it is longer than a lease, and some fails.
async fn effect<DB: TestDatabase>(
    pool: &Pool<DB>,
    terms: &Terms,
    process: usize,
    tick: &Tick<DB>,
) -> Result<(), sqlx::Error> {
    let millis = if fastrand::u8(..100) < 2 { 2_000 } else { fastrand::u64(5..100) };
    sleep(Duration::from_millis(millis)).await;
    if fastrand::u8(..100) < 5 {
        return Err(sqlx::Error::Protocol("the work fails".into()));
    }
    if !terms.in_transaction {
        return Ok(());
    }
    let (name, token, slot) = (&terms.name, tick.token().get(), tick.slot().timestamp());
    let mut tx = pool.begin().await?;
    DB::execute_on(&mut tx, &format!("INSERT INTO work_done VALUES ('{name} {token} {slot}')")).await?;
    tick.finish_in(&mut tx).await.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
    tell(process, Step::Commits { name: name.clone(), token });
    tx.commit().await
}
