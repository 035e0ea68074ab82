//! The files in `docs/operating`, checked by Prometheus's own program. `PROMTOOL` names it;
//! `scripts/test` provides it.

use std::{collections::BTreeSet, path::PathBuf, process::Stdio};

use harness::{Need, TestDatabase, TestDb, acquired};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{
    program::Stage,
    program_cron::{cron, ended_as, jobs},
    ui::open,
};

pub const PROMTOOL: Need = Need { what: "PROMTOOL", is_met: |_| promtool().is_some() };

harness::tests!(sqlite[PROMTOOL](
    the_numbers_have_the_format_of_prometheus,
    the_alerts_fire_when_they_should,
    alerts_and_dashboard_use_numbers_that_exist
));

fn promtool() -> Option<String> {
    std::env::var("PROMTOOL").ok().filter(|path| !path.is_empty())
}

pub fn file(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operating")).join(name)
}

/// Runs promtool, and returns what it said if it found nothing wrong.
pub async fn checked(words: &[&str], stdin: &str) -> String {
    let mut command = Command::new(promtool().unwrap());
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that reads no stdin may have ended.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes()).await;
    let ended = child.wait_with_output().await.unwrap();
    let said = String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap();
    assert!(ended.status.success(), "{words:?}: {said}");
    said
}

async fn numbers<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let stage = Stage::new();
    let file = jobs(&stage, &[("sync", "every = \"1s\"", "true"), ("long", "every = \"1s\"", "sleep 600")]);
    let _running = cron(db, "", &file);
    ended_as(db, "sync", "succeeded").await;
    let _held = acquired(db.lock().try_acquire("s#1").await);
    open(db, "").await.get("/metrics").await.with(200).body
}

async fn the_numbers_have_the_format_of_prometheus<DB: TestDatabase>(db: TestDb<DB>) {
    let numbers = numbers(&db).await;
    for number in ["rowlock_job_since_success_seconds{job=\"sync\"}", "rowlock_job_running_seconds{job=\"long\"}"] {
        assert!(numbers.contains(number), "{numbers}");
    }
    let said = checked(&["check", "metrics"], &numbers).await;
    assert_eq!(said.trim(), "", "no advice");
}

async fn the_alerts_fire_when_they_should<DB: TestDatabase>(_: TestDb<DB>) {
    checked(&["check", "rules", file("alerts.yml").to_str().unwrap()], "").await;
    checked(&["test", "rules", file("alerts-test.yml").to_str().unwrap()], "").await;
}

/// Returns the names of numbers in a text.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("rowlock_")).map(str::to_owned).collect()
}

async fn alerts_and_dashboard_use_numbers_that_exist<DB: TestDatabase>(db: TestDb<DB>) {
    let published = names(&numbers(&db).await);
    let library = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../src/metrics.rs")).unwrap();
    let library = names(&library);
    for used in ["alerts.yml", "dashboard.json"] {
        let text = std::fs::read_to_string(file(used)).unwrap();
        for name in names(&text) {
            let plain = name.trim_end_matches("_bucket");
            assert!(published.contains(&name) || library.contains(plain), "{used}: {name} is not published");
        }
    }
    let dashboard = std::fs::read_to_string(file("dashboard.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let mut rules = "groups:\n- name: dashboard\n  rules:\n".to_owned();
    for (number, panel) in dashboard["panels"].as_array().unwrap().iter().enumerate() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m");
            let refers = target["refId"].as_str().unwrap();
            rules += &format!("  - record: panel:{number}_{refers}\n    expr: {expression:?}\n");
        }
    }
    let stage = Stage::new();
    std::fs::write(stage.file("rules.yml"), rules).unwrap();
    checked(&["check", "rules", stage.file("rules.yml").to_str().unwrap()], "").await;
}
