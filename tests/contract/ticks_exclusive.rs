//! Runs that hold a key of t_resource_lock as well.

use std::{
    path::Path,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{
    Error, LeaseLock, Reason, Rules, RunError, Schedule, Schedules, Status, Tick,
    errors::Setup,
    jobs::{CatchUp, TickOutcome},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    child,
    failures_apart::{add, refuse_with},
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, steal, told},
    ticks_again::{refuse_writes, take_writes},
};

harness::tests!(
    servers(a_run_waits_for_a_server_that_takes_no_writes),
    everywhere(
        a_runner_that_is_killed_is_taken_over_from_with_both,
        the_loss_of_the_key_cancels_the_work,
        the_key_and_the_tick_are_confirmed_together,
        a_transaction_that_has_lost_the_key_says_so,
        a_run_that_has_waited_for_its_key_may_be_late,
        a_run_that_is_stopped_while_it_waits_is_put_back,
        a_takeover_that_is_stopped_while_it_waits_stays_one,
        a_run_that_waits_does_not_begin_after_a_shutdown,
        a_run_that_waits_does_not_begin_after_a_pause,
        a_run_that_is_lost_while_it_waits_takes_no_key,
        the_tick_is_kept_while_a_command_is_stopped,
        the_key_is_kept_while_a_command_is_stopped,
        two_schedules_with_one_key_exclude_each_other,
        a_lock_without_a_lease_of_its_own_takes_the_key_for_that_of_the_run,
        what_cannot_work_is_refused_at_the_door,
        a_run_waits_for_a_key_that_the_server_refuses
    ),
    everywhere.long(a_run_and_another_program_exclude_each_other)
);

/// Short enough for a test to wait for its end.
const LEASE: Duration = Duration::from_secs(3);

pub async fn due_with_key<DB: TestDatabase>(db: &TestDb<DB>) -> Schedule {
    due(db, "k").await.exclusive_with("key")
}

/// Work that tells of its tick, and goes on until it is told to end.
pub struct Work<DB: TestDatabase> {
    pub schedules: Schedules<DB>,
    pub begun: mpsc::UnboundedReceiver<Tick<DB>>,
    /// Whether the work succeeds.
    pub finish: watch::Sender<Option<bool>>,
}

pub fn work<DB: TestDatabase>(db: &TestDb<DB>, label: &str, schedule: Schedule) -> Work<DB> {
    let (began, begun) = mpsc::unbounded_channel();
    let (finish, finished) = watch::channel(None);
    let schedules = instance(db, label).lease(LEASE).on(schedule, move |tick: Tick<DB>| {
        began.send(tick).unwrap();
        let mut finished = finished.clone();
        async move {
            let succeeds = finished.wait_for(Option::is_some).await.map_err(|error| error.to_string())?.unwrap();
            if succeeds { Ok(()) } else { Err("no".to_owned()) }
        }
    });
    Work { schedules, begun, finish }
}

impl<DB: TestDatabase> Work<DB> {
    pub fn try_tick(&self) -> JoinHandle<TickOutcome> {
        let schedules = self.schedules.clone();
        harness::spawn(async move { schedules.try_tick("k").await.unwrap() })
    }

    /// Begins a run, whose work begins.
    pub async fn run(&mut self) -> (JoinHandle<TickOutcome>, Tick<DB>) {
        let mut run = self.try_tick();
        let tick = self.begun(&mut run).await;
        (run, tick)
    }

    async fn begun(&mut self, run: &mut JoinHandle<TickOutcome>) -> Tick<DB> {
        tokio::select! {
            tick = self.tick() => tick,
            ended = run => panic!("the run ended before its work began: {ended:?}"),
        }
    }

    pub async fn tick(&mut self) -> Tick<DB> {
        timeout(PATIENCE, self.begun.recv()).await.unwrap().unwrap()
    }
}

pub async fn ended(run: JoinHandle<TickOutcome>) -> TickOutcome {
    timeout(PATIENCE, run).await.unwrap().unwrap()
}

pub async fn is_run<DB: TestDatabase>(db: &TestDb<DB>) {
    eventually("it is run", || async { info(db, "k").await.running }).await;
}

