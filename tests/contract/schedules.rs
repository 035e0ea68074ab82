//! The examples of scheduled jobs do what they show.

use std::{path::Path, time::Duration};

use rowlock::{LeaseLock, Reason};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::{
    bed::{Bed, PATIENCE, Site, acquired, refused},
    examples,
};

fn example(name: &str, arguments: &[&str]) -> Child {
    examples::example(name, arguments).spawn().unwrap()
}

async fn lines(example: Child) -> Vec<String> {
    let output = timeout(PATIENCE, example.wait_with_output()).await.expect("it ends by itself").unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// On SQLite a token is the moment of its claim, in microseconds.
fn tokens(lines: &[String]) -> Vec<i64> {
    lines.iter().filter_map(|line| line.strip_prefix("ran report under token ")?.parse().ok()).collect()
}

fn file(folder: &Path) -> String {
    folder.join("locks.db").to_str().unwrap().to_owned()
}

pub async fn an_interval_runs_the_job_on_each_tick<DB: Bed>(_: Site<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let lines = lines(example("interval", &[&file(folder.path()), "3"])).await;
    assert_eq!((tokens(&lines).len(), lines.len()), (3, 3), "{lines:?}");
}

pub async fn instances_with_an_interval_run_the_job_once_a_tick<DB: Bed>(_: Site<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let instances = [(); 3].map(|()| example("interval", &[&file, "4"]));
    let [a, b, c] = instances.map(lines);
    let (a, b, c) = tokio::join!(a, b, c);
    let all = [a, b, c].concat();
    let mut tokens = tokens(&all);
    tokens.sort();
    let refused = all.iter().filter(|line| line.starts_with("not now: report: ")).count();
    assert_eq!(tokens.len() + refused, 12, "{all:?}");
    assert!(tokens.windows(2).all(|two| two[1] - two[0] >= 250_000), "{tokens:?}");
}

pub async fn a_cron_schedule_runs_the_job_on_each_tick<DB: Bed>(_: Site<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let lines = lines(example("cron", &[&file(folder.path()), "3"])).await;
    assert_eq!((tokens(&lines).len(), lines.len()), (3, 3), "{lines:?}");
}

pub async fn asked_to_stop_it_gives_the_key_back_at_once<DB: Bed>(_: Site<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let mut job = example("graceful_shutdown", &[&file, "9", "3600000"]);
    let mut said = BufReader::new(job.stdout.take().unwrap()).lines();
    let mut next = async || timeout(PATIENCE, said.next_line()).await.unwrap().unwrap();
    assert_eq!(next().await.as_deref(), Some("begun"));
    let lock = LeaseLock::new(crate::bed::pool::<sqlx::Sqlite>(&format!("sqlite:{file}"), 1).await);
    assert_eq!(refused(lock.try_acquire("report").await).reason, Reason::Held);
    let pid = job.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    assert_eq!(next().await.as_deref(), Some("asked to stop"));
    assert_eq!(next().await.as_deref(), Some("stopped half-way"));
    assert!(timeout(PATIENCE, job.wait()).await.unwrap().unwrap().success());
    let lock = lock.once_per(Duration::from_secs(3600)).unwrap();
    assert!(acquired(lock.try_acquire("report").await).taken_over_from().is_some());
    // And a job that comes to its end is done.
    let other = folder.path().join("other.db");
    let done = lines(example("graceful_shutdown", &[other.to_str().unwrap(), "1", "10"])).await;
    assert_eq!(done, ["begun", "done"]);
}
