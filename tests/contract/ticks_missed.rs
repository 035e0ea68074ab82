//! Ticks that fail, and ticks that nothing ran at their time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Schedule, Tick,
    jobs::{CatchUp, TickOutcome},
};

use crate::ticks::{LONG, SHORT, back, due, idle, info, instance, runs, told};

harness::tests!(everywhere(
    a_failed_tick_is_run_again_after_its_pause,
    a_failed_tick_is_not_due_during_its_pause,
    the_last_failure_moves_the_slot_on,
    ticks_that_were_missed_are_caught_up_on_as_chosen,
    a_late_tick_is_skipped_beyond_its_grace,
    a_tick_that_was_begun_is_finished_after_a_crash,
    a_slot_whose_times_were_replaced_is_run_as_it_is
));

async fn a_failed_tick_is_run_again_after_its_pause<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(3, 3 * SHORT..LONG);
    let slot = info(&db, "k").await.slot;
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| async move {
        if tick.attempt() < 3 { Err(format!("attempt {} of {}", tick.attempt(), tick.name())) } else { Ok(()) }
    });
    let first = schedules.try_tick("k").await.unwrap();
    assert_eq!(first, TickOutcome::Failed { error: "attempt 1 of k".into(), again: true });
    let pending = info(&db, "k").await;
    assert!(!pending.running && pending.slot == slot && pending.run_slot == Some(slot), "{pending:?}");
    let running = schedules.start().await.unwrap();
    eventually("it succeeds", || async { info(&db, "k").await.slot > slot }).await;
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "F1 F2 S3");
    let runs = runs(&db, "k").await;
    let pauses = [runs[1].began - runs[0].began, runs[2].began - runs[1].began];
    assert!(pauses[0].num_milliseconds() >= 300 && pauses[1].num_milliseconds() >= 600, "{pauses:?}");
    assert!(runs.iter().all(|run| run.slot == slot), "{runs:?}");
    assert_eq!(runs[1].error.as_deref(), Some("attempt 2 of k"));
}

async fn a_failed_tick_is_not_due_during_its_pause<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(3, LONG / 2..LONG);
    let schedules = instance(&db, "one").on(schedule, async |_| Err::<(), _>("no"));
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Failed { error: "no".into(), again: true });
    let TickOutcome::NotDue { retry_after: Some(after) } = schedules.try_tick("k").await.unwrap() else {
        panic!("it pauses")
    };
    assert!(after <= LONG / 2 && after > LONG / 3, "{after:?}");
    assert_eq!(told(&db, "k").await, "F1");
}

async fn the_last_failure_moves_the_slot_on<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(1, Duration::ZERO);
    let slot = info(&db, "k").await.slot;
    let schedules = instance(&db, "one").on(schedule, async |_| Err::<(), _>("no"));
    for again in [true, false] {
        let outcome = schedules.try_tick("k").await.unwrap();
        assert_eq!(outcome, TickOutcome::Failed { error: "no".into(), again });
    }
    let after = info(&db, "k").await;
    assert!(after.slot == slot + LONG && after.attempt == 0 && after.due == after.slot, "{after:?}");
    assert_eq!(told(&db, "k").await, "F1 F2");
}

/// Eleven ticks were missed.
async fn ticks_that_were_missed_are_caught_up_on_as_chosen<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, catch_up, grace, expected) in [
        ("skip all", CatchUp::Skip, Duration::ZERO, "M0(11)"),
        ("skip all but one", CatchUp::Skip, LONG, "M0(10) S1"),
        ("once", CatchUp::Once, LONG, "S1(10)"),
        ("three", CatchUp::All(3), LONG, "S1(8) S1 S1"),
        ("all", CatchUp::All(100), LONG, "S1 S1 S1 S1 S1 S1 S1 S1 S1 S1 S1"),
    ] {
        let schedule = due(&db, name).await.catch_up(catch_up).grace(grace);
        back(&db, name, 10 * LONG).await;
        let first = info(&db, name).await.slot;
        let seen = Arc::new(AtomicU32::new(0));
        let ran = seen.clone();
        let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
            ran.fetch_add(1 + 100 * tick.missed(), Ordering::Relaxed);
            async { Ok::<_, String>(()) }
        });
        let running = schedules.start().await.unwrap();
        eventually("all are past", || async {
            let info = info(&db, name).await;
            info.slot == first + 11 * LONG && !info.running
        })
        .await;
        assert!(running.shutdown(PATIENCE).await);
        assert_eq!(told(&db, name).await, expected, "{name}");
        let (passed, missed) = (
            expected.matches('S').count(),
            expected.matches("S1(10)").count() * 1_000 + expected.matches("S1(8)").count() * 800,
        );
        assert_eq!(seen.load(Ordering::Relaxed) as usize, passed + missed, "{name}");
        let mut slots: Vec<_> = runs(&db, name).await.iter().map(|run| run.slot).collect();
        assert!(slots.is_sorted(), "{name}: {slots:?}");
        slots.dedup();
        assert_eq!(slots.len(), expected.split(' ').count(), "{name}");
    }
}

async fn a_late_tick_is_skipped_beyond_its_grace<DB: TestDatabase>(db: TestDb<DB>) {
    let skipping = |schedule: Schedule| schedule.catch_up(CatchUp::Skip).grace(Duration::ZERO);
    let schedules = idle(&db, skipping(due(&db, "k").await));
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Missed);
    let after = info(&db, "k").await;
    assert!(!after.running && after.attempt == 0 && after.due == after.slot, "{after:?}");
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!(told(&db, "k").await, "M0(1)");
}

/// The row as it is when its process has died at work, and its lease has ended.
async fn crashed<DB: TestDatabase>(db: &TestDb<DB>, name: &str, attempt: u32) {
    let (holder, now) = (DB::uuid("0123456789abcdef0123456789abcdef"), DB::ago(1));
    let set = format!(
        "holder = {holder}, token = 7, attempt = {attempt}, run_slot = slot, begin_time = slot, due_at = {now}, client_ip = 'dead'"
    );
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET {set} WHERE name = '{name}'")).await, 1);
}

/// It is older than its grace by then, but it was begun in time.
async fn a_tick_that_was_begun_is_finished_after_a_crash<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.catch_up(CatchUp::Skip).grace(Duration::ZERO);
    crashed(&db, "k", 1).await;
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
}

/// Its process died before it chose among the ticks that were due. Moved to one of them, it could
/// run a slot of the new times.
async fn a_slot_whose_times_were_replaced_is_run_as_it_is<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    back(&db, "k", 3 * LONG).await;
    crashed(&db, "k", 1).await;
    db.execute("UPDATE t_resource_schedule SET slot = due_at, begin_time = due_at").await;
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
}
