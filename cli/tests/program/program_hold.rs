//! `rowlock hold`: a key that a script holds, and how the script ends it.

use std::{
    fs::{self, File},
    path::Path,
    process::Stdio,
};

use harness::{TestDatabase, TestDb, acquired, eventually};
use rustix::process::Signal;
use serde_json::Value;
use tokio::{net::unix::pipe, process::Command};

use crate::program::{PROGRAM, Program as _, STAYS, Stage, Started, read, start};

harness::tests!(everywhere(
    a_key_is_held_while_stdin_is_open,
    a_stdin_without_a_reply_is_open,
    a_stdin_that_fails_is_told,
    a_signal_ends_the_claim_as_failed,
    the_end_of_the_parent_ends_the_claim_as_failed,
    an_error_of_a_script_ends_the_claim_as_failed,
    a_claim_that_is_lost_ends_the_program,
    a_lock_delay_ends_with_a_forced_release,
    a_release_by_hand_leaves_no_lock_delay,
    what_is_not_granted_is_not_held,
    a_name_that_is_read_is_not_held,
    the_guides_scripts_succeed_and_fail_with_their_work,
    a_guides_script_that_is_killed_has_failed,
    a_guides_script_that_loses_its_claim_stops_its_work,
    a_guides_script_that_is_told_to_end_stops_its_work
));

fn hold<DB: TestDatabase>(db: &TestDb<DB>, words: &str) -> Started {
    let mut command = db.command(&format!("hold k {words}"), &[]);
    command.stdin(Stdio::piped());
    start(command)
}

async fn claim(holding: &mut Started) -> Value {
    holding.says("\n", 1).await;
    serde_json::from_str(holding.said()).unwrap()
}

/// Waits until the claim has ended, and returns the status of the row.
async fn ended<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> Value {
    eventually("the claim has ended", async || db.show(key).await["holder"].is_null()).await;
    db.show(key).await["status"].clone()
}

async fn a_key_is_held_while_stdin_is_open<DB: TestDatabase>(db: TestDb<DB>) {
    let mut holding = hold(&db, "--lease 2s --label me");
    let claim = claim(&mut holding).await;
    let row = db.show("k").await;
    for field in ["token", "holder", "key"] {
        assert_eq!(claim[field], row[field], "{claim} {row}");
    }
    // It may have been renewed since.
    assert!(claim["expires_at"].as_str() <= row["until"].as_str() && claim["expires_at"].is_string(), "{claim} {row}");
    eventually("it is renewed", async || db.show("k").await["until"] != row["until"]).await;
    let refused = db.rowlock("run k -E 9 -- true", &[]).await.with(9);
    assert!(refused.err.starts_with("rowlock: refused: k: held, by me"), "{refused:?}");
    assert!(!holding.is_over());
    holding.close_stdin();
    let ended = holding.ended().await.with(0);
    assert_eq!((ended.out.lines().count(), ended.err.as_str()), (1, ""));
    let row = db.show("k").await;
    assert_eq!((&row["status"], &row["state"], &row["token"]), (&"S".into(), &"free".into(), &claim["token"]));
}

/// Another process may have made the pipe one whose reads do not wait.
async fn a_stdin_without_a_reply_is_open<DB: TestDatabase>(db: TestDb<DB>) {
    let (writer, reader) = pipe::pipe().unwrap();
    let mut command = db.command("hold k --lease 2s", &[]);
    command.stdin(reader.into_nonblocking_fd().unwrap());
    let mut holding = start(command);
    claim(&mut holding).await;
    let row = db.show("k").await;
    eventually("it is renewed", async || db.show("k").await["until"] != row["until"]).await;
    drop(writer);
    holding.ended().await.with(0);
    assert_eq!(db.show("k").await["status"], "S");
}

async fn a_stdin_that_fails_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let mut command = db.command("hold k --wait 1h", &[]);
    command.stdin(File::open("/").unwrap());
    let ended = start(command).ended().await.with(75);
    assert!(ended.err.contains("stdin cannot be read any more: Is a directory"), "{ended:?}");
}

async fn a_signal_ends_the_claim_as_failed<DB: TestDatabase>(db: TestDb<DB>) {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        let mut holding = hold(&db, "--lease 1h");
        claim(&mut holding).await;
        holding.signal(signal);
        holding.ended().await.with(code);
        let row = db.show("k").await;
        assert_eq!((&row["status"], &row["holder"]), (&"F".into(), &Value::Null), "{row}");
    }
}

