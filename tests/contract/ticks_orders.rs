//! Orders of operators beside others: two schedules, two instances, two orders; and orders that
//! come between the statements of a run.

use std::time::Duration;

use chrono::{DateTime, Utc};
use harness::{PATIENCE, TestDatabase, TestDb, eventually, proxy::Way};
use rowlock::{
    Schedule, Schedules,
    admin::ScheduleInfo,
    jobs::{CatchUp, TickOutcome},
};
use tokio::time::{Instant, timeout};

use crate::{
    ticks::{LONG, back, due, idle, info, instance, reader, runs, told},
    ticks_apart::Run,
    ticks_replies::{LIMIT, MESSAGES, behind, behind_with, held_or_over},
};

harness::tests!(
    everywhere(
        a_stop_of_one_schedule_leaves_others_alone,
        the_end_of_a_pause_is_that_of_one_schedule,
        an_order_for_one_schedule_is_taken_back_alone,
        the_second_stop_takes_the_place_of_the_first,
        the_second_skip_takes_the_place_of_the_first,
        an_order_to_drain_ends_one_instance,
        a_run_that_is_stopped_keeps_its_lease_until_its_command_has_ended,
        a_run_after_one_that_was_stopped_is_renewed
    ),
    servers(
        a_pause_that_begins_while_another_one_ends_goes_on,
        a_stop_between_a_claim_and_its_pass_is_obeyed,
        a_skip_that_is_taken_back_between_a_claim_and_its_pass_is_not_obeyed,
        a_stop_while_a_failure_is_recorded_ends_the_tick,
        a_trigger_between_a_claim_and_its_pass_is_run,
        other_times_between_a_look_and_a_claim_are_seen,
        other_times_between_a_claim_and_its_pass_are_left_alone,
        a_skip_between_a_look_and_a_claim_is_obeyed,
        a_stop_between_a_look_and_a_takeover_is_obeyed
    )
);

/// A run renews its lease, and notices that it is to stop, after a third of it.
const LEASE: Duration = Duration::from_secs(6);

pub fn stopped_by(who: &str) -> TickOutcome {
    TickOutcome::Failed { error: format!("stopped by {who}"), again: false }
}

/// An instance whose work fails. The next attempt is far ahead.
fn failing<DB: TestDatabase>(db: &TestDb<DB>, schedule: Schedule) -> Schedules<DB> {
    instance(db, "failing").on(schedule.retry(3, LONG), async |_| Err::<(), _>("no"))
}

/// Runs a tick whose first attempt fails.
async fn fails<DB: TestDatabase>(failing: &Schedules<DB>, name: &str) {
    let outcome = failing.try_tick(name).await.unwrap();
    assert!(matches!(outcome, TickOutcome::Failed { again: true, .. }), "{outcome:?}");
}

/// Waits until the lease of a run is renewed, or over.
async fn renewed_or_over<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> ScheduleInfo {
    let before = info(db, name).await.due;
    eventually("its lease is renewed, or over", || async {
        let row = info(db, name).await;
        row.due > before || !row.running
    })
    .await;
    info(db, name).await
}

/// All three have the same slot, which is what an order to stop names.
async fn a_stop_of_one_schedule_leaves_others_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let (k, l, m) = (due(&db, "k").await, due(&db, "l").await, due(&db, "m").await);
    let slot = info(&db, "k").await.slot;
    assert_eq!((info(&db, "l").await.slot, info(&db, "m").await.slot), (slot, slot));
    let (k, m) = (failing(&db, k), failing(&db, m));
    fails(&k, "k").await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    let run = Run::begin_named(instance(&db, "one").lease(LEASE), l, "l").await;
    let row = renewed_or_over(&db, "l").await;
    assert!(row.running && !row.stopping && !run.tick.is_stopped(), "{row:?}");
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    // Both orders are there at once.
    fails(&m, "m").await;
    assert!(instance(&db, "bob").stop("m").await.unwrap());
    assert_eq!(m.try_tick("m").await.unwrap(), stopped_by("bob"));
    assert_eq!(k.try_tick("k").await.unwrap(), stopped_by("alice"));
    assert_eq!((told(&db, "k").await, told(&db, "l").await), ("F1 F2".to_owned(), "S1".to_owned()));
}

