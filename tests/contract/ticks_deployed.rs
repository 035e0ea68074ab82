//! Deploys: which times a schedule has while instances declare different ones.

use std::time::Duration;

use chrono::TimeDelta;
use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Error, Schedule, Schedules,
    admin::RunInfo,
    errors::{NotFound, Setup},
    jobs::{Running, TickOutcome},
};
use tokio::time::sleep;

use crate::ticks::{LONG, SHORT, back, idle, info, instance, runs, steal, told};

harness::tests!(
    everywhere(
        the_newest_times_of_a_living_instance_apply,
        uncontested_times_apply_at_once,
        an_instance_that_dies_gives_way,
        what_was_due_stays_due,
        a_failed_attempt_is_made_again_under_other_times,
        a_triggered_run_keeps_its_attempts_under_other_times,
        a_row_that_is_gone_is_created_again,
        of_two_crontabs_the_newer_one_runs,
        a_call_by_hand_counts_for_a_moment,
        a_run_that_died_is_over_when_its_schedule_comes_back,
        a_due_time_that_a_wrong_clock_has_left_is_put_back,
        a_slot_that_a_wrong_clock_has_left_is_put_back,
        a_slot_is_put_back_by_an_operator,
        an_attempt_that_is_due_far_ahead_is_due_after_a_reset,
        a_schedule_that_its_service_lacks_is_gone,
        a_schedule_that_is_declared_as_removed_is_run_by_no_old_instance,
        a_schedule_is_removed_when_no_instance_has_it,
        a_schedule_that_is_resumed_is_not_overdue,
        instances_are_listed_with_what_they_declare,
        a_build_that_its_column_does_not_hold_is_refused
    ),
    servers(a_beat_that_waits_holds_up_no_run),
    postgres[DIRECT](an_instance_with_nothing_to_do_sends_one_statement_a_poll)
);

/// Several times the pause between two beats of an instance.
const A_WHILE: Duration = Duration::from_millis(1_500);

/// An instance that beats as often as one can.
pub fn every<DB: TestDatabase>(db: &TestDb<DB>, label: &str, period: Duration) -> Schedules<DB> {
    let schedules = idle(db, Schedule::every("k", period)).label(label);
    schedules.poll_interval(SHORT / 10).lease(10 * SHORT)
}

pub async fn times<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    info(db, "k").await.times
}

pub fn text(period: Duration) -> String {
    format!("every {period:?}")
}

async fn applies<DB: TestDatabase>(db: &TestDb<DB>, period: Duration) {
    eventually(&format!("{period:?} applies"), || async { times(db).await == text(period) }).await;
}

pub async fn ends(running: Running) {
    assert!(running.shutdown(PATIENCE).await);
}

async fn the_newest_times_of_a_living_instance_apply<DB: TestDatabase>(db: TestDb<DB>) {
    let old = every(&db, "old", LONG).start().await.unwrap();
    let new = every(&db, "new", 2 * SHORT).start().await.unwrap();
    assert_eq!(times(&db).await, text(LONG), "the word of an instance that has just begun does not count");
    applies(&db, 2 * SHORT).await;
    // An old instance that begins takes nothing back, however long it lives.
    let again = every(&db, "again", LONG).start().await.unwrap();
    sleep(2 * A_WHILE).await;
    assert_eq!(times(&db).await, text(2 * SHORT));
    let row = info(&db, "k").await;
    assert_eq!((row.instances, row.instances_with_other_times), (1, 2), "{row:?}");
    let before = runs(&db, "k").await.len();
    eventually("the new instance goes on", || async { runs(&db, "k").await.len() > before + 2 }).await;
    assert!(runs(&db, "k").await.iter().all(|run| run.by == "new"));
    // A rollback.
    ends(new).await;
    applies(&db, LONG).await;
    instance(&db, "operator").trigger("k").await.unwrap();
    eventually("an old instance goes on", || async { runs(&db, "k").await.iter().any(|run| run.by != "new") }).await;
    // The time of a trigger is rounded up.
    let is_early = |run: &RunInfo| run.slot - run.began > TimeDelta::milliseconds(1);
    assert!(!runs(&db, "k").await.iter().any(is_early), "nothing is run early at the hand-over");
    ends(old).await;
    ends(again).await;
}

async fn uncontested_times_apply_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    ends(every(&db, "old", LONG).start().await.unwrap()).await;
    let slot = info(&db, "k").await.slot;
    ends(every(&db, "the same", LONG).start().await.unwrap()).await;
    assert_eq!(info(&db, "k").await.slot, slot, "a restart keeps the slot");
    let new = every(&db, "new", 2 * LONG).start().await.unwrap();
    let row = info(&db, "k").await;
    assert_eq!(row.times, text(2 * LONG));
    assert!(row.slot > row.now && row.times_since.is_some(), "{row:?}");
    ends(new).await;
}

