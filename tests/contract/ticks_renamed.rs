//! Schedules with another name than before.

use std::{collections::BTreeSet, time::Duration};

use chrono::TimeDelta;
use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Error, Schedule, Schedules, Tick,
    errors::NotFound,
    jobs::{CatchUp, Running, TickOutcome},
};
use tokio::{sync::watch, time::sleep};

use crate::ticks::{LONG, SHORT, back, idle, info, instance, reader, runs, told};

harness::tests!(
    everywhere(
        each_tick_of_a_renamed_schedule_runs_once,
        a_renamed_schedule_gets_what_was_due_the_pause_and_the_trigger,
        a_run_under_the_old_name_ends_before_the_new_one_begins,
        a_run_that_died_under_the_old_name_is_lost,
        a_failed_tick_goes_on_under_the_other_name,
        a_trigger_that_failed_goes_on_under_the_other_name,
        an_old_instance_takes_nothing_from_a_name_that_lives,
        a_name_that_is_used_again_is_another_schedule,
        an_old_name_may_be_removed_afterwards,
        an_operator_learns_the_new_name,
        a_rename_outlives_a_rollback,
        a_rollback_gets_what_was_due_the_pause_and_the_trigger,
        a_run_that_died_before_a_rollback_is_lost,
        a_schedule_that_has_run_since_goes_on_with_what_it_has,
        a_name_may_come_back,
        a_schedule_may_have_had_several_names,
        a_call_gives_a_schedule_its_new_name,
        a_name_that_is_declared_twice_is_refused
    ),
    servers(an_instance_that_cannot_beat_leaves_the_old_name_to_others)
);

/// Several times the pause between two beats of an instance.
const A_WHILE: Duration = Duration::from_millis(1_500);

fn every(name: &str, period: Duration) -> Schedule {
    Schedule::every(name, period).catch_up(CatchUp::All(1_000))
}

fn renamed(period: Duration) -> Schedule {
    every("new", period).renamed_from("old")
}

/// An instance that beats as often as one can.
fn with<DB: TestDatabase>(db: &TestDb<DB>, schedule: Schedule) -> Schedules<DB> {
    idle(db, schedule).poll_interval(SHORT / 10).lease(10 * SHORT)
}

async fn ends(running: Running) {
    assert!(running.shutdown(PATIENCE).await);
}

async fn is_renamed<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    let schedules = reader(db);
    schedules.inspect("new").await.unwrap().is_some() && info(db, "old").await.is_removed()
}

async fn each_tick_of_a_renamed_schedule_runs_once<DB: TestDatabase>(db: TestDb<DB>) {
    let period = 2 * SHORT;
    let old = with(&db, every("old", period)).start().await.unwrap();
    eventually("the old one runs", || async { !runs(&db, "old").await.is_empty() }).await;
    let new = with(&db, renamed(period)).start().await.unwrap();
    assert!(!is_renamed(&db).await, "the word of an instance that has just begun does not count");
    eventually("the new one runs", || async { runs(&db, "new").await.len() > 5 }).await;
    ends(old).await;
    ends(new).await;
    assert_eq!(distances(&db).await, BTreeSet::from([period]), "no tick is lost");
    let (old, new) = (runs(&db, "old").await, runs(&db, "new").await);
    assert!(old.iter().all(|old| new.iter().all(|new| new.slot > old.slot)), "none is run twice");
}

/// No instance that has the old name lives.
async fn a_renamed_schedule_gets_what_was_due_the_pause_and_the_trigger<DB: TestDatabase>(db: TestDb<DB>) {
    let old = with(&db, every("old", LONG));
    ends(old.start().await.unwrap()).await;
    back(&db, "old", LONG).await;
    old.pause("old").await.unwrap();
    old.trigger("old").await.unwrap();
    let before = info(&db, "old").await;
    let new = with(&db, renamed(2 * LONG)).start().await.unwrap();
    assert!(is_renamed(&db).await);
    let after = info(&db, "new").await;
    assert!(after.paused && !after.running, "{after:?}");
    assert_eq!((after.slot, after.triggered), (before.slot, before.triggered));
    instance(&db, "operator").resume("new").await.unwrap();
    eventually("the trigger and the tick run", || async { runs(&db, "new").await.len() == 2 }).await;
    assert!(runs(&db, "new").await.iter().any(|run| run.slot == before.slot));
    assert!(runs(&db, "old").await.is_empty());
    ends(new).await;
}

