//! What an operator orders instances to do: stop, skip, pause, drain; what is kept of it; and what
//! runs printed.

use harness::{TestDatabase, TestDb, acquired, eventually};
use rustix::process::Signal;

use crate::{
    program::{Program as _, STAYS, Stage, read},
    program_cron::{cron, ended_as, job, jobs},
    program_schedules::due,
};

harness::tests!(everywhere(
    a_command_is_stopped_from_elsewhere_and_its_output_kept,
    the_next_tick_is_skipped_and_that_is_taken_back,
    a_pause_ends_at_its_time,
    an_instance_that_is_drained_ends_after_its_runs,
    what_runs_print_is_shown,
    a_run_shows_its_process_and_what_it_waits_for,
    what_operators_changed_is_shown,
    a_stop_says_what_it_cannot_do,
    an_order_for_nothing_is_refused
));

async fn a_command_is_stopped_from_elsewhere_and_its_output_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let after = stage.file("after");
    let hook =
        format!("on_failure = [\"sh\", \"-c\", 'echo \"$ROWLOCK_OUTCOME $ROWLOCK_ERROR\" > {}']", after.display());
    let terms = format!("after = \"1h\"\nretry = 3\nlease = \"2s\"\n{hook}");
    let running = cron(&db, "--label node-1", &job(&stage, "k", &terms, &format!("echo begun; {STAYS}")));
    stage.up().await;
    let said = db.by_ann("stop k", &[]).await.with(0);
    assert!(said.out.starts_with("k is to stop: node-1 stops its command within 20 seconds"), "{said:?}");
    let run = ended_as(&db, "k", "failed").await;
    let error = run["error"].as_str().unwrap();
    assert!(error.starts_with("stopped by ann@"), "{run}");
    assert_eq!(db.rowlock("output k", &[]).await.with(0).out, "begun\n");
    eventually("the command after it was run", async || {
        after.exists() && read(&after).contains("failed stopped by an operator")
    })
    .await;
    let row = db.rowlock("schedules --json", &[]).await.json()[0].clone();
    assert_eq!((&row["attempt"], &row["stopping"]), (&0.into(), &false.into()), "it is not tried again: {row}");
    let cron = running.stopped().await;
    assert!(cron.err.contains("k: stopped by an operator; stopping the command"), "{cron:?}");
}

async fn the_next_tick_is_skipped_and_that_is_taken_back<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    assert!(db.by_ann("skip k", &[]).await.with(0).out.starts_with("k is skipped: the tick of 2"));
    let none = db.by_ann("skip k --until 2000-01-01T00:00:00Z", &[]).await.with(75);
    assert!(none.err.contains("no tick is skipped until 2000"), "{none:?}");
    let said = db.rowlock("why k", &[]).await.with(0).out;
    assert!(said.contains("an operator has its ticks skipped until 2"), "{said}");
    assert!(db.rowlock("schedules", &[]).await.with(0).out.contains("skipped until 2"));
    db.by_ann("resume k", &[]).await.with(0);
    assert!(db.rowlock("schedules --json", &[]).await.json()[0]["skipped_until"].is_null());
    // One that is due.
    let stage = Stage::new();
    let running = cron(&db, "--label node-1", &job(&stage, "often", "every = \"1h\"", "true"));
    eventually("it is known", async || db.rowlock("show often", &[]).await.code == 0).await;
    db.by_ann("skip often", &[]).await.with(0);
    let hour = DB::ago(30_000);
    db.execute(&format!("UPDATE t_resource_schedule SET due_at = {hour} WHERE name = 'often'")).await;
    let run = ended_as(&db, "often", "missed").await;
    assert!(run["error"].as_str().unwrap().starts_with("skipped by ann@"), "{run}");
    running.stopped().await;
}

async fn a_pause_ends_at_its_time<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let running = cron(&db, "--label node-1", &job(&stage, "k", "every = \"1s\"", "true"));
    ended_as(&db, "k", "succeeded").await;
    let said = db.by_ann("pause k --until 4s", &[]).await.with(0).out;
    assert!(said.starts_with("k is paused until 2"), "{said}");
    let row = db.rowlock("schedules --json", &[]).await.json()[0].clone();
    assert!(row["paused"] == true && row["paused_until"].is_string(), "{row}");
    assert!(db.rowlock("why k", &[]).await.with(0).out.contains("it is paused until 2"));
    eventually("it is resumed", async || db.rowlock("schedules --json", &[]).await.json()[0]["paused"] == false).await;
    let shown = db.rowlock("show k", &[]).await.with(0).out;
    assert!(shown.contains("its pause has ended") && shown.contains("ann@"), "{shown}");
    running.stopped().await;
}