/// It may be about to hand its work to another server.
async fn a_run_waits_for_a_server_that_takes_no_writes<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due_with_key(&db).await);
    refuse_writes(&db, "t_resource_lock").await;
    let run = harness::spawn(async move { schedules.try_tick("k").await.unwrap() });
    is_run(&db).await;
    sleep(LEASE / 2).await;
    assert!(!run.is_finished() && told(&db, "k").await.is_empty());
    take_writes(&db, "t_resource_lock").await;
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

async fn a_run_and_another_program_exclude_each_other<DB: TestDatabase>(db: TestDb<DB>) {
    for (number, succeeds) in [true, false].into_iter().enumerate() {
        let mut one = work(&db, "one", due_with_key(&db).await);
        db.execute("DELETE FROM t_resource_schedule_run").await;
        let by_hand = acquired(db.lock().try_acquire("key").await);
        let mut run = one.try_tick();
        is_run(&db).await;
        sleep(LEASE * 3 / 2).await;
        let waiting = info(&db, "k").await;
        assert!(waiting.running && waiting.attempt == 1, "the tick is kept while it waits: {waiting:?}");
        assert!(one.begun.try_recv().is_err(), "the key is held by hand");
        by_hand.release().await.unwrap();
        let tick = one.begun(&mut run).await;
        let claim = tick.exclusive_claim().unwrap();
        assert_eq!(claim.key.as_str(), "key");
        sleep(LEASE * 3 / 2).await;
        let refusal = refused(db.lock().try_acquire("key").await);
        assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::Held, "one"));
        assert_eq!(db.number("SELECT token FROM t_resource_lock").await, Some(claim.token.get()));
        one.finish.send(Some(succeeds)).unwrap();
        let (outcome, status) = (ended(run).await, db.column("key", "status").await.unwrap());
        let expected = if succeeds { "S" } else { "F" };
        assert_eq!(outcome == TickOutcome::Succeeded, succeeds, "{number}: {outcome:?}");
        assert_eq!((status.trim(), told(&db, "k").await), (expected, format!("{expected}1")));
        acquired(db.lock().try_acquire("key").await).release().await.unwrap();
    }
}

/// The job of a process: it runs the tick, and does not end.
pub async fn hold<DB: TestDatabase>(pool: sqlx::Pool<DB>) {
    let schedule = Schedule::every("k", LONG).exclusive_with("key");
    let schedules = Schedules::new(pool).label("victim").lease(LEASE);
    let schedules = schedules.on(schedule, async |tick: Tick<DB>| {
        child::say(tick.exclusive_claim().unwrap().token);
        std::future::pending::<Never>().await
    });
    schedules.try_tick("k").await.unwrap();
}

async fn a_runner_that_is_killed_is_taken_over_from_with_both<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due_with_key(&db).await;
    let mut victim = child::start(&db, "hold a tick", "", Path::new(""));
    let mut said = BufReader::new(victim.stdout.take().unwrap()).lines();
    let token = timeout(PATIENCE, said.next_line()).await.unwrap().unwrap().unwrap();
    let mut second = work(&db, "second", schedule);
    let running = second.schedules.start().await.unwrap();
    victim.kill().await.unwrap();
    let tick = second.tick().await;
    assert_eq!((tick.attempt(), tick.taken_over_from().unwrap().label.as_str()), (2, "victim"));
    assert!(tick.exclusive_claim().unwrap().token.get() > token.parse().unwrap());
    assert_eq!(refused(db.lock().try_acquire("key").await).by, "second");
    second.finish.send(Some(true)).unwrap();
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "L1 S2");
}

async fn the_loss_of_the_key_cancels_the_work<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let (run, tick) = one.run().await;
    db.lock().force_release("key", Status::Failed).await.unwrap().unwrap();
    timeout(PATIENCE, tick.cancellation_token().cancelled()).await.unwrap();
    let mut tx = db.pool.begin().await.unwrap();
    let error = tick.finish_in(&mut tx).await.unwrap_err();
    assert!(matches!(&error, Error::Lost { key, .. } if key.as_str() == "key"), "{error:?}");
    tx.rollback().await.unwrap();
    assert_eq!(ended(run).await, TickOutcome::Lost);
    let again = one.try_tick();
    assert_eq!(one.tick().await.attempt(), 2, "the tick was handed back");
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(again).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
}