async fn a_run_under_the_old_name_ends_before_the_new_one_begins<DB: TestDatabase>(db: TestDb<DB>) {
    let (finish, finished) = watch::channel(false);
    let held = Schedule::after("old", SHORT);
    let old = instance(&db, "old").poll_interval(SHORT / 10).on(held, move |_: Tick<DB>| {
        let mut finished = finished.clone();
        async move { finished.wait_for(|finished| *finished).await.map(drop) }
    });
    let old = old.start().await.unwrap();
    eventually("the old one runs", || async { info(&db, "old").await.running }).await;
    let after = Schedule::after("new", SHORT).renamed_from("old");
    let new = with(&db, after).start().await.unwrap();
    sleep(3 * A_WHILE).await;
    assert!(!is_renamed(&db).await, "a run is under way");
    finish.send_replace(true);
    eventually("the new one runs", || async { runs(&db, "new").await.len() > 1 }).await;
    let ran = runs(&db, "old").await;
    let first = &runs(&db, "new").await[0];
    assert!(ran.iter().all(|run| run.ended <= first.began), "{ran:?} {first:?}");
    ends(old).await;
    ends(new).await;
}

/// Its process is stopped, and may come back after the rename.
async fn a_run_that_died_under_the_old_name_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    back(&db, "old", LONG).await;
    let tick = Tick::for_test(&db.pool, &every("old", LONG), info(&db, "old").await.slot).await.unwrap();
    due(&db, "old").await;
    let new = with(&db, renamed(LONG)).start().await.unwrap();
    eventually("the new one runs its tick", || async { told(&db, "new").await.starts_with("S2") }).await;
    assert_eq!(runs(&db, "new").await[0].slot, tick.slot());
    let late = tick.transaction(&db.pool, async |_| Ok::<_, sqlx::Error>(())).await;
    assert!(late.is_err(), "the run was lost");
    assert_eq!(told(&db, "old").await, "L1");
    let old = info(&db, "old").await;
    assert!(!old.running && old.lost_since.is_none() && old.attempt == 0, "{old:?}");
    assert!(info(&db, "new").await.token > tick.token());
    ends(new).await;
}

/// Makes what waits for its next attempt, or whose process has died, due.
async fn due<DB: TestDatabase>(db: &TestDb<DB>, name: &str) {
    let due = format!("UPDATE t_resource_schedule SET due_at = {} WHERE name = '{name}'", DB::ago(1_000));
    assert_eq!(db.execute(&due).await, 1);
}

/// Ends the word of all instances.
pub async fn forget_all<DB: TestDatabase>(db: &TestDb<DB>) {
    let operator = instance(db, "operator");
    for instance in operator.instances().await.unwrap() {
        operator.forget_instance(instance.id).await.unwrap();
    }
}

/// Its attempts and the ticks that it stands for count on, also after a rollback.
async fn a_failed_tick_goes_on_under_the_other_name<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = |name| Schedule::every(name, LONG).retry(9, LONG);
    let failing = |schedule| instance(&db, "one").on(schedule, async |_: Tick<DB>| Err::<(), _>("not yet"));
    let (old, new) = (failing(schedule("old")), failing(schedule("new").renamed_from("old")));
    old.try_tick("old").await.unwrap();
    back(&db, "old", 3 * LONG).await;
    old.try_tick("old").await.unwrap();
    let slot = runs(&db, "old").await[0].slot;
    for (instance, name) in [(&new, "new"), (&old, "old"), (&new, "new")] {
        forget_all(&db).await;
        // The first call takes the place, and finds that the tick waits for its next attempt.
        assert!(matches!(instance.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }));
        due(&db, name).await;
        assert!(matches!(instance.try_tick(name).await.unwrap(), TickOutcome::Failed { again: true, .. }));
    }
    assert_eq!((told(&db, "old").await, told(&db, "new").await), ("F1(2) F3(2)".into(), "F2(2) F4(2)".into()));
    assert!(runs(&db, "new").await.iter().all(|run| run.slot == slot));
}

