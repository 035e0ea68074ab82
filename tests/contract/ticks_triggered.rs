//! Triggers and pauses beside failures, other times, other names and removals.

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{Error, Schedule, Schedules, Tick, errors::NotFound, jobs::TickOutcome};
use tokio::{sync::mpsc, time::timeout};

use crate::{
    ticks::{LONG, Never, due, idle, info, instance, runs, told},
    ticks_apart::Run,
    ticks_renamed::forget_all,
};

harness::tests!(everywhere(
    a_trigger_between_attempts_of_a_triggered_run_adds_no_run,
    a_trigger_is_later_than_the_last_run,
    a_trigger_after_a_thousand_ahead_of_the_clock_is_no_tick,
    a_trigger_does_not_wait_for_a_tick_of_other_times_or_another_name,
    a_schedule_that_is_removed_is_neither_paused_nor_triggered,
    a_name_that_is_free_keeps_no_pause_and_no_trigger,
    a_name_in_use_keeps_its_own_pause_and_trigger,
    a_trigger_that_was_begun_ends_when_another_name_is_inherited,
    a_run_of_a_schedule_that_was_removed_may_be_stopped
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

/// Both names are in effect, and the old one has run last.
async fn a_name_in_use_keeps_its_own_pause_and_trigger<DB: TestDatabase>(db: TestDb<DB>) {
    let (operator, schedule) = (instance(&db, "operator"), Schedule::every("new", LONG).renamed_from("old"));
    lives(&idle(&db, Schedule::every("new", LONG))).await;
    operator.pause("new").await.unwrap();
    operator.trigger("new").await.unwrap();
    let before = info(&db, "new").await;
    assert_eq!(idle(&db, Schedule::every("old", LONG)).run_now("old").await.unwrap(), TickOutcome::Succeeded);
    operator.pause_until("old", before.now + LONG).await.unwrap();
    forget_all(&db).await;
    let renamed = idle(&db, schedule);
    lives(&renamed).await;
    assert_eq!(info(&db, "old").await.renamed_to(), Some("new"));
    let row = info(&db, "new").await;
    assert!(row.paused && row.paused_until.is_none(), "the pause of the other one has an end: {row:?}");
    assert!(row.triggered.is_some() && row.triggered == before.triggered, "{row:?}");
    operator.resume("new").await.unwrap();
    assert_eq!(renamed.try_tick("new").await.unwrap(), TickOutcome::Succeeded, "the trigger is due");
    assert!(matches!(renamed.try_tick("new").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!((told(&db, "new").await.as_str(), runs(&db, "new").await[0].slot), ("S1", before.triggered.unwrap()));
}

/// A run of it has failed, and would be made again. The number of its attempt is taken.
async fn a_trigger_that_was_begun_ends_when_another_name_is_inherited<DB: TestDatabase>(db: TestDb<DB>) {
    let new = Schedule::every("new", LONG).retry(1, LONG);
    let fails = instance(&db, "fails").on(new.clone(), async |_| Err::<(), _>("no"));
    assert!(matches!(fails.run_now("new").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    assert_eq!(idle(&db, Schedule::every("old", LONG)).run_now("old").await.unwrap(), TickOutcome::Succeeded);
    forget_all(&db).await;
    let renamed = idle(&db, new.renamed_from("old"));
    lives(&renamed).await;
    let row = info(&db, "new").await;
    assert!(row.triggered.is_none() && row.attempt == 0 && row.due == row.slot, "{row:?}");
    assert_eq!(renamed.run_now("new").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "new").await, "F1 S1");
}

/// No instance has it any more but the one that runs it.
async fn a_run_of_a_schedule_that_was_removed_may_be_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let (operator, schedule) = (instance(&db, "operator"), due(&db, "k").await);
    let run = Run::begin(instance(&db, "one"), schedule).await;
    forget_all(&db).await;
    lives(&instance(&db, "without it").removed("k")).await;
    assert_eq!(info(&db, "k").await.times, "none");
    assert!(operator.stop("k").await.unwrap(), "its run is under way");
    let over = run.tick.cancellation_token();
    timeout(PATIENCE, over.cancelled()).await.expect("its work is told");
    assert!(matches!(run.ended().await, TickOutcome::Failed { again: false, .. }));
    let error = operator.stop("k").await.unwrap_err();
    assert!(matches!(&error, Error::NotFound(NotFound::Schedule { renamed_to: None, .. })), "{error:?}");
}
