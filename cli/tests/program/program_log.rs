//! The log: its lines for runs, as text and as JSON, and which of them are written.

use harness::{TestDatabase, TestDb};
use serde_json::Value;

use crate::{
    program::{Ended, Program as _, STAYS, Stage, start},
    program_cron::{cron, ended_as, job, jobs, runs},
};

harness::tests!(sqlite(
    each_run_has_a_line_for_its_start_and_its_end,
    each_line_is_an_object,
    what_is_no_failure_is_a_warning,
    levels_select_the_lines,
    a_tick_that_is_given_up_has_a_line
));

/// A job that succeeds, and one that fails twice.
async fn ran<DB: TestDatabase>(db: &TestDb<DB>, words: &str) -> Ended {
    let stage = Stage::new();
    let path = jobs(
        &stage,
        &[
            ("fine", "cron = \"0 0 1 1 *\"", "echo \"it's \\\"fine\\\"\""),
            ("fails", "cron = \"0 0 1 1 *\"\nretry = 1", "echo disk full >&2; exit 3"),
        ],
    );
    let mut command = db.command(words, &["cron", "--label", "node-1", path.to_str().unwrap()]);
    command.env_remove("RUST_LOG");
    let running = start(command);
    for name in ["fine", "fails"] {
        harness::eventually("it is declared", async || db.rowlock("trigger", &[name]).await.code == 0).await;
    }
    ended_as(db, "fine", "succeeded").await;
    harness::eventually("it has failed", async || runs(db, "fails").await.len() == 2).await;
    running.stopped().await
}

async fn each_run_has_a_line_for_its_start_and_its_end<DB: TestDatabase>(db: TestDb<DB>) {
    let ended = ran(&db, "").await;
    let lines = |what: &str| -> Vec<&str> { ended.err.lines().filter(|line| line.contains(what)).collect() };
    assert_eq!(
        [lines("cron: started job=\"fine\"").len(), lines("cron: started job=\"fails\"").len()],
        [1, 2],
        "{ended:?}"
    );
    let fine = lines("cron: succeeded job=\"fine\"");
    assert!(fine[0].contains(" INFO ") && fine[0].contains(" attempt=1 took=\""), "{fine:?}");
    assert!(fine[0].contains("-01-01T00:00:00.000000Z\"") && fine[0].contains(" next=\"2"), "{fine:?}");
    let fails = lines("cron: failed job=\"fails\"");
    assert!(
        fails[0].contains("attempt=1 ") && fails[0].ends_with("error=\"exit code 3: disk full\" next=\"attempt 2\""),
        "{fails:?}"
    );
    assert!(fails[1].contains("attempt=2 ") && fails[1].contains("next=\"2"), "{fails:?}");
    assert!(fails[0].contains(" INFO ") && fails[1].contains(" WARN "), "{fails:?}");
    assert_eq!((ended.err.matches("WARN").count(), lines("exit code 3").len()), (1, 2), "{ended:?}");
}

async fn each_line_is_an_object<DB: TestDatabase>(db: TestDb<DB>) {
    let ended = ran(&db, "--log-format json").await;
    let objects =
        |text: &str| -> Vec<Value> { text.lines().map(|line| serde_json::from_str(line).expect(line)).collect() };
    let (out, err) = (objects(&ended.out), objects(&ended.err));
    for line in out.iter().chain(&err) {
        assert!(line["timestamp"].as_str().unwrap().ends_with('Z') && line["level"].is_string(), "{line}");
    }
    let has = |lines: &[Value], fields: &[(&str, &str)]| {
        lines.iter().any(|line| fields.iter().all(|(name, value)| line[*name] == *value))
    };
    assert!(has(&out, &[("job", "fine"), ("stream", "stdout"), ("message", "it's \"fine\"")]), "{out:?}");
    assert!(has(&err, &[("job", "fails"), ("stream", "stderr"), ("message", "disk full")]), "{err:?}");
    assert!(has(&err, &[("job", "fails"), ("message", "failed"), ("error", "exit code 3: disk full")]), "{err:?}");
    assert!(has(&err, &[("message", "started"), ("target", "rowlock::cron")]), "{err:?}");
    let jobs = err.iter().find(|line| line["message"].as_str().unwrap().ends_with("jobs.toml: 2 jobs"));
    assert_eq!(jobs.unwrap()["level"], "INFO", "{err:?}");
}

async fn what_is_no_failure_is_a_warning<DB: TestDatabase>(db: TestDb<DB>) {
    let level = |err: &str, text: &str| {
        let line = err.lines().find(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text:?}: {err}"));
        serde_json::from_str::<Value>(line).unwrap()["level"].as_str().unwrap().to_owned()
    };
    let mut command = db.command("--log-format json run t --cron", &["0 0 1 1 *", "--", "true"]);
    command.env("TZ", "Europe/Berlin");
    let refused = start(command).ended().await.with(75).err;
    assert_eq!([level(&refused, "is read in UTC"), level(&refused, "refused: ")], ["WARN", "ERROR"]);
    let stage = Stage::new();
    let mut leader = db.start("--log-format json lead k --lease 1s -- sh -c", &[STAYS, stage.path()]);
    stage.up().await;
    db.rowlock("release k --force", &[]).await.with(0);
    leader.complains("campaigning again").await;
    assert_eq!(level(leader.complained(), "campaigning again"), "WARN");
    db.execute("ALTER TABLE t_resource_change RENAME COLUMN detail TO other").await;
    let shown = db.rowlock("--log-format json show k", &[]).await.with(0).err;
    assert_eq!(level(&shown, "what operators changed is not known"), "WARN");
}

async fn levels_select_the_lines<DB: TestDatabase>(db: TestDb<DB>) {
    let ended = ran(&db, "--log-level warn").await;
    assert!(!ended.err.contains("started"), "{ended:?}");
    db.execute("DELETE FROM t_resource_schedule_run").await;
    let ended = ran(&db, "--log-level rowlock::cron=off,rowlock=debug").await;
    assert!(!ended.err.contains("started") && ended.err.contains("DEBUG"), "{ended:?}");
    // The driver's events are left out.
    db.execute("DELETE FROM t_resource_schedule_run").await;
    let ended = ran(&db, "--log-level debug").await;
    assert!(ended.err.contains("DEBUG rowlock") && !ended.err.contains("sqlx"), "{ended:?}");
    let wrong = db.rowlock("--log-level much list", &[]).await.with(2);
    assert!(wrong.err.contains("write it like info"), "{wrong:?}");
}

/// The processes of eleven attempts have died. The tick fails without its command.
async fn a_tick_that_is_given_up_has_a_line<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"0 0 1 1 *\"", "echo it runs");
    let declares = cron(&db, "", &file);
    let schedules = "SELECT COUNT(*) FROM t_resource_schedule";
    harness::eventually("it is declared", async || db.number(schedules).await == Some(1)).await;
    declares.stopped().await;
    let (holder, ago) = (DB::uuid("0123456789abcdef0123456789abcdef"), DB::ago(90_000));
    let died = format!("holder = {holder}, attempt = 11, run_slot = slot, begin_time = {ago}, due_at = {ago}");
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET {died}")).await, 1);
    let mut cron = cron(&db, "--log-level warn", &file);
    cron.complains("given up: the processes that ran it died").await;
    let ended = cron.stopped().await;
    assert!(ended.err.contains(" WARN ") && ended.err.contains("schedule=\"k\"") && ended.out.is_empty(), "{ended:?}");
}
