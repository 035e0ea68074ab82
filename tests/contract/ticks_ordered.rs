//! What operators order instances to do: stop, skip, pause for a time, drain; and what is kept of
//! it, and of what runs print.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Error, LeaseLock, Schedule, Status, Tick,
    admin::{ChangeInfo, RunStatus},
    errors::{NotFound, Setup},
    jobs::TickOutcome,
};
use tokio::{sync::mpsc, time::timeout};

use crate::{
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, runs, told},
    ticks_apart::Run,
};

harness::tests!(everywhere(
    a_run_is_stopped_on_the_instance_that_has_it,
    a_run_of_a_schedule_that_was_removed_is_stopped,
    an_order_reaches_no_run_that_has_come_since,
    a_tick_that_waits_for_its_next_attempt_is_stopped,
    a_tick_whose_process_died_is_stopped,
    a_run_that_waits_for_its_key_says_so_and_is_stopped,
    a_run_that_has_its_key_does_not_say_that_it_waits,
    a_skip_during_a_run_leaves_its_tick_to_be_finished,
    a_pause_of_an_older_version_has_no_end,
    a_tick_is_skipped_and_the_next_one_runs,
    a_skip_of_one_tick_leaves_out_none_that_a_deploy_adds,
    a_skip_leaves_out_what_is_due_until_then_and_runs_the_rest,
    a_skip_is_taken_back,
    orders_for_no_tick_are_refused,
    a_pause_ends_by_itself,
    a_drained_instance_ends_its_runs_and_claims_nothing,
    an_order_that_comes_during_a_shutdown_is_noticed,
    the_end_of_an_output_is_kept_with_its_run,
    a_note_is_shown_while_the_run_goes_on,
    a_forced_release_is_kept_with_the_one_that_it_was_taken_from,
    orders_go_with_a_schedule_that_is_renamed_and_with_one_that_is_removed
));

/// A run notices that it is to stop after a third of it.
const LEASE: Duration = Duration::from_secs(3);

async fn changes<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Vec<ChangeInfo> {
    LeaseLock::new(db.pool.clone()).changes(Some(name), 100).await.unwrap()
}

/// The changes of a name, as who did what, the first one first.
async fn said<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> String {
    let changes = changes(db, name).await;
    let said = changes.iter().rev().map(|change| format!("{} {}", change.who, change.what));
    said.collect::<Vec<_>>().join(", ")
}

/// The errors of the history, the first one first.
async fn errors<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Vec<String> {
    runs(db, name).await.into_iter().map(|run| run.error.unwrap_or_default()).collect()
}

async fn a_run_is_stopped_on_the_instance_that_has_it<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(3, Duration::ZERO).lease(LEASE);
    let run = Run::begin(instance(&db, "one"), schedule.clone()).await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    timeout(PATIENCE, run.tick.cancellation_token().cancelled()).await.unwrap();
    assert_eq!(run.ended().await, TickOutcome::Failed { error: "stopped by alice".into(), again: false });
    assert_eq!((told(&db, "k").await, errors(&db, "k").await), ("F1".into(), vec!["stopped by alice".into()]));
    let after = info(&db, "k").await;
    assert!(after.attempt == 0 && !after.stopping && after.slot > after.now, "no further attempt: {after:?}");
    assert!(!instance(&db, "alice").stop("k").await.unwrap(), "nothing is left to stop");
    // The order was for that tick.
    instance(&db, "alice").trigger("k").await.unwrap();
    let next = Run::begin(instance(&db, "one"), schedule).await;
    tokio::time::sleep(LEASE / 2).await;
    assert!(!next.tick.cancellation_token().is_cancelled() && info(&db, "k").await.running);
    assert_eq!(said(&db, "k").await, "alice stopped, alice triggered");
    assert_eq!(next.end().await, TickOutcome::Succeeded);
}

/// The run that it was for has ended, after the row was read and before the order was given. Both
/// are first attempts at triggers, and the slot is the same.
async fn an_order_reaches_no_run_that_has_come_since<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db, "k").await;
    let begins = |millis| format!("UPDATE t_resource_schedule SET attempt = 1, run_slot = {}", DB::ago(millis));
    db.execute(&begins(10)).await;
    let mut other = db.pool.acquire().await.unwrap();
    for sql in [DB::BEGIN, &begins(5)] {
        DB::execute_on(&mut other, sql).await.unwrap();
    }
    let alice = instance(&db, "alice");
    let order = harness::spawn(async move { alice.stop("k").await });
    // It waits for the row that it has read.
    tokio::time::sleep(3 * SHORT).await;
    assert!(!order.is_finished());
    DB::execute_on(&mut other, "COMMIT").await.unwrap();
    assert!(timeout(PATIENCE, order).await.unwrap().unwrap().unwrap(), "the run that has come is stopped");
    let same = "SELECT COUNT(*) FROM t_resource_schedule s JOIN t_resource_order o ON o.name = s.name AND o.until = s.run_slot";
    assert_eq!(db.number(same).await, Some(1));
}

