//! Instances of schedules, and what operators do about schedules that no instance has.

use std::path::Path;

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    program::{Program as _, STAYS, Stage, Started},
    program_cron::{cron, job, jobs},
    program_jobs,
    program_schedules::{due, schedule},
};

// The times that apply are decided by the library, whose contract tests this on each database.
harness::tests!(
    everywhere(
        instances_are_listed_with_what_they_declare,
        an_instance_that_has_died_is_forgotten,
        a_job_that_has_gone_from_the_file_is_removed,
        a_schedule_without_an_instance_is_not_triggered,
        other_times_of_a_file_that_is_read_anew_apply_within_seconds,
        a_paused_schedule_that_runs_shows_both,
        a_slot_is_reset,
        a_file_may_be_empty
    ),
    servers.long(a_job_that_is_declared_as_removed_is_run_nowhere, instances_with_other_times_are_counted),
    sqlite.long(instances_with_other_times_are_counted, a_job_that_is_declared_as_removed_is_run_nowhere)
);

const YEARLY: &str = "cron = \"0 0 1 1 *\"";

async fn instances<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<Value> {
    db.rowlock("instances --json", &[]).await.with(0).json().as_array().unwrap().clone()
}

async fn named<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Option<Value> {
    let all = db.rowlock("schedules --json", &[]).await.with(0).json();
    all.as_array().unwrap().iter().find(|one| one["name"] == name).cloned()
}

async fn started<DB: TestDatabase>(db: &TestDb<DB>, words: &str, file: &Path) -> Started {
    let mut cron = cron(db, words, file);
    cron.complains("jobs.toml: ").await;
    cron
}

async fn instances_are_listed_with_what_they_declare<DB: TestDatabase>(db: TestDb<DB>) {
    let [one, other] = [Stage::new(), Stage::new()];
    let first = started(&db, "--label node-1 --build 1.4", &jobs(&one, &[("b", YEARLY, ""), ("a", YEARLY, "")])).await;
    let second = started(&db, "--label node-2", &jobs(&one, &[("b", YEARLY, ""), ("a", YEARLY, "")])).await;
    let third = started(&db, "--label node-3", &job(&other, "c", "every = \"1h\"", "true")).await;
    let all = instances(&db).await;
    let labels: Vec<&Value> = all.iter().map(|one| &one["label"]).collect();
    assert_eq!(labels, ["node-1", "node-2", "node-3"]);
    assert!(all.iter().all(|one| one["alive"] == true && one["calls"] == false), "{all:?}");
    assert_eq!((&all[0]["build"], &all[1]["build"]), (&"1.4".into(), &"".into()));
    let times = |name: &str, times: &str| serde_json::json!({ "name": name, "times": times, "zone": "UTC" });
    assert_eq!(all[0]["declares"], Value::from(vec![times("a", "cron 0 0 1 1 *"), times("b", "cron 0 0 1 1 *")]));
    assert_eq!(all[2]["declares"], Value::from(vec![times("c", "every 3600s")]));
    assert!(all[0]["set"] == all[1]["set"] && all[0]["set"] != all[2]["set"], "{all:?}");
    let table = db.rowlock("instances", &[]).await.with(0).out;
    let line = table.lines().find(|line| line.starts_with("node-1")).unwrap();
    let set = format!("2 schedules ({})", all[0]["set"].as_str().unwrap());
    for part in ["1.4", "alive", &set, all[0]["id"].as_str().unwrap()] {
        assert!(line.contains(part), "{part}: {table}");
    }
    for cron in [first, second, third] {
        cron.stopped().await;
    }
    assert_eq!(instances(&db).await, Vec::<Value>::new(), "each has ended its word");
}

async fn an_instance_that_has_died_is_forgotten<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let cron = started(&db, "--label node-1", &job(&stage, "k", YEARLY, "true")).await;
    cron.signal(Signal::KILL);
    cron.ended().await.with(-9);
    db.execute(&format!("UPDATE t_resource_schedule_instance SET beat_at = {}", DB::ago(25_000))).await;
    let all = instances(&db).await;
    assert_eq!((all.len(), &all[0]["alive"]), (1, &false.into()), "{all:?}");
    assert_eq!(schedule(&db).await["state"], "no_instance");
    let id = all[0]["id"].as_str().unwrap();
    let forgotten = db.by_ann(&format!("instances --forget {id}"), &[]).await.with(0);
    assert!(forgotten.out.starts_with(&format!("{id} is forgotten")), "{forgotten:?}");
    let event = format!("change=\"forget instance\" of=\"{id}\" by=\"ann\" from=");
    assert!(forgotten.err.contains(&event) && forgotten.err.contains("was=\"node-1, silent\""), "{forgotten:?}");
    assert!(instances(&db).await.is_empty());
    let again = db.by_ann(&format!("instances --forget {id}"), &[]).await.with(75);
    assert!(again.err.contains(&format!("there is no instance {id}")), "{again:?}");
    db.rowlock("instances --forget k", &[]).await.with(2);
}