async fn an_instance_that_is_drained_ends_after_its_runs<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let drained = cron(&db, "--label node-1 --drain 1h", &job(&stage, "k", "after = \"1h\"", STAYS));
    stage.up().await;
    let other = Stage::new();
    let stays = cron(&db, "--label node-2", &job(&other, "other", "after = \"1h\"", "true"));
    ended_as(&db, "other", "succeeded").await;
    let said = db.by_ann("drain node-1", &[]).await.with(0).out;
    assert_eq!(said, "node-1: 1 instance ends after its runs, for which it has its own --drain\n");
    eventually("it claims nothing more", async || {
        let instances = db.rowlock("instances --json", &[]).await.with(0).json();
        instances.as_array().unwrap().iter().all(|instance| instance["label"] != "node-1")
    })
    .await;
    let running = db.rowlock("runs --running --json", &[]).await.with(0).json();
    assert_eq!(running[0]["by"], "node-1", "its run goes on");
    stage.go();
    ended_as(&db, "k", "succeeded").await;
    let ended = drained.ended().await.with(0);
    assert!(ended.err.contains("an operator has ordered that this instance ends"), "{ended:?}");
    stays.stopped().await;
}

async fn what_runs_print_is_shown<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let many = "i=0; while [ $i -lt 9000 ]; do echo line $i; i=$((i+1)); done";
    let path = jobs(
        &stage,
        &[
            ("both", "after = \"1h\"\nretry = 1", "echo out $ROWLOCK_ATTEMPT; echo \"err \\033[2J\" >&2; exit 3"),
            ("none", "after = \"1h\"\nkeep_output = 0", "echo secret"),
            ("much", "after = \"1h\"", many),
            ("silent", "after = \"1h\"", "true"),
        ],
    );
    let running = cron(&db, "--label node-1", &path);
    for (name, outcome) in [("none", "succeeded"), ("much", "succeeded"), ("silent", "succeeded")] {
        ended_as(&db, name, outcome).await;
    }
    eventually("both attempts have failed", async || {
        db.rowlock("runs both --json", &[]).await.json().as_array().unwrap().len() == 2
    })
    .await;
    let last = db.rowlock("output both", &[]).await.with(0).out;
    assert!(last.contains("out 2\n") && last.contains("err \u{1b}[2J\n"), "as it was printed: {last:?}");
    assert!(db.rowlock("output both --attempt 1", &[]).await.with(0).out.contains("out 1\n"));
    // The table has a fraction of the second, which `runs` shows in its JSON only.
    let slots = (db.rowlock("runs both", &[]).await.out, db.rowlock("runs both --json", &[]).await.json());
    let shown = slots.0.lines().nth(1).unwrap().split("  ").next().unwrap();
    for slot in [shown, slots.1[0]["slot"].as_str().unwrap()] {
        assert_eq!(db.rowlock("output both --slot", &[slot]).await.with(0).out, last, "{slot}");
    }
    let other = db.rowlock("output both --slot 2000-01-01T00:00:00Z", &[]).await.with(75);
    assert!(other.err.contains("has no such run"), "{other:?}");
    for nothing in ["none", "silent"] {
        assert!(db.rowlock("output", &[nothing]).await.with(75).err.contains("nothing is kept of attempt 1"));
    }
    let much = db.rowlock("output much", &[]).await.with(0).out;
    assert!(much.len() <= 64 * 1024 && much.ends_with("line 8999\n"), "{}", much.len());
    let whole: usize = (0..9000).map(|number| format!("line {number}\n").len()).sum();
    let (first, rest) = much.split_once('\n').unwrap();
    assert_eq!(first, format!("[{} bytes cut off]", whole - rest.len()));
    assert!(db.rowlock("output both --attempt 7", &[]).await.with(75).err.contains("has no such run"));
    running.stopped().await;
    db.rowlock("remove both", &[]).await.with(0);
    assert_eq!(db.rowlock("output both", &[]).await.with(0).out, last, "it stays with its run");
    assert!(db.rowlock("output both --attempt 7", &[]).await.with(75).err.contains("has no such run"));
}