async fn a_trigger_that_failed_goes_on_under_the_other_name<DB: TestDatabase>(db: TestDb<DB>) {
    let (old, new) = (every("old", LONG), renamed(LONG));
    let fails = instance(&db, "old").on(old.retry(9, LONG), async |_| Err::<(), _>("not yet"));
    assert!(matches!(fails.run_now("old").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    forget_all(&db).await;
    let succeeds = with(&db, new);
    assert!(matches!(succeeds.try_tick("new").await.unwrap(), TickOutcome::NotDue { .. }));
    due(&db, "new").await;
    assert_eq!(succeeds.try_tick("new").await.unwrap(), TickOutcome::Succeeded);
    let (before, after) = (runs(&db, "old").await[0].slot, runs(&db, "new").await[0].slot);
    assert_eq!((before, told(&db, "new").await.as_str()), (after, "S2"));
}

/// The release after the rename no longer says which name the schedule had.
async fn an_old_instance_takes_nothing_from_a_name_that_lives<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    let new = with(&db, every("new", 2 * SHORT)).start().await.unwrap();
    eventually("the new one runs", || async { runs(&db, "new").await.len() > 2 }).await;
    let old = with(&db, every("old", LONG)).start().await.unwrap();
    let before = runs(&db, "new").await.len();
    sleep(A_WHILE).await;
    assert!(info(&db, "old").await.is_removed() && runs(&db, "new").await.len() > before);
    ends(new).await;
    eventually("it is a rollback", || async { info(&db, "new").await.is_removed() }).await;
    ends(old).await;
}

/// A release has another schedule of the old name.
async fn a_name_that_is_used_again_is_another_schedule<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    instance(&db, "operator").pause("new").await.unwrap();
    back(&db, "new", LONG).await;
    let slot = info(&db, "new").await.slot;
    let both = with(&db, every("new", LONG)).on(every("old", 2 * SHORT), async |_| Ok::<_, &str>(()));
    let both = both.start().await.unwrap();
    eventually("the other one runs", || async { runs(&db, "old").await.len() > 3 }).await;
    sleep(A_WHILE).await;
    let (new, old) = (info(&db, "new").await, info(&db, "old").await);
    assert!((new.slot, new.paused) == (slot, true) && !old.paused, "{new:?} {old:?}");
    ends(both).await;
}

/// A release declares that nothing has the old name.
async fn an_old_name_may_be_removed_afterwards<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    back(&db, "new", 2 * LONG).await;
    let slot = info(&db, "new").await.slot;
    let new = with(&db, every("new", LONG)).removed("old").start().await.unwrap();
    eventually("what was due runs", || async { runs(&db, "new").await.len() == 2 }).await;
    assert_eq!(runs(&db, "new").await[0].slot, slot);
    assert_eq!(info(&db, "old").await.times, "none");
    ends(new).await;
}

async fn an_operator_learns_the_new_name<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    let new = with(&db, renamed(LONG)).start().await.unwrap();
    let operator = instance(&db, "operator");
    let stopped = operator.stop("old").await.map(drop);
    for refused in [operator.pause("old").await, operator.resume("old").await, operator.trigger("old").await, stopped] {
        let error = refused.unwrap_err();
        assert!(
            matches!(&error, Error::NotFound(NotFound::Schedule { renamed_to: Some(new), .. }) if new == "new"),
            "{error:?}"
        );
        assert!(error.to_string().ends_with("its name is \"new\" now"), "{error}");
    }
    let old = info(&db, "old").await;
    assert!(!old.paused && old.triggered.is_none() && old.renamed_to() == Some("new"), "{old:?}");
    ends(new).await;
}

