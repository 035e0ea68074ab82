//! `rowlock run --shared` and `--exclusive`: many commands at a time, or one.

use harness::{TestDatabase, TestDb};
use rustix::process::Signal;

use crate::program::{Program as _, STAYS, Stage, read};

harness::tests!(everywhere(
    shared_commands_run_together_and_an_exclusive_one_alone,
    a_killed_reader_is_replaced_when_its_lease_ends,
    options_that_do_not_fit_are_refused
));

async fn shared_commands_run_together_and_an_exclusive_one_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let stages = [Stage::new(), Stage::new()];
    let script = format!("echo \"$ROWLOCK_KEY $ROWLOCK_WRITER_TOKEN\" > \"$0/reads\"; {STAYS}");
    let mut running = Vec::new();
    for stage in &stages {
        // The first one of all holds the name while it enters.
        running.push(db.start("run k --shared -- sh -c", &[&script, stage.path()]));
        stage.up().await;
        let reads = read(&stage.file("reads"));
        let (key, token) = reads.split_once(' ').unwrap();
        assert!(key.starts_with("k#r") && token.parse::<i64>().unwrap() > 0, "{reads}");
    }
    for wait in ["0s", "1s"] {
        let refused = db.rowlock(&format!("run k --exclusive --wait {wait} -- echo"), &["it runs"]).await.with(75);
        assert!(refused.out.is_empty() && refused.err.starts_with("rowlock: refused: k#r"), "{refused:?}");
        let name = "SELECT lock_flag FROM t_resource_lock WHERE key_resource = 'k'";
        assert_eq!(db.number(name).await, Some(0), "the name is free after a wait of {wait}");
    }
    // A plain claim on the name means the same, and is put back.
    for plain in ["run k -- echo", "run j --also k -- echo", "acquire k"] {
        let words: &[&str] = if plain.ends_with("echo") { &["it runs"] } else { &[] };
        let refused = db.rowlock(plain, words).await.with(75);
        assert!(refused.out.is_empty() && refused.err.contains("k is read by"), "{plain}: {refused:?}");
        assert_ne!(db.show("k").await["state"], "held", "{plain}");
    }
    let mut waiting = db.start("run k --exclusive --wait 1h -- echo", &["it runs"]);
    stages.iter().for_each(Stage::go);
    for one in running {
        one.ended().await.with(0);
    }
    assert_eq!(waiting.ended().await.with(0).out, "it runs\n");

    let stage = Stage::new();
    waiting = db.start("run k --exclusive -- sh -c", &[STAYS, stage.path()]);
    stage.up().await;
    for option in ["--shared", "--exclusive"] {
        db.rowlock(&format!("run k {option} -- true"), &[]).await.with(75);
    }
    stage.go();
    waiting.ended().await.with(0);
}

async fn a_killed_reader_is_replaced_when_its_lease_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let reader = db.start("run k --shared --lease 2s -- sh -c", &[STAYS, stage.path()]);
    stage.up().await;
    reader.signal(Signal::KILL);
    assert_eq!(reader.ended().await.code, -9, "its command has died with it");
    assert_eq!(db.rowlock("run k --exclusive --wait 1h -- echo", &["it runs"]).await.with(0).out, "it runs\n");
}

async fn options_that_do_not_fit_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    for options in
        ["--shared --exclusive", "--shared --permits 2", "--exclusive --permits 2", "--shared --min-interval 1h"]
    {
        db.rowlock(&format!("run k {options} -- true"), &[]).await.with(2);
    }
    db.rowlock("run k --exclusive --rules article -- true", &[]).await.with(2);
}
