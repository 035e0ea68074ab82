//! What happens to the command and to the key when the program is asked to stop, is paused, or
//! loses its claim.

use std::time::{Duration, Instant};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::program::{PROGRAM, Program as _, STAYS, Stage, Started, start};

harness::tests!(
    everywhere(
        a_command_that_stops_is_waited_for_and_the_next_may_run_at_once,
        a_command_that_does_not_listen_is_killed_after_the_stop_timeout,
        a_command_keeps_its_key_through_its_stop_timeout,
        a_paused_holder_finds_out_and_stops_its_command,
        a_paused_holders_late_end_changes_nothing,
        a_forced_release_stops_the_command,
        an_end_after_a_forced_release_is_a_loss,
        a_holder_that_cannot_renew_stops_its_command,
        a_repeated_signal_does_not_wait_for_the_database
    ),
    sqlite(a_signal_that_was_ignored_stays_ignored)
);

/// A command that ends with 7 on any of these signals.
const OBEYS: &str =
    r#"trap 'echo bye; exit 7' TERM INT HUP QUIT; touch "$0/up"; while [ ! -e "$0/go" ]; do sleep 0.05; done"#;
/// A command that ignores these signals.
const IGNORES: &str = r#"trap '' TERM INT HUP QUIT; echo "$ROWLOCK_HOLDER" > "$0/new"; mv "$0/new" "$0/up"; while :; do sleep 0.05; done"#;

async fn a_command_that_stops_is_waited_for_and_the_next_may_run_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let stage = Stage::new();
        let job = db.start("run k --min-interval 1h --lease 1h --stop-timeout 1h -- sh -c", &[OBEYS, stage.path()]);
        stage.up().await;
        job.signal(signal);
        let ended = job.ended().await.with(7);
        assert!(ended.out == "bye\n" && !ended.err.contains("rowlock"), "{signal:?}: {ended:?}");
        let row = db.show("k").await;
        assert_eq!((&row["state"], &row["ended"]), (&"expired".into(), &serde_json::Value::Null), "abandoned: {row}");
    }
    db.rowlock("run k --min-interval 1h -- true", &[]).await.with(0);
}

async fn a_command_that_does_not_listen_is_killed_after_the_stop_timeout<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --min-interval 1h --lease 1h --stop-timeout 700ms -- sh -c", &[IGNORES, stage.path()]);
    stage.up().await;
    let asked = Instant::now();
    job.signal(Signal::TERM);
    let ended = job.ended().await.with(137);
    assert!(ended.err.contains("k: not ended within 700ms: killed") && ended.err.lines().count() == 1, "{ended:?}");
    assert!(asked.elapsed() >= Duration::from_millis(700), "{:?}", asked.elapsed());
    db.rowlock("run k --min-interval 1h -- true", &[]).await.with(0);
}

/// The lease is renewed during the stop timeout, while the command is still ending.
async fn a_command_keeps_its_key_through_its_stop_timeout<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 3s --stop-timeout 1h -- sh -c", &[IGNORES, stage.path()]);
    let holder = stage.up().await;
    job.signal(Signal::TERM);
    let (asked, first) = (Instant::now(), db.show("k").await);
    eventually("it is renewed", async || {
        asked.elapsed() > Duration::from_millis(3500) && db.show("k").await["until"] != first["until"]
    })
    .await;
    let row = db.show("k").await;
    assert_eq!((&row["holder"], &row["state"]), (&holder.into(), &"held".into()));
    drop(job);
}

/// Pauses the holder between two renewals. On SQLite, a holder that is paused during a write blocks
/// all other clients.
async fn pause<DB: TestDatabase>(db: &TestDb<DB>, holder: &Started) {
    let lock = db.lock();
    let until = async || lock.inspect("k").await.unwrap().unwrap().until;
    let first = until().await;
    eventually("it is renewed", async || until().await != first).await;
    holder.signal(Signal::STOP);
}

async fn a_paused_holder_finds_out_and_stops_its_command<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let paused = db.start("run k --lease 2s --stop-timeout 500ms -- sh -c", &[IGNORES, stage.path()]);
    let holder = stage.up().await;
    pause(&db, &paused).await;
    let claim = db.rowlock("acquire k --wait 1h --lease 1h", &[]).await.with(0).json();
    let row = db.show("k").await;
    for status in ["S", "F"] {
        let late = db.rowlock("release k --holder", &[&holder, "--status", status]).await.with(74);
        assert!(late.out.is_empty() && late.err.lines().count() == 1, "{late:?}");
    }
    db.rowlock("renew k --holder", &[&holder]).await.with(74);
    paused.signal(Signal::CONT);
    let ended = paused.ended().await.with(74);
    assert!(ended.err.contains("lost"), "{ended:?}");
    assert_eq!((&db.show("k").await, &row["holder"]), (&row, &claim["holder"]), "nothing was changed");
}