async fn a_run_of_a_schedule_that_was_removed_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let run = Run::begin(instance(&db, "one").lease(LEASE), due(&db, "k").await).await;
    let new = instance(&db, "new").removed("k").start().await.unwrap();
    eventually("it is removed", || async { info(&db, "k").await.is_removed() }).await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    timeout(PATIENCE, run.tick.cancellation_token().cancelled()).await.unwrap();
    eventually("it has ended", || async { told(&db, "k").await == "F1" }).await;
    assert!(new.shutdown(PATIENCE).await);
}

async fn a_tick_that_waits_for_its_next_attempt_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(3, LONG);
    let failing = instance(&db, "one").on(schedule, async |_| Err::<(), _>("no"));
    assert!(matches!(failing.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    assert!(info(&db, "k").await.stopping);
    let stopped = TickOutcome::Failed { error: "stopped by alice".into(), again: false };
    assert_eq!(failing.try_tick("k").await.unwrap(), stopped, "at once");
    assert_eq!(told(&db, "k").await, "F1 F2");
    let after = info(&db, "k").await;
    assert!(after.attempt == 0 && after.slot > after.now && !after.stopping, "{after:?}");
}

async fn a_tick_whose_process_died_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.lease(LEASE);
    // What a process leaves that is killed during its first attempt.
    let holder = if db.server.name == "postgres" { "gen_random_uuid()" } else { "x'0123456789abcdef0123456789abcdef'" };
    let claim = format!(
        "UPDATE t_resource_schedule SET holder = {holder}, attempt = 1, run_slot = slot, token = token + 1, begin_time = slot, due_at = slot"
    );
    db.execute(&claim).await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    let stopped = TickOutcome::Failed { error: "stopped by alice".into(), again: false };
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), stopped);
    assert_eq!(told(&db, "k").await, "L1 F2");
}

async fn a_run_that_waits_for_its_key_says_so_and_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let held = LeaseLock::new(db.pool.clone()).try_acquire("key").await.unwrap().acquired().unwrap();
    let schedule = due(&db, "k").await.exclusive_with("key").lease(LEASE);
    let jobs = idle(&db, schedule);
    let run = harness::spawn(async move { jobs.try_tick("k").await.unwrap() });
    eventually("it says what it waits for", || async { info(&db, "k").await.waits_for() == Some("key") }).await;
    assert!(instance(&db, "alice").stop("k").await.unwrap());
    let stopped = TickOutcome::Failed { error: "stopped by alice".into(), again: false };
    assert_eq!(timeout(PATIENCE, run).await.unwrap().unwrap(), stopped);
    held.release().await.unwrap();
}

async fn a_run_that_has_its_key_does_not_say_that_it_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let held = LeaseLock::new(db.pool.clone()).try_acquire("key").await.unwrap().acquired().unwrap();
    let schedule = due(&db, "k").await.exclusive_with("key");
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let running = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        std::future::pending::<Never>()
    });
    let running = running.start().await.unwrap();
    eventually("it waits", || async { info(&db, "k").await.waits_for() == Some("key") }).await;
    held.release().await.unwrap();
    timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert_eq!(info(&db, "k").await.note, None);
    assert!(!running.shutdown(SHORT).await);
}

/// A deploy stops the instance, and another one finishes the tick.
async fn a_skip_during_a_run_leaves_its_tick_to_be_finished<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let first = instance(&db, "one").on(schedule.clone(), move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        std::future::pending::<Never>()
    });
    let first = first.start().await.unwrap();
    timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert_eq!(instance(&db, "alice").skip("k").await.unwrap(), slot + LONG);
    assert!(!first.shutdown(SHORT).await);
    let jobs = idle(&db, schedule);
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!((told(&db, "k").await, runs(&db, "k").await[1].slot), ("L1 S2".into(), slot));
    assert_eq!(info(&db, "k").await.skipped_until, Some(slot + LONG), "the next one is skipped");
}

