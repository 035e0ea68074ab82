//! `rowlock run --cron`, and the commands for operators of schedules.

use std::time::Duration;

use harness::{TestDatabase, TestDb, eventually, proxy::Way};
use rustix::process::Signal;
use serde_json::Value;
use tokio::time::sleep;

use crate::{
    program::{Program as _, STAYS, Stage, at, start},
    program_cron::{cron, job, runs},
};

harness::tests!(
    everywhere(
        a_tick_that_is_given_up_is_a_failure,
        a_tick_that_is_due_is_run,
        a_tick_that_is_not_due_is_refused,
        a_schedule_is_shown_with_its_runs,
        a_tick_that_runs_elsewhere_is_waited_for,
        a_tick_is_finished_elsewhere_after_a_kill,
        a_failed_command_is_a_failed_run,
        all_ticks_that_were_missed_are_run_one_after_another,
        old_runs_are_forgotten,
        a_run_that_is_lost_stops_its_command,
        a_tick_that_is_stopped_keeps_its_lease_until_its_command_has_ended,
        a_schedule_is_paused_resumed_and_triggered,
        a_schedule_that_does_not_exist_says_so,
        tables_that_are_missing_say_what_to_run
    ),
    sqlite(a_tick_that_the_database_refuses_is_a_failure, a_signal_during_the_claim_leaves_the_tick_free),
    servers(a_tick_whose_row_is_locked_is_asked_for_seldom),
    servers.long(newer_times_are_named),
    sqlite.long(newer_times_are_named)
);

/// A pattern that is not due while the tests run, unless they run at the turn of a year.
const YEARLY: [&str; 2] = ["--cron", "0 0 1 1 *"];

pub async fn schedule<DB: TestDatabase>(db: &TestDb<DB>) -> Value {
    db.rowlock("schedules --json", &[]).await.with(0).json()[0].clone()
}

/// Registers the yearly schedule `k`, whose tick is then due.
pub async fn due<DB: TestDatabase>(db: &TestDb<DB>) {
    db.rowlock("run k", &[YEARLY[0], YEARLY[1], "--", "true"]).await.with(75);
    let ago = DB::ago(1000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago}")).await;
}

fn yearly<'a>(script: &'a str, stage: &'a Stage) -> [&'a str; 7] {
    [YEARLY[0], YEARLY[1], "--", "sh", "-c", script, stage.path()]
}

async fn a_tick_that_is_due_is_run<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    let script = r#"echo "$ROWLOCK_JOB/$ROWLOCK_ATTEMPT/$ROWLOCK_MISSED/$ROWLOCK_SLOT/$ROWLOCK_TOKEN""#;
    let ended = db.rowlock("run k", &yearly(script, &stage)).await.with(0);
    let run = &runs(&db, "k").await[0];
    let (slot, token) = (run["slot"].as_str().unwrap(), &run["token"]);
    assert_eq!((ended.out, ended.err.as_str()), (format!("k/1/0/{slot}/{token}\n"), ""));
    assert_eq!((&run["status"], runs(&db, "k").await.len()), (&"succeeded".into(), 1));
    db.rowlock("run k", &yearly("echo again", &stage)).await.with(75);
}

async fn a_tick_that_is_not_due_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let refused = db.rowlock("run k", &[YEARLY[0], YEARLY[1], "--", "echo", "it runs"]).await.with(75);
    assert!(refused.out.is_empty() && refused.err.lines().count() == 1, "{refused:?}");
    let says = "rowlock: refused: k: registered, and not run yet: the first tick is at 2";
    assert!(refused.err.starts_with(says), "{refused:?}");
    let skipped = db.rowlock("run k --refused-ok", &[YEARLY[0], YEARLY[1], "--", "echo", "it runs"]).await.with(0);
    assert_eq!((skipped.out.as_str(), skipped.err.as_str()), ("", ""));
    due(&db).await;
    db.rowlock("run k", &[YEARLY[0], YEARLY[1], "--", "true"]).await.with(0);
    let done = db.rowlock("run k", &[YEARLY[0], YEARLY[1], "--", "echo", "it runs"]).await.with(75);
    assert!(done.err.starts_with("rowlock: refused: k: done, or not due: the next tick is at 2"), "{done:?}");
    let wrong = db.rowlock("run k --cron", &["61 * * * *", "--", "true"]).await.with(2);
    assert!(wrong.err.contains("the cron pattern") && wrong.err.contains("the minute \"61\""), "{wrong:?}");
    let both = db.rowlock("run k --wait 1m", &[YEARLY[0], YEARLY[1], "--", "true"]).await.with(2);
    assert!(both.err.contains("--wait"), "{both:?}");
}

