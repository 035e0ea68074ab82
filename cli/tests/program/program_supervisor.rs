//! `rowlock cron` whose process above a command is killed, as by the kernel when memory is short.

use std::{path::Path, time::Duration};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    program::{Stage, Started, read},
    program_cron::{cron, jobs, runs},
    program_terminal::signal,
};

harness::tests!(sqlite(
    nothing_of_a_killed_command_is_left_when_its_end_is_recorded,
    nothing_of_a_killed_command_is_left_when_its_run_is_handed_back
));

/// A command that has started two processes: one without its variables, and one in a session of its
/// own. All of them write lines, and go on when they are asked to stop. `up` has the number of the
/// process above the command.
const WRITES: &str = r#"writes='while :; do echo line >> "$0/$ROWLOCK_JOB"; sleep 0.01; done'
    trap '' TERM; env -i sh -c "ROWLOCK_JOB=$ROWLOCK_JOB; $writes" "$0" & setsid sh -c "$writes" "$0" &
    trap 'touch "$0/$ROWLOCK_JOB.asked"' TERM
    echo $PPID > "$0/$ROWLOCK_JOB.new"; mv "$0/$ROWLOCK_JOB.new" "$0/$ROWLOCK_JOB.up"
    while :; do echo line >> "$0/$ROWLOCK_JOB"; sleep 0.01; done"#;

/// Starts two jobs that write.
async fn writing<DB: TestDatabase>(db: &TestDb<DB>, stage: &Stage, words: &str) -> Started {
    let terms = "after = \"1h\"\nlease = \"1h\"";
    let cron = cron(db, words, &jobs(stage, &[("one", terms, WRITES), ("other", terms, WRITES)]));
    each_has(stage, "up").await;
    cron
}

/// Waits until each job has written this file.
async fn each_has(stage: &Stage, what: &str) {
    for job in ["one", "other"] {
        let file = stage.file(&format!("{job}.{what}"));
        eventually(what, async || file.exists()).await;
    }
}

fn kill_above(stage: &Stage, job: &str) {
    signal(&read(&stage.file(&format!("{job}.up"))), Signal::KILL);
}

fn length(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().len()
}

/// Each writer takes 10 ms for a line.
async fn is_written(file: &Path) -> bool {
    let before = length(file);
    sleep(Duration::from_millis(300)).await;
    length(file) > before
}

/// Returns how many children of a process have ended and were not waited for.
fn zombies(parent: u32) -> usize {
    let stats = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        Some(stat.rsplit_once(") ")?.1.to_owned())
    });
    stats.filter(|stat| stat.starts_with(&format!("Z {parent} "))).count()
}

async fn nothing_of_a_killed_command_is_left_when_its_end_is_recorded<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut cron = writing(&db, &stage, "--stop-timeout 300ms").await;
    kill_above(&stage, "one");
    eventually("its end is recorded", async || !runs(&db, "one").await.is_empty()).await;
    assert!(!is_written(&stage.file("one")).await, "a process of the command lives on");
    let run = &runs(&db, "one").await[0];
    let error = "the command was stopped: signal 9 ended the process above it";
    assert_eq!((&run["status"], &run["error"]), (&"failed".into(), &error.into()));
    assert!(is_written(&stage.file("other")).await, "the other job goes on");
    eventually("all are waited for", async || zombies(cron.id()) == 0).await;
    cron.complains(&format!("error=\"{error}\"")).await;
    cron.stopped().await;
}

/// The process is killed while its command is being stopped.
async fn nothing_of_a_killed_command_is_left_when_its_run_is_handed_back<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut cron = writing(&db, &stage, "--stop-timeout 1h").await;
    let pid = cron.id();
    let again = async {
        // The first signal lets runs end, the second one stops their commands.
        loop {
            signal(&pid.to_string(), Signal::TERM);
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = cron.complains("stopping commands") => {}
        () = again => {}
    }
    each_has(&stage, "asked").await;
    for job in ["one", "other"] {
        kill_above(&stage, job);
    }
    cron.ended().await.with(0);
    for job in ["one", "other"] {
        assert!(!is_written(&stage.file(job)).await, "a process of {job} lives on");
        assert_eq!(runs(&db, job).await[0]["error"], "handed back: its work was stopped");
    }
}