/// An older version knows of no such order: it resumes, and pauses again.
async fn a_pause_of_an_older_version_has_no_end<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let alice = instance(&db, "alice");
    alice.pause_until("k", info(&db, "k").await.now + LONG).await.unwrap();
    let resumed = if db.server.name == "postgres" { "false" } else { "0" };
    db.execute(&format!("UPDATE t_resource_schedule SET paused = {resumed} WHERE name = 'k'")).await;
    let running = idle(&db, schedule).start().await.unwrap();
    eventually("the end is forgotten", || async {
        db.number("SELECT COUNT(*) FROM t_resource_order WHERE what = 'pause'").await == Some(0)
    })
    .await;
    assert!(running.shutdown(PATIENCE).await);
}

async fn a_tick_is_skipped_and_the_next_one_runs<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    assert_eq!(instance(&db, "alice").skip("k").await.unwrap(), slot);
    assert_eq!(info(&db, "k").await.skipped_until, Some(slot));
    let jobs = idle(&db, schedule);
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Missed);
    assert_eq!((told(&db, "k").await, errors(&db, "k").await), ("M0(1)".into(), vec!["skipped by alice".into()]));
    let after = info(&db, "k").await;
    assert!(after.slot == slot + LONG && after.skipped_until.is_none(), "{after:?}");
    assert!(matches!(jobs.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::Succeeded, "a trigger runs");
    back(&db, "k", LONG / 2).await;
    jobs.trigger("k").await.unwrap();
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
}

/// The one that is skipped lies after those, whether it was the next one or a run was under way.
async fn a_skip_of_one_tick_leaves_out_none_that_a_deploy_adds<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, is_begun) in [("k", false), ("l", true)] {
        let schedule = due(&db, name).await;
        let run = Run::begin_named(instance(&db, "one"), schedule, name).await;
        let alice = instance(&db, "alice");
        let during = if is_begun { Some(alice.skip(name).await.unwrap()) } else { None };
        assert_eq!(run.end().await, TickOutcome::Succeeded);
        let skipped = if let Some(during) = during { during } else { alice.skip(name).await.unwrap() };
        let before = info(&db, name).await;
        assert_eq!(before.skipped_until, Some(skipped));
        let denser = idle(&db, Schedule::every(name, LONG / 10_000));
        let outcome = denser.try_tick(name).await.unwrap();
        if outcome == TickOutcome::Succeeded {
            // One of the added ticks came due during the call.
            assert!(runs(&db, name).await.last().is_some_and(|run| run.slot >= before.now));
            continue;
        }
        assert!(matches!(outcome, TickOutcome::NotDue { retry_after: Some(_) }), "{outcome:?}");
        let row = info(&db, name).await;
        assert!(row.slot < skipped && row.skipped_until.is_none(), "{row:?}");
        back(&db, name, LONG / 10_000).await;
        assert_eq!(denser.try_tick(name).await.unwrap(), TickOutcome::Succeeded);
    }
}

/// The instances were down.
async fn a_skip_leaves_out_what_is_due_until_then_and_runs_the_rest<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db, "k").await;
    let period = LONG / 10;
    let schedule = Schedule::every("k", period);
    let jobs = idle(&db, schedule.clone());
    jobs.try_tick("k").await.unwrap();
    let slot = info(&db, "k").await.slot;
    back(&db, "k", 5 * period).await;
    db.execute("DELETE FROM t_resource_schedule_run").await;
    instance(&db, "alice").skip_until("k", slot - 3 * period).await.unwrap();
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    let ran = runs(&db, "k").await;
    let told: Vec<_> = ran.iter().map(|run| (run.status, run.slot, run.missed)).collect();
    let (missed, last) = (ran.iter().find(|run| run.status == RunStatus::Missed).unwrap(), ran.last().unwrap());
    assert_eq!(missed.error.as_deref(), Some("skipped by alice"), "{told:?}");
    assert_eq!((missed.slot, last.status), (slot - 5 * period, RunStatus::Succeeded), "{told:?}");
    assert!(last.slot > slot - 3 * period && last.slot <= info(&db, "k").await.now, "{told:?}");
}

async fn a_skip_is_taken_back<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let alice = instance(&db, "alice");
    alice.skip("k").await.unwrap();
    alice.resume("k").await.unwrap();
    assert_eq!(info(&db, "k").await.skipped_until, None);
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(said(&db, "k").await, "alice skipped, alice resumed");
}

