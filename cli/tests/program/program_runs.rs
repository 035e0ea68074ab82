//! `rowlock runs`: of one schedule or of all, and which of them.

use harness::{TestDatabase, TestDb};
use serde_json::Value;

use crate::program::Program as _;

harness::tests!(everywhere(
    without_a_name_the_latest_runs_of_all_schedules_are_listed,
    runs_are_selected_by_outcome_and_age,
    the_days_of_a_schedule_are_compared
));

const MINUTE: i64 = 60_000;

/// Writes a run into the history, which began and ended so many milliseconds ago. Its token is the
/// minutes since its end.
pub async fn ran<DB: TestDatabase>(db: &TestDb<DB>, name: &str, began: i64, ended: i64, status: &str) {
    let (begin, end, token) = (DB::ago(began), DB::ago(ended), ended / MINUTE);
    db.execute(&format!(
        "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status)
         VALUES ('{name}', {begin}, 1, {token}, 'me', {begin}, {end}, '{status}')"
    ))
    .await;
}

/// Writes runs of a minute: the schedule, how many minutes ago each ended, the status.
async fn ran_each<DB: TestDatabase>(db: &TestDb<DB>, runs: &[(&str, i64, &str)]) {
    for (name, ago, status) in runs {
        ran(db, name, (ago + 1) * MINUTE, ago * MINUTE, status).await;
    }
}

async fn listed<DB: TestDatabase>(db: &TestDb<DB>, words: &str) -> Vec<String> {
    let runs = db.rowlock(&format!("runs --json {words}"), &[]).await.with(0).json();
    let named = |run: &Value| format!("{}{}", run["name"].as_str().unwrap(), run["token"]);
    runs.as_array().unwrap().iter().map(named).collect()
}

async fn without_a_name_the_latest_runs_of_all_schedules_are_listed<DB: TestDatabase>(db: TestDb<DB>) {
    assert_eq!(db.rowlock("runs", &[]).await.with(0).out.lines().count(), 1, "the header");
    let minutes: Vec<_> = (10..40).map(|ago| ("b", ago, "S")).collect();
    ran_each(&db, &minutes).await;
    ran_each(&db, &[("a", 1, "S"), ("c", 12, "F")]).await;
    let all = listed(&db, "").await;
    assert_eq!((all.len(), &all[..3]), (20, &["a1", "b10", "b11"].map(str::to_owned)[..]));
    assert_eq!(listed(&db, "--limit 2").await, ["a1", "b10"]);
    let table = db.rowlock("runs --limit 2", &[]).await.with(0).out;
    let first: Vec<&str> = table.lines().map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(first, ["NAME", "a", "b"], "{table}");
    let one = db.rowlock("runs a", &[]).await.with(0).out;
    assert!(one.starts_with("SLOT"), "{one}");
}

async fn runs_are_selected_by_outcome_and_age<DB: TestDatabase>(db: TestDb<DB>) {
    let minutes: Vec<_> = (10..40).map(|ago| ("a", ago, "S")).collect();
    ran_each(&db, &minutes).await;
    ran_each(&db, &[("a", 5, "F"), ("a", 100, "L"), ("b", 50, "M"), ("b", 7, "S"), ("b", 200, "F")]).await;
    assert_eq!(listed(&db, "--unsuccessful").await, ["a5", "b50", "a100", "b200"]);
    assert_eq!(listed(&db, "--unsuccessful --limit 1").await, ["a5"]);
    assert_eq!(listed(&db, "--unsuccessful --since 75m").await, ["a5", "b50"]);
    assert_eq!(listed(&db, "--since 9m").await, ["a5", "b7"]);
    assert_eq!(listed(&db, "a --unsuccessful").await, ["a5", "a100"]);
    assert_eq!(listed(&db, "b --since 75m").await, ["b7", "b50"]);
    assert_eq!(db.rowlock("runs --unsuccessful --since 1s --json", &[]).await.with(0).json(), Value::Array(Vec::new()));
}

async fn the_days_of_a_schedule_are_compared<DB: TestDatabase>(db: TestDb<DB>) {
    const DAY: i64 = 24 * 60;
    // Each run takes a minute, but for the failed one of the day before.
    let days = [("a", DAY, "S"), ("a", DAY, "F"), ("b", 1, "S"), ("a", 9 * DAY, "S"), ("a", 40 * DAY, "S")];
    for (index, (name, ago, status)) in days.into_iter().enumerate() {
        ran(&db, name, (ago + 1 + index as i64) * MINUTE, ago * MINUTE, status).await;
    }
    let stats = db.rowlock("runs a --stats --json", &[]).await.with(0).json();
    let numbers = |day: &Value| {
        let seconds = |name: &str| day[name].as_f64().unwrap().round() as u64;
        (day["runs"].clone(), day["succeeded"].clone(), ["p50", "p95", "longest"].map(seconds))
    };
    let days: Vec<_> = stats.as_array().unwrap().iter().map(numbers).collect();
    let day = |runs: u32, succeeded: u32, times| (runs.into(), succeeded.into(), times);
    assert_eq!(days, [day(2, 1, [60, 120, 120]), day(1, 1, [240, 240, 240])], "{stats}");
    let table = db.rowlock("runs a --stats --since 2d", &[]).await.with(0).out;
    let lines: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines.len(), &lines[0][1..4]), (1, &["2", "50", "%"][..]), "{table}");
}
