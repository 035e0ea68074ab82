//! `why` and `runs --running`: what an operator asks at night.

use harness::{TestDatabase, TestDb};

use crate::{
    program::{Program as _, STAYS, Stage},
    program_cron::{cron, ended_as, job, jobs},
    program_schedules::due,
};

harness::tests!(
    everywhere(what_keeps_a_schedule_from_running_is_said, a_run_is_shown_while_it_goes_on),
    sqlite(a_machine_that_is_busy_is_named)
);

async fn why<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> String {
    db.rowlock("why", &[name]).await.with(0).out
}

#[track_caller]
fn assert_says(said: &str, expected: &[&str]) {
    let fits = expected.iter().zip(said.lines()).all(|(expected, line)| line.starts_with(&format!("k: {expected}")));
    assert!(fits && said.lines().count() == expected.len(), "{expected:?}: {said}");
}

async fn what_keeps_a_schedule_from_running_is_said<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    db.rowlock("run k --label node-1 --cron", &["0 0 1 1 *", "--", "true"]).await.with(0);
    assert_says(&why(&db, "k").await, &["it is not due: its next tick is at 2", "it succeeded last at 2"]);
    db.rowlock("trigger k", &[]).await.with(0);
    assert_says(&why(&db, "k").await, &["a run was asked for at 2", "it succeeded last at 2"]);
    db.rowlock("pause k", &[]).await.with(0);
    let paused = "it is paused, and the run that was asked for waits too: `rowlock resume` lets it run";
    assert_says(&why(&db, "k").await, &[paused, "it succeeded last at 2"]);
    db.rowlock("resume k", &[]).await.with(0);
    // A pattern that no machine calls any more.
    let ago = DB::ago(3_600_000);
    db.execute(&format!("UPDATE t_resource_schedule_instance SET beat_at = {ago}, lives = 1000000, label = 'node-1'"))
        .await;
    let said = why(&db, "k").await;
    let nobody = "no instance that declares it is alive; node-1 ran it last, from 2";
    assert!(
        said.starts_with(&format!("k: {nobody}")) && said.contains("; declared by node-1, silent since 2"),
        "{said}"
    );
    let json = db.rowlock("why k --json", &[]).await.with(0).json();
    assert_eq!((&json["name"], json["why"].as_array().unwrap().len()), (&"k".into(), said.lines().count()));

    let stage = Stage::new();
    let terms = "after = \"1h\"\nretry = 1\nbackoff = \"1h\"";
    let path = job(&stage, "fails", terms, "echo disk full >&2; exit 3");
    let running = cron(&db, "--label node-2", &path);
    ended_as(&db, "fails", "failed").await;
    let said = why(&db, "fails").await;
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("fails: attempt 1 failed on node-2: the next one is due at 2"), "{said}");
    let failed = lines[1];
    assert!(failed.starts_with("fails: attempt 1 at the tick of 2"), "{said}");
    assert!(failed.contains(" failed at 2") && failed.ends_with(", on node-2: exit code 3: disk full"), "{said}");
    running.stopped().await;
    let now = DB::ago(0);
    db.execute(&format!("UPDATE t_resource_schedule SET due_at = {now} WHERE name = 'fails'")).await;
    let said = why(&db, "fails").await;
    assert!(said.contains("fails: attempt 1 failed on node-2: the next one is due since 2"), "{said}");
}

async fn a_run_is_shown_while_it_goes_on<DB: TestDatabase>(db: TestDb<DB>) {
    let none = db.rowlock("runs --running", &[]).await.with(0);
    assert_eq!((none.out.lines().count(), none.err.as_str()), (1, ""));
    let stage = Stage::new();
    let running = cron(&db, "--label node-1", &job(&stage, "k", "after = \"1h\"", STAYS));
    stage.up().await;
    let shown = db.rowlock("runs --running", &[]).await.with(0).out;
    let cells: Vec<&str> = shown.lines().nth(1).unwrap().split("  ").filter(|cell| !cell.is_empty()).collect();
    let listed = db.rowlock("schedules --json", &[]).await.json()[0].clone();
    let token = listed["token"].to_string();
    assert_eq!([cells[0], cells[2], cells[3], cells[5]].map(str::trim), ["k", "1", "node-1", &token]);
    let json = db.rowlock("runs --running --json k", &[]).await.with(0).json();
    assert_eq!((&json[0]["run_slot"], &json[0]["by"]), (&listed["run_slot"], &"node-1".into()));
    assert_says(&why(&db, "k").await, &["it runs: attempt 1 on node-1 since 2", "it has no run in the history"]);
    stage.go();
    ended_as(&db, "k", "succeeded").await;
    assert_eq!(db.rowlock("runs --running k", &[]).await.with(0).out.lines().count(), 1);
    running.stopped().await;
}

async fn a_machine_that_is_busy_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let path =
        jobs(&stage, &[("first", "after = \"1h\"", STAYS), ("k", "every = \"1s\"\ncatch_up = \"once\"", "true")]);
    let running = cron(&db, "--label node-1 --max-concurrent-runs 1", &path);
    stage.up().await;
    let ago = DB::ago(60_000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago} WHERE name = 'k'")).await;
    let said = why(&db, "k").await;
    assert!(
        said.starts_with("k: it is due since 2")
            && said.contains("more ticks at a time than its limit: node-1 runs 1\n"),
        "{said}"
    );
    stage.go();
    ended_as(&db, "k", "succeeded").await;
    running.stopped().await;
}