/// The command succeeds while the program that would record the success is paused.
async fn a_paused_holders_late_end_changes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!(r#"{STAYS}; touch "$0/gone""#);
    let paused = db.start("run k --lease 2s -- sh -c", &[&script, stage.path()]);
    stage.up().await;
    pause(&db, &paused).await;
    db.rowlock("acquire k --wait 1h --lease 1h", &[]).await.with(0);
    let row = db.show("k").await;
    stage.go();
    let gone = stage.file("gone");
    eventually("the command is done", async || gone.exists()).await;
    paused.signal(Signal::CONT);
    let ended = paused.ended().await.with(74);
    assert!(ended.err.contains("lost"), "{ended:?}");
    assert_eq!(db.show("k").await, row);
}

async fn a_forced_release_stops_the_command<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 1s --stop-timeout 1h -- sh -c", &[OBEYS, stage.path()]);
    stage.up().await;
    db.rowlock("release k --force --status F", &[]).await.with(0);
    let ended = job.ended().await.with(74);
    assert!(ended.out == "bye\n" && ended.err.contains("rowlock: k: lost; stopping the command"), "{ended:?}");
    let row = db.show("k").await;
    assert_eq!((&row["status"], &row["state"]), (&"F".into(), &"failed".into()));
}

/// The key was freed so recently that no renewal has detected it.
async fn an_end_after_a_forced_release_is_a_loss<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 1h -- sh -c", &[STAYS, stage.path()]);
    stage.up().await;
    db.rowlock("release k --force --status F", &[]).await.with(0);
    let row = db.show("k").await;
    stage.go();
    let ended = job.ended().await.with(74);
    assert!(ended.err.contains("was lost") && ended.err.lines().count() == 1, "{ended:?}");
    assert_eq!(db.show("k").await, row);
}

/// Another transaction has the row locked, so that no renewal succeeds.
async fn a_holder_that_cannot_renew_stops_its_command<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 1s --stop-timeout 1h -- sh -c", &[OBEYS, stage.path()]);
    stage.up().await;
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut other, DB::LOCK_ROW).await.unwrap();
    let ended = job.ended().await.with(74);
    assert!(ended.out == "bye\n" && ended.err.contains("lost; stopping the command"), "{ended:?}");
    DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
}

/// Another transaction has the row locked, so that the end cannot be written. A repeated signal
/// ends the program without waiting for the end of the lease.
async fn a_repeated_signal_does_not_wait_for_the_database<DB: TestDatabase>(db: TestDb<DB>) {
    let ends = format!(r#"{STAYS}; trap '' TERM; touch "$0/gone""#);
    for (script, code) in [(ends.as_str(), 0), (OBEYS, 7)] {
        let stage = Stage::new();
        let mut job = db.start("run k --lease 1h -- sh -c", &[script, stage.path()]);
        stage.up().await;
        let mut other = db.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut other, DB::LOCK_ROW).await.unwrap();
        if code == 0 {
            stage.go();
            eventually("the command is done", async || stage.file("gone").exists()).await;
        }
        let asked = Instant::now();
        while !job.is_over() {
            assert!(asked.elapsed() < PATIENCE, "it does not stop");
            job.signal(Signal::TERM);
            sleep(Duration::from_millis(20)).await;
        }
        job.ended().await.with(code);
        DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
        db.rowlock("release k --force", &[]).await.with(0);
    }
}

/// `nohup` and a shell's background jobs: signals that are ignored at the start stay ignored, also
/// in the command.
async fn a_signal_that_was_ignored_stays_ignored<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut shell = tokio::process::Command::new("sh");
    let script = r#"trap '' HUP INT; exec "$0" run k --stop-timeout 1h -- sh -c "$1" "$2""#;
    shell.args(["-c", script, PROGRAM, STAYS, stage.path()]).env("DATABASE_URL", &db.url);
    let job = start(shell);
    stage.up().await;
    job.signal(Signal::HUP);
    job.signal(Signal::INT);
    stage.go();
    job.ended().await.with(0);
    assert_eq!(db.show("k").await["status"], "S");
}