async fn orders_for_no_tick_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "alice");
    for unknown in [
        schedules.stop("no").await.map(drop),
        schedules.skip("no").await.map(drop),
        schedules.pause_until("no", chrono::Utc::now() + LONG).await,
    ] {
        assert!(matches!(unknown, Err(Error::NotFound(NotFound::Schedule { .. }))), "{unknown:?}");
    }
    let after = Schedule::after("k", LONG);
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let running = instance(&db, "one").on(after, move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        std::future::pending::<Never>()
    });
    let running = running.start().await.unwrap();
    timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    let row = info(&db, "k").await;
    for refused in [
        schedules.skip("k").await.map(drop),
        schedules.skip_until("k", row.slot - SHORT).await,
        schedules.pause_until("k", row.now - SHORT).await,
    ] {
        assert!(matches!(refused, Err(Error::Setup(Setup::ScheduleUnfit { .. }))), "{refused:?}");
    }
    let run = Run::begin_named(instance(&db, "two"), due(&db, "l").await, "l").await;
    let refused = schedules.skip_until("l", run.tick.slot() + SHORT).await;
    assert!(matches!(refused, Err(Error::Setup(Setup::ScheduleUnfit { .. }))), "none comes until then: {refused:?}");
    assert_eq!(schedules.drain("nobody").await.unwrap(), 0);
    assert_eq!((said(&db, "k").await, said(&db, "nobody").await), (String::new(), String::new()));
    assert!(!running.shutdown(SHORT).await);
}

async fn a_pause_ends_by_itself<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let until = info(&db, "k").await.now + Duration::from_secs(3);
    instance(&db, "alice").pause_until("k", until).await.unwrap();
    assert_eq!(info(&db, "k").await.paused_until, Some(until));
    let running = idle(&db, schedule.clone()).start().await.unwrap();
    eventually("it has run", || async { told(&db, "k").await == "S1" }).await;
    let after = info(&db, "k").await;
    assert!(runs(&db, "k").await[0].began >= until && !after.paused && after.paused_until.is_none(), "{after:?}");
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(said(&db, "k").await, "alice paused, idle resumed");
    // A pause without an end takes the place of one that has an end.
    let alice = instance(&db, "alice");
    alice.pause_until("k", after.now + LONG).await.unwrap();
    alice.pause("k").await.unwrap();
    let paused = info(&db, "k").await;
    assert!(paused.paused && paused.paused_until.is_none(), "{paused:?}");
}

async fn a_drained_instance_ends_its_runs_and_claims_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, later) = (due(&db, "k").await, Schedule::every("later", LONG));
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let (finish, finished) = tokio::sync::watch::channel(false);
    let schedules = instance(&db, "one").on(later, async |_| Never::Ok(())).on(schedule, move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        let mut finished = finished.clone();
        async move { finished.wait_for(|finished| *finished).await.map(drop) }
    });
    let running = schedules.start().await.unwrap();
    timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert_eq!(instance(&db, "alice").drain("one").await.unwrap(), 1);
    timeout(PATIENCE, running.drained()).await.unwrap();
    back(&db, "later", LONG).await;
    eventually("it is no instance any more", || async {
        let instances = instance(&db, "reader").instances().await.unwrap();
        instances.iter().all(|instance| instance.label != "one")
    })
    .await;
    assert!(info(&db, "k").await.running && info(&db, "later").await.run_slot.is_none());
    finish.send(true).unwrap();
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!((told(&db, "k").await, said(&db, "one").await), ("S1".into(), "alice drained".into()));
    // One that starts after the order runs.
    let later = Schedule::every("later", LONG);
    let again = instance(&db, "one").on(later, async |_| Never::Ok(())).start().await.unwrap();
    eventually("it has run", || async { told(&db, "later").await.ends_with("S1") }).await;
    assert!(again.shutdown(PATIENCE).await);
}

/// The order comes before the next beat, which the instance does not reach. A run goes on during
/// the shutdown.
async fn an_order_that_comes_during_a_shutdown_is_noticed<DB: TestDatabase>(db: TestDb<DB>) {
    for is_ordered in [false, true] {
        let schedule = due(&db, &format!("ordered {is_ordered}")).await;
        let (sender, mut ticks) = mpsc::unbounded_channel();
        let one = instance(&db, "one").poll_interval(Duration::from_secs(3600));
        let running = one.on(schedule, move |tick: Tick<DB>| {
            sender.send(tick).unwrap();
            std::future::pending::<Never>()
        });
        let running = running.start().await.unwrap();
        timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
        let ordered = instance(&db, "alice").drain(if is_ordered { "one" } else { "two" }).await.unwrap();
        assert_eq!(ordered, usize::from(is_ordered));
        let drained = running.drained();
        if is_ordered {
            let shutdown = harness::spawn(running.shutdown(PATIENCE));
            timeout(PATIENCE, drained).await.unwrap();
            shutdown.abort();
        } else {
            assert!(!running.shutdown(SHORT).await);
            assert!(timeout(Duration::ZERO, drained).await.is_err());
        }
    }
}