/// The other job stays, so that its instance tells that the first one has gone.
async fn a_job_that_has_gone_from_the_file_is_removed<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = jobs(&stage, &[("gone", YEARLY, "true"), ("stays", YEARLY, "true")]);
    let cron = started(&db, "", &file).await;
    jobs(&stage, &[("stays", YEARLY, "true")]);
    cron.signal(Signal::HUP);
    eventually("it is removed", async || named(&db, "gone").await.unwrap()["state"] == "removed").await;
    let row = named(&db, "gone").await.unwrap();
    assert!(row["removed"] == true && row["gone_since"].is_string() && row["instances"] == 0, "{row}");
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    let line: Vec<&str> = table.lines().find(|line| line.starts_with("gone")).unwrap().split("  ").collect();
    let cells: Vec<&str> = line.into_iter().map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells[..5], ["gone", "cron 0 0 1 1 *", "removed", "-", "-"]);
    let refused = db.rowlock("trigger gone", &[]).await.with(75);
    let says = "rowlock: gone: not triggered: it was removed from the application, or renamed, at 2";
    assert!(refused.err.contains(says) && refused.err.contains("--anyway"), "{refused:?}");
    assert_eq!(named(&db, "gone").await.unwrap()["triggered"], Value::Null);
    let refused = db.by_ann("remove stays", &[]).await.with(75);
    assert!(refused.err.contains("instances that are alive declare it"), "{refused:?}");
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    let told = db.by_ann("--log-level debug remove stays", &[]).await.with(75);
    assert!(told.err.contains("not changed on the command line change=\"remove\" of=\"stays\" by=\"ann\""));
    let removed = db.by_ann("remove gone", &[]).await.with(0);
    assert_eq!(removed.out, "gone is removed; its runs stay in the history\n");
    assert!(removed.err.contains("change=\"remove\" of=\"gone\" by=\"ann\" from="), "{removed:?}");
    assert!(removed.err.contains("was=\"cron 0 0 1 1 *, removed\""), "{removed:?}");
    assert!(named(&db, "gone").await.is_none() && named(&db, "stays").await.unwrap()["instances"] == 1);
    let again = db.rowlock("remove gone", &[]).await.with(75);
    assert!(again.err.contains("there is no schedule \"gone\""), "{again:?}");
    cron.stopped().await;
}

/// One machine has the new file, and another one still has the old one.
async fn a_job_that_is_declared_as_removed_is_run_nowhere<DB: TestDatabase>(db: TestDb<DB>) {
    let [old, new] = [Stage::new(), Stage::new()];
    let old = started(&db, "", &job(&old, "k", YEARLY, "echo it runs")).await;
    let mut new = cron(&db, "", &program_jobs::file(&new, "[k]\nremoved = true\n"));
    new.complains("jobs.toml: 0 jobs, 1 removed").await;
    eventually("it is removed", async || schedule(&db).await["state"] == "removed").await;
    let row = schedule(&db).await;
    let counts = (&row["times"], &row["instances"], &row["instances_with_other_times"]);
    assert_eq!(counts, (&"none".into(), &1.into(), &1.into()));
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("removed, 2 versions: 1 declares that, 1 declares times"), "{table}");
    let refused = db.rowlock("trigger k", &[]).await.with(75);
    assert!(refused.err.contains("k: not triggered: it is declared as removed since 2"), "{refused:?}");
    let refused = db.rowlock("run k --cron", &["0 0 1 1 *", "--", "true"]).await.with(75);
    assert!(refused.err.contains("refused: k: instances that are alive declare it as removed"), "{refused:?}");
    let old = old.stopped().await;
    assert!(!old.out.contains("it runs"), "{old:?}");
    new.stopped().await;
}

async fn a_schedule_without_an_instance_is_not_triggered<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", YEARLY, "echo it runs");
    started(&db, "", &file).await.stopped().await;
    let row = schedule(&db).await;
    assert_eq!((&row["state"], &row["states"]), (&"no_instance".into(), &vec!["no_instance"].into()), "{row}");
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("  no instance  "), "{table}");
    let refused = db.rowlock("trigger k", &[]).await.with(75);
    let says = "k: not triggered: no instance that declares it is alive; it was not run so far; --anyway asks";
    assert!(refused.out.is_empty() && refused.err.contains(says), "{refused:?}");
    assert_eq!(schedule(&db).await["triggered"], Value::Null);
    let asked = db.rowlock("trigger k --anyway", &[]).await.with(0);
    assert!(asked.out.ends_with("the next instance that declares it runs it\n"), "{asked:?}");
    let mut cron = started(&db, "--label node-1", &file).await;
    cron.says("k: it runs", 1).await;
    cron.stopped().await;
    let refused = db.rowlock("trigger k", &[]).await.with(75);
    assert!(refused.err.contains("; node-1 ran it last, from 2"), "{refused:?}");
}