async fn the_end_of_a_pause_is_that_of_one_schedule<DB: TestDatabase>(db: TestDb<DB>) {
    let (k, l) = (due(&db, "k").await, due(&db, "l").await);
    let (alice, until) = (instance(&db, "alice"), info(&db, "k").await.now + LONG);
    alice.pause_until("k", until).await.unwrap();
    alice.pause("l").await.unwrap();
    assert_eq!(info(&db, "k").await.paused_until, Some(until));
    let other = info(&db, "l").await;
    assert!(other.paused && other.paused_until.is_none(), "{other:?}");
    db.execute(&format!("UPDATE t_resource_order SET until = {}", DB::ago(1_000))).await;
    let both = idle(&db, k).on(l, async |_| Ok::<_, &str>(())).start().await.unwrap();
    eventually("its pause has ended", || async { told(&db, "k").await == "S1" }).await;
    assert!(both.shutdown(PATIENCE).await);
    assert!(info(&db, "l").await.paused && told(&db, "l").await.is_empty());
}

async fn an_order_for_one_schedule_is_taken_back_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let (k, l) = (due(&db, "k").await, due(&db, "l").await);
    let alice = instance(&db, "alice");
    let slot = alice.skip("k").await.unwrap();
    assert_eq!(info(&db, "l").await.skipped_until, None);
    alice.skip("l").await.unwrap();
    alice.resume("l").await.unwrap();
    assert_eq!((info(&db, "k").await.skipped_until, info(&db, "l").await.skipped_until), (Some(slot), None));
    assert_eq!(idle(&db, l).try_tick("l").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(idle(&db, k).try_tick("k").await.unwrap(), TickOutcome::Missed);
}

/// The order for a tick that has ended is still in the table.
async fn the_second_stop_takes_the_place_of_the_first<DB: TestDatabase>(db: TestDb<DB>) {
    let jobs = failing(&db, due(&db, "k").await);
    fails(&jobs, "k").await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    assert_eq!(jobs.try_tick("k").await.unwrap(), stopped_by("alice"));
    let again = jobs.run_now("k").await.unwrap();
    assert!(matches!(again, TickOutcome::Failed { again: true, .. }), "{again:?}");
    assert!(!info(&db, "k").await.stopping, "the first order was for that tick");
    assert!(instance(&db, "bob").stop("k").await.unwrap());
    assert!(info(&db, "k").await.stopping);
    assert_eq!(jobs.try_tick("k").await.unwrap(), stopped_by("bob"));
    assert_eq!(told(&db, "k").await, "F1 F2 F1 F2");
}

/// The first one begins after the tick that the second one is for, since it came during a run.
async fn the_second_skip_takes_the_place_of_the_first<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let run = Run::begin(instance(&db, "one"), schedule.clone()).await;
    assert_eq!(instance(&db, "alice").skip("k").await.unwrap(), slot + LONG);
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    // The same tick once more.
    back(&db, "k", LONG).await;
    db.execute("DELETE FROM t_resource_schedule_run").await;
    assert_eq!(instance(&db, "bob").skip("k").await.unwrap(), slot);
    assert_eq!(info(&db, "k").await.skipped_until, Some(slot));
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Missed);
    assert_eq!(told(&db, "k").await, "M0(1)");
    assert_eq!(runs(&db, "k").await[0].error.as_deref(), Some("skipped by bob"));
    assert_eq!(info(&db, "k").await.skipped_until, None, "nothing is left of the first one");
}

/// When an instance was last heard of, unless it has ended.
async fn beat<DB: TestDatabase>(db: &TestDb<DB>, label: &str) -> Option<DateTime<Utc>> {
    let instances = reader(db).instances().await.unwrap();
    instances.into_iter().find(|instance| instance.label == label).map(|instance| instance.beat)
}

async fn an_order_to_drain_ends_one_instance<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::every("k", LONG);
    let one = idle(&db, schedule.clone()).label("one").start().await.unwrap();
    let two = idle(&db, schedule).label("two").start().await.unwrap();
    assert_eq!(instance(&db, "alice").drain("one").await.unwrap(), 1);
    timeout(PATIENCE, one.drained()).await.unwrap();
    // An order goes with its instance. That of an instance which died stays.
    let now = DB::ago(0);
    let columns = "t_resource_order (what, name, since, until, who)";
    db.execute(&format!("INSERT INTO {columns} VALUES ('drain', 'another', {now}, {now}, 'alice')")).await;
    // An order is noticed at a beat. The second one begins after what the first one has found.
    for _ in 0..2 {
        let before = beat(&db, "two").await;
        eventually("it beats, or ends", || async { beat(&db, "two").await != before }).await;
    }
    assert!(timeout(Duration::ZERO, two.drained()).await.is_err());
    instance(&db, "alice").trigger("k").await.unwrap();
    eventually("it has run", || async { told(&db, "k").await == "S1" }).await;
    assert_eq!(runs(&db, "k").await[0].by, "two");
    assert!(one.shutdown(PATIENCE).await && two.shutdown(PATIENCE).await);
}

