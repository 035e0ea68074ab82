//! A run whose lease is over, because its instance died: what the program and the page say of it.

use harness::{TestDatabase, TestDb};
use serde_json::Value;

use crate::{
    program::Program as _,
    program_schedules::{due, schedule},
    ui::open,
};

harness::tests!(everywhere(
    a_run_whose_lease_is_over_is_shown_as_lost,
    the_page_shows_a_run_whose_lease_is_over_as_lost,
    the_numbers_count_a_run_whose_lease_is_over_as_late
));

/// Writes a run of `k` by `node-1` into its row. Its lease ended this many milliseconds ago.
async fn runs_until<DB: TestDatabase>(db: &TestDb<DB>, ago: i64) {
    let holder = DB::uuid("0123456789abcdef0123456789abcdef");
    db.execute(&format!(
        "UPDATE t_resource_schedule SET holder = {holder}, attempt = 1, run_slot = slot, client_ip = 'node-1',
             begin_time = {}, due_at = {}, token = token + 1",
        DB::ago(90_000),
        DB::ago(ago)
    ))
    .await;
}

async fn a_run_whose_lease_is_over_is_shown_as_lost<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    runs_until(&db, -600_000).await;
    let row = schedule(&db).await;
    assert_eq!((&row["state"], &row["running"], &row["lost_since"]), (&"running".into(), &true.into(), &Value::Null));
    assert_eq!(db.rowlock("runs k", &[]).await.with(0).err, "");

    runs_until(&db, 60_000).await;
    let row = schedule(&db).await;
    assert_eq!((&row["state"], &row["running"], &row["lost_since"]), (&"lost".into(), &false.into(), &row["due"]));
    let table = db.rowlock("schedules", &[]).await.with(0).out;
    assert!(table.contains("lost, lease over since 2") && !table.contains("running"), "{table}");
    let shown = db.rowlock("show k", &[]).await.with(0).out;
    assert!(shown.contains("lost, lease over since 2"), "{shown}");
    let runs = db.rowlock("runs k", &[]).await.with(0);
    assert!(runs.err.starts_with("rowlock: k: the run that node-1 began at 2"), "{runs:?}");
    assert!(
        runs.err.contains("is lost or handed back: its lease is over since 2") && runs.err.lines().count() == 1,
        "{runs:?}"
    );
    for words in ["runs k --json", "runs k --running --json"] {
        assert_eq!(db.rowlock(words, &[]).await.with(0).err, "", "{words}: JSON is for programs");
    }
    let running = db.rowlock("runs --running", &[]).await.with(0);
    assert_eq!((running.out.lines().count(), &running.err), (1, &runs.err), "{running:?}");
    let why = db.rowlock("why k", &[]).await.with(0).out;
    assert!(
        why.contains("k: its run on node-1 since 2") && why.contains(" is lost: its lease is over since 2"),
        "{why}"
    );
    assert!(why.contains("no instance has taken it over"), "{why}");
}

async fn the_page_shows_a_run_whose_lease_is_over_as_lost<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    runs_until(&db, 60_000).await;
    let ui = open(&db, "").await;
    let jobs = ui.get("/jobs").await.with(200).body;
    assert!(jobs.contains("badge lost") && jobs.contains("lease ended"), "{jobs}");
    assert!(!jobs.contains("badge running") && jobs.contains(">1 lost</a>") && !jobs.contains("running</a>"), "{jobs}");
    let job = ui.get("/job?name=k").await.with(200).body;
    assert!(job.contains("badge lost") && job.contains("Last begun") && !job.contains("badge running"), "{job}");
    let runs = ui.get("/runs?window=6h").await.with(200).body;
    assert!(runs.contains("lost, lease over since") && !runs.contains("running for"), "{runs}");
}

async fn the_numbers_count_a_run_whose_lease_is_over_as_late<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let numbers = async || {
        let text = open(&db, "").await.get("/metrics").await.with(200).body;
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("rowlock_job_{name}{{job=\"k\"}} ")));
            line.unwrap_or_else(|| panic!("no {name}: {text}")).parse::<f64>().unwrap()
        };
        (number("running"), number("late_seconds"))
    };
    runs_until(&db, -600_000).await;
    assert_eq!(numbers().await, (1.0, 0.0), "its lease stands");
    runs_until(&db, 60_000).await;
    let (running, late) = numbers().await;
    assert!(running == 0.0 && (60.0..120.0).contains(&late), "{running} {late}");
}