async fn a_run_that_has_waited_for_its_key_may_be_late<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due_with_key(&db).await;
    let before = info(&db, "k").await;
    let grace = (before.now - before.slot).to_std().unwrap() + LEASE;
    let mut one = work(&db, "one", schedule.grace(grace));
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let run = one.try_tick();
    eventually("the grace is over", || async { info(&db, "k").await.now > before.now + LEASE }).await;
    by_hand.release().await.unwrap();
    assert!(one.tick().await.is_late());
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
}

/// The work has been dropped, and what it has started still runs.
async fn the_tick_is_kept_while_a_command_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let (run, tick) = one.run().await;
    let command = tick.going_on();
    db.lock().force_release("key", Status::Failed).await.unwrap().unwrap();
    timeout(PATIENCE, tick.cancellation_token().cancelled()).await.unwrap();
    sleep(LEASE * 3 / 2).await;
    assert!(matches!(ended(one.try_tick()).await, TickOutcome::NotDue { .. }));
    assert!(!run.is_finished() && info(&db, "k").await.attempt == 1);
    drop(command);
    assert_eq!(ended(run).await, TickOutcome::Lost);
    let again = one.try_tick();
    assert_eq!(one.tick().await.attempt(), 2);
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(again).await, TickOutcome::Succeeded);
}

/// Such a lock is given for another setting.
async fn a_lock_without_a_lease_of_its_own_takes_the_key_for_that_of_the_run<DB: TestDatabase>(db: TestDb<DB>) {
    const HOUR: Duration = Duration::from_secs(3600);
    for (lock, lease) in [(db.lock().fair(true), HOUR), (db.lock().lease(HOUR * 2), HOUR * 2)] {
        db.execute("DELETE FROM t_resource_schedule").await;
        db.execute("DELETE FROM t_resource_schedule_run").await;
        let mut one = work(&db, "one", due_with_key(&db).await);
        one.schedules = one.schedules.lease(HOUR).lock(lock);
        let (run, _tick) = one.run().await;
        let row = db.lock().inspect("key").await.unwrap().unwrap();
        let held = (row.until.unwrap() - row.since.unwrap()).to_std().unwrap();
        assert!(held.abs_diff(lease) < LEASE, "{held:?}");
        one.finish.send(Some(true)).unwrap();
        assert_eq!(ended(run).await, TickOutcome::Succeeded);
    }
}

async fn the_key_is_kept_while_a_command_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let (run, tick) = one.run().await;
    let command = tick.going_on();
    steal(&db, "k").await;
    timeout(PATIENCE, tick.cancellation_token().cancelled()).await.unwrap();
    sleep(LEASE * 3 / 2).await;
    assert_eq!(refused(db.lock().try_acquire("key").await).by, "one");
    assert!(!run.is_finished());
    drop(command);
    assert_eq!(ended(run).await, TickOutcome::Lost);
    acquired(db.lock().try_acquire("key").await);
}

/// The key is lost before the run has noticed it, and cannot be acquired again within the run.
async fn a_transaction_that_has_lost_the_key_says_so<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let lock = db.lock().lease(PATIENCE);
    one.schedules = one.schedules.lease(PATIENCE).lock(lock);
    let (run, tick) = one.run().await;
    db.take_from("key").await;
    let (pool, runs) = (db.pool_of(1).await, AtomicU32::new(0));
    let done: Result<(), _> = tick
        .transaction(&pool, |_tx| {
            runs.fetch_add(1, Ordering::Relaxed);
            async { Ok::<_, sqlx::Error>(()) }
        })
        .await;
    assert!(matches!(&done, Err(RunError::Lost { key, .. }) if key.as_str() == "key"), "{done:?}");
    assert_eq!(runs.into_inner(), 1);
    run.abort();
}