/// The work has been dropped, and what it has started still runs. Another instance has the
/// schedule, and takes nothing over.
async fn a_run_that_is_stopped_keeps_its_lease_until_its_command_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let other = idle(&db, schedule.clone());
    let run = Run::begin(instance(&db, "one").lease(LEASE), schedule).await;
    let command = run.tick.going_on();
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    let outcome = other.try_tick("k").await.unwrap();
    assert!(matches!(outcome, TickOutcome::NotDue { .. }), "the order leaves the lease as it is: {outcome:?}");
    timeout(PATIENCE, run.tick.cancellation_token().cancelled()).await.unwrap();
    let row = renewed_or_over(&db, "k").await;
    assert!(row.running && row.stopping && row.attempt == 1 && row.by == "one", "{row:?}");
    let outcome = other.try_tick("k").await.unwrap();
    assert!(matches!(outcome, TickOutcome::NotDue { .. }), "{outcome:?}");
    drop(command);
    eventually("it has ended", || async { told(&db, "k").await == "F1" }).await;
    let after = info(&db, "k").await;
    assert!(after.attempt == 0 && after.slot > after.now && after.by == "one", "{after:?}");
}

/// The order for the tick before is still in the table.
async fn a_run_after_one_that_was_stopped_is_renewed<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let jobs = failing(&db, schedule.clone());
    fails(&jobs, "k").await;
    let alice = instance(&db, "alice");
    assert!(alice.stop("k").await.unwrap());
    assert_eq!(jobs.try_tick("k").await.unwrap(), stopped_by("alice"));
    alice.trigger("k").await.unwrap();
    let run = Run::begin(instance(&db, "one").lease(LEASE), schedule).await;
    let row = renewed_or_over(&db, "k").await;
    assert!(row.running && !row.stopping, "{row:?}");
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "F1 F2 S1");
}

/// An operator who does not wait for a row that is locked.
fn impatient<DB: TestDatabase>(db: &TestDb<DB>, label: &str) -> Schedules<DB> {
    instance(db, label).time_limit(LIMIT)
}

/// An operator acts after each reply of a run, in a round of its own, until the row or the history
/// show that it is too late. Then the outcome of the run is known, and the row is settled.
///
/// An act that is not done in time waits for a row that the run has locked, and shows nothing. The
/// rounds begin again until there was an act before the run had its claim, or after that if
/// `claimed`.
pub async fn acts_after_each_reply<DB: TestDatabase, T>(
    db: &TestDb<DB>,
    claimed: bool,
    prepare: impl AsyncFn(&str) -> Schedule,
    is_too_late: impl Fn(&ScheduleInfo, &str) -> bool,
    act: impl AsyncFn(&str) -> Option<T>,
    settled: impl AsyncFn(&str, Schedule, T),
) {
    let (proxy, began) = (db.proxy().await, Instant::now());
    let (mut has_acted, mut passed) = (false, 0);
    for round in 0.. {
        assert!(began.elapsed() < 2 * PATIENCE && passed < MESSAGES, "no act in time, {passed} replies");
        let name = format!("k{round}");
        let schedule = prepare(&name).await;
        let schedules = behind(db, &proxy, &schedule).await.time_limit(PATIENCE);
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let run = harness::spawn(async move { schedules.try_tick(&own).await });
        held_or_over(&proxy, Way::Replies, &run).await;
        let row = info(db, &name).await;
        if is_too_late(&row, &told(db, &name).await) {
            proxy.open();
            timeout(PATIENCE, run).await.unwrap().unwrap().unwrap();
            if has_acted {
                return;
            }
            passed = 0;
            continue;
        }
        let done = act(&name).await;
        proxy.open();
        let outcome = timeout(PATIENCE, run).await.unwrap().unwrap().unwrap();
        let is_due = matches!(outcome, TickOutcome::NotDue { retry_after: Some(Duration::ZERO) });
        assert!(!is_due || row.paused, "after {passed} replies what is due is claimed");
        if let Some(done) = done {
            has_acted |= row.running == claimed;
            settled(&name, schedule, done).await;
        }
        passed += 1;
    }
}

