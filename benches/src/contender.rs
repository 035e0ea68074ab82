//! One process of `handover`: tasks that ask for one key repeatedly, and report on stdout when they
//! acquired and released it.
//!
//! It reads commands on stdin: `go` and `granted TOKEN` (from any process). The end of the input
//! stops it.

use std::{sync::Arc, time::Duration};

use clap::Args;
use rowlock::LeaseLock;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, stdin},
    sync::watch,
    task::JoinSet,
    time::sleep,
};
use tokio_util::sync::CancellationToken;

use crate::{
    database::{Bench, Kind, on, pool},
    error::Error,
    statistics::now,
};

/// The database's URL. It is not an argument, because every user of the machine can read a
/// process's arguments.
pub const URL: &str = "ROWLOCK_BENCH_URL";

#[derive(Args)]
pub struct Options {
    #[arg(long)]
    database: Kind,
    #[arg(long, env = URL, hide_env_values = true)]
    url: String,
    #[arg(long)]
    key: String,
    #[arg(long)]
    tasks: usize,
    #[arg(long)]
    hold_ms: u64,
    #[arg(long)]
    fair: bool,
}

/// The reports of a contender, one per line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    Ready,
    Granted {
        token: i64,
        asked: i64,
        acquired: i64,
    },
    Released {
        token: i64,
        at: i64,
    },
    /// The task stops, and has asked since then without acquiring the key.
    Waiting {
        asked: i64,
    },
}

/// Tells the process that started this one, in one line.
pub fn tell(word: &impl Serialize) -> Result<(), Error> {
    println!("{}", serde_json::to_string(word)?);
    Ok(())
}

/// What the tasks of a process share.
struct Contest {
    key: String,
    hold: Duration,
    stop: CancellationToken,
    /// The highest token that was granted to any process.
    granted: watch::Sender<i64>,
}

pub async fn run(options: Options) -> Result<(), Error> {
    on!(options.database, contend(&options))
}

async fn contend<DB: Bench>(options: &Options) -> Result<(), Error> {
    let lock = LeaseLock::new(pool::<DB>(&options.url, 10).await?).fair(options.fair);
    let hold = Duration::from_millis(options.hold_ms);
    let contest = Arc::new(Contest {
        key: options.key.clone(),
        hold,
        stop: CancellationToken::new(),
        granted: watch::Sender::new(0),
    });
    let mut tasks = JoinSet::new();
    tell(&Word::Ready)?;
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        match line.split_once(' ') {
            Some((_, token)) => {
                contest.granted.send_replace(token.parse()?);
            }
            None if line == "go" => {
                for _ in 0..options.tasks {
                    tasks.spawn(ask_again_and_again(lock.clone(), contest.clone()));
                }
            }
            None => break,
        }
    }
    contest.stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    lock.shutdown(Duration::from_secs(60)).await;
    Ok(())
}

async fn ask_again_and_again<DB: Bench>(lock: LeaseLock<DB>, contest: Arc<Contest>) -> Result<(), Error> {
    let mut granted = contest.granted.subscribe();
    loop {
        let asked = now();
        let attempt = tokio::select! {
            attempt = lock.acquire(&contest.key, Duration::MAX) => attempt?,
            () = contest.stop.cancelled() => {
                return tell(&Word::Waiting { asked });
            }
        };
        let acquired = now();
        let lease = attempt;
        let token = lease.token().get();
        tell(&Word::Granted { token, asked, acquired })?;
        sleep(contest.hold).await;
        let at = now();
        lease.release().await?;
        tell(&Word::Released { token, at })?;
        // Another task acquires the key first, so that two tasks hand it over to each other as two
        // hundred do.
        tokio::select! {
            next = granted.wait_for(|highest| *highest > token) => drop(next?),
            () = contest.stop.cancelled() => return Ok(()),
        }
    }
}
