//! No process of the command outlives its claim, and nothing runs longer than the stop timeout.

use std::{
    os::unix::fs::PermissionsExt as _,
    time::{Duration, Instant},
};

use harness::{Need, TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use tokio::{process::Command, time::sleep};

use crate::{
    program::{PROGRAM, Program as _, STAYS, Stage, Started, ended, read, start, within},
    program_cron::{cron, ended_as, job, jobs},
    program_terminal::{TICKS, is_stopped, signal, state},
};

/// A process namespace, in which the program is the first process.
const NAMESPACES: Need = Need { what: "unshare -pf --mount-proc", is_met: |_| has_process_namespaces() };

harness::tests!(
    everywhere(
        a_suspension_is_passed_on_and_the_key_kept,
        what_is_told_to_the_database_is_within_the_stop_timeout,
        a_command_whose_beginning_fails_leaves_the_key_free
    ),
    sqlite[NAMESPACES](
        as_pid_1_it_stops_as_soon_as_its_command_does,
        the_leader_of_its_session_may_be_outside,
        as_pid_1_cron_buries_orphans
    ),
    sqlite(
        orphans_are_buried_while_the_command_works,
        orphans_are_buried_while_a_cron_drains,
        descendants_are_stopped_too,
        what_the_command_leaves_behind_is_ended_first,
        a_loss_after_the_command_has_ended_spares_daemons,
        what_the_shell_had_started_before_is_left_alone,
        the_status_of_a_command_that_has_ended_stays
    )
);

/// Whether this machine can create a process namespace.
fn has_process_namespaces() -> bool {
    let mut trial = std::process::Command::new("unshare");
    trial.args(["-pf", "--kill-child", "--mount-proc", "true"]).stderr(std::process::Stdio::null());
    trial.status().is_ok_and(|status| status.success())
}

/// In a container, orphans become children of the program. Some of them are dead before the program
/// is asked to stop.
async fn as_pid_1_it_stops_as_soon_as_its_command_does<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = r#"trap 'exit 7' TERM; (true & true & true &); touch "$0/up"; while :; do sleep 0.05; done"#;
    let job = as_pid_1(&db, "run k --lease 1h --stop-timeout 1h -- sh -c", &[script, stage.path()]);
    stage.up().await;
    signal(&children(&job.id().to_string()), Signal::TERM);
    job.ended().await.with(7);
}

/// A long run accumulates no zombie processes.
async fn orphans_are_buried_while_the_command_works<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!(r#"for n in 1 2 3; do (sh -c 'echo $$ >> "$0/orphans"' "$0" &); done; {STAYS}"#);
    let job = db.start("run k -- sh -c", &[&script, stage.path()]);
    stage.up().await;
    let orphans = stage.file("orphans");
    eventually("three orphans", async || orphans.exists() && read(&orphans).lines().count() == 3).await;
    for orphan in read(&orphans).lines() {
        let there = format!("/proc/{orphan}");
        eventually("it is buried", async || !std::path::Path::new(&there).exists()).await;
    }
    stage.go();
    job.ended().await.with(0);
}

/// The command of the orphan has ended, and the program waits for another one.
async fn orphans_are_buried_while_a_cron_drains<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let daemon = r#"echo $$ > "$0/daemon"; while [ ! -e "$0/end" ]; do sleep 0.05; done"#;
    std::fs::write(stage.file("child"), daemon).unwrap();
    let leaves =
        r#"setsid sh -c "$(cat "$0/child")" "$0" > /dev/null 2>&1 & while [ ! -s "$0/daemon" ]; do sleep 0.05; done"#;
    let terms = "after = \"1h\"";
    let file = jobs(&stage, &[("leaves", terms, leaves), ("stays", terms, STAYS)]);
    let cron = cron(&db, "--drain 1h", &file);
    stage.up().await;
    ended_as(&db, "leaves", "succeeded").await;
    let daemon = format!("/proc/{}", read(&stage.file("daemon")));
    assert!(std::path::Path::new(&daemon).exists());
    cron.signal(Signal::TERM);
    // It claims nothing more.
    sleep(Duration::from_millis(500)).await;
    std::fs::write(stage.file("end"), "").unwrap();
    eventually("it is buried", async || !std::path::Path::new(&daemon).exists()).await;
    stage.go();
    cron.ended().await.with(0);
}

