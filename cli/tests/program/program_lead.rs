//! `rowlock lead`, `rowlock leader` and `rowlock run --permits`: one instance, or at most N.

use std::time::{Duration, Instant};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;

use crate::program::{Program as _, STAYS, Stage, read};

harness::tests!(everywhere(
    a_killed_leader_is_replaced_and_its_command_dies,
    a_leader_that_loses_stops_its_command_and_campaigns_again,
    a_signal_while_a_lost_command_stops_ends_the_campaign,
    a_command_that_ends_is_a_resignation,
    a_leader_that_is_asked_to_stop_resigns_at_once,
    a_lock_delay_holds_the_next_leader_back_after_a_crash,
    the_leader_is_shown_and_watched,
    so_many_commands_run_at_a_time
));

/// A command that appends the number of its term to `terms`, and runs until the file `go` exists.
const LEADS: &str = r#"echo "$ROWLOCK_TOKEN" >> "$0/terms"; while [ ! -e "$0/go" ]; do sleep 0.05; done"#;

fn terms(stage: &Stage) -> Vec<i64> {
    let text = std::fs::read_to_string(stage.file("terms")).unwrap_or_default();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

async fn led(stage: &Stage, times: usize) {
    eventually("it leads", || async { terms(stage).len() >= times }).await;
}

async fn a_killed_leader_is_replaced_and_its_command_dies<DB: TestDatabase>(db: TestDb<DB>) {
    let (one, two) = (Stage::new(), Stage::new());
    let first = db.start("lead k --lease 2s --label one -- sh -c", &[LEADS, one.path()]);
    led(&one, 1).await;
    let second = db.start("lead k --lease 2s --label two -- sh -c", &[LEADS, two.path()]);
    first.signal(Signal::KILL);
    assert_eq!(first.ended().await.code, -9, "its command has died with it");
    led(&two, 1).await;
    assert!(terms(&two)[0] > terms(&one)[0], "terms grow");
    assert_eq!(db.show("k").await["by"], "two");
    two.go();
    second.ended().await.with(0);
}

async fn a_leader_that_loses_stops_its_command_and_campaigns_again<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!("trap 'echo told >> \"$0/told\"; exit' TERM; {LEADS}");
    let mut leader = db.start("lead k --lease 2s -- sh -c", &[&script, stage.path()]);
    led(&stage, 1).await;
    db.rowlock("release k --force", &[]).await.with(0);
    leader.complains("k: campaigning again").await;
    assert_eq!(read(&stage.file("told")), "told", "the command was asked to stop before");
    led(&stage, 2).await;
    assert!(terms(&stage).is_sorted() && terms(&stage)[0] < terms(&stage)[1]);
    stage.go();
    leader.ended().await.with(0);
}

async fn a_signal_while_a_lost_command_stops_ends_the_campaign<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!("trap ':' TERM; {LEADS}");
    let mut leader = db.start("lead k --lease 2s --stop-timeout 20s -- sh -c", &[&script, stage.path()]);
    led(&stage, 1).await;
    db.rowlock("release k --force", &[]).await.with(0);
    leader.complains("k: lost; stopping the command").await;
    leader.signal(Signal::TERM);
    tokio::time::sleep(Duration::from_millis(300)).await; // the signal is received
    stage.go();
    leader.ended().await.with(143);
    assert_eq!(terms(&stage).len(), 1, "it leads no more");
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_command_that_ends_is_a_resignation<DB: TestDatabase>(db: TestDb<DB>) {
    for (script, code, status) in [("true", 0, "S"), ("exit 3", 3, "F")] {
        db.rowlock("lead k --lease 1h -- sh -c", &[script]).await.with(code);
        let row = db.show("k").await;
        assert_eq!((&row["status"], &row["holder"]), (&status.into(), &serde_json::Value::Null));
    }
    db.rowlock("lead k -- /no/such/program", &[]).await.with(127);
}

async fn a_leader_that_is_asked_to_stop_resigns_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let words = [LEADS, stage.path()];
    let leader = db.start("lead k --lease 1h --lock-delay 1h -- sh -c", &words);
    led(&stage, 1).await;
    // One that campaigns ends too, and leaves nothing behind.
    let mut waiting = db.start("lead k --lease 1h -vv -- sh -c", &words);
    waiting.complains("refused").await;
    waiting.signal(Signal::TERM);
    waiting.ended().await.with(143);
    leader.signal(Signal::TERM);
    leader.ended().await.with(143);
    // The command has stopped, so neither the lease nor the delay is waited for.
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_lock_delay_holds_the_next_leader_back_after_a_crash<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let leader = db.start("lead k --lease 1s --lock-delay 3s -- sh -c", &[LEADS, stage.path()]);
    led(&stage, 1).await;
    let killed = Instant::now();
    leader.signal(Signal::KILL);
    leader.ended().await.with(-9);
    db.rowlock("run k --wait 1h -- true", &[]).await.with(0);
    assert!(killed.elapsed() >= Duration::from_secs(3), "{:?}", killed.elapsed());
}

async fn the_leader_is_shown_and_watched<DB: TestDatabase>(db: TestDb<DB>) {
    let none = db.rowlock("leader k", &[]).await.with(75);
    assert_eq!(none.out, "k: no instance leads\n");
    assert_eq!(db.rowlock("leader k --json", &[]).await.with(75).json()["term"], serde_json::Value::Null);
    let mut watched = db.start("leader k --watch --json", &[]);
    watched.says("\"term\":null", 1).await;
    let stage = Stage::new();
    let leader = db.start("lead k --label node-7 -- sh -c", &[LEADS, stage.path()]);
    led(&stage, 1).await;
    let term = terms(&stage)[0];
    watched.says(&format!("\"term\":{term}"), 1).await;
    let shown = db.rowlock("leader k --json", &[]).await.with(0).json();
    assert!(shown["term"] == term && shown["by"] == "node-7" && shown["since"].is_string(), "{shown}");
    let shown = db.rowlock("leader k", &[]).await.with(0).out;
    assert!(shown.starts_with("k: node-7 leads since 2") && shown.ends_with(&format!("in term {term}\n")), "{shown}");
    stage.go();
    leader.ended().await.with(0);
    watched.says("\"term\":null", 2).await;
    watched.signal(Signal::INT);
    watched.ended().await;
}

async fn so_many_commands_run_at_a_time<DB: TestDatabase>(db: TestDb<DB>) {
    let stages = [Stage::new(), Stage::new()];
    let script = format!("echo \"$ROWLOCK_KEY $ROWLOCK_PERMIT\" > \"$0/permit\"; {STAYS}");
    let run = |stage: &Stage| db.start("run k --permits 2 -- sh -c", &[&script, stage.path()]);
    let running = [run(&stages[0]), run(&stages[1])];
    for stage in &stages {
        stage.up().await;
    }
    let mut permits = [read(&stages[0].file("permit")), read(&stages[1].file("permit"))];
    permits.sort();
    assert_eq!(permits, ["k#1 1", "k#2 2"]);
    let refused = db.rowlock("run k --permits 2 -- echo", &["it runs"]).await.with(75);
    assert!(refused.out.is_empty() && refused.err.starts_with("rowlock: refused: k#"), "{refused:?}");
    db.rowlock("run k --permits 3 -- true", &[]).await.with(0);
    db.rowlock("run k --permits 0 -- true", &[]).await.with(2);
    stages.iter().for_each(Stage::go);
    for one in running {
        one.ended().await.with(0);
    }
    db.rowlock("run k --permits 2 -- true", &[]).await.with(0);
}
