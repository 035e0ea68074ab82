//! What operators and deploys do with schedules: pause, trigger, other times.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Error, Schedule, Tick, admin::RunOptions, errors::NotFound, jobs::TickOutcome};
use tokio::{sync::mpsc, time::timeout};

use crate::{
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, runs, told},
    ticks_apart::Run,
};

harness::tests!(
    postgres(infinite_times_of_one_schedule_stop_no_other),
    everywhere(
        a_paused_schedule_runs_when_it_is_resumed,
        a_trigger_runs_beside_the_ticks,
        a_schedule_is_run_now,
        a_trigger_during_a_run_is_run_after_it,
        a_trigger_between_attempts_loses_no_attempt,
        a_trigger_makes_one_attempt_at_once_and_not_all,
        an_unknown_schedule_is_told,
        a_restart_leaves_the_slot_alone,
        other_times_replace_the_slot,
        the_end_of_a_run_leaves_other_times_alone
    )
);

/// An operator writes PostgreSQL's "never" into the tables.
async fn infinite_times_of_one_schedule_stop_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let (never, other) = (due(&db, "never").await, Schedule::after("k", SHORT));
    idle(&db, never.clone()).try_tick("never").await.unwrap();
    // The last tick, which is run again, has no run in the history.
    db.execute("UPDATE t_resource_schedule_run SET slot = slot - interval '1 day' WHERE name = 'never'").await;
    let schedules = instance(&db, "all").poll_interval(SHORT);
    let schedules = schedules.on(never, async |_| Never::Ok(())).on(other, async |_| Never::Ok(()));
    let running = schedules.start().await.unwrap();
    for time in ["'infinity'", "'-infinity'"] {
        for set in ["paused = true", "paused = false"] {
            let times =
                ["slot", "due_at", "run_slot", "begin_time"].map(|column| format!("{column} = {time}")).join(", ");
            db.execute(&format!("UPDATE t_resource_schedule SET {set}, {times} WHERE name = 'never'")).await;
            db.execute(&format!(
                "UPDATE t_resource_schedule_run SET end_time = {time}, begin_time = {time} WHERE name = 'never'"
            ))
            .await;
            let before = runs(&db, "k").await.len();
            eventually("the other one runs", || async { runs(&db, "k").await.len() > before + 3 }).await;
            assert_eq!(instance(&db, "reader").list().await.unwrap().len(), 2);
            instance(&db, "reader").runs(&RunOptions::default()).await.unwrap();
        }
    }
    assert!(running.shutdown(PATIENCE).await);
    db.execute("UPDATE t_resource_schedule SET paused = false, run_slot = 'infinity' WHERE name = 'never'").await;
    timeout(PATIENCE, instance(&db, "operator").reset("never")).await.unwrap().unwrap();
}

async fn a_paused_schedule_runs_when_it_is_resumed<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due(&db, "k").await);
    schedules.pause("k").await.unwrap();
    assert!(info(&db, "k").await.paused);
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    schedules.trigger("k").await.unwrap();
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    schedules.resume("k").await.unwrap();
    for _ in 0..2 {
        assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded, "the trigger, and the tick");
    }
    assert_eq!(told(&db, "k").await, "S1 S1");
}

async fn a_trigger_runs_beside_the_ticks<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(Schedule::every("k", LONG), move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        async { Never::Ok(()) }
    });
    let running = schedules.start().await.unwrap();
    let before = info(&db, "k").await;
    for number in 1..=3 {
        schedules.trigger("k").await.unwrap();
        let tick = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
        assert!(tick.is_triggered() && tick.slot() != before.slot && tick.attempt() == 1, "{tick:?}");
        eventually("it is recorded", || async { runs(&db, "k").await.len() == number }).await;
        let after = info(&db, "k").await;
        assert!((after.slot, after.due) == (before.slot, before.due) && after.triggered.is_none(), "{after:?}");
    }
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "S1 S1 S1");
}