/// The crontab is as old as its times, which were in effect before those of the instance.
async fn newer_times_are_named<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"1 1 1 1 *\"\nzone = \"Europe/Berlin\"", "true");
    let cron = cron(&db, "", &file);
    eventually("the newer times apply", async || schedule(&db).await["times"] == "cron 1 1 1 1 *").await;
    let refused = db.rowlock("run k", &[YEARLY[0], YEARLY[1], "--", "echo", "it runs"]).await.with(75);
    let says = "rowlock: refused: k: other times are in effect, which are newer: cron 1 1 1 1 * Europe/Berlin";
    assert!(refused.out.is_empty() && refused.err.contains(says), "{refused:?}");
    cron.stopped().await;
}

/// A schedule has no row in the table of locks, unless a key has its name too.
async fn a_schedule_is_shown_with_its_runs<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    db.rowlock("run k", &yearly("exit 3", &stage)).await.with(3);
    let shown = db.rowlock("show k --json", &[]).await.with(0).json();
    assert_eq!((&shown["schedule"], &shown["state"]), (&schedule(&db).await, &Value::Null));
    assert_eq!(shown["runs"].as_array().unwrap(), &runs(&db, "k").await);
    let text = db.rowlock("show k", &[]).await.with(0).out;
    assert!(text.starts_with("schedule k: cron 0 0 1 1 *, waiting, next at 2"), "{text}");
    assert!(text.contains("\n\nSLOT") && text.contains("exit code 3"), "{text}");
    db.rowlock("run k -- true", &[]).await.with(0);
    let text = db.rowlock("show k", &[]).await.with(0).out;
    assert!(text.starts_with("KEY") && text.contains("\n\nschedule k: ") && text.contains("exit code 3"), "{text}");
    assert_eq!(db.show("k").await["runs"].as_array().unwrap().len(), 1);
    db.execute("DROP TABLE t_resource_schedule_run").await;
    let shown = db.rowlock("show k", &[]).await.with(0);
    assert!(shown.out.starts_with("KEY") && shown.out.contains("\n\nschedule k: "), "{shown:?}");
    assert!(shown.err.contains("k: how its schedule ran is not known"), "{shown:?}");
    db.execute("DROP TABLE t_resource_schedule").await;
    assert_eq!(db.show("k").await["schedule"], Value::Null, "locks need no tables of schedules");
}

async fn a_tick_that_runs_elsewhere_is_waited_for<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    let first = db.start("run k", &yearly(STAYS, &stage));
    stage.up().await;
    let mut second = db.start("run k", &yearly("echo again", &stage));
    sleep(Duration::from_secs(1)).await;
    assert!(!second.is_over());
    stage.go();
    first.ended().await.with(0);
    assert_eq!(second.ended().await.with(75).out, "");
}

async fn a_tick_is_finished_elsewhere_after_a_kill<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    let first = db.start("run k --lease 2s", &yearly(STAYS, &stage));
    stage.up().await;
    let second = db.start("run k --lease 2s", &yearly("echo \"$ROWLOCK_ATTEMPT\"", &stage));
    sleep(Duration::from_millis(300)).await;
    first.signal(Signal::KILL);
    assert_eq!(first.ended().await.code, -9);
    assert_eq!(second.ended().await.with(0).out, "2\n");
    let statuses: Vec<Value> = runs(&db, "k").await.iter().map(|run| run["status"].clone()).collect();
    assert_eq!(statuses, ["succeeded", "lost"]);
}

async fn a_failed_command_is_a_failed_run<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    db.rowlock("run k", &yearly("exit 3", &stage)).await.with(3);
    let run = &runs(&db, "k").await[0];
    assert_eq!((&run["status"], &run["error"]), (&"failed".into(), &"exit code 3".into()));
}

/// A tick each minute: the one that is set, 150 s ago, and the two or three minutes since then.
async fn all_ticks_that_were_missed_are_run_one_after_another<DB: TestDatabase>(db: TestDb<DB>) {
    let minutely = |script| ["--cron", "* * * * *", "--catch-up", "all", "--refused-ok", "--", "sh", "-c", script];
    db.rowlock("run k --cron", &["* * * * *", "--catch-up", "all", "--", "true"]).await;
    // A minute may just have begun.
    db.execute("DELETE FROM t_resource_schedule_run").await;
    let ago = DB::ago(150_000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago}")).await;
    db.rowlock("run k", &minutely("exit 3")).await.with(3);
    assert_eq!(runs(&db, "k").await.len(), 1, "a failure ends the program");
    let ended = db.rowlock("run k", &minutely("echo tick")).await.with(0);
    let runs = runs(&db, "k").await;
    assert!((3..=4).contains(&runs.len()) && runs.iter().all(|run| run["missed"] == 0), "{runs:?}");
    assert_eq!((ended.out, ended.err.as_str()), ("tick\n".repeat(runs.len() - 1), ""));
}