/// A child of the parent may keep the pipe open, so that its end is not seen.
async fn the_end_of_the_parent_ends_the_claim_as_failed<DB: TestDatabase>(db: TestDb<DB>) {
    for script in [
        r#"coproc "$0" hold k --lease 1h; read -r claim <&"${COPROC[0]}"; echo "$claim" > "$1/claim"; wait "$COPROC_PID""#,
        r#"mkfifo "$1/pipe"; sleep 20 > "$1/pipe" 2> /dev/null & "$0" hold k --lease 1h < "$1/pipe" > "$1/claim" & wait"#,
    ] {
        let (stage, mut shell) = (Stage::new(), Command::new("bash"));
        shell.args(["-c", script, PROGRAM, stage.path()]).env("DATABASE_URL", &db.url).stdin(Stdio::null());
        let parent = start(shell);
        // A claim that cannot be printed is abandoned, because no work has begun.
        let claim = Path::new(stage.path()).join("claim");
        eventually("the claim is printed", async || fs::metadata(&claim).is_ok_and(|claim| claim.len() > 0)).await;
        parent.signal(Signal::KILL);
        assert_eq!(ended(&db, "k").await, "F", "{script}");
    }
}

/// Its interpreter closes the pipe before the process ends.
async fn an_error_of_a_script_ends_the_claim_as_failed<DB: TestDatabase>(db: TestDb<DB>) {
    const SCRIPT: &str = "import subprocess, sys
hold = subprocess.Popen([sys.argv[1], 'hold', 'k', '--lease', '1h'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
hold.stdout.readline()
raise SystemExit('the work has failed')";
    let mut script = Command::new("python3");
    script.args(["-c", SCRIPT, PROGRAM]).env("DATABASE_URL", &db.url).stdin(Stdio::null());
    start(script).ended().await.with(1);
    assert_eq!(ended(&db, "k").await, "F");
}

async fn a_claim_that_is_lost_ends_the_program<DB: TestDatabase>(db: TestDb<DB>) {
    let mut holding = hold(&db, "--lease 1s");
    claim(&mut holding).await;
    db.rowlock("release k --force", &[]).await.with(0);
    let row = db.show("k").await;
    let lost = holding.ended().await.with(74);
    assert!(lost.err.contains("rowlock: k: lost; its work has to stop"), "{lost:?}");
    assert_eq!(db.show("k").await, row);
}

/// A program that was killed leaves the key closed for its lease and the delay.
async fn killed_with_a_delay<DB: TestDatabase>(db: &TestDb<DB>) -> Value {
    let mut holding = hold(db, "--lease 1s --lock-delay 1h");
    let claim = claim(&mut holding).await;
    holding.signal(Signal::KILL);
    holding.ended().await;
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    db.rowlock("run k -- true", &[]).await.with(75);
    claim
}

async fn a_lock_delay_ends_with_a_forced_release<DB: TestDatabase>(db: TestDb<DB>) {
    killed_with_a_delay(&db).await;
    db.rowlock("release k --force", &[]).await.with(0);
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_release_by_hand_leaves_no_lock_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let claim = killed_with_a_delay(&db).await;
    db.rowlock("release k --holder", &[claim["holder"].as_str().unwrap()]).await.with(0);
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_name_that_is_read_is_not_held<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let reader = db.start("run k --shared -- sh -c", &[STAYS, stage.path()]);
    stage.up().await;
    let refused = hold(&db, "").ended().await.with(75);
    assert!(refused.out.is_empty() && refused.err.contains("k is read by"), "{refused:?}");
    stage.go();
    reader.ended().await.with(0);
    let mut holding = hold(&db, "");
    claim(&mut holding).await;
    holding.close_stdin();
    holding.ended().await.with(0);
}

async fn what_is_not_granted_is_not_held<DB: TestDatabase>(db: TestDb<DB>) {
    let null = db.rowlock("hold k", &[]).await.with(2);
    assert!(null.err.contains("stdin is /dev/null") && null.out.is_empty(), "{null:?}");
    db.rowlock("show k", &[]).await.with(75);
    db.rowlock("acquire k --lease 1h", &[]).await.with(0);
    let row = db.show("k").await;
    let refused = hold(&db, "-E 3").ended().await.with(3);
    assert!(refused.out.is_empty() && refused.err.contains("refused: k: held"), "{refused:?}");
    let mut waiting = hold(&db, "--wait forever -vv");
    waiting.complains("refused").await;
    waiting.close_stdin();
    let closed = waiting.ended().await.with(75);
    assert!(closed.out.is_empty() && closed.err.contains("stdin was closed while it waited"), "{closed:?}");
    let mut waiting = hold(&db, "--wait forever -vv");
    waiting.complains("refused").await;
    waiting.signal(Signal::TERM);
    waiting.ended().await.with(143);
    assert_eq!(db.show("k").await, row);
}

/// The scripts of `docs/run.md`, each in a folder with the work that it starts.
const SCRIPTS: [(&str, &str); 2] = [("bash", "bash"), ("python", "python3")];

/// What the scripts start: it writes its token into `up`, and works until the file `go` exists.
const WORK: &str = r#"#!/bin/sh
trap 'touch stopped; exit 9' TERM
echo "$1" > new; mv new up
while [ ! -e go ]; do sleep 0.05; done
exit "$(cat go)"
"#;

fn script<DB: TestDatabase>(db: &TestDb<DB>, stage: &Stage, (name, program): (&str, &str)) -> Started {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/run.md")).unwrap();
    let (_, script) = page.split_once(&format!("<!-- hold: {name} -->\n```{name}\n")).expect("the script of the page");
    let (script, _) = script.split_once("```").unwrap();
    let work = stage.file("deploy.sh");
    std::fs::write(&work, WORK).unwrap();
    std::fs::set_permissions(&work, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let folder = std::path::Path::new(PROGRAM).parent().unwrap().to_str().unwrap();
    let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
    let mut command = Command::new(program);
    command.args(["-c", script]).current_dir(stage.path()).stdin(Stdio::null());
    start({
        command.env("DATABASE_URL", &db.url).env("PATH", path);
        command
    })
}

async fn the_guides_scripts_succeed_and_fail_with_their_work<DB: TestDatabase>(db: TestDb<DB>) {
    for of in SCRIPTS {
        for (code, status) in [(0, "S"), (3, "F")] {
            let stage = Stage::new();
            let running = script(&db, &stage, of);
            let token = stage.up().await;
            let row = db.show("deploy").await;
            assert_eq!((row["token"].to_string(), &row["state"]), (token, &"held".into()), "{of:?}");
            stage.put("go", &code.to_string());
            running.ended().await.with(code);
            let row = db.show("deploy").await;
            assert_eq!((&row["status"], &row["holder"]), (&status.into(), &Value::Null), "{of:?}: {row}");
        }
    }
}

async fn a_guides_script_that_is_killed_has_failed<DB: TestDatabase>(db: TestDb<DB>) {
    for of in SCRIPTS {
        let stage = Stage::new();
        let running = script(&db, &stage, of);
        stage.up().await;
        running.signal(Signal::KILL);
        assert_eq!(ended(&db, "deploy").await, "F", "{of:?}");
        // The work is a process of its own.
        stage.put("go", "0");
        running.ended().await.with(-9);
    }
}

async fn a_guides_script_that_is_told_to_end_stops_its_work<DB: TestDatabase>(db: TestDb<DB>) {
    for (of, signal) in SCRIPTS.into_iter().flat_map(|of| [Signal::TERM, Signal::HUP].map(|signal| (of, signal))) {
        let stage = Stage::new();
        let running = script(&db, &stage, of);
        stage.up().await;
        running.signal(signal);
        running.ended().await.with(143);
        assert_eq!(read(&stage.file("stopped")), "", "{of:?}: the work has ended before");
        assert_eq!(ended(&db, "deploy").await, "F", "{of:?}");
    }
}

async fn a_guides_script_that_loses_its_claim_stops_its_work<DB: TestDatabase>(db: TestDb<DB>) {
    for of in SCRIPTS {
        let stage = Stage::new();
        let running = script(&db, &stage, of);
        stage.up().await;
        db.rowlock("release deploy --force", &[]).await.with(0);
        running.ended().await.with(74);
        assert_eq!(read(&stage.file("stopped")), "", "{of:?}: the work was asked to stop");
    }
}