async fn a_schedule_is_run_now<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let jobs = instance(&db, "one").on(Schedule::every("k", LONG), move |tick: Tick<DB>| {
        sender.send(tick.is_triggered()).unwrap();
        async { Never::Ok(()) }
    });
    // It has no row before the first call.
    for number in 1..=2 {
        assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::Succeeded);
        assert_eq!((ticks.recv().await, runs(&db, "k").await.len()), (Some(true), number));
    }
    let row = info(&db, "k").await;
    assert!(row.slot > row.now && row.triggered.is_none(), "the tick that is next keeps its time: {row:?}");
    jobs.pause("k").await.unwrap();
    assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    assert!(matches!(jobs.run_now("l").await, Err(Error::NotFound(NotFound::Schedule { .. }))));
    assert!(ticks.try_recv().is_err(), "it is paused");
    let failing = instance(&db, "one").on(Schedule::every("m", LONG), async |_| Err::<(), _>("no"));
    let failed = TickOutcome::Failed { error: "no".into(), again: false };
    assert_eq!((failing.run_now("m").await.unwrap(), told(&db, "m").await.as_str()), (failed, "F1"));
}

async fn a_trigger_during_a_run_is_run_after_it<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let (finish, finished) = tokio::sync::watch::channel(0);
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        sender.send(tick.clone()).unwrap();
        let mut finished = finished.clone();
        let wanted = if tick.is_triggered() { 2 } else { 1 };
        async move { finished.wait_for(|finished| *finished >= wanted).await.map(drop) }
    });
    let running = schedules.start().await.unwrap();
    let first = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    for _ in 0..2 {
        schedules.trigger("k").await.unwrap();
    }
    let during = info(&db, "k").await;
    assert!(during.running && during.triggered.is_some() && during.run_slot == Some(slot), "{during:?}");
    assert!(ticks.try_recv().is_err(), "not two at once");
    finish.send(1).unwrap();
    let second = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert!(!first.is_triggered() && second.is_triggered() && second.attempt() == 1, "{second:?}");
    assert_eq!(info(&db, "k").await.slot, slot + LONG);
    schedules.trigger("k").await.unwrap();
    finish.send(2).unwrap();
    let third = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert!(third.is_triggered() && third.slot() > second.slot(), "{third:?}");
    eventually("all are recorded", || async { told(&db, "k").await == "S1 S1 S1" }).await;
    assert!(running.shutdown(PATIENCE).await);
    assert!(ticks.try_recv().is_err(), "triggers that wait count once");
    assert_eq!(info(&db, "k").await.due, slot + LONG);
}

/// The next attempt is made at once, and the triggered run after it.
async fn a_trigger_between_attempts_loses_no_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(1, LONG);
    let slot = info(&db, "k").await.slot;
    let schedules =
        instance(&db, "one").on(
            schedule,
            async |tick: Tick<DB>| {
                if tick.attempt() == 1 && !tick.is_triggered() { Err("no") } else { Ok(()) }
            },
        );
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    schedules.trigger("k").await.unwrap();
    for _ in 0..2 {
        assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    }
    let runs = runs(&db, "k").await;
    assert_eq!(told(&db, "k").await, "F1 S2 S1");
    assert!(runs[0].slot == slot && runs[1].slot == slot && runs[2].slot > slot, "{runs:?}");
    assert_eq!(info(&db, "k").await.due, slot + LONG);
}

/// The triggers come between attempts, and during one.
async fn a_trigger_makes_one_attempt_at_once_and_not_all<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(3, LONG);
    let operator = instance(&db, "operator");
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let operator = operator.clone();
        async move {
            if tick.attempt() == 3 {
                operator.trigger("k").await.unwrap();
            }
            if tick.is_triggered() { Ok(()) } else { Err("no") }
        }
    });
    for attempt in 1..=4 {
        let outcome = schedules.try_tick("k").await.unwrap();
        assert!(
            matches!(outcome, TickOutcome::Failed { again, .. } if again == (attempt < 4)),
            "{attempt}: {outcome:?}"
        );
        if attempt < 4 {
            let next = schedules.try_tick("k").await.unwrap();
            assert!(matches!(next, TickOutcome::NotDue { retry_after: Some(pause) } if pause > LONG / 2), "{next:?}");
            schedules.trigger("k").await.unwrap();
        }
    }
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "F1 F2 F3 F4 S1");
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }), "triggers count once");
}