/// The last success stays, so that the schedule is not shown as one that never succeeded.
async fn old_runs_are_forgotten<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    for (script, code) in [("true", 0), ("true", 0), ("exit 3", 3)] {
        due(&db).await;
        db.rowlock("run k", &yearly(script, &stage)).await.with(code);
    }
    for (age, says) in [("1h", "0 deleted\n"), ("0s", "2 deleted\n"), ("0s", "0 deleted\n")] {
        assert_eq!(db.rowlock("forget --runs --older-than", &[age]).await.with(0).out, says);
    }
    let left = runs(&db, "k").await;
    assert!(left.len() == 1 && left[0]["status"] == "succeeded" && schedule(&db).await["name"] == "k", "{left:?}");
    db.rowlock("forget --runs --min-interval 1h --older-than 1h", &[]).await.with(2);
}

async fn a_run_that_is_lost_stops_its_command<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let stage = Stage::new();
    let first = db.start("run k --lease 2s", &yearly(STAYS, &stage));
    stage.up().await;
    db.execute("UPDATE t_resource_schedule SET token = token + 1").await;
    let ended = first.ended().await.with(74);
    assert!(ended.err.contains("k: lost; stopping the command"), "{ended:?}");
}

/// An operator stops the tick, or a signal the program. The command takes its time to stop.
async fn a_tick_that_is_stopped_keeps_its_lease_until_its_command_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let script = format!(r#"trap 'touch "$0/asked"' TERM; {STAYS}; exit 7"#);
    for (by_operator, code, error) in [(true, 74, "stopped by "), (false, 7, "handed back: ")] {
        due(&db).await;
        let stage = Stage::new();
        let program = db.start("run k --lease 6s --stop-timeout 1h", &yearly(&script, &stage));
        stage.up().await;
        match by_operator {
            true => drop(db.rowlock("stop k", &[]).await.with(0)),
            false => program.signal(Signal::TERM),
        }
        eventually("the command is asked to stop", async || stage.file("asked").exists()).await;
        for _ in 0..2 {
            let (before, token) =
                (db.cell("due_at", "t_resource_schedule").await, schedule(&db).await["token"].clone());
            eventually("the lease is renewed", async || {
                let row = schedule(&db).await;
                assert!(row["running"] == true && row["token"] == token, "the command still runs: {row}");
                db.cell("due_at", "t_resource_schedule").await != before
            })
            .await;
        }
        assert!(runs(&db, "k").await.is_empty(), "no end is recorded");
        stage.go();
        let said = program.ended().await.with(code).err;
        assert_eq!(said.contains("k: stopped by an operator; stopping the command"), by_operator, "{said}");
        let ended = runs(&db, "k").await;
        assert!(ended[0]["error"].as_str().unwrap().starts_with(error), "{ended:?}");
        db.execute("DELETE FROM t_resource_schedule_run").await;
    }
}

async fn a_schedule_is_paused_resumed_and_triggered<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"0 0 1 1 *\"\nzone = \"Europe/Berlin\"", "echo it runs");
    let mut cron = cron(&db, "", &file);
    cron.complains("jobs.toml: 1 job").await;
    let row = schedule(&db).await;
    let seen = (row["name"].as_str(), row["times"].as_str(), row["zone"].as_str(), row["state"].as_str());
    assert_eq!(seen, (Some("k"), Some("cron 0 0 1 1 *"), Some("Europe/Berlin"), Some("waiting")));
    assert_eq!(db.rowlock("pause k", &[]).await.with(0).out, "k is paused\n");
    let row = db.rowlock("trigger k --json", &[]).await.with(0).json();
    assert!(row["paused"] == true && row["triggered"].is_string() && row["state"] == "paused", "{row}");
    let again = db.rowlock("trigger k", &[]).await.with(0);
    assert!(again.out.contains("it was triggered already at 2"), "{again:?}");
    sleep(Duration::from_secs(3)).await;
    assert!(runs(&db, "k").await.is_empty());
    assert_eq!(db.rowlock("resume k", &[]).await.with(0).out, "k is resumed\n");
    cron.says("k: it runs", 1).await;
    eventually("the run is recorded", async || runs(&db, "k").await.len() == 1).await;
    let (schedules, runs) = (db.rowlock("schedules", &[]).await.with(0), db.rowlock("runs k", &[]).await.with(0));
    assert!(schedules.out.starts_with("NAME  TIMES") && schedules.out.contains("0 0 1 1 * Europe/Berlin"));
    assert!(runs.out.starts_with("SLOT") && runs.out.contains("succeeded") && !runs.out.contains(" \n"), "{runs:?}");
    cron.stopped().await;
}

