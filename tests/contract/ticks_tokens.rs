//! Tokens that never fall, and what is left of the runs of processes that died.

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{
    Schedule, Tick,
    jobs::{CatchUp, TickOutcome},
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, reader, runs, steal, told},
    ticks_renamed::forget_all,
};

harness::tests!(everywhere(
    a_schedule_that_is_created_again_has_a_higher_token,
    a_token_that_is_ahead_of_the_clock_is_not_undercut,
    a_token_that_is_ahead_of_the_clock_outlives_a_rename,
    lost_runs_keep_their_tokens_and_the_ticks_that_they_stood_for,
    attempts_at_another_tick_are_not_counted_as_handed_back,
    a_run_that_died_before_its_name_was_taken_is_lost,
    a_lost_run_ahead_of_the_clock_is_cleared_by_a_reset,
    a_lost_run_ahead_of_the_clock_leaves_the_history_at_a_reset
));

/// In microseconds since 1970: late in this century.
const AHEAD: i64 = 4_000_000_000_000_000;

async fn set<DB: TestDatabase>(db: &TestDb<DB>, name: &str, set: &str) {
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET {set} WHERE name = '{name}'")).await, 1, "{name}");
}

/// The row as it is when the process of this attempt has died at work. The lease ends when the row
/// is due.
async fn dies<DB: TestDatabase>(db: &TestDb<DB>, name: &str, attempt: u32, token: i64) {
    let holder = DB::uuid("0123456789abcdef0123456789abcdef");
    let died = "run_slot = slot, begin_time = slot, client_ip = 'dead'";
    set(db, name, &format!("holder = {holder}, token = {token}, attempt = {attempt}, {died}")).await;
}

/// What its work has written carries the tokens of before.
async fn a_schedule_that_is_created_again_has_a_higher_token<DB: TestDatabase>(db: TestDb<DB>) {
    assert_eq!(idle(&db, Schedule::every("k", LONG)).run_now("k").await.unwrap(), TickOutcome::Succeeded);
    let before = info(&db, "k").await.token;
    forget_all(&db).await;
    reader(&db).remove("k").await.unwrap();
    // SQLite's clock has milliseconds.
    sleep(SHORT / 10).await;
    let schedule = due(&db, "k").await;
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    let after = info(&db, "k").await.token;
    assert!(after > before, "{before} {after}");
    assert_eq!(told(&db, "k").await, "S1 S1", "the history stays");
}

/// The clock was ahead at the last claim. A claim, and one that takes over.
async fn a_token_that_is_ahead_of_the_clock_is_not_undercut<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, takes_over) in [("k", false), ("l", true)] {
        let schedules = idle(&db, due(&db, name).await);
        if takes_over {
            dies(&db, name, 1, AHEAD).await;
        } else {
            set(&db, name, &format!("token = {AHEAD}")).await;
        }
        assert_eq!(schedules.try_tick(name).await.unwrap(), TickOutcome::Succeeded, "{name}");
        assert_eq!(told(&db, name).await, if takes_over { "L1 S2" } else { "S1" });
        let (runs, row) = (runs(&db, name).await, info(&db, name).await);
        let last = runs.last().unwrap().token;
        assert!(last.get() > AHEAD && row.token == last, "{runs:?} {row:?}");
        assert!(!takes_over || runs[0].token.get() == AHEAD, "{runs:?}");
    }
}

/// The token of either row is ahead.
async fn a_token_that_is_ahead_of_the_clock_outlives_a_rename<DB: TestDatabase>(db: TestDb<DB>) {
    for (old, new, ahead) in [("a", "b", "a"), ("c", "d", "d")] {
        for name in [old, new] {
            let tried = idle(&db, Schedule::every(name, LONG)).try_tick(name).await.unwrap();
            assert!(matches!(tried, TickOutcome::NotDue { .. }), "{tried:?}");
        }
        set(&db, ahead, &format!("token = {AHEAD}")).await;
        let renamed = idle(&db, Schedule::every(new, LONG).renamed_from(old));
        assert_eq!(renamed.run_now(new).await.unwrap(), TickOutcome::Succeeded);
        assert_eq!(info(&db, old).await.renamed_to(), Some(new));
        let runs = runs(&db, new).await;
        assert!(runs[0].token.get() > AHEAD, "ahead: {ahead}: {runs:?}");
    }
}