/// The key is lost before the run has noticed it.
async fn the_key_and_the_tick_are_confirmed_together<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let lock = db.lock().lease(PATIENCE);
    one.schedules = one.schedules.lock(lock);
    for lose in [true, false] {
        let (run, tick) = one.run().await;
        if lose {
            db.take_from("key").await;
        }
        let mut tx = db.pool.begin().await.unwrap();
        let finished = tick.finish_in(&mut tx).await;
        if lose {
            assert!(matches!(&finished, Err(Error::Lost { key, .. }) if key.as_str() == "key"), "{finished:?}");
            tx.rollback().await.unwrap();
            run.abort();
            eventually("it is handed back", || async { info(&db, "k").await.due <= chrono::Utc::now() }).await;
            db.lock().force_release("key", Status::Failed).await.unwrap().unwrap();
        } else {
            finished.unwrap();
            tx.commit().await.unwrap();
            one.finish.send(Some(true)).unwrap();
            assert_eq!(ended(run).await, TickOutcome::Succeeded);
        }
    }
    assert_eq!(told(&db, "k").await, "L1 S2");
    acquired(db.lock().try_acquire("key").await);
}

async fn a_run_that_is_stopped_while_it_waits_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    one.schedules = one.schedules.lease(Duration::from_secs(3600));
    let by_hand = acquired(db.lock().try_acquire("key").await);
    for dropped in [true, false] {
        let (run, running) = match dropped {
            true => (Some(one.try_tick()), None),
            false => (None, Some(one.schedules.start().await.unwrap())),
        };
        is_run(&db).await;
        if let Some(run) = run {
            run.abort();
        }
        if let Some(running) = running {
            // The claim may have been seen before its reply, and is then undone at once.
            running.shutdown(SHORT).await;
        }
        eventually("it is put back", || async { !info(&db, "k").await.running }).await;
        let row = info(&db, "k").await;
        assert!(row.attempt == 0 && row.due <= chrono::Utc::now() + SHORT, "{row:?}");
    }
    by_hand.release().await.unwrap();
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(one.try_tick()).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// The instance that died began the tick in time, and its work may be half done. The tick is
/// finished, whichever instance runs it, though others are due by then.
async fn a_takeover_that_is_stopped_while_it_waits_stays_one<DB: TestDatabase>(db: TestDb<DB>) {
    for catch_up in [CatchUp::Once, CatchUp::Skip] {
        db.execute("DELETE FROM t_resource_schedule").await;
        db.execute("DELETE FROM t_resource_schedule_run").await;
        let schedule = due_with_key(&db).await.catch_up(catch_up).grace(Duration::ZERO);
        let mut one = work(&db, "one", schedule);
        steal(&db, "k").await;
        back(&db, "k", 3 * LONG).await;
        db.execute("UPDATE t_resource_schedule SET run_slot = slot, begin_time = slot").await;
        let begun = info(&db, "k").await.slot;
        // A claim of a run that was stopped may still be in flight.
        let by_hand = acquired(db.lock().acquire("key", PATIENCE).await);
        for _ in 0..2 {
            let running = one.schedules.start().await.unwrap();
            eventually("it is taken over", || async { info(&db, "k").await.by == "one" }).await;
            assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
            let row = info(&db, "k").await;
            assert!(row.attempt == 1 && row.due <= chrono::Utc::now() && row.by == "thief", "{row:?}");
        }
        by_hand.release().await.unwrap();
        let (run, tick) = one.run().await;
        assert_eq!((tick.attempt(), tick.taken_over_from().unwrap().label.as_str()), (2, "thief"));
        assert_eq!(tick.slot(), begun, "{catch_up:?}");
        one.finish.send(Some(true)).unwrap();
        assert_eq!(ended(run).await, TickOutcome::Succeeded);
        assert_eq!(told(&db, "k").await, "L1 S2");
    }
}

/// The limit is long, since runs that have begun may end.
async fn a_run_that_waits_does_not_begin_after_a_shutdown<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let running = one.schedules.start().await.unwrap();
    is_run(&db).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    let row = info(&db, "k").await;
    assert!(!row.running && row.attempt == 0 && row.due == row.slot, "{row:?}");
    by_hand.release().await.unwrap();
    assert!(one.begun.try_recv().is_err());
}

