//! Triggers and pauses beside failures, other times, other names and removals.

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{Error, Schedule, Schedules, Tick, errors::NotFound, jobs::TickOutcome};
use tokio::sync::mpsc;

use crate::ticks::{LONG, Never, due, idle, info, instance, runs, told};

harness::tests!(everywhere(
    a_trigger_between_attempts_of_a_triggered_run_adds_no_run,
    a_trigger_is_later_than_the_last_run,
    a_trigger_after_a_thousand_ahead_of_the_clock_is_no_tick,
    a_trigger_does_not_wait_for_a_tick_of_other_times_or_another_name,
    a_schedule_that_is_removed_is_neither_paused_nor_triggered,
    a_name_that_is_free_keeps_no_pause_and_no_trigger
));

/// Starts an instance, which ends at once.
async fn lives<DB: TestDatabase>(schedules: &Schedules<DB>) {
    assert!(schedules.start().await.unwrap().shutdown(PATIENCE).await);
}

/// The trigger is the one that waits already.
async fn a_trigger_between_attempts_of_a_triggered_run_adds_no_run<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::every("k", LONG).retry(1, LONG);
    let schedules =
        instance(&db, "one").on(schedule, async |tick: Tick<DB>| if tick.attempt() == 1 { Err("no") } else { Ok(()) });
    assert!(matches!(schedules.run_now("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    let before = info(&db, "k").await;
    assert!(before.triggered.is_some() && before.triggered == before.run_slot && !before.running, "{before:?}");
    schedules.trigger("k").await.unwrap();
    assert_eq!(info(&db, "k").await.triggered, before.triggered);
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!(told(&db, "k").await, "F1 S2");
    let after = info(&db, "k").await;
    assert!(after.triggered.is_none() && (after.slot, after.due) == (before.slot, before.slot), "{after:?}");
}

/// The clock was set back after that run. The same slot once more would be refused by the history.
async fn a_trigger_is_later_than_the_last_run<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "one").on(Schedule::every("k", LONG), async |_: Tick<DB>| Never::Ok(()));
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }));
    assert_eq!(db.execute("UPDATE t_resource_schedule SET run_slot = slot").await, 1);
    let last = info(&db, "k").await.slot;
    for number in 1..=2 {
        assert_eq!(schedules.run_now("k").await.unwrap(), TickOutcome::Succeeded);
        assert_eq!(runs(&db, "k").await.len(), number);
    }
    let runs = runs(&db, "k").await;
    assert!(last < runs[0].slot && runs[0].slot < runs[1].slot, "{last}: {runs:?}");
    assert_eq!(told(&db, "k").await, "S1 S1");
    assert_eq!(info(&db, "k").await.slot, last, "the tick stays");
}

/// Of ticks, the slots have whole milliseconds.
async fn a_trigger_after_a_thousand_ahead_of_the_clock_is_no_tick<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db, "k").await;
    let last = match db.server.name {
        "sqlite" => "4102444800000999",
        "postgres" => "'2100-01-01 00:00:00.000999Z'",
        _ => "'2100-01-01 00:00:00.000999'",
    };
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET run_slot = {last}")).await, 1);
    instance(&db, "one").trigger("k").await.unwrap();
    let triggered = info(&db, "k").await.triggered.unwrap();
    assert_eq!(triggered.timestamp_micros(), 4_102_444_800_001_001);
}

/// No instance looked between the trigger and the deploy.
async fn a_trigger_does_not_wait_for_a_tick_of_other_times_or_another_name<DB: TestDatabase>(db: TestDb<DB>) {
    for (old, new, schedule) in
        [("k", "k", Schedule::every("k", 2 * LONG)), ("old", "new", Schedule::every("new", LONG).renamed_from("old"))]
    {
        let before = idle(&db, Schedule::every(old, LONG));
        assert!(matches!(before.try_tick(old).await.unwrap(), TickOutcome::NotDue { .. }));
        before.trigger(old).await.unwrap();
        let (sender, mut ticks) = mpsc::unbounded_channel();
        let after = instance(&db, "after").on(schedule, move |tick: Tick<DB>| {
            sender.send(tick.is_triggered()).unwrap();
            async { Never::Ok(()) }
        });
        assert_eq!(after.try_tick(new).await.unwrap(), TickOutcome::Succeeded, "{new}");
        assert_eq!(ticks.try_recv(), Ok(true));
        assert!(matches!(after.try_tick(new).await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
        let row = info(&db, new).await;
        assert!(row.triggered.is_none() && row.slot > row.now && row.due == row.slot, "{row:?}");
        assert_eq!(told(&db, new).await, "S1");
    }
}

/// The trigger from before its removal is over when it comes back.
async fn a_schedule_that_is_removed_is_neither_paused_nor_triggered<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedules, operator) = (idle(&db, Schedule::every("k", LONG)), instance(&db, "operator"));
    lives(&schedules).await;
    operator.trigger("k").await.unwrap();
    lives(&instance(&db, "without it").removed("k")).await;
    assert_eq!(info(&db, "k").await.times, "none");
    for refused in [operator.pause("k").await, operator.resume("k").await, operator.trigger("k").await] {
        let error = refused.unwrap_err();
        assert!(matches!(&error, Error::NotFound(NotFound::Schedule { renamed_to: None, .. })), "{error:?}");
    }
    lives(&schedules).await;
    let row = info(&db, "k").await;
    assert!(!row.paused && row.triggered.is_none() && row.slot > row.now && row.due == row.slot, "{row:?}");
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!(told(&db, "k").await, "");
}

/// They have moved on with the schedule. Another schedule of its old name begins without them.
async fn a_name_that_is_free_keeps_no_pause_and_no_trigger<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = instance(&db, "operator");
    lives(&idle(&db, Schedule::every("old", LONG))).await;
    operator.pause("old").await.unwrap();
    operator.trigger("old").await.unwrap();
    lives(&idle(&db, Schedule::every("new", LONG).renamed_from("old"))).await;
    let (old, new) = (info(&db, "old").await, info(&db, "new").await);
    assert_eq!(old.renamed_to(), Some("new"));
    assert!(!old.paused && old.triggered.is_none() && old.due == old.slot, "{old:?}");
    assert!(new.paused && new.triggered.is_some(), "{new:?}");
    let both = idle(&db, Schedule::every("new", LONG)).on(Schedule::every("old", LONG), async |_| Never::Ok(()));
    lives(&both).await;
    let (old, again) = (info(&db, "old").await, info(&db, "new").await);
    assert!(!old.is_removed() && !old.paused && old.triggered.is_none() && old.due == old.slot, "{old:?}");
    assert_eq!((again.paused, again.triggered), (true, new.triggered));
}