/// The first attempt is handed back, and the process of the second one dies.
async fn lost_runs_keep_their_tokens_and_the_ticks_that_they_stood_for<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.catch_up(CatchUp::Once);
    back(&db, "k", 3 * LONG).await;
    let (sender, mut begun) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(schedule.clone(), move |tick: Tick<DB>| {
        sender.send(tick.token()).unwrap();
        std::future::pending::<Never>()
    });
    let mut token = None;
    let stop = async { token = timeout(PATIENCE, begun.recv()).await.unwrap() };
    assert_eq!(schedules.try_tick_until("k", stop).await.unwrap(), TickOutcome::HandedBack);
    let first = token.unwrap().get();
    steal(&db, "k").await;
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1(3) L2(3) S3(3)");
    let runs = runs(&db, "k").await;
    let lost: Vec<_> = runs[..2].iter().map(|run| (run.token.get(), run.by.as_str())).collect();
    assert_eq!(lost, [(first, "one"), (first + 1, "thief")]);
    assert!(runs[2].token > runs[1].token, "{runs:?}");
}

/// Eleven processes died at this tick, and eleven attempts at another one were handed back.
async fn attempts_at_another_tick_are_not_counted_as_handed_back<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due(&db, "k").await);
    dies(&db, "k", 11, 7).await;
    let other = DB::ago(1);
    for attempt in 1..=11 {
        db.execute(&format!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, error)
             SELECT name, {other}, {attempt}, {attempt}, 'other', slot, slot, 'L', 'handed back: its work was stopped' FROM t_resource_schedule WHERE name = 'k'"
        ))
        .await;
    }
    let outcome = schedules.try_tick("k").await.unwrap();
    assert!(
        matches!(&outcome, TickOutcome::Failed { error, again: false } if error.starts_with("given up")),
        "{outcome:?}"
    );
}

/// It was in effect beside the other name, which was run later.
async fn a_run_that_died_before_its_name_was_taken_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "new").await;
    dies(&db, "new", 1, 7).await;
    assert_eq!(idle(&db, Schedule::every("old", LONG)).run_now("old").await.unwrap(), TickOutcome::Succeeded);
    forget_all(&db).await;
    let renamed = idle(&db, schedule.renamed_from("old"));
    assert!(matches!(renamed.try_tick("new").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    let (old, new) = (info(&db, "old").await, info(&db, "new").await);
    assert_eq!(old.renamed_to(), Some("new"));
    assert!(!new.running && new.lost_since.is_none() && new.attempt == 0 && new.due == new.slot, "{new:?}");
    assert_eq!(told(&db, "new").await, "L1");
    assert_eq!(renamed.run_now("new").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "new").await, "L1 S1");
}

/// The clock was ahead when the run was begun, and was put right while it was renewed.
async fn a_lost_run_ahead_of_the_clock_is_cleared_by_a_reset<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG));
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }));
    dies(&db, "k", 1, 7).await;
    set(&db, "k", &format!("due_at = {}", DB::ago(1_000))).await;
    let before = info(&db, "k").await;
    assert!(before.lost_since.is_some() && before.run_slot > Some(before.now), "{before:?}");
    instance(&db, "operator").reset("k").await.unwrap();
    let row = info(&db, "k").await;
    assert!(!row.running && row.lost_since.is_none() && row.attempt == 0 && row.due == row.slot, "{row:?}");
    let forgotten = "SELECT COUNT(*) FROM t_resource_schedule WHERE run_slot IS NULL";
    assert_eq!(db.number(forgotten).await, Some(1), "it is not the last run");
}

/// The clock was ahead when the run was begun, and was put right while it was renewed. Its tick
/// comes again, and an attempt with the same number would be refused by the history.
async fn a_lost_run_ahead_of_the_clock_leaves_the_history_at_a_reset<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG));
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }));
    assert_eq!(instance(&db, "alice").skip("k").await.unwrap(), info(&db, "k").await.slot);
    dies(&db, "k", 1, 7).await;
    set(&db, "k", &format!("due_at = {}", DB::ago(1_000))).await;
    let tick = info(&db, "k").await.slot;
    assert_eq!(instance(&db, "operator").reset("k").await.unwrap(), tick, "it is the next one");
    assert_eq!(info(&db, "k").await.skipped_until, Some(tick), "the order is for it");
    assert_eq!(told(&db, "k").await, "");
}