async fn a_run_that_waits_does_not_begin_after_a_pause<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let run = one.try_tick();
    is_run(&db).await;
    one.schedules.pause("k").await.unwrap();
    by_hand.release().await.unwrap();
    assert_eq!(ended(run).await, TickOutcome::HandedBack);
    assert!(one.begun.try_recv().is_err());
    acquired(db.lock().try_acquire("key").await).release().await.unwrap();
    one.schedules.resume("k").await.unwrap();
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(one.try_tick()).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

async fn a_run_that_is_lost_while_it_waits_takes_no_key<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let run = one.try_tick();
    is_run(&db).await;
    steal(&db, "k").await;
    assert_eq!(ended(run).await, TickOutcome::Lost);
    by_hand.release().await.unwrap();
    acquired(db.lock().try_acquire("key").await);
    assert!(one.begun.try_recv().is_err());
    assert_eq!(info(&db, "k").await.by, "thief");
}

async fn two_schedules_with_one_key_exclude_each_other<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut schedules = instance(&db, "one");
    for name in ["k", "l"] {
        let (schedule, sender) = (due(&db, name).await.exclusive_with("key"), sender.clone());
        schedules = schedules.on(schedule, move |_| {
            let sender = sender.clone();
            async move {
                sender.send("begin").unwrap();
                sleep(3 * SHORT).await;
                sender.send("end").unwrap();
                Never::Ok(())
            }
        });
    }
    let running = schedules.start().await.unwrap();
    for expected in ["begin", "end", "begin", "end"] {
        assert_eq!(timeout(PATIENCE, events.recv()).await.unwrap(), Some(expected));
    }
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!((told(&db, "k").await, told(&db, "l").await), ("S1".to_owned(), "S1".to_owned()));
}

async fn what_cannot_work_is_refused_at_the_door<DB: TestDatabase>(db: TestDb<DB>) {
    let other = LeaseLock::new(db.pool_of(1).await);
    for (lock, says) in [
        (other, "another pool"),
        (db.lock().min_interval(SHORT), "a minimum interval"),
        (db.lock().rules(Rules::Article), "Rules::Article"),
    ] {
        let error = instance(&db, "one").lock(lock).start().await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains(says), "{error}");
    }
    db.execute("DROP TABLE t_resource_lock").await;
    let schedule = due(&db, "k").await.exclusive_with("key");
    let one = work(&db, "one", schedule).schedules;
    for error in [one.start().await.unwrap_err(), one.try_tick("k").await.unwrap_err()] {
        assert!(matches!(error, Error::Setup(Setup::TableMissing)), "{error:?}");
    }
}

/// The error is none that passes by itself. Operators may stop the tick.
async fn a_run_waits_for_a_key_that_the_server_refuses<DB: TestDatabase>(db: TestDb<DB>) {
    refuse_with(&db, "42501", 1142).await;
    // The order to stop a tick stands for as long as the tick does.
    for is_stopped in [false, true] {
        let mut one = work(&db, "one", due_with_key(&db).await);
        db.execute("DELETE FROM t_resource_schedule_run").await;
        add(&db, "key").await;
        let run = one.try_tick();
        is_run(&db).await;
        sleep(LEASE / 2).await;
        assert!(!run.is_finished() && told(&db, "k").await.is_empty());
        if is_stopped {
            assert!(one.schedules.stop("k").await.unwrap());
        } else {
            db.execute("DELETE FROM refused").await;
            one.tick().await;
            one.finish.send(Some(true)).unwrap();
        }
        let outcome = ended(run).await;
        match &outcome {
            TickOutcome::Failed { error, again: false } => assert!(is_stopped && error.starts_with("stopped by")),
            _ => assert!(!is_stopped && outcome == TickOutcome::Succeeded, "{outcome:?}"),
        }
        assert_eq!(told(&db, "k").await, if is_stopped { "F1" } else { "S1" });
        db.execute("DELETE FROM refused").await;
    }
}