/// This includes those that have created a session of their own, and those that outlive the
/// command.
async fn descendants_are_stopped_too<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    std::fs::write(stage.file("child"), format!("trap '' TERM\n{TICKS}")).unwrap();
    for (start, words) in [("", "& wait"), ("setsid", "& wait"), ("(setsid", "&); while :; do sleep 0.05; done")] {
        let script = format!(r#"{start} sh -c "$(cat "$0/child")" "$0" > /dev/null 2>&1 {words}"#);
        let job = db.start("run k --lease 1h --stop-timeout 300ms -- sh -c", &[&script, stage.path()]);
        let grandchild = stage.up().await;
        job.signal(Signal::TERM);
        let ended = job.ended().await.with(143);
        assert_eq!(state(&grandchild), None, "it works beside the next holder");
        assert!(ended.err.contains("k: not ended within 300ms: killed"), "{ended:?}");
        std::fs::remove_file(stage.file("up")).unwrap();
    }
}

/// What the command leaves running in its session is ended before the key is released. A daemon
/// keeps running.
async fn what_the_command_leaves_behind_is_ended_first<DB: TestDatabase>(db: TestDb<DB>) {
    for (own_session, lives) in [("", false), ("setsid ", true)] {
        let stage = Stage::new();
        std::fs::write(stage.file("child"), TICKS).unwrap();
        let up = r#"while [ ! -e "$0/up" ]; do sleep 0.05; done"#;
        let script = format!(r#"{own_session}sh -c "$(cat "$0/child")" "$0" > /dev/null 2>&1 & {up}"#);
        let job = db.start("run k --lease 1h --stop-timeout 300ms -- sh -c", &[&script, stage.path()]);
        let ended = job.ended().await.with(0);
        let child = read(&stage.file("up"));
        assert_eq!(state(&child).is_some(), lives, "{ended:?}");
        assert_eq!(ended.err.contains("left running"), !lives, "{ended:?}");
        assert_eq!(db.show("k").await["status"], "S");
        stage.go();
        eventually("it is gone", async || state(&child).is_none()).await;
    }
}

/// One process is left in the session of the command, and one has a session of its own.
async fn a_loss_after_the_command_has_ended_spares_daemons<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, daemon) = (Stage::new(), Stage::new());
    std::fs::write(stage.file("child"), TICKS).unwrap();
    let script = r#"setsid sh -c "$(cat "$0/child")" "$1" > /dev/null 2>&1 &
        sh -c "$(cat "$0/child")" "$0" > /dev/null 2>&1 &
        while ! [ -e "$0/up" -a -e "$1/up" ]; do sleep 0.05; done; echo $$ > "$0/command"; exit 7"#;
    let words = "run k --lease 3s --stop-timeout 1h -- sh -c";
    let job = db.start(words, &[script, stage.path(), daemon.path()]);
    let (left, daemon_left) = (stage.up().await, daemon.up().await);
    let has_ended = async || {
        let command = std::fs::read_to_string(stage.file("command")).unwrap_or_default();
        !command.is_empty() && state(command.trim_end()).is_none()
    };
    eventually("the command has ended", has_ended).await;
    db.rowlock("release k --force", &[]).await.with(0);
    let ended = job.ended().await.with(74);
    let says = "rowlock: k: lost after the command had ended: stopping what it had left running\n";
    assert!(ended.err.contains(says), "{ended:?}");
    assert_eq!((state(&left), state(&daemon_left).is_some()), (None, true), "{ended:?}");
    daemon.go();
    eventually("the daemon has ended", async || state(&daemon_left).is_none()).await;
}