/// The instance with the newest times is killed: it does not end its word.
async fn an_instance_that_dies_gives_way<DB: TestDatabase>(db: TestDb<DB>) {
    let old = every(&db, "old", LONG).start().await.unwrap();
    let new = every(&db, "new", 2 * LONG).start().await.unwrap();
    applies(&db, 2 * LONG).await;
    let row = "INSERT INTO t_resource_schedule_instance SELECT * FROM killed";
    db.execute("CREATE TABLE killed AS SELECT * FROM t_resource_schedule_instance WHERE label = 'new'").await;
    ends(new).await;
    assert_eq!(db.execute(row).await, 1);
    applies(&db, LONG).await;
    eventually("it is forgotten", || async { instance(&db, "reader").instances().await.unwrap().len() == 1 }).await;
    ends(old).await;
}

async fn what_was_due_stays_due<DB: TestDatabase>(db: TestDb<DB>) {
    ends(every(&db, "old", LONG).start().await.unwrap()).await;
    back(&db, "k", LONG).await;
    let slot = info(&db, "k").await.slot;
    let new = every(&db, "new", 2 * LONG).start().await.unwrap();
    eventually("the tick is run", || async { told(&db, "k").await == "S1" }).await;
    assert_eq!(runs(&db, "k").await[0].slot, slot);
    let row = info(&db, "k").await;
    assert!(row.slot > row.now && row.times == text(2 * LONG), "{row:?}");
    ends(new).await;
}

async fn a_failed_attempt_is_made_again_under_other_times<DB: TestDatabase>(db: TestDb<DB>) {
    let old = Schedule::every("k", LONG).retry(1, 2 * SHORT);
    let old = instance(&db, "old").on(old, async |_| Err::<(), _>("no"));
    assert!(matches!(old.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }));
    back(&db, "k", LONG).await;
    let slot = info(&db, "k").await.slot;
    assert!(matches!(old.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    let new = every(&db, "new", 2 * LONG);
    eventually("the attempt", || async { new.try_tick("k").await.unwrap() == TickOutcome::Succeeded }).await;
    assert_eq!(told(&db, "k").await, "F1 S2");
    assert!(runs(&db, "k").await.iter().all(|run| run.slot == slot));
    let row = info(&db, "k").await;
    assert!(row.slot > row.now && row.due == row.slot && row.attempt == 0 && row.run_slot.is_none(), "{row:?}");
}

/// Another trigger may have come during the run that failed.
async fn a_triggered_run_keeps_its_attempts_under_other_times<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, again) in [("k", false), ("l", true)] {
        let (old, operator) = (Schedule::every(name, LONG).retry(3, SHORT), instance(&db, "operator"));
        let old = instance(&db, "old").on(old, move |_| {
            let operator = operator.clone();
            async move {
                if again {
                    operator.trigger(name).await.unwrap();
                }
                Err::<(), _>("no")
            }
        });
        assert!(matches!(old.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }));
        old.trigger(name).await.unwrap();
        assert!(matches!(old.try_tick(name).await.unwrap(), TickOutcome::Failed { again: true, .. }));
        let new = idle(&db, Schedule::every(name, 2 * LONG));
        for _ in 0..if again { 2 } else { 1 } {
            eventually("its run", || async { new.try_tick(name).await.unwrap() == TickOutcome::Succeeded }).await;
        }
        assert!(matches!(new.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }));
        assert_eq!(told(&db, name).await, if again { "F1 S2 S1" } else { "F1 S2" });
    }
}

async fn a_row_that_is_gone_is_created_again<DB: TestDatabase>(db: TestDb<DB>) {
    let running = every(&db, "one", LONG).start().await.unwrap();
    assert_eq!(db.execute("DELETE FROM t_resource_schedule").await, 1);
    let rows = "SELECT COUNT(*) FROM t_resource_schedule";
    eventually("it is back", || async { db.number(rows).await == Some(1) }).await;
    // What others wrote over it is replaced as well.
    db.execute("UPDATE t_resource_schedule SET spec = 'every 7s'").await;
    applies(&db, LONG).await;
    ends(running).await;
}