async fn a_run_shows_its_process_and_what_it_waits_for<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("node-2").build().unwrap();
    let held = acquired(lock.try_acquire("key").await);
    let stage = Stage::new();
    let pid = stage.file("pid");
    let command = format!("echo $$ > {}; {STAYS}", pid.display());
    let terms = "after = \"1h\"\nexclusive_with = \"key\"\ndescription = \"Ask the team.\"\ntimeout = \"1h\"";
    let running = cron(&db, "--label node-1", &job(&stage, "k", terms, &command));
    let says = "it waits for the key key (held by node-2 since 2";
    eventually("it waits", async || db.rowlock("why k", &[]).await.out.contains(says)).await;
    held.release().await.unwrap();
    stage.up().await;
    let own = format!("pid {}", read(&pid).trim());
    eventually("its process is shown", async || db.rowlock("runs --running", &[]).await.out.contains(&own)).await;
    assert!(db.rowlock("why k", &[]).await.out.contains(&format!("; {own}; its lease")));
    let shown = db.rowlock("show k", &[]).await.with(0).out;
    assert!(shown.contains("\nAsk the team.\nruns: sh -c ") && shown.contains("\ntimeout 1h"), "{shown}");
    stage.go();
    ended_as(&db, "k", "succeeded").await;
    running.stopped().await;
}

async fn what_operators_changed_is_shown<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let lock = db.builder().label("node-1").build().unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    db.by_ann("release k --force", &[]).await.with(0);
    assert_eq!(db.show("k").await["status"], "F", "the work that lost its key has not succeeded");
    for order in ["pause k", "resume k", "trigger k", "reset k"] {
        db.by_ann(order, &[]).await.with(0);
    }
    let changes = db.show("k").await["changes"].clone();
    let what: Vec<_> = changes.as_array().unwrap().iter().map(|change| change["what"].as_str().unwrap()).collect();
    assert_eq!(what, ["reset", "triggered", "resumed", "paused", "released"], "{changes}");
    assert!(changes.as_array().unwrap().iter().all(|change| change["who"].as_str().unwrap().starts_with("ann@")));
    let detail = format!("from node-1, token {}; status F", lease.token());
    assert_eq!(changes[4]["detail"].as_str(), Some(&*detail));
    for words in ["show k", "changes k", "changes"] {
        let shown = db.rowlock(words, &[]).await.with(0).out;
        assert!(shown.contains("CHANGED") && shown.contains(&detail), "{words}: {shown}");
    }
    assert_eq!(db.rowlock("changes --limit 2 --json", &[]).await.with(0).json().as_array().unwrap().len(), 2);
    assert_eq!(db.rowlock("changes other", &[]).await.with(0).out.lines().count(), 1, "the header");
}

/// The machine is suspended, or its tick took so long that the next one is due.
async fn a_stop_says_what_it_cannot_do<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let running =
        cron(&db, "--label node-1 --stop-timeout 2s", &job(&stage, "k", "every = \"1s\"\nlease = \"10s\"", STAYS));
    stage.up().await;
    let asked = db.rowlock("output k", &[]).await.with(75);
    assert!(asked.err.contains("k: attempt 1 runs now on node-1: its output is kept at its end"), "{asked:?}");
    let before = db.rowlock("schedules --json", &[]).await.json()[0]["run_slot"].clone();
    eventually("the next tick is due", async || {
        let at = |time: &serde_json::Value| time.as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
        chrono::Utc::now() - at(&before) > chrono::TimeDelta::seconds(2)
    })
    .await;
    running.signal(Signal::STOP);
    let ago = DB::ago(60_000);
    db.execute(&format!("UPDATE t_resource_schedule_instance SET beat_at = {ago} WHERE label = 'node-1'")).await;
    let said = db.by_ann("stop k", &[]).await.with(0).out;
    assert!(said.starts_with("k is to stop: node-1 is silent since 2"), "{said}");
    assert!(said.contains("; its tick of 2") && said.contains(" is due, and begins after that"), "{said}");
    let drained = db.by_ann("drain node-1", &[]).await.with(0).out;
    assert!(drained.contains("; 1 of them is silent, and ends after its next beat"), "{drained}");
    running.signal(Signal::CONT);
    running.ended().await.with(0);
}

async fn an_order_for_nothing_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    for (order, code, says) in [
        ("stop k", 75, "no tick was begun that could be stopped"),
        ("pause k --until 2020-01-01T00:00:00Z", 75, "which has passed"),
        ("pause k --until soon", 2, "or a duration like 8h"),
        ("drain nobody", 75, "no instance has the label \"nobody\""),
    ] {
        let refused = db.rowlock(order, &[]).await.with(code);
        assert!(refused.err.contains(says) && refused.out.is_empty(), "{order}: {refused:?}");
    }
}