async fn a_pause_that_begins_while_another_one_ends_goes_on<DB: TestDatabase>(db: TestDb<DB>) {
    let (alice, later) = (instance(&db, "alice"), DateTime::from_timestamp(4_000_000_000, 0).unwrap());
    let bob = impatient(&db, "bob");
    let paused_until_now = async |name: &str| {
        let schedule = due(&db, name).await;
        alice.pause_until(name, later - LONG).await.unwrap();
        let now = DB::ago(1_000);
        let set = format!("UPDATE t_resource_order SET since = {now}, until = {now} WHERE name = '{name}'");
        assert_eq!(db.execute(&set).await, 1);
        schedule
    };
    let is_resumed = |row: &ScheduleInfo, _: &str| !row.paused;
    let pause = async |name: &str| bob.pause_until(name, later).await.ok();
    let is_paused = async |name: &str, _: Schedule, ()| {
        let row = info(&db, name).await;
        assert!(row.paused && row.paused_until == Some(later), "{row:?}");
        assert_eq!(told(&db, name).await, "", "{name}");
    };
    acts_after_each_reply(&db, false, paused_until_now, is_resumed, pause, is_paused).await;
}

/// Makes a tick due that is skipped.
pub async fn due_too_late<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Schedule {
    due(db, name).await.catch_up(CatchUp::Skip).grace(Duration::ZERO)
}

fn is_skipped(_: &ScheduleInfo, told: &str) -> bool {
    told.starts_with('M')
}

pub fn is_claimed(row: &ScheduleInfo, told: &str) -> bool {
    row.running || !told.is_empty()
}

async fn a_stop_between_a_claim_and_its_pass_is_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let alice = impatient(&db, "alice");
    let late = async |name: &str| due_too_late(&db, name).await;
    let stop = async |name: &str| alice.stop(name).await.ok();
    let has_ended = async |name: &str, schedule: Schedule, is_stopped: bool| {
        if is_stopped {
            assert_eq!(idle(&db, schedule).try_tick(name).await.unwrap(), stopped_by("alice"), "{name}");
        }
        // Before the claim, there is nothing to stop.
        assert_eq!(told(&db, name).await, if is_stopped { "F1" } else { "M0(1)" }, "{name}");
    };
    acts_after_each_reply(&db, true, late, is_skipped, stop, has_ended).await;
}

async fn a_skip_that_is_taken_back_between_a_claim_and_its_pass_is_not_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = impatient(&db, "operator");
    let skipped = async |name: &str| {
        let schedule = due(&db, name).await;
        instance(&db, "alice").skip(name).await.unwrap();
        schedule
    };
    let resume = async |name: &str| operator.resume(name).await.ok();
    let has_run = async |name: &str, schedule: Schedule, ()| {
        let rest = idle(&db, schedule);
        let is_over = || async { matches!(rest.try_tick(name).await, Ok(TickOutcome::NotDue { .. })) };
        eventually("nothing is left", is_over).await;
        assert_eq!(told(&db, name).await, "S1", "{name}");
    };
    acts_after_each_reply(&db, true, skipped, is_skipped, resume, has_run).await;
}

/// The next attempt is far ahead. The stop is also given after the last look for one.
async fn a_stop_while_a_failure_is_recorded_ends_the_tick<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, alice, mut stopped) = (db.proxy().await, impatient(&db, "alice"), 0);
    for passed in 0..MESSAGES {
        let name = format!("k{passed}");
        let schedule = due(&db, &name).await.retry(3, LONG);
        let failing = behind_with(&db, &proxy, &schedule, Err("no")).await.time_limit(PATIENCE);
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let run = harness::spawn(async move { failing.try_tick(&own).await });
        held_or_over(&proxy, Way::Replies, &run).await;
        let is_recorded = !told(&db, &name).await.is_empty();
        let is_stopped = alice.stop(&name).await.unwrap_or(false);
        proxy.open();
        timeout(PATIENCE, run).await.unwrap().unwrap().unwrap();
        if is_recorded {
            break;
        }
        if is_stopped {
            idle(&db, schedule).try_tick(&name).await.unwrap();
            let row = info(&db, &name).await;
            assert!(row.attempt == 0 && row.slot > row.now, "after {passed} replies: {row:?}");
            stopped += 1;
        }
    }
    assert!(stopped > 0);
}

