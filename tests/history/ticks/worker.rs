//! A process that runs the schedules, fails now and then, and records what its work does.

use std::{io::Write as _, process::Stdio, sync::Arc, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{Schedules, Tick, jobs::Running};
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
        terms::{LEASE, POLL, Terms},
    },
    worker::watch,
};

const JOB: &str = "ROWLOCK_TICKS";
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(1);
/// How long a deploy waits for the runs of the version before.
const DEPLOY: Duration = Duration::from_millis(300);
/// Longer than a lease.
const LONG: Duration = Duration::from_secs(2);

/// The application's table: a line for each success.
pub async fn tables<DB: TestDatabase>(db: &TestDb<DB>) {
    db.execute("CREATE TABLE work_done (line varchar(100) NOT NULL)").await;
}

pub fn was_asked_for() -> bool {
    std::env::var_os(JOB).is_some()
}

/// Starts this program again as a worker of this version, with its database at this URL. `session`
/// is executed on each new connection.
pub fn start<DB: TestDatabase>(db: &TestDb<DB>, url: &str, session: &str, number: usize, version: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(JOB, db.server.name).env("JOB_URL", url).env("JOB_SESSION", session);
    command.env("JOB_NUMBER", number.to_string()).env("JOB_VERSION", version.to_string());
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

/// A pool whose sessions begin with this statement.
pub fn pool_with<DB: TestDatabase>(url: &str, connections: u32, session: String) -> Pool<DB> {
    let options = PoolOptions::new().max_connections(connections).test_before_acquire(false).acquire_timeout(LIMIT);
    let options = options.after_connect(move |conn, _| {
        let session = session.clone();
        Box::pin(async move {
            match session.as_str() {
                "" => Ok(()),
                session => DB::execute_on(conn, session).await.map(drop),
            }
        })
    });
    options.connect_lazy(url).unwrap()
}

/// Runs the schedules until the orders end. Without the order to quit, the process that gave them
/// has died.
async fn work<DB: TestDatabase>() {
    let number: usize = var("JOB_NUMBER").parse().unwrap();
    let pool = pool_with::<DB>(&var("JOB_URL"), 3, var("JOB_SESSION"));
    tokio::spawn(watch(move |since| tell(number, Step::HeldUp { since })));
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let mut running = deploy(&pool, number, var("JOB_VERSION").parse().unwrap()).await;
    while let Ok(Some(order)) = orders.next_line().await {
        match order.strip_prefix("deploy ") {
            Some(version) => {
                tell(number, Step::Leaves);
                running.shutdown(DEPLOY).await;
                running = deploy(&pool, number, version.parse().unwrap()).await;
            }
            None => {
                tell(number, Step::Leaves);
                running.shutdown(PATIENCE).await;
                return;
            }
        }
    }
    std::process::exit(1);
}

async fn deploy<DB: TestDatabase>(pool: &Pool<DB>, number: usize, version: u64) -> Running {
    let schedules = Schedules::new(pool.clone()).lease(LEASE).label(&number.to_string());
    let mut schedules = schedules.time_limit(LIMIT).poll_interval(POLL);
    for terms in Terms::all() {
        let (pool, terms) = (pool.clone(), Arc::new(terms));
        schedules = schedules.on(terms.schedule(version), move |tick| {
            let work = Work { pool: pool.clone(), terms: terms.clone(), process: number, version, tick };
            work.run()
        });
    }
    tell(number, Step::Starts { version });
    // The server may be busy, or its connections may be cut at this moment.
    loop {
        match schedules.start().await {
            Ok(running) => {
                tell(number, Step::Started { version });
                return running;
            }
            Err(_) => sleep(Duration::from_millis(50)).await,
        }
    }
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

type Done = Result<(), sqlx::Error>;

/// The work of one run.
struct Work<DB: TestDatabase> {
    pool: Pool<DB>,
    terms: Arc<Terms>,
    process: usize,
    version: u64,
    tick: Tick<DB>,
}

impl<DB: TestDatabase> Work<DB> {
    /// Some work is done by a task, which is not dropped with it: the task ends when it is told.
    async fn run(self) -> Done {
        let (slot, attempt, version) = (self.tick.slot().timestamp_micros(), self.tick.attempt(), self.version);
        let (name, token) = (self.tick.name().to_owned(), self.tick.token().get());
        tell(self.process, Step::Run { name: name.clone(), slot, attempt, token, version });
        let telling = Telling { process: self.process, name: name.clone(), token, how: How::Dropped };
        let (over, process) = (self.tick.cancellation_token(), self.process);
        tokio::spawn(async move {
            over.cancelled().await;
            tell(process, Step::Told { name, token });
        });
        if fastrand::u8(..4) > 0 {
            return self.record(telling).await;
        }
        let over = self.tick.cancellation_token();
        let told = async move { over.run_until_cancelled_owned(self.record(telling)).await };
        tokio::spawn(told).await.unwrap().unwrap_or_else(|| failure("told to stop"))
    }

    async fn record(self, mut telling: Telling) -> Done {
        let done = self.work().await;
        telling.how = if done.is_ok() { How::Succeeded } else { How::Failed };
        done
    }

    /// Some work is longer than a lease, and some fails. Triggered runs are longer, and fail more
    /// often.
    async fn work(&self) -> Done {
        let (most, fails) = if self.tick.is_triggered() { (800, 30) } else { (100, 5) };
        let long = fastrand::u8(..100) < 2;
        sleep(if long { LONG } else { Duration::from_millis(fastrand::u64(5..most)) }).await;
        if fastrand::u8(..100) < fails {
            return failure("the work fails");
        }
        if self.terms.in_transaction { self.finish().await } else { Ok(()) }
    }

    /// Ends the tick in the transaction of its effect. Some of these transactions are rolled back,
    /// and the work goes on for longer than a lease.
    async fn finish(&self) -> Done {
        let (name, token, slot) = (&self.terms.name, self.tick.token().get(), self.tick.slot());
        let line = format!("{name} {token} {}.{:06}", slot.timestamp(), slot.timestamp_subsec_micros());
        let mut tx = self.pool.begin().await?;
        DB::execute_on(&mut tx, &format!("INSERT INTO work_done VALUES ('{line}')")).await?;
        self.tick.finish_in(&mut tx).await.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
        if fastrand::u8(..100) < 5 {
            tx.rollback().await?;
            sleep(LONG).await;
            return failure("the work was rolled back");
        }
        tell(self.process, Step::Commits { name: name.clone(), token });
        let committed = tx.commit().await;
        tell(self.process, Step::Committed { name: name.clone(), token });
        committed
    }
}

fn failure(text: &str) -> Done {
    Err(sqlx::Error::Protocol(text.into()))
}
