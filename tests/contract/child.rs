//! The jobs of the processes that tests start: this program again, with the job in an environment
//! variable.

use std::{io::Write as _, path::PathBuf, process::Stdio, time::Duration};

use harness::{TestDatabase, TestDb, pool};
use rowlock::{Attempt, LeaseLock};
use tokio::{
    process::{Child, Command},
    time::sleep,
};

use crate::{
    article::{Answer, Program},
    bank, blocked, elections, ticks_commits, ticks_exclusive, ticks_raced, waiters,
};

const JOB: &str = "ROWLOCK_TEST_JOB";

/// The lease of the process that is killed.
pub const VICTIMS_LEASE: Duration = Duration::from_secs(3);

pub fn was_asked_for() -> bool {
    std::env::var_os(JOB).is_some()
}

/// Starts this program again, to do one job on the site's database.
pub fn start<DB: TestDatabase>(db: &TestDb<DB>, job: &str, key: &str, file: &std::path::Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .env(JOB, job)
        .env("JOB_KEY", key)
        .env("JOB_URL", &db.url)
        .env("JOB_SERVER", db.server.name)
        .env("JOB_FILE", file);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap()
}

pub fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        match var("JOB_SERVER").as_str() {
            "sqlite" => work::<sqlx::Sqlite>().await,
            "postgres" => work::<sqlx::Postgres>().await,
            _ => work::<sqlx::MySql>().await,
        }
    });
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap()
}

pub fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).unwrap();
}

async fn work<DB: TestDatabase>() {
    let pool = pool::<DB>(&var("JOB_URL"), 2).await;
    let lock = LeaseLock::new(pool.clone());
    let (key, file) = (var("JOB_KEY"), PathBuf::from(var("JOB_FILE")));
    match var(JOB).as_str() {
        "commit" => ticks_commits::commit(pool).await,
        "count" => count(&lock, &key, &file).await,
        "count as the article" => count_as_the_article(pool, &key, &file).await,
        "create" => create(&lock, &key, &file).await,
        "deduct" => take_ten(&pool, &key).await,
        "hold" => hold(pool, &key).await,
        "hold behind a hook" => blocked::hold(pool, &var("JOB_URL"), true).await,
        "hold behind a pipe" => blocked::hold(pool, &var("JOB_URL"), false).await,
        "migrate" => rowlock::migrate(&pool).await.unwrap(),
        "undo" => drop(rowlock::migration::Migration::new(pool).undo().await.unwrap()),
        "stall" => blocked::stall(pool, &var("JOB_URL")).await,
        "hold a tick" => ticks_exclusive::hold(pool).await,
        "lead" => elections::lead(pool, &key).await,
        "tick" => ticks_raced::work(pool).await,
        "wait" => waiters::work(lock, &key).await,
        "wait in order" => waiters::work(lock.fair(true), &key).await,
        other => panic!("no job {other}"),
    }
}

/// Adds one to a number in a file, ten times. Only the lock excludes other processes.
async fn count<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str, file: &std::path::Path) {
    for _ in 0..10 {
        let lease = loop {
            match lock.try_acquire(key).await.unwrap() {
                Attempt::Acquired(lease) => break lease,
                Attempt::Refused(_) => pause().await,
            }
        };
        add_one(file).await;
        lease.release().await.unwrap();
    }
}

/// Deducts one from an account, ten times, under the strategy of that name.
async fn take_ten<DB: TestDatabase>(pool: &sqlx::Pool<DB>, account: &str) {
    let (_, lock) = bank::locks(pool).into_iter().find(|(name, _)| *name == account).unwrap();
    for _ in 0..10 {
        bank::deduct(&*lock, account, 1).await.unwrap();
    }
}

/// Does the same as `count`, with the statements of the article's program, which does not know this
/// crate.
async fn count_as_the_article<DB: TestDatabase>(pool: sqlx::Pool<DB>, key: &str, file: &std::path::Path) {
    let program = Program::new(pool, &var("JOB_SERVER"), chrono::TimeDelta::zero()).await;
    for _ in 0..10 {
        while program.take(key).await != Answer::Taken {
            pause().await;
        }
        add_one(file).await;
        program.give(key, "S").await;
    }
}

/// Between two tries. Processes that pause for the same time would try at the same moment.
async fn pause() {
    sleep(Duration::from_millis(fastrand::u64(5..20))).await;
}

async fn add_one(file: &std::path::Path) {
    let number: u64 = std::fs::read_to_string(file).unwrap().parse().unwrap();
    sleep(Duration::from_millis(2)).await;
    std::fs::write(file, (number + 1).to_string()).unwrap();
}

/// Waits for a file as the start signal, then tries to claim a key that has no row yet.
async fn create<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str, start: &std::path::Path) {
    say("ready");
    while !start.exists() {
        sleep(Duration::from_millis(1)).await;
    }
    match lock.try_acquire(key).await.unwrap() {
        Attempt::Acquired(lease) => {
            say("acquired");
            sleep(Duration::from_secs(3600)).await;
            drop(lease);
        }
        Attempt::Refused(refusal) => say(refusal.reason),
    }
}

/// Claims a key with a short lease and holds it until the process is killed.
async fn hold<DB: TestDatabase>(pool: sqlx::Pool<DB>, key: &str) {
    let lock = LeaseLock::builder(pool).label("victim").build().unwrap().lease(VICTIMS_LEASE);
    let lease = lock.try_acquire(key).await.unwrap().acquired().unwrap();
    say(lease.token());
    lease.lost().await;
}