async fn a_rename_outlives_a_rollback<DB: TestDatabase>(db: TestDb<DB>) {
    let period = 2 * SHORT;
    let old = with(&db, every("old", period)).start().await.unwrap();
    eventually("the old one runs", || async { !runs(&db, "old").await.is_empty() }).await;
    for _ in 0..2 {
        let new = with(&db, renamed(period)).start().await.unwrap();
        let before = runs(&db, "new").await.len();
        eventually("the new one runs", || async { runs(&db, "new").await.len() > before + 2 }).await;
        let stopped = runs(&db, "old").await.len();
        sleep(A_WHILE).await;
        assert_eq!(runs(&db, "old").await.len(), stopped);
        ends(new).await;
        eventually("the old one runs again", || async { runs(&db, "old").await.len() > stopped + 2 }).await;
        assert!(info(&db, "new").await.is_removed());
    }
    ends(old).await;
    assert_eq!(distances(&db).await, BTreeSet::from([period]), "no tick is lost");
    let slots = runs(&db, "old").await.into_iter().chain(runs(&db, "new").await).map(|run| run.slot);
    let mut slots: Vec<_> = slots.collect();
    slots.sort();
    assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "none is run twice");
}

/// All instances are stopped before the old ones are started.
async fn a_rollback_gets_what_was_due_the_pause_and_the_trigger<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    back(&db, "new", 3 * LONG).await;
    let operator = instance(&db, "operator");
    operator.pause("new").await.unwrap();
    operator.trigger("new").await.unwrap();
    let new = info(&db, "new").await;
    let running = with(&db, every("old", LONG)).start().await.unwrap();
    let old = info(&db, "old").await;
    assert_eq!((old.slot, old.paused, old.triggered), (new.slot, true, new.triggered));
    assert!(info(&db, "new").await.is_removed());
    operator.resume("old").await.unwrap();
    eventually("all are caught up on", || async { runs(&db, "old").await.len() == 4 }).await;
    ends(running).await;
}

/// Returns the distances between the ticks that were run under either name.
async fn distances<DB: TestDatabase>(db: &TestDb<DB>) -> BTreeSet<Duration> {
    let (old, new) = (runs(db, "old").await, runs(db, "new").await);
    let slots: BTreeSet<_> = old.into_iter().chain(new).map(|run| run.slot).collect();
    let slots: Vec<_> = slots.into_iter().collect();
    slots.windows(2).map(|pair| (pair[1] - pair[0]).to_std().unwrap()).collect()
}

/// The instance died, and the old name was run after a rollback since.
async fn a_run_that_died_before_a_rollback_is_lost<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    let slot = info(&db, "new").await.slot - TimeDelta::from_std(9 * LONG).unwrap();
    let died = Tick::for_test(&db.pool, &every("new", LONG), slot).await.unwrap();
    due(&db, "new").await;
    let old = with(&db, every("old", LONG));
    old.run_now("old").await.unwrap();
    assert!(info(&db, "new").await.is_removed());
    assert_eq!((told(&db, "old").await.as_str(), runs(&db, "old").await[0].slot), ("S2", slot));
    forget_all(&db).await;
    old.pause("old").await.unwrap();
    let before = info(&db, "old").await.slot;
    let new = with(&db, renamed(2 * LONG)).start().await.unwrap();
    let row = info(&db, "new").await;
    assert!(row.paused && !row.running && row.attempt == 0 && row.times == format!("every {:?}", 2 * LONG), "{row:?}");
    assert!(row.slot >= before, "{row:?} {before}");
    assert_eq!(told(&db, "new").await, "L1");
    assert!(row.token >= died.token());
    ends(new).await;
}

/// The declaration comes late.
async fn a_schedule_that_has_run_since_goes_on_with_what_it_has<DB: TestDatabase>(db: TestDb<DB>) {
    with(&db, every("old", LONG)).run_now("old").await.unwrap();
    let new = with(&db, every("new", LONG));
    new.run_now("new").await.unwrap();
    forget_all(&db).await;
    back(&db, "old", 5 * LONG).await;
    new.pause("new").await.unwrap();
    let before = info(&db, "new").await;
    let running = with(&db, renamed(LONG)).start().await.unwrap();
    assert!(info(&db, "old").await.is_removed());
    let after = info(&db, "new").await;
    assert_eq!((after.slot, after.paused), (before.slot, true));
    ends(running).await;
}