/// Each process lives for one tick.
async fn of_two_crontabs_the_newer_one_runs<DB: TestDatabase>(db: TestDb<DB>) {
    let (older, newer) = (every(&db, "older", LONG), every(&db, "newer", 2 * LONG));
    for _ in 0..2 {
        assert!(matches!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    }
    assert!(matches!(newer.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    back(&db, "k", 2 * LONG).await;
    assert!(matches!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None }));
    assert_eq!(newer.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert!(matches!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None }));
    // The newer crontab is gone: its word ends after its next tick.
    let newer =
        instance(&db, "reader").instances().await.unwrap().into_iter().find(|one| one.label == "newer").unwrap();
    assert!(newer.calls && newer.alive, "{newer:?}");
    assert!(older.forget_instance(newer.id).await.unwrap());
    assert!(!older.forget_instance(newer.id).await.unwrap());
    assert!(matches!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!(times(&db).await, text(LONG));
}

/// Returns how the database writes a time that lies this many days ahead.
pub fn ahead<DB: TestDatabase>(days: i64) -> String {
    DB::ago(-days * 24 * 60 * 60 * 1_000)
}

/// A run that was begun while the clock was ahead is in the history, under a slot that comes again.
async fn a_slot_that_a_wrong_clock_has_left_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let period = 2 * SHORT;
    let running = every(&db, "one", period).start().await.unwrap();
    eventually("it runs", || async { !runs(&db, "k").await.is_empty() }).await;
    ends(running).await;
    let (slot, run) = (ahead::<DB>(400), ahead::<DB>(399));
    let set = format!("UPDATE t_resource_schedule SET slot = {slot}, due_at = {slot}, run_slot = {run}, attempt = 0");
    assert_eq!(db.execute(&set).await, 1);
    assert!(db.execute(&format!("UPDATE t_resource_schedule_run SET slot = {run} WHERE attempt = 1 AND slot = (SELECT * FROM (SELECT MAX(slot) FROM t_resource_schedule_run) latest)")).await > 0);
    assert!(info(&db, "k").await.clock_was_ahead);
    instance(&db, "alice").skip("k").await.unwrap();
    let before = runs(&db, "k").await.len();
    let running = every(&db, "one", period).start().await.unwrap();
    assert!(!info(&db, "k").await.clock_was_ahead);
    eventually("it runs again", || async { runs(&db, "k").await.len() > before + 2 }).await;
    let row = info(&db, "k").await;
    assert!(runs(&db, "k").await.iter().all(|run| run.slot <= row.now), "none is ahead");
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_order").await, Some(0), "the order is for no tick");
    ends(running).await;
}

/// Its tick is due, and is not skipped.
async fn a_due_time_that_a_wrong_clock_has_left_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    ends(every(&db, "one", LONG).start().await.unwrap()).await;
    back(&db, "k", LONG).await;
    let slot = info(&db, "k").await.slot;
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET due_at = {}", ahead::<DB>(400))).await, 1);
    assert!(info(&db, "k").await.clock_was_ahead);
    let running = every(&db, "one", LONG).start().await.unwrap();
    eventually("it runs", || async { told(&db, "k").await == "S1" }).await;
    assert_eq!(runs(&db, "k").await[0].slot, slot);
    ends(running).await;
}

async fn a_call_by_hand_counts_for_a_moment<DB: TestDatabase>(db: TestDb<DB>) {
    let old = every(&db, "old", LONG).start().await.unwrap();
    assert_eq!(every(&db, "by hand", 2 * LONG).run_now("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(times(&db).await, text(2 * LONG));
    applies(&db, LONG).await;
    ends(old).await;
}

/// The run of a process that was killed before its schedule was removed, or is moved by an
/// operator.
async fn a_run_that_died_is_over_when_its_schedule_comes_back<DB: TestDatabase>(db: TestDb<DB>) {
    for by_operator in [false, true] {
        ends(every(&db, "old", LONG).start().await.unwrap()).await;
        back(&db, "k", LONG).await;
        steal(&db, "k").await;
        db.execute("UPDATE t_resource_schedule SET run_slot = slot, begin_time = slot").await;
        assert!(info(&db, "k").await.lost_since.is_some());
        db.execute("DELETE FROM t_resource_schedule_run").await;
        if by_operator {
            instance(&db, "operator").reset("k").await.unwrap();
        } else {
            ends(instance(&db, "without it").removed("k").start().await.unwrap()).await;
            assert_eq!(times(&db).await, "none");
        }
        let back = every(&db, "back", LONG).start().await.unwrap();
        let row = info(&db, "k").await;
        assert!(row.slot > row.now && row.due == row.slot && row.attempt == 0 && !row.running, "{row:?}");
        assert_eq!(told(&db, "k").await, "L1", "by an operator: {by_operator}");
        ends(back).await;
    }
}

async fn a_slot_is_put_back_by_an_operator<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::after("k", LONG));
    assert!(matches!(schedules.reset("k").await, Err(Error::NotFound(NotFound::Schedule { .. }))));
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {0}, due_at = {0}", ahead::<DB>(400))).await;
    let far = info(&db, "k").await.slot;
    db.execute("ALTER TABLE t_resource_change RENAME TO elsewhere").await;
    assert!(schedules.reset("k").await.is_err(), "it is not recorded");
    db.execute("ALTER TABLE elsewhere RENAME TO t_resource_change").await;
    assert_eq!(info(&db, "k").await.slot, far);
    let slot = schedules.reset("k").await.unwrap();
    let row = info(&db, "k").await;
    assert_eq!((row.slot, row.due), (slot, slot));
    assert!(slot > row.now && slot < row.now + 2 * LONG, "{row:?}");
    db.execute("UPDATE t_resource_schedule SET spec = 'at noon'").await;
    assert!(matches!(schedules.reset("k").await, Err(Error::Setup(Setup::ScheduleUnfit { .. }))));
}

