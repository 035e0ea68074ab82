//! The examples of scheduled jobs do what they show.

use std::{
    path::Path,
    time::{Duration, SystemTime},
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{LeaseLock, Reason, Schedules, admin::RunStatus};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::examples;

harness::tests!(sqlite[examples::EXAMPLES](
    an_instance_that_was_stopped_ticks_on_the_clock_again,
    of_instances_that_are_asked_to_stop_the_next_takes_over_on_the_clock,
    a_scheduler_of_the_application_runs_each_tick,
    a_scheduler_of_the_application_finishes_a_tick_after_a_kill,
    a_job_that_is_stopped_frees_its_key_at_once
));

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
    lines.iter().filter_map(|line| line.split_once(" under token ")?.1.parse().ok()).collect()
}

/// The clock periods in which the job began. It begins at most once in each, and in the first half,
/// where the tick is.
fn periods(lines: &[String], period: Duration) -> Vec<i64> {
    let period = period.as_micros() as i64;
    let mut began = tokens(lines);
    began.sort();
    let apart = began.windows(2).all(|two| two[0] / period < two[1] / period);
    assert!(apart && began.iter().all(|token| token % period < period / 2), "not on the clock: {lines:?}");
    began.into_iter().map(|token| token / period).collect()
}

/// Waits until the clock is past the middle of a period, where there is no tick.
async fn after_the_middle(period: Duration) {
    let past = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() % period.as_millis();
    sleep(period - Duration::from_millis(past as u64) + period * 6 / 10).await;
}

async fn send(signal: &str, example: &Child) {
    let pid = example.id().unwrap().to_string();
    assert!(Command::new("kill").args([signal, &pid]).status().await.unwrap().success());
}

/// The period of the examples.
const PERIOD: Duration = Duration::from_secs(2);

fn file(folder: &Path) -> String {
    folder.join("locks.db").to_str().unwrap().to_owned()
}

/// A stopped instance continues in the second half of a period. Another instance ran the job at the
/// missed tick, and the instance's next ticks are on the clock.
async fn an_instance_that_was_stopped_ticks_on_the_clock_again<DB: TestDatabase>(_: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let stopped = example("graceful_shutdown", &[&file, "4", "1"]);
    let others = [(); 2].map(|()| harness::spawn(lines(example("graceful_shutdown", &[&file, "7", "1"]))));
    after_the_middle(PERIOD).await;
    send("-STOP", &stopped).await;
    after_the_middle(PERIOD).await;
    send("-CONT", &stopped).await;
    let mut all = lines(stopped).await;
    for other in others {
        all.extend(other.await.unwrap());
    }
    let periods = periods(&all, PERIOD);
    assert!(periods.len() >= 6 && periods.windows(2).all(|two| two[1] - two[0] == 1), "no tick is left out: {all:?}");
}

/// Instances that begin at any moment of the period run the job once in each period, on the clock.
/// When the one that runs the job is asked to stop, another runs the job at its next tick.
async fn of_instances_that_are_asked_to_stop_the_next_takes_over_on_the_clock<DB: TestDatabase>(_: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    after_the_middle(PERIOD).await;
    let mut first = example("graceful_shutdown", &[&file, "9", "3600000"]);
    let mut said = BufReader::new(first.stdout.take().unwrap()).lines();
    let mut began = vec![timeout(PATIENCE, said.next_line()).await.unwrap().unwrap().unwrap()];
    after_the_middle(PERIOD).await;
    let second = example("graceful_shutdown", &[&file, "2", "1"]);
    let lock = LeaseLock::new(harness::pool::<sqlx::Sqlite>(&format!("sqlite:{file}"), 1).await);
    assert_eq!(refused(lock.try_acquire("report").await).reason, Reason::Held);
    send("-TERM", &first).await;
    assert!(timeout(PATIENCE, first.wait()).await.unwrap().unwrap().success());
    began.extend(lines(second).await);
    assert!(periods(&began, PERIOD).len() >= 2, "it was taken over: {began:?}");
}

/// The first look registers the schedule. It also runs its tick, if that is due by then.
async fn a_scheduler_of_the_application_runs_each_tick<DB: TestDatabase>(_: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let lines = lines(example("cron", &[&file(folder.path()), "3"])).await;
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    let at_first = lines.iter().filter(|line| *line == "Succeeded").count();
    let counts = (count("attempt 1, under token"), count("Ok(Succeeded)"), lines.len());
    assert_eq!(counts, (3 + at_first, 3, 7 + at_first), "{lines:?}");
}

async fn a_scheduler_of_the_application_finishes_a_tick_after_a_kill<DB: TestDatabase>(_: TestDb<DB>) {
    let recipe = examples::recipe("examples/cron/main.rs", "async fn fired");
    let guide = std::fs::read_to_string(examples::repository().join("docs/jobs.md")).unwrap();
    assert!(guide.contains(&recipe), "docs/jobs.md shows another function than the example runs");
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let mut first = example("cron", &[&file, "99", "3600000"]);
    let mut said = BufReader::new(first.stdout.take().unwrap()).lines();
    let mut next = async || timeout(PATIENCE, said.next_line()).await.unwrap().unwrap().unwrap();
    let tick = loop {
        if let Some((tick, _)) = next().await.split_once(", attempt 1") {
            break tick.to_owned();
        }
    };
    let second = example("cron", &[&file, "2"]);
    sleep(Duration::from_millis(500)).await;
    send("-KILL", &first).await;
    let lines = lines(second).await;
    assert!(lines.iter().any(|line| line.starts_with(&format!("{tick}, attempt 2, under token "))), "{lines:?}");
    let schedules = Schedules::new(harness::pool::<sqlx::Sqlite>(&format!("sqlite:{file}"), 1).await);
    let mut runs = schedules.history("report", 100).await.unwrap();
    runs.reverse();
    let first_two: Vec<_> = runs.iter().take(2).map(|run| (run.attempt, run.status)).collect();
    assert_eq!(first_two, [(1, RunStatus::Lost), (2, RunStatus::Succeeded)], "{runs:?}");
    assert_eq!(runs[0].slot, runs[1].slot);
}

async fn a_job_that_is_stopped_frees_its_key_at_once<DB: TestDatabase>(_: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let file = file(folder.path());
    let mut job = example("graceful_shutdown", &[&file, "9", "3600000"]);
    let mut said = BufReader::new(job.stdout.take().unwrap()).lines();
    let mut next = async || timeout(PATIENCE, said.next_line()).await.unwrap().unwrap();
    assert!(next().await.unwrap().starts_with("begun under token "));
    let lock = LeaseLock::new(harness::pool::<sqlx::Sqlite>(&format!("sqlite:{file}"), 1).await);
    assert_eq!(refused(lock.try_acquire("report").await).reason, Reason::Held);
    send("-TERM", &job).await;
    assert_eq!(next().await.as_deref(), Some("asked to stop"));
    assert_eq!(next().await.as_deref(), Some("stopped half-way"));
    assert!(timeout(PATIENCE, job.wait()).await.unwrap().unwrap().success());
    let lock = lock.min_interval(Duration::from_secs(3600));
    assert!(acquired(lock.try_acquire("report").await).taken_over_from().is_some());
    // A job that finishes is done.
    let other = folder.path().join("other.db");
    let done = lines(example("graceful_shutdown", &[other.to_str().unwrap(), "1", "10"])).await;
    assert!(done.len() == 2 && periods(&done, PERIOD).len() == 1 && done[1] == "done", "{done:?}");
}