/// A script ends with `exec rowlock ...`. One of its processes has started another one, and ends
/// while the command runs.
async fn what_the_shell_had_started_before_is_left_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let script = r#"rowlock=$1; words=$2; command=$3; stage=$4
        sh -c 'echo $$ > "$0/above"; sh -c "$(cat "$0/child")" "$0" & wait' "$0" > /dev/null 2>&1 &
        while [ ! -e "$0/up" ]; do sleep 0.05; done
        exec "$rowlock" $words --lease 1h --stop-timeout 1h -- sh -c "$command" "$stage""#;
    for (words, asked, code) in [("run k", false, 0), ("run k", true, 143), ("lead k", true, 143)] {
        let (before, stage) = (Stage::new(), Stage::new());
        std::fs::write(before.file("child"), TICKS).unwrap();
        let mut shell = Command::new("setsid");
        shell.args(["sh", "-c", script, before.path(), PROGRAM, words, STAYS, stage.path()]);
        shell.env("DATABASE_URL", &db.url);
        let job = start(shell);
        stage.up().await;
        let (above, child) = (read(&before.file("above")), before.up().await);
        signal(&above, Signal::KILL);
        eventually("it has ended", async || state(&above).is_none()).await;
        match asked {
            true => job.signal(Signal::TERM),
            false => stage.go(),
        }
        let ended = job.ended().await.with(code);
        assert!(state(&child).is_some() && ended.err.is_empty(), "{ended:?}");
        before.go();
        eventually("it is gone", async || state(&child).is_none()).await;
    }
}

/// Without a terminal, the command is suspended, and the program goes on renewing.
async fn a_suspension_is_passed_on_and_the_key_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 4s -- sh -c", &[TICKS, stage.path()]);
    let command = stage.up().await;
    job.signal(Signal::TSTP);
    eventually("the command is stopped", async || is_stopped(&command)).await;
    db.rowlock("run k --wait 9s -- true", &[]).await.with(75);
    job.signal(Signal::CONT);
    eventually("the command goes on", async || !is_stopped(&command)).await;
    job.signal(Signal::TSTP);
    eventually("the command is stopped", async || is_stopped(&command)).await;
    // A stopped process handles a signal only after it is continued.
    job.signal(Signal::TERM);
    job.ended().await.with(143);
}

/// Another transaction has the row locked, so that the end cannot be written. The lease would last
/// for an hour.
async fn what_is_told_to_the_database_is_within_the_stop_timeout<DB: TestDatabase>(db: TestDb<DB>) {
    for (asked, code) in [(false, 0), (true, 143)] {
        let stage = Stage::new();
        let job = db.start("run k --lease 1h --stop-timeout 1500ms -- sh -c", &[STAYS, stage.path()]);
        stage.up().await;
        let mut other = db.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        DB::execute_on(&mut other, DB::LOCK_ROW).await.unwrap();
        let begun = Instant::now();
        if asked {
            job.signal(Signal::TERM);
        } else {
            stage.go();
        }
        let ended = job.ended().await.with(code);
        // The program's connections are closed within one second more.
        within(begun.elapsed(), Duration::from_millis(2500));
        let says = "rowlock: k: its end was not recorded: no reply within 1.5s; it is free when its lease ends\n";
        assert!(ended.err.starts_with(says), "{ended:?}");
        DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
        db.rowlock("release k --force", &[]).await.with(0);
    }
}