async fn a_trigger_between_a_claim_and_its_pass_is_run<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = impatient(&db, "operator");
    let late = async |name: &str| due_too_late(&db, name).await;
    let trigger = async |name: &str| operator.trigger(name).await.ok();
    let both_are_over = async |name: &str, schedule: Schedule, ()| {
        let rest = idle(&db, schedule);
        let is_over = || async { matches!(rest.try_tick(name).await, Ok(TickOutcome::NotDue { .. })) };
        eventually("nothing is left", is_over).await;
        assert_eq!(told(&db, name).await, "M0(1) S1", "{name}");
    };
    acts_after_each_reply(&db, true, late, is_skipped, trigger, both_are_over).await;
}

/// Sets other times. The row may be locked.
async fn replace_times<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Option<u64> {
    let set = format!("UPDATE t_resource_schedule SET spec = 'every {:?}' WHERE name = '{name}'", 2 * LONG);
    let own = db.pool_of(1).await;
    timeout(LIMIT, DB::execute(&own, &set)).await.ok().map(|rows| rows.unwrap())
}

/// Of times that are not in effect, nothing has run and nothing was skipped. An instance that
/// has those in effect runs the tick.
async fn runs_with_other_times<DB: TestDatabase>(db: &TestDb<DB>, name: &str) {
    let row = info(db, name).await;
    let other = Schedule::every(name, 2 * LONG);
    // The run may have found the other times before its look, and put its own into effect.
    if row.times == format!("every {:?}", 2 * LONG) {
        assert_eq!(told(db, name).await, "", "{name}");
        assert_eq!(idle(db, other).try_tick(name).await.unwrap(), TickOutcome::Succeeded, "{row:?}");
        assert_eq!(runs(db, name).await[0].slot, row.slot, "{name}");
    }
}

async fn other_times_between_a_look_and_a_claim_are_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let in_time = async |name: &str| due(&db, name).await;
    let replace = async |name: &str| replace_times(&db, name).await;
    let settled = async |name: &str, _: Schedule, _: u64| runs_with_other_times(&db, name).await;
    acts_after_each_reply(&db, false, in_time, is_claimed, replace, settled).await;
}

async fn other_times_between_a_claim_and_its_pass_are_left_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let late = async |name: &str| due_too_late(&db, name).await;
    let replace = async |name: &str| replace_times(&db, name).await;
    let settled = async |name: &str, _: Schedule, _: u64| runs_with_other_times(&db, name).await;
    acts_after_each_reply(&db, true, late, is_skipped, replace, settled).await;
}

async fn a_skip_between_a_look_and_a_claim_is_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let alice = impatient(&db, "alice");
    let in_time = async |name: &str| due(&db, name).await;
    let skip = async |name: &str| alice.skip(name).await.ok();
    let is_skipped = async |name: &str, _: Schedule, _: DateTime<Utc>| {
        assert_eq!(told(&db, name).await, "M0(1)", "{name}");
    };
    acts_after_each_reply(&db, false, in_time, is_claimed, skip, is_skipped).await;
}

/// The order comes after the lease of a process that died.
async fn a_stop_between_a_look_and_a_takeover_is_obeyed<DB: TestDatabase>(db: TestDb<DB>) {
    let alice = impatient(&db, "alice");
    let left = async |name: &str| {
        let schedule = due(&db, name).await;
        let holder = DB::uuid("0123456789abcdef0123456789abcdef");
        let claim = format!(
            "holder = {holder}, attempt = 1, run_slot = slot, token = token + 1, begin_time = slot, due_at = slot"
        );
        db.execute(&format!("UPDATE t_resource_schedule SET {claim} WHERE name = '{name}'")).await;
        schedule
    };
    let is_taken_over = |row: &ScheduleInfo, _: &str| row.attempt != 1;
    let stop = async |name: &str| alice.stop(name).await.ok();
    let has_ended = async |name: &str, schedule: Schedule, is_stopped: bool| {
        let rest = idle(&db, schedule);
        eventually("it has ended", || async {
            rest.try_tick(name).await.unwrap();
            info(&db, name).await.attempt == 0
        })
        .await;
        assert_eq!((is_stopped, told(&db, name).await.as_str()), (true, "L1 F2"), "{name}");
    };
    acts_after_each_reply(&db, false, left, is_taken_over, stop, has_ended).await;
}