async fn a_name_may_come_back<DB: TestDatabase>(db: TestDb<DB>) {
    ends(with(&db, every("old", LONG)).start().await.unwrap()).await;
    ends(with(&db, renamed(LONG)).start().await.unwrap()).await;
    back(&db, "new", LONG).await;
    let slot = info(&db, "new").await.slot;
    instance(&db, "operator").pause("new").await.unwrap();
    let back = every("old", LONG).renamed_from("new");
    let running = with(&db, back).start().await.unwrap();
    let (old, new) = (info(&db, "old").await, info(&db, "new").await);
    assert!(old.paused && !old.is_removed() && new.is_removed(), "{old:?} {new:?}");
    assert_eq!(old.slot, slot);
    instance(&db, "operator").resume("old").await.unwrap();
    eventually("it runs", || async { told(&db, "old").await == "S1" }).await;
    ends(running).await;
}

/// The release in between was left out.
async fn a_schedule_may_have_had_several_names<DB: TestDatabase>(db: TestDb<DB>) {
    let old = with(&db, every("old", 2 * SHORT)).start().await.unwrap();
    eventually("the old one runs", || async { !runs(&db, "old").await.is_empty() }).await;
    let new = renamed(2 * SHORT).renamed_from("between");
    let new = with(&db, new).start().await.unwrap();
    eventually("the new one runs", || async { runs(&db, "new").await.len() > 3 }).await;
    assert!(is_renamed(&db).await);
    assert_eq!(distances(&db).await, BTreeSet::from([2 * SHORT]));
    ends(old).await;
    ends(new).await;
}

/// Another transaction has locked the row of the instance, so that the others take it for dead. Its
/// claims would be granted.
async fn an_instance_that_cannot_beat_leaves_the_old_name_to_others<DB: TestDatabase>(db: TestDb<DB>) {
    let period = 2 * SHORT;
    let new = with(&db, renamed(period)).label("new").time_limit(5 * SHORT).start().await.unwrap();
    eventually("the new one runs", || async { !runs(&db, "new").await.is_empty() }).await;
    let old = with(&db, every("old", period)).start().await.unwrap();
    let other = db.pool_of(1).await;
    let instances = instance(&db, "reader").instances().await.unwrap();
    let id = instances.into_iter().find(|instance| instance.label == "new").unwrap().id;
    let mut tx = other.begin().await.unwrap();
    let id = DB::uuid(&id.simple().to_string());
    DB::execute_on(&mut tx, &format!("UPDATE t_resource_schedule_instance SET build = 'x' WHERE id = {id}"))
        .await
        .unwrap();
    eventually("the old one runs", || async { runs(&db, "old").await.len() > 5 }).await;
    let first = runs(&db, "old").await[0].began;
    let after = first + TimeDelta::from_std(A_WHILE).unwrap();
    let beside: Vec<_> = runs(&db, "new").await.into_iter().filter(|run| run.began > after).collect();
    assert!(beside.is_empty(), "{beside:?}");
    tx.rollback().await.unwrap();
    ends(old).await;
    ends(new).await;
}

async fn a_call_gives_a_schedule_its_new_name<DB: TestDatabase>(db: TestDb<DB>) {
    with(&db, every("old", LONG)).try_tick("old").await.unwrap();
    back(&db, "old", LONG).await;
    let new = with(&db, renamed(LONG));
    assert_eq!(new.try_tick("new").await.unwrap(), TickOutcome::Succeeded);
    assert!(is_renamed(&db).await);
    let retry_after = match with(&db, every("old", LONG)).try_tick("old").await.unwrap() {
        TickOutcome::NotDue { retry_after } => retry_after,
        other => panic!("{other:?}"),
    };
    assert_eq!(retry_after, None, "the new name is in effect");
}

async fn a_name_that_is_declared_twice_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    assert!(every("k", LONG).renamed_from("k").check().is_err());
    let both = with(&db, every("old", LONG)).on(renamed(LONG), async |_| Ok::<_, &str>(()));
    assert!(matches!(both.start().await, Err(Error::Invalid(_))));
    let twice = with(&db, renamed(LONG)).removed("old");
    assert!(matches!(twice.start().await, Err(Error::Invalid(_))));
}