/// The newer times take effect when their instance has beaten a few times. There are two versions
/// before that, and after it.
async fn instances_with_other_times_are_counted<DB: TestDatabase>(db: TestDb<DB>) {
    let [old, new] = [Stage::new(), Stage::new()];
    let (first, second) = (job(&old, "k", YEARLY, "true"), job(&new, "k", "cron = \"0 0 2 1 *\"", "true"));
    let olds = [started(&db, "", &first).await, started(&db, "", &first).await];
    let new = started(&db, "", &second).await;
    let counts = async || {
        let row = schedule(&db).await;
        (row["times"] == "cron 0 0 2 1 *", row["instances"].clone(), row["instances_with_other_times"].clone())
    };
    assert_eq!(counts().await, (false, 2.into(), 1.into()));
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("waiting, 2 versions: 2 run it, 1 declares other times"), "{table}");
    eventually("the newer times apply", async || counts().await == (true, 1.into(), 2.into())).await;
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("waiting, 2 versions: 1 runs it, 2 declare other times"), "{table}");
    for cron in olds {
        cron.stopped().await;
    }
    assert_eq!(counts().await, (true, 1.into(), 0.into()));
    new.stopped().await;
}

/// The instance of before has left, so that nothing contests the new times at the next beat.
async fn other_times_of_a_file_that_is_read_anew_apply_within_seconds<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let cron = started(&db, "", &job(&stage, "k", YEARLY, "true")).await;
    job(&stage, "k", "cron = \"0 0 2 1 *\"", "true");
    cron.signal(Signal::HUP);
    let begun = std::time::Instant::now();
    eventually("the old instance has left", async || {
        let all = instances(&db).await;
        all.len() == 1 && all[0]["declares"][0]["times"] == "cron 0 0 2 1 *"
    })
    .await;
    eventually("the new times apply", async || schedule(&db).await["times"] == "cron 0 0 2 1 *").await;
    // A beat comes every six seconds at most; contested times would take three more of them.
    assert!(begun.elapsed().as_secs() < 12, "{:?}", begun.elapsed());
    cron.stopped().await;
}

async fn a_paused_schedule_that_runs_shows_both<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let cron = started(&db, "", &job(&stage, "k", "after = \"1h\"", STAYS)).await;
    stage.up().await;
    db.rowlock("pause k", &[]).await.with(0);
    let row = schedule(&db).await;
    assert_eq!((&row["state"], &row["states"]), (&"running".into(), &vec!["paused", "running"].into()), "{row}");
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("  paused, running  "), "{table}");
    stage.go();
    eventually("it is paused", async || schedule(&db).await["states"] == Value::from(vec!["paused"])).await;
    cron.stopped().await;
}

async fn a_slot_is_reset<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let ago = DB::ago(60_000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago}")).await;
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("waiting, due since 2"), "{table}");
    let reset = db.by_ann("reset k", &[]).await.with(0);
    let slot = schedule(&db).await["slot"].as_str().unwrap().to_owned();
    assert!(slot.contains("-01-01T00:00:00"), "{slot}");
    let shown = slot.replace('T', " ").replace(".000000Z", "Z");
    assert_eq!(reset.out, format!("k is reset: the next tick is at {shown}\n"));
    assert!(reset.err.contains("change=\"reset\" of=\"k\" by=\"ann\" from="), "{reset:?}");
    let refused = db.rowlock("run k --cron", &["0 0 1 1 *", "--", "true"]).await.with(75);
    assert!(refused.err.contains("the first tick is at 2"), "what was due is skipped: {refused:?}");
}

async fn a_file_may_be_empty<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = program_jobs::file(&stage, "# no job yet\n");
    assert!(db.rowlock("cron --check", &[file.to_str().unwrap()]).await.with(0).out.ends_with("0 jobs, no error\n"));
    let mut cron = started(&db, "", &file).await;
    let all = instances(&db).await;
    assert_eq!((all.len(), &all[0]["declares"]), (1, &Value::from(Vec::<Value>::new())), "{all:?}");
    job(&stage, "k", "after = \"1h\"", "echo it runs");
    cron.signal(Signal::HUP);
    cron.says("k: it runs", 1).await;
    program_jobs::file(&stage, "");
    cron.signal(Signal::HUP);
    cron.complains("0 jobs; gone: k").await;
    assert!(!cron.is_over());
    let table =
        db.rowlock("cron --next 1", &[program_jobs::file(&stage, "[k]\nremoved = true\n").to_str().unwrap()]).await;
    assert!(table.with(0).out.contains("\nk     removed  -"));
    cron.stopped().await;
}