async fn an_unknown_schedule_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG));
    let errors = [
        schedules.pause("l").await.unwrap_err(),
        schedules.resume("l").await.unwrap_err(),
        schedules.trigger("l").await.unwrap_err(),
    ];
    for error in errors {
        assert!(
            matches!(&error, Error::NotFound(NotFound::Schedule { name, .. }) if name.as_str() == "l"),
            "{error:?}"
        );
    }
    assert!(matches!(schedules.pause(" l").await, Err(Error::Invalid(_))));
    assert!(schedules.history("l", 9).await.unwrap().is_empty());
}

async fn a_restart_leaves_the_slot_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let before = info(&db, "k").await;
    let schedules = idle(&db, schedule);
    schedules.pause("k").await.unwrap();
    for _ in 0..2 {
        assert!(schedules.start().await.unwrap().shutdown(PATIENCE).await);
    }
    let after = info(&db, "k").await;
    assert_eq!((after.slot, after.due, after.attempt), (before.slot, before.due, 0));
}

async fn other_times_replace_the_slot<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = |pattern, zone| Schedule::cron("k", pattern).zone(zone);
    let mut slots = Vec::new();
    for (pattern, zone) in [("0 3 1 1 *", "UTC"), ("0 4 1 1 *", "UTC"), ("0 4 1 1 *", "Asia/Tokyo")] {
        idle(&db, schedule(pattern, zone)).try_tick("k").await.unwrap();
        let row = info(&db, "k").await;
        assert_eq!((row.times, row.zone), (format!("cron {pattern}"), zone.to_owned()));
        assert_eq!(row.slot, row.due);
        slots.push(row.slot);
    }
    assert_eq!(slots[1] - slots[0], chrono::TimeDelta::hours(1));
    assert_eq!(slots[1] - slots[2], chrono::TimeDelta::hours(9));
}

/// The old instance's run ends after other times took effect.
async fn the_end_of_a_run_leaves_other_times_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let every = |name: &str, periods| Schedule::every(name, periods * LONG);
    let in_zone = |name: &str, zone| Schedule::cron(name, "0 4 1 1 *").zone(zone);
    for (name, old, new, succeeds, expected) in [
        ("k", every("k", 1), every("k", 2), true, "S1"),
        ("l", every("l", 1), every("l", 2), false, "F1"),
        ("m", in_zone("m", "UTC"), in_zone("m", "Asia/Tokyo"), true, "S1"),
        ("n", in_zone("n", "UTC"), in_zone("n", "Asia/Tokyo"), false, "F1"),
    ] {
        let old = old.retry(9, Duration::ZERO);
        idle(&db, old.clone()).try_tick(name).await.unwrap();
        let row = info(&db, name).await;
        // A slot has whole milliseconds.
        back(&db, name, Duration::from_secs((row.slot - row.now).num_seconds().unsigned_abs() + 1)).await;
        let run = Run::begin_named(instance(&db, "old"), old, name).await;
        let new = idle(&db, new);
        assert!(matches!(new.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }), "it is run");
        let during = info(&db, name).await;
        assert!(during.running && during.attempt == 1 && during.due < during.slot, "{during:?}");
        run.end_with(if succeeds { Ok(()) } else { Err("no") }).await;
        let after = info(&db, name).await;
        assert_eq!((after.running, after.slot), (false, during.slot), "{after:?}");
        // A failed attempt is made again.
        assert!(if succeeds { after.due == after.slot } else { after.due <= after.now }, "{after:?}");
        assert_eq!(after.attempt, u32::from(!succeeds), "{after:?}");
        assert_eq!(told(&db, name).await, expected);
    }
}
