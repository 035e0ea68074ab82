//! Details and history: what belongs to one run is kept, shown and deleted with that run alone.

use std::time::Duration;

use harness::{TestDatabase, TestDb, eventually};
use rowlock::{Schedule, Tick, jobs::TickOutcome};

use crate::{
    ticks::{LONG, Never, due, idle, info, instance, told},
    ticks_apart::Run,
    ticks_listed::ran,
};

harness::tests!(everywhere(
    the_output_of_a_run_that_had_a_note_is_kept,
    a_note_that_comes_too_late_leaves_nothing,
    the_output_of_a_success_outlives_its_failed_attempt,
    old_runs_are_forgotten_beside_a_tick_that_is_tried_again,
    the_failed_attempts_before_the_last_success_are_not_listed_with_it
));

const DETAILS: &str = "SELECT COUNT(*) FROM t_resource_schedule_detail";

async fn the_output_of_a_run_that_had_a_note_is_kept<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let jobs = instance(&db, "one").on(schedule, move |tick: Tick<DB>| async move {
        tick.note("half").await.unwrap();
        tick.keep_output(b"all".to_vec());
        Never::Ok(())
    });
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(jobs.output("k", slot, 1).await.unwrap().as_deref(), Some(&b"all"[..]));
}

/// A detail that belongs to no run of the history would never be deleted.
async fn a_note_that_comes_too_late_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let run = Run::begin(instance(&db, "one"), due(&db, "k").await).await;
    let tick = run.tick.clone();
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    tick.note("too late").await.unwrap();
    assert_eq!(db.number(DETAILS).await, Some(0));
}

/// The first attempt is forgotten. The success is the last one, and stays with what it printed.
async fn the_output_of_a_success_outlives_its_failed_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(1, Duration::ZERO);
    let slot = info(&db, "k").await.slot;
    let jobs = instance(&db, "one").on(schedule, move |tick: Tick<DB>| async move {
        tick.keep_output(tick.attempt().to_string().into_bytes());
        if tick.attempt() == 1 { Err("no") } else { Ok(()) }
    });
    assert!(matches!(jobs.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(db.number(DETAILS).await, Some(2));
    eventually("the first attempt is forgotten", || async {
        jobs.forget_history(Duration::ZERO).await.unwrap();
        told(&db, "k").await == "S2"
    })
    .await;
    assert_eq!(jobs.output("k", slot, 1).await.unwrap(), None);
    assert_eq!(jobs.output("k", slot, 2).await.unwrap().as_deref(), Some(&b"2"[..]));
}

async fn old_runs_are_forgotten_beside_a_tick_that_is_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(2, LONG);
    ran(&db, &[("k", 1_000_000, 1, "F")]).await;
    let jobs = instance(&db, "one").on(schedule, async |_| Err::<(), _>("no"));
    assert!(matches!(jobs.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    assert_eq!(told(&db, "k").await, "F1 F1");
    let day = Duration::from_secs(24 * 60 * 60);
    assert_eq!(jobs.forget_history(day).await.unwrap(), 1);
    let runs = jobs.history("k", 9).await.unwrap();
    assert_eq!(runs.iter().map(|run| run.by.as_str()).collect::<Vec<_>>(), ["one"]);
}

async fn the_failed_attempts_before_the_last_success_are_not_listed_with_it<DB: TestDatabase>(db: TestDb<DB>) {
    idle(&db, Schedule::every("k", LONG)).try_tick("k").await.unwrap();
    ran(&db, &[("k", 61, 1, "F"), ("k", 60, 2, "S"), ("k", 10, 1, "F")]).await;
    let same = "UPDATE t_resource_schedule_run SET slot = (
                    SELECT slot FROM (SELECT slot FROM t_resource_schedule_run WHERE token = 60) x)
                WHERE token = 61";
    assert_eq!(db.execute(same).await, 1);
    assert_eq!(told(&db, "k").await, "F1 S2 F1");
    let latest = instance(&db, "reader").latest_runs(1).await.unwrap();
    // Their tokens are their ages in minutes.
    assert_eq!(latest.iter().map(|run| run.token.get()).collect::<Vec<_>>(), [60, 10], "{latest:?}");
}
