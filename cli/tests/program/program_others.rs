//! Commands with processes of another user's, which the program may not signal, as under `sudo`.
//!
//! Here the program is run by root, without the right to signal processes of others.

use std::os::unix::fs::PermissionsExt as _;

use harness::{Need, Server, TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use tokio::process::Command;

use crate::{
    program::{PROGRAM, Program as _, Stage, Started, read, start},
    program_cron::{ended_as, job, runs},
    program_schedules::schedule,
    program_terminal::{TICKS, signal, state},
};

/// Root, who may become another user, and a program that takes rights from it.
const OTHER_USERS: Need = Need { what: "root and setpriv", is_met: has_other_users };

harness::tests!(sqlite[OTHER_USERS](
    a_key_is_kept_until_processes_of_another_user_have_ended,
    what_a_command_has_left_to_another_user_is_waited_for,
    a_tick_is_kept_until_processes_of_another_user_have_ended,
    a_killed_supervisor_does_not_hide_processes_of_another_user
));

/// Runs the words that follow without the right to signal processes of others.
const WITHOUT_RIGHT: [&str; 2] = ["setpriv", "--bounding-set=-kill"];
/// Runs [`TICKS`] as another user.
const OTHER: &str = r#"setpriv --reuid=65534 --clear-groups sh -c "$(cat "$0/ticks.sh")" "$0""#;

fn has_other_users(_: Server) -> bool {
    let mut trial = std::process::Command::new(WITHOUT_RIGHT[0]);
    trial.args([WITHOUT_RIGHT[1], "setpriv", "--reuid=65534", "--clear-groups", "true"]);
    trial.stderr(std::process::Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Returns a folder in which the other user writes too.
fn stage() -> Stage {
    let stage = Stage::new();
    std::fs::set_permissions(stage.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::write(stage.file("ticks.sh"), TICKS).unwrap();
    stage
}

/// Starts the program without that right.
fn restricted<DB: TestDatabase>(db: &TestDb<DB>, words: &str, more: &[&str]) -> Started {
    let mut command = Command::new(WITHOUT_RIGHT[0]);
    command.args([WITHOUT_RIGHT[1], "setsid", PROGRAM]).args(words.split_whitespace()).args(more);
    command.env("DATABASE_URL", &db.url).stdin(std::process::Stdio::null());
    start(command)
}

/// Waits until the key `k` was renewed twice.
async fn key_is_renewed<DB: TestDatabase>(db: &TestDb<DB>, holder: &serde_json::Value) {
    for _ in 0..2 {
        let before = db.show("k").await;
        eventually("it is renewed", async || {
            let row = db.show("k").await;
            assert!(row["holder"] == *holder && row["state"] == "held", "it is kept: {row}");
            row["until"] != before["until"]
        })
        .await;
    }
}

/// The process is the command, or one that the command has started.
async fn a_key_is_kept_until_processes_of_another_user_have_ended<DB: TestDatabase>(db: TestDb<DB>) {
    for (script, code) in [(format!("exec {OTHER}"), 0), (format!("{OTHER} & wait"), 143)] {
        let stage = stage();
        let mut job = restricted(&db, "run k --lease 6s --stop-timeout 300ms -- sh -c", &[&script, stage.path()]);
        let other = stage.up().await;
        let holder = db.show("k").await["holder"].clone();
        job.signal(Signal::TERM);
        job.complains(&format!("k: process {other} is another user's and cannot be signalled")).await;
        job.complains("k: not ended within 300ms: killed what may be signalled").await;
        key_is_renewed(&db, &holder).await;
        assert!(state(&other).is_some() && !job.is_over());
        stage.go();
        let ended = job.ended().await.with(code);
        assert_eq!(ended.err.matches("another user's").count(), 1, "it is said once: {ended:?}");
        db.rowlock("run k --wait 1h -- true", &[]).await.with(0);
    }
}

async fn what_a_command_has_left_to_another_user_is_waited_for<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = stage();
    let script = format!(r#"{OTHER} > /dev/null 2>&1 & while [ ! -e "$0/up" ]; do sleep 0.05; done"#);
    let mut job = restricted(&db, "run k --lease 6s --stop-timeout 300ms -- sh -c", &[&script, stage.path()]);
    let other = stage.up().await;
    let holder = db.show("k").await["holder"].clone();
    job.complains(&format!("k: process {other} is another user's and cannot be signalled")).await;
    key_is_renewed(&db, &holder).await;
    assert!(state(&other).is_some() && !job.is_over());
    stage.go();
    let ended = job.ended().await.with(0);
    assert!(ended.err.contains("k: what the command had left running has ended"), "{ended:?}");
}

/// Waits until the lease of the tick was renewed so many times.
async fn tick_is_renewed<DB: TestDatabase>(db: &TestDb<DB>, times: u32) {
    for _ in 0..times {
        let before = db.cell("due_at", "t_resource_schedule").await;
        eventually("the lease is renewed", async || {
            let row = schedule(db).await;
            assert!(row["running"] == true && row["attempt"] == 1, "it is kept: {row}");
            db.cell("due_at", "t_resource_schedule").await != before
        })
        .await;
    }
}

/// The process above the command would be killed five seconds after the stop timeout.
async fn a_tick_is_kept_until_processes_of_another_user_have_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = stage();
    let script = format!(r#"echo $PPID > "$0/above"; {OTHER} & wait"#);
    let file = job(&stage, "k", "after = \"1h\"\nlease = \"6s\"", &script);
    let mut cron = restricted(&db, "cron --stop-timeout 300ms", &[file.to_str().unwrap()]);
    let other = stage.up().await;
    cron.signal(Signal::TERM);
    cron.complains(&format!("k: rowlock: process {other} is another user's and cannot be signalled")).await;
    tick_is_renewed(&db, 4).await;
    assert!(state(&other).is_some() && state(&read(&stage.file("above"))).is_some());
    stage.go();
    cron.ended().await.with(0);
    let runs = runs(&db, "k").await;
    assert_eq!((runs.len(), &runs[0]["error"]), (1, &"handed back: its work was stopped".into()), "{runs:?}");
}

async fn a_killed_supervisor_does_not_hide_processes_of_another_user<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = stage();
    let script = format!(r#"echo $PPID > "$0/above"; {OTHER} & wait"#);
    let file = job(&stage, "k", "after = \"1h\"\nlease = \"6s\"", &script);
    let mut cron = restricted(&db, "cron", &[file.to_str().unwrap()]);
    let other = stage.up().await;
    signal(&read(&stage.file("above")), Signal::KILL);
    cron.complains(&format!("rowlock: k: process {other} is another user's and cannot be signalled")).await;
    tick_is_renewed(&db, 2).await;
    assert!(state(&other).is_some());
    stage.go();
    let error = &ended_as(&db, "k", "failed").await["error"];
    assert_eq!(error, "the command was stopped: signal 9 ended the process above it");
    cron.stopped().await;
}