/// The interpreter of the script's interpreter is missing. This error appears only at `exec`.
async fn a_command_whose_beginning_fails_leaves_the_key_free<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = |name: &str, interpreter: &str| {
        std::fs::write(stage.file(name), format!("#!{interpreter}\n")).unwrap();
        std::fs::set_permissions(stage.file(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        stage.file(name).display().to_string()
    };
    let inner = script("inner", "/no/such/interpreter");
    let outer = script("outer", &inner);
    for rules in ["recover", "article"] {
        let mut command = db.command("run k --lease 1h --rules", &[rules, "--", &outer]);
        command.env("LANG", "C");
        let failed = ended(command).await.with(126);
        assert!(failed.err.contains(&format!("{outer}: No such file or directory")), "{failed:?}");
        assert_eq!(failed.err.lines().count(), 1, "{failed:?}");
        assert_ne!(db.show("k").await["status"], "F");
        db.rowlock("run k --rules", &[rules, "--", "true"]).await.with(0);
        if rules == "recover" {
            db.rowlock("run w --min-interval 1h --lease 1h --", &[&outer]).await.with(126);
            db.rowlock("run w --min-interval 1h -- true", &[]).await.with(0);
        }
    }
    // An exit code of 126 from the command itself is passed on, and counts as a failure.
    db.rowlock("run k -- sh -c", &["exit 126"]).await.with(126);
    assert_eq!(db.show("k").await["status"], "F");
}

/// The command leaves a process behind, which has the stop timeout. A signal and the timeout come
/// within it.
async fn the_status_of_a_command_that_has_ended_stays<DB: TestDatabase>(db: TestDb<DB>) {
    let leaves = r#"sleep 1000 & echo $$ > "$0/new"; mv "$0/new" "$0/up"; exit $1"#;
    for (code, status) in [(0, "S"), (7, "F")] {
        for words in ["--lease 1h --stop-timeout 1h", "--lease 1h --stop-timeout 5s --timeout 3s"] {
            let stage = Stage::new();
            let words = format!("run k {words} -- sh -c");
            let job = db.start(&words, &[leaves, stage.path(), &code.to_string()]);
            let command = stage.up().await;
            eventually("the command has ended", async || state(&command).is_none()).await;
            if !words.contains("--timeout") {
                // A signal that comes with the end of a command may have ended it.
                sleep(Duration::from_millis(1000)).await;
                job.signal(Signal::TERM);
            }
            let ended = job.ended().await.with(code);
            assert!(ended.err.contains("stopped what the command had left running"), "{ended:?}");
            let row = db.show("k").await;
            assert_eq!(row["status"], status, "{words}");
        }
    }
}

/// Starts the program as the first process of a namespace.
fn as_pid_1<DB: TestDatabase>(db: &TestDb<DB>, words: &str, more: &[&str]) -> Started {
    let mut unshare = Command::new("unshare");
    unshare.args(["-pf", "--kill-child", "--mount-proc", PROGRAM]).args(words.split_whitespace()).args(more);
    unshare.env("DATABASE_URL", &db.url);
    start(unshare)
}

fn children(of: &str) -> String {
    std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default().trim().to_owned()
}

async fn the_leader_of_its_session_may_be_outside<DB: TestDatabase>(db: TestDb<DB>) {
    let script = "sleep 1000 > /dev/null 2>&1 &";
    let ended = as_pid_1(&db, "run k --lease 1h --stop-timeout 300ms -- sh -c", &[script]).ended().await.with(0);
    assert!(ended.err.contains("stopped what the command had left running"), "{ended:?}");
}

/// A daemon that has ended becomes a child of the first process.
async fn as_pid_1_cron_buries_orphans<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = r#"setsid sh -c 'while [ ! -e "$0/go" ]; do sleep 0.05; done' "$0" > /dev/null 2>&1 & touch "$0/up""#;
    let file = job(&stage, "k", "after = \"1h\"", script);
    let unshare = as_pid_1(&db, "cron", &[file.to_str().unwrap()]);
    stage.up().await;
    let cron = children(&unshare.id().to_string());
    ended_as(&db, "k", "succeeded").await;
    assert_ne!(children(&cron), "", "the daemon lives");
    stage.go();
    eventually("it is buried", async || children(&cron).is_empty()).await;
    signal(&cron, Signal::TERM);
    unshare.ended().await.with(0);
}