async fn the_end_of_an_output_is_kept_with_its_run<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(1, Duration::ZERO);
    let slot = info(&db, "k").await.slot;
    let jobs = instance(&db, "one").on(schedule, async |tick: Tick<DB>| {
        // Bytes that are no text, and more than is kept.
        let end = [vec![b'x'; 70_000], vec![0, 255, 10], vec![b'0' + u8::try_from(tick.attempt()).unwrap()]].concat();
        tick.keep_output(end);
        if tick.attempt() == 1 && !tick.is_triggered() { Err("no") } else { Ok(()) }
    });
    for _ in 0..2 {
        jobs.try_tick("k").await.unwrap();
    }
    let output = async |attempt| instance(&db, "reader").output("k", slot, attempt).await.unwrap();
    for attempt in [1_u8, 2] {
        let kept = output(attempt.into()).await.unwrap();
        assert_eq!((kept.len(), &kept[65_532..]), (65_536, &[0, 255, 10, b'0' + attempt][..]));
    }
    assert_eq!(output(3).await, None);
    // It is deleted with its run.
    let quiet = due(&db, "quiet").await;
    idle(&db, quiet).try_tick("quiet").await.unwrap();
    assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::Succeeded, "the last success stays");
    tokio::time::sleep(Duration::from_millis(2)).await;
    jobs.forget_history(Duration::ZERO).await.unwrap();
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_schedule_detail").await, Some(1));
    assert_eq!((output(1).await, output(2).await), (None, None));
    assert_eq!(changes(&db, "k").await, [], "so are old changes");
}

async fn a_note_is_shown_while_the_run_goes_on<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, long) = (due(&db, "k").await, "é".repeat(300));
    let run = Run::begin(instance(&db, "one"), schedule).await;
    let tick = run.tick.clone();
    for (note, shown) in [("1 of\n3", "1 of3".to_owned()), (long.as_str(), "é".repeat(255))] {
        tick.note(note).await.unwrap();
        assert_eq!(info(&db, "k").await.note, Some(shown));
    }
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(info(&db, "k").await.note, None);
    tick.note("too late").await.unwrap();
    assert_eq!(info(&db, "k").await.note, None, "its claim has ended");
}

async fn a_forced_release_is_kept_with_the_one_that_it_was_taken_from<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = |label: &str| LeaseLock::builder(db.pool.clone()).label(label).build().unwrap();
    let (holder, alice) = (lock("node-1"), lock("alice"));
    let lease = holder.try_acquire("key").await.unwrap().acquired().unwrap();
    let seen = alice.inspect("key").await.unwrap().unwrap();
    let released = alice.force_release_if_unchanged(&seen, Status::Failed).await.unwrap();
    assert!(matches!(released, rowlock::admin::ForcedRelease::Released(_)));
    let changed = alice.force_release_if_unchanged(&seen, Status::Failed).await.unwrap();
    assert!(matches!(changed, rowlock::admin::ForcedRelease::Changed(_)), "nothing is recorded of it");
    assert_eq!(alice.force_release("other", Status::Failed).await.unwrap(), None);
    let kept = alice.changes(None, 10).await.unwrap();
    let [change] = &kept[..] else { panic!("{kept:?}") };
    let detail = format!("from node-1, token {}; status F", lease.token());
    assert_eq!((&*change.who, &*change.what, &*change.name, &*change.detail), ("alice", "released", "key", &*detail));
    assert!((change.at - seen.now).abs() < chrono::TimeDelta::minutes(1), "{change:?}");
}

async fn orders_go_with_a_schedule_that_is_renamed_and_with_one_that_is_removed<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db, "old").await;
    let slot = info(&db, "old").await.slot;
    instance(&db, "alice").skip("old").await.unwrap();
    let renamed = Schedule::every("new", LONG).renamed_from("old");
    let jobs = idle(&db, renamed);
    eventually("it has the other name", || async {
        jobs.try_tick("new").await.unwrap();
        runs(&db, "new").await.len() == 1
    })
    .await;
    let run = runs(&db, "new").await.remove(0);
    assert_eq!((run.status, run.slot, run.error.as_deref()), (RunStatus::Missed, slot, Some("skipped by alice")));
    db.execute("DELETE FROM t_resource_schedule_instance").await;
    let alice = instance(&db, "alice");
    alice.pause_until("new", info(&db, "new").await.now + LONG).await.unwrap();
    alice.remove("new").await.unwrap();
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_order").await, Some(0));
    assert_eq!(said(&db, "new").await, "alice paused, alice removed");
}