async fn a_schedule_that_does_not_exist_says_so<DB: TestDatabase>(db: TestDb<DB>) {
    for words in [
        "pause none",
        "resume none",
        "trigger none",
        "skip none",
        "stop none",
        "reset none",
        "remove none",
        "why none",
        "output none",
        "runs none",
        "runs none --running",
        "runs none --unsuccessful",
        "runs none --stats",
    ] {
        let ended = db.rowlock(words, &[]).await.with(75);
        let says = "rowlock: there is no schedule \"none\", or it was removed: `rowlock schedules` lists them\n";
        assert_eq!((ended.out.as_str(), ended.err.as_str()), ("", says), "{words}");
    }
}

async fn tables_that_are_missing_say_what_to_run<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("DROP TABLE t_resource_schedule").await;
    for words in ["schedules", "pause k"] {
        let ended = db.rowlock(words, &[]).await.with(78);
        assert!(ended.err.contains("run `rowlock migrate` once"), "{words}: {ended:?}");
    }
}

/// Eleven instances died while they ran the tick.
async fn a_tick_that_is_given_up_is_a_failure<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let holder = DB::uuid("0123456789abcdef0123456789abcdef");
    db.execute(&format!(
        "UPDATE t_resource_schedule SET holder = {holder}, attempt = 11, run_slot = slot, client_ip = 'node-1',
             begin_time = {}, due_at = {}, token = token + 1",
        DB::ago(90_000),
        DB::ago(1000)
    ))
    .await;
    let ended = db.rowlock("run k --refused-ok", &[YEARLY[0], YEARLY[1], "--", "echo", "runs"]).await.with(70);
    assert!(ended.err.contains("k: given up") && ended.out.is_empty(), "{ended:?}");
}

/// The ticks that were missed cannot be skipped.
async fn a_tick_that_the_database_refuses_is_a_failure<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let ago = DB::ago(1000 * 60 * 60 * 24 * 366 * 3);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago}")).await;
    db.execute(
        "CREATE TRIGGER refuses BEFORE UPDATE OF slot ON t_resource_schedule WHEN NEW.slot <> OLD.slot
             BEGIN SELECT RAISE(ABORT, 'refused'); END",
    )
    .await;
    let ended = db.rowlock("run k --refused-ok", &[YEARLY[0], YEARLY[1], "--", "echo", "runs"]).await.with(69);
    assert!(ended.err.contains("k: handed back") && ended.out.is_empty(), "{ended:?}");
}

/// The claim takes a while, and the signals come at various times of it. The lease is so long that
/// only a claim that was undone leaves the tick free.
async fn a_signal_during_the_claim_leaves_the_tick_free<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    db.execute(
        "CREATE TRIGGER slow BEFORE UPDATE ON t_resource_schedule WHEN NEW.holder IS NOT NULL AND OLD.holder IS NULL
             BEGIN SELECT count(*) FROM
                 (WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 1000000) SELECT n FROM c);
             END",
    )
    .await;
    for round in 1..=8 {
        let program = db.start("run k --lease 1h", &[YEARLY[0], YEARLY[1], "--", "sleep", "1000"]);
        sleep(Duration::from_millis(round * 100)).await;
        program.signal(Signal::TERM);
        let ended = program.ended().await;
        assert!([143, -15].contains(&ended.code), "{ended:?}");
        assert_eq!(schedule(&db).await["running"], false, "{round}");
    }
}

/// Another transaction has locked it. The program says so once, and counts on less than fifty
/// statements for each of three looks. It waits for a lease at most.
async fn a_tick_whose_row_is_locked_is_asked_for_seldom<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let (stage, proxy) = (Stage::new(), db.proxy().await);
    let mut other = db.pool.begin().await.unwrap();
    DB::execute_on(&mut other, "SELECT 1 FROM t_resource_schedule FOR UPDATE").await.unwrap();
    let mut program = start(at(&proxy.url, "run k", &yearly("echo it runs", &stage)));
    program.complains("k: it is due, and another transaction has locked its row").await;
    let asked = proxy.seen(Way::Requests);
    sleep(Duration::from_secs(6)).await;
    let asked = proxy.seen(Way::Requests) - asked;
    assert!(asked < 3 * 50, "{asked}");
    let given_up = start(at(&proxy.url, "run k --lease 2s", &yearly("echo it runs", &stage))).ended().await.with(69);
    assert!(given_up.err.contains("k: another transaction has its row locked for "), "{given_up:?}");
    other.rollback().await.unwrap();
    let ended = program.ended().await.with(0);
    assert_eq!((ended.out.as_str(), ended.err.lines().count()), ("it runs\n", 1), "{ended:?}");
}