/// The clock was ahead when the pause before the attempt began.
async fn an_attempt_that_is_due_far_ahead_is_due_after_a_reset<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::after("k", LONG).retry(1, SHORT);
    let failing = instance(&db, "failing").on(schedule, async |_| Err::<(), _>("no"));
    assert!(matches!(failing.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    db.execute(&format!("UPDATE t_resource_schedule SET due_at = {}", ahead::<DB>(400))).await;
    failing.reset("k").await.unwrap();
    let row = info(&db, "k").await;
    assert!(row.due <= row.now && row.attempt == 1, "{row:?}");
}

/// An instance with two schedules: `k`, if it has it, and one that all have.
fn service<DB: TestDatabase>(db: &TestDb<DB>, has_k: bool) -> Schedules<DB> {
    let schedules = if has_k { every(db, "old", 2 * SHORT) } else { instance(db, "new").poll_interval(SHORT / 10) };
    schedules.on(Schedule::every("of all", LONG), async |_| Ok::<_, &str>(()))
}

async fn a_schedule_that_its_service_lacks_is_gone<DB: TestDatabase>(db: TestDb<DB>) {
    let old = service(&db, true).start().await.unwrap();
    let new = service(&db, false).start().await.unwrap();
    assert!(!info(&db, "k").await.is_removed());
    ends(old).await;
    eventually("it is gone", || async { info(&db, "k").await.gone_since.is_some() }).await;
    let row = info(&db, "k").await;
    assert!(row.is_removed() && row.instances == 0, "{row:?}");
    // A service that ends as a whole leaves its schedules as they are.
    ends(new).await;
    assert!(!info(&db, "of all").await.is_removed());
    // It comes back with its slot.
    let again = service(&db, true).start().await.unwrap();
    let row = info(&db, "k").await;
    assert!(!row.is_removed() && row.instances == 1, "{row:?}");
    ends(again).await;
}

async fn a_schedule_that_is_declared_as_removed_is_run_by_no_old_instance<DB: TestDatabase>(db: TestDb<DB>) {
    let old = service(&db, true).start().await.unwrap();
    eventually("it runs", || async { !runs(&db, "k").await.is_empty() }).await;
    let new = service(&db, false).removed("k").start().await.unwrap();
    eventually("it is removed", || async { times(&db).await == "none" }).await;
    assert!(info(&db, "k").await.is_removed());
    let operator = instance(&db, "operator");
    assert!(matches!(operator.remove("k").await, Err(Error::Setup(Setup::ScheduleUnfit { .. }))));
    eventually("its run has ended", || async { !info(&db, "k").await.running }).await;
    let before = runs(&db, "k").await.len();
    sleep(A_WHILE).await;
    assert_eq!(runs(&db, "k").await.len(), before);
    // A rollback brings it back.
    ends(new).await;
    eventually("it runs again", || async { runs(&db, "k").await.len() > before }).await;
    ends(old).await;
    let twice = every(&db, "one", LONG).removed("k").start().await;
    assert!(matches!(twice, Err(Error::Invalid(_))));
}

async fn a_schedule_is_removed_when_no_instance_has_it<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = instance(&db, "operator");
    assert!(matches!(operator.remove("k").await, Err(Error::NotFound(NotFound::Schedule { .. }))));
    let running = every(&db, "one", 2 * SHORT).start().await.unwrap();
    eventually("it runs", || async { !runs(&db, "k").await.is_empty() }).await;
    assert!(matches!(operator.remove("k").await, Err(Error::Setup(Setup::ScheduleUnfit { .. }))));
    ends(running).await;
    let before = runs(&db, "k").await.len();
    operator.remove("k").await.unwrap();
    assert!(operator.inspect("k").await.unwrap().is_none());
    assert_eq!(runs(&db, "k").await.len(), before, "the history stays");
}

/// It was due while it was paused. Instances that know its times may not have looked yet.
async fn a_schedule_that_is_resumed_is_not_overdue<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = every(&db, "one", LONG);
    schedules.try_tick("k").await.unwrap();
    schedules.pause("k").await.unwrap();
    back(&db, "k", 2 * LONG).await;
    let before = info(&db, "k").await;
    schedules.resume("k").await.unwrap();
    let after = info(&db, "k").await;
    assert!(after.due > before.due + LONG && after.slot == before.slot, "{after:?}");
    schedules.resume("k").await.unwrap();
    assert_eq!(info(&db, "k").await.due, after.due);
}

async fn instances_are_listed_with_what_they_declare<DB: TestDatabase>(db: TestDb<DB>) {
    let cron = Schedule::cron("tab\there \\ and é", "0 9 * * *").zone("Europe/Berlin");
    let schedules = every(&db, "one", LONG).build("2026.11").on(cron, async |_| Ok::<_, &str>(()));
    let running = schedules.start().await.unwrap();
    let [one] = &schedules.instances().await.unwrap()[..] else { panic!("one instance") };
    assert_eq!((one.label.as_str(), one.build.as_str(), one.alive, one.calls), ("one", "2026.11", true, false));
    let declares: Vec<_> =
        one.declares.iter().map(|times| (times.name.as_str(), times.times.as_str(), times.zone.as_str())).collect();
    let expected = [("k", text(LONG)), ("tab\there \\ and é", "cron 0 9 * * *".to_owned())];
    assert_eq!(declares, [("k", expected[0].1.as_str(), "UTC"), (expected[1].0, "cron 0 9 * * *", "Europe/Berlin")]);
    let (id, beat) = (one.id, one.beat);
    eventually("it beats", || async { schedules.instances().await.unwrap()[0].beat > beat }).await;
    assert!(schedules.forget_instance(id).await.unwrap());
    eventually("it announces itself again", || async { schedules.instances().await.unwrap().len() == 1 }).await;
    ends(running).await;
    assert!(schedules.instances().await.unwrap().is_empty());
}

async fn a_build_that_its_column_does_not_hold_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    for bad in ["x".repeat(65), "a\nb".to_owned()] {
        let started = every(&db, "one", LONG).build(&bad).start().await;
        assert!(matches!(started, Err(Error::Invalid(_))), "{bad:?}");
    }
    ends(every(&db, "one", LONG).build(&"é".repeat(64)).start().await.unwrap()).await;
}

/// A beat takes the place of a poll. (MySQL counts the statements of a session alone.)
async fn an_instance_with_nothing_to_do_sends_one_statement_a_poll<DB: TestDatabase>(db: TestDb<DB>) {
    let running = every(&db, "one", LONG).poll_interval(2 * SHORT).start().await.unwrap();
    // The rows are read until the instance judges.
    sleep(20 * SHORT * 2).await;
    let (before, since) = (DB::statements(&db.pool).await.unwrap(), tokio::time::Instant::now());
    sleep(20 * SHORT * 2).await;
    let sent = DB::statements(&db.pool).await.unwrap() - before - DB::COUNTING;
    // A pause is at least nine tenths of the interval. Once in thirty polls the rows are read.
    let most = since.elapsed().as_millis() / (SHORT * 2).mul_f64(0.9).as_millis() + 4;
    assert!(sent > 0 && sent <= i64::try_from(most).unwrap(), "{sent} statements, {most} at most");
    ends(running).await;
}

/// Another transaction has locked the row of the instance. Each beat waits for it up to its limit.
async fn a_beat_that_waits_holds_up_no_run<DB: TestDatabase>(db: TestDb<DB>) {
    let running = every(&db, "one", LONG).time_limit(2 * PATIENCE).start().await.unwrap();
    let other = db.pool_of(1).await;
    let mut tx = other.begin().await.unwrap();
    DB::execute_on(&mut tx, "UPDATE t_resource_schedule_instance SET build = 'locked'").await.unwrap();
    for number in 1..=3 {
        instance(&db, "operator").trigger("k").await.unwrap();
        eventually("it is run", || async { runs(&db, "k").await.len() == number }).await;
        sleep(A_WHILE).await;
    }
    tx.rollback().await.unwrap();
    ends(running).await;
}
