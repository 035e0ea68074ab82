//! How runs end: with a transaction of their own, and when an instance is shut down.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use chrono::TimeDelta;
use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Error, Schedule, Schedules, Tick, jobs::TickOutcome};
use tokio::{
    sync::mpsc,
    task::block_in_place,
    time::{Instant, sleep, timeout},
};

use crate::{
    ticks::{Never, SHORT, due, idle, info, instance, runs, steal, told},
    ticks_apart::Run,
};

harness::tests!(
    everywhere(
        the_work_and_its_tick_are_committed_together,
        a_transaction_that_is_not_committed_fails_the_run,
        a_lost_run_cannot_commit_its_tick,
        a_tick_that_was_committed_is_not_committed_again,
        a_stop_after_the_commit_leaves_a_success,
        a_run_is_lost_though_its_transaction_is_not_committed,
        a_tick_ends_only_in_a_transaction,
        a_shutdown_waits_for_the_runs,
        a_shutdown_hands_back_what_does_not_end,
        instances_that_are_dropped_hand_back_too,
        a_try_that_is_dropped_hands_back,
        a_tick_that_is_handed_back_often_is_not_given_up,
        a_tick_whose_processes_died_too_often_is_given_up,
        a_run_that_takes_too_long_is_stopped_and_fails,
        a_shutdown_tells_of_work_that_goes_on,
        work_that_hangs_occupies_one_thread
    ),
    servers.each(a_lost_run_is_told_and_stopped_before_the_next_one_begins)
);

/// What the work does with its transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Commit,
    CommitAndFail,
    RollBack,
    RollBackAndFail,
    DropIt,
}

async fn work<DB: TestDatabase>(tick: Tick<DB>, url: String, deed: Deed) -> Result<(), String> {
    let pool = harness::pool::<DB>(&url, 1).await;
    let mut tx = pool.begin().await.unwrap();
    DB::execute_on(&mut tx, "INSERT INTO effect (id) VALUES (1)").await.unwrap();
    tick.finish_in(&mut tx).await.map_err(|error| format!("{error:?}"))?;
    match deed {
        Deed::Commit | Deed::CommitAndFail => tx.commit().await.unwrap(),
        Deed::RollBack | Deed::RollBackAndFail => tx.rollback().await.unwrap(),
        Deed::DropIt => drop(tx),
    }
    if matches!(deed, Deed::CommitAndFail | Deed::RollBackAndFail) { Err("no".to_owned()) } else { Ok(()) }
}

async fn done<DB: TestDatabase>(db: &TestDb<DB>, name: &str, deed: Deed) -> (TickOutcome, Option<i64>) {
    let schedule = due(db, name).await;
    let url = db.url.clone();
    let schedules = instance(db, "one").on(schedule, move |tick| work::<DB>(tick, url.clone(), deed));
    let outcome = timeout(PATIENCE, schedules.try_tick(name)).await.unwrap().unwrap();
    (outcome, db.number("SELECT COUNT(*) FROM effect").await)
}

async fn the_work_and_its_tick_are_committed_together<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    for (number, deed) in [Deed::Commit, Deed::CommitAndFail].into_iter().enumerate() {
        let name = format!("{deed:?}");
        let (outcome, effects) = done(&db, &name, deed).await;
        assert_eq!((outcome, effects), (TickOutcome::Succeeded, Some(i64::try_from(number).unwrap() + 1)), "{deed:?}");
        let after = info(&db, &name).await;
        assert!(!after.running && after.due == after.slot && after.attempt == 0, "{deed:?}: {after:?}");
        assert_eq!(told(&db, &name).await, "S1", "{deed:?}");
    }
}

async fn a_transaction_that_is_not_committed_fails_the_run<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    for deed in [Deed::RollBack, Deed::RollBackAndFail, Deed::DropIt] {
        let name = format!("{deed:?}");
        let (outcome, effects) = done(&db, &name, deed).await;
        let expected = if deed == Deed::RollBackAndFail { "no" } else { "its transaction was not committed" };
        assert_eq!(outcome, TickOutcome::Failed { error: expected.to_owned(), again: false }, "{deed:?}");
        assert_eq!(effects, Some(0), "{deed:?}");
        assert_eq!(told(&db, &name).await, "F1", "{deed:?}");
    }
}

/// The work is told that the tick is lost, and goes on all the same.
async fn a_lost_run_cannot_commit_its_tick<DB: TestDatabase>(db: TestDb<DB>) {
    let run = Run::begin(instance(&db, "one").lease(20 * SHORT), due(&db, "k").await).await;
    steal(&db, "k").await;
    let mut tx = db.pool.begin().await.unwrap();
    let error = run.tick.finish_in(&mut tx).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error:?}");
    tx.rollback().await.unwrap();
    assert_eq!(run.ended().await, TickOutcome::Lost);
    assert_eq!(info(&db, "k").await.by, "thief");
}

/// The work repeats a transaction whose commit had no reply.
async fn a_tick_that_was_committed_is_not_committed_again<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    let (schedule, url) = (due(&db, "k").await, db.url.clone());
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let url = url.clone();
        async move {
            work::<DB>(tick.clone(), url.clone(), Deed::Commit).await?;
            work::<DB>(tick, url, Deed::Commit).await
        }
    });
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(db.number("SELECT COUNT(*) FROM effect").await, Some(1));
    assert_eq!(told(&db, "k").await, "S1");
}

async fn a_stop_after_the_commit_leaves_a_success<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    let (committed, mut commits) = mpsc::unbounded_channel();
    let (schedule, url) = (due(&db, "k").await, db.url.clone());
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let (url, committed) = (url.clone(), committed.clone());
        async move {
            work::<DB>(tick, url, Deed::Commit).await?;
            committed.send(()).unwrap();
            std::future::pending::<Result<(), String>>().await
        }
    });
    let stop = async { timeout(PATIENCE, commits.recv()).await.unwrap().unwrap() };
    assert_eq!(schedules.try_tick_until("k", stop).await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// The work goes on after its transaction was rolled back.
async fn a_run_is_lost_though_its_transaction_is_not_committed<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    let schedules = instance(&db, "one").time_limit(30 * SHORT).lease(60 * SHORT);
    let run = Run::begin(schedules, due(&db, "k").await).await;
    work::<DB>(run.tick.clone(), db.url.clone(), Deed::RollBack).await.unwrap();
    steal(&db, "k").await;
    timeout(PATIENCE, run.tick.cancellation_token().cancelled()).await.expect("the work is told");
    assert_eq!(run.ended().await, TickOutcome::Lost);
}

/// The work goes on after its transaction was rolled back, and the server then falls silent.
async fn a_lost_run_is_told_and_stopped_before_the_next_one_begins<DB: TestDatabase>(db: TestDb<DB>) {
    const LEASE: Duration = Duration::from_secs(6);
    db.execute("CREATE TABLE effect (id BIGINT)").await;
    let (schedule, url, proxy) = (due(&db, "k").await, db.url.clone(), db.proxy().await);
    let (said, mut events) = mpsc::unbounded_channel();
    let (began, mut begun) = mpsc::unbounded_channel();
    let first = Schedules::new(proxy.pool(4)).time_limit(PATIENCE).lease(LEASE);
    let next = said.clone();
    let first = first.on(schedule.clone(), move |tick: Tick<DB>| {
        let (url, began, stopped) = (url.clone(), began.clone(), Stopped(said.clone(), tick.clone()));
        async move {
            work::<DB>(tick, url, Deed::RollBack).await?;
            began.send(()).unwrap();
            let _stopped = stopped;
            std::future::pending::<Result<(), String>>().await
        }
    });
    let running = harness::spawn(async move { first.try_tick("k").await });
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    proxy.hold_everything();
    let next = instance(&db, "next").on(schedule, move |_| {
        next.send("begun").unwrap();
        async { Never::Ok(()) }
    });
    harness::eventually("it is taken over", || async { next.try_tick("k").await.unwrap() == TickOutcome::Succeeded })
        .await;
    for expected in ["told and stopped", "begun"] {
        assert_eq!(timeout(PATIENCE, events.recv()).await.unwrap(), Some(expected));
    }
    proxy.open();
    assert_eq!(timeout(PATIENCE, running).await.unwrap().unwrap().unwrap(), TickOutcome::Lost);
}

/// Says when the work that has it is dropped, and whether its tasks were told before.
struct Stopped<DB: TestDatabase>(mpsc::UnboundedSender<&'static str>, Tick<DB>);

impl<DB: TestDatabase> Drop for Stopped<DB> {
    fn drop(&mut self) {
        let told =
            if self.1.cancellation_token().is_cancelled() { "told and stopped" } else { "stopped, and not told" };
        // The test may have ended.
        self.0.send(told).ok();
    }
}

async fn a_tick_ends_only_in_a_transaction<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let pool = db.pool_of(1).await;
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let pool = pool.clone();
        async move {
            let mut conn = pool.acquire().await.unwrap();
            tick.finish_in(&mut conn).await.map_err(|error| error.to_string())
        }
    });
    let outcome = schedules.try_tick("k").await.unwrap();
    assert!(
        matches!(&outcome, TickOutcome::Failed { error, .. } if error.contains("not in a transaction")),
        "{outcome:?}"
    );
}

async fn a_shutdown_waits_for_the_runs<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(schedule, move |_| {
        began.send(()).unwrap();
        async {
            sleep(3 * SHORT).await;
            Never::Ok(())
        }
    });
    let running = schedules.start().await.unwrap();
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    let next = due(&db, "l").await;
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "S1");
    assert_eq!(idle(&db, next).try_tick("l").await.unwrap(), TickOutcome::Succeeded);
}

/// The lease is long: the other instance need not wait for its end.
async fn a_shutdown_hands_back_what_does_not_end<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, mut begun, running) = endless(&db).await;
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    assert!(!running.shutdown(SHORT).await);
    assert!(begun.recv().await.is_none(), "the work was dropped");
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
}

async fn instances_that_are_dropped_hand_back_too<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, mut begun, running) = endless(&db).await;
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    drop(running);
    let other = idle(&db, schedule);
    harness::eventually("it is handed back", || async { other.try_tick("k").await.unwrap() == TickOutcome::Succeeded })
        .await;
    assert_eq!(told(&db, "k").await, "L1 S2");
}

/// The lease is long: the other instance need not wait for its end.
async fn a_try_that_is_dropped_hands_back<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").lease(Duration::from_secs(3600));
    let schedules = schedules.on(schedule.clone(), move |tick: Tick<DB>| {
        began.send(tick.cancellation_token()).unwrap();
        std::future::pending::<Never>()
    });
    let trying = harness::spawn(async move { schedules.try_tick("k").await });
    let token = timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    trying.abort();
    timeout(PATIENCE, token.cancelled()).await.unwrap();
    let other = idle(&db, schedule);
    harness::eventually("it is handed back", || async { other.try_tick("k").await.unwrap() == TickOutcome::Succeeded })
        .await;
    assert!(begun.recv().await.is_none(), "the work was dropped");
    assert_eq!(told(&db, "k").await, "L1 S2");
}

async fn a_run_that_takes_too_long_is_stopped_and_fails<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.timeout(2 * SHORT).retry(1, Duration::ZERO);
    let (sender, mut stopped) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let (sender, token, first) = (sender.clone(), tick.cancellation_token(), tick.attempt() == 1);
        async move {
            if first {
                harness::spawn(async move {
                    token.cancelled().await;
                    sender.send(()).unwrap();
                });
                std::future::pending::<()>().await;
            }
            Never::Ok(())
        }
    });
    let error = "stopped: it took longer than its timeout of 200ms".to_owned();
    let since = Instant::now();
    let outcome = timeout(PATIENCE, schedules.try_tick("k")).await.unwrap().unwrap();
    assert_eq!(outcome, TickOutcome::Failed { error: error.clone(), again: true });
    assert!(since.elapsed() >= 2 * SHORT);
    timeout(PATIENCE, stopped.recv()).await.unwrap().expect("the tasks of the work are told");
    assert_eq!(runs(&db, "k").await[0].error, Some(error));
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "F1 S2");
}

/// Starts work that does not end by itself.
async fn endless<DB: TestDatabase>(db: &TestDb<DB>) -> (Schedule, mpsc::UnboundedReceiver<()>, rowlock::jobs::Running) {
    let schedule = due(db, "k").await;
    let (began, begun) = mpsc::unbounded_channel();
    let schedules = instance(db, "one").lease(Duration::from_secs(3600));
    let schedules = schedules.on(schedule.clone(), move |_| {
        began.send(()).unwrap();
        std::future::pending::<Never>()
    });
    let running = schedules.start().await.unwrap();
    drop(schedules);
    (schedule, begun, running)
}

/// More often than a tick is taken over from processes that died.
async fn a_tick_that_is_handed_back_often_is_not_given_up<DB: TestDatabase>(db: TestDb<DB>) {
    const TIMES: u32 = 13;
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(due(&db, "k").await, move |tick: Tick<DB>| {
        let ends = tick.attempt() > TIMES;
        sender.send(tick).unwrap();
        async move {
            if !ends {
                std::future::pending::<()>().await;
            }
            Never::Ok(())
        }
    });
    for _ in 0..TIMES {
        let (mut begun, stop) = (None, async { timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap() });
        let outcome = schedules.try_tick_until("k", async { begun = Some(stop.await) }).await.unwrap();
        assert_eq!(outcome, TickOutcome::HandedBack);
        let mut tx = db.pool.begin().await.unwrap();
        let error = begun.unwrap().finish_in(&mut tx).await.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "it can no longer end: {error:?}");
        tx.rollback().await.unwrap();
    }
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(ticks.recv().await.unwrap().taken_over_from().unwrap().label, "one");
    let runs = runs(&db, "k").await;
    assert!(told(&db, "k").await.ends_with("L12 L13 S14"), "{runs:?}");
    assert_eq!(runs[0].error.as_deref(), Some("handed back: its work was stopped"));
}

/// Five attempts were handed back. The last one is found without its process.
async fn a_tick_whose_processes_died_too_often_is_given_up<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, died, given_up) in [("k", 10, false), ("l", 11, true)] {
        let schedules = idle(&db, due(&db, name).await);
        let slot = info(&db, name).await.slot;
        for attempt in 1..died + 5 {
            let error = if attempt > 5 { "taken over: its lease ended" } else { "handed back: its work was stopped" };
            db.execute(&format!(
                "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status, error)
                 SELECT name, slot, {attempt}, {attempt}, 'dead', slot, slot, 'L', '{error}' FROM t_resource_schedule WHERE name = '{name}'"
            ))
            .await;
        }
        let (holder, attempt) = (DB::uuid("0123456789abcdef0123456789abcdef"), died + 5);
        db.execute(&format!(
            "UPDATE t_resource_schedule SET holder = {holder}, attempt = {attempt}, run_slot = slot, client_ip = 'dead', begin_time = slot WHERE name = '{name}'"
        ))
        .await;
        let outcome = schedules.try_tick(name).await.unwrap();
        let is_given_up =
            matches!(&outcome, TickOutcome::Failed { error, again: false } if error.starts_with("given up"));
        assert!(if given_up { is_given_up } else { outcome == TickOutcome::Succeeded }, "{name}: {outcome:?}");
        let told = told(&db, name).await;
        assert!(told.ends_with(if given_up { "L15 L16 F17" } else { "L14 L15 S16" }), "{name}: {told}");
        assert!(info(&db, name).await.slot > slot, "{name}");
    }
}

/// An instance with work that cannot be stopped, how often it has begun, and whether it hangs.
pub async fn hanging<DB: TestDatabase>(db: &TestDb<DB>) -> (Schedules<DB>, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let (begun, hangs) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    let (count, waits) = (begun.clone(), hangs.clone());
    // The timeout leaves a busy machine the time to begin the work, which would be dropped
    // otherwise.
    let schedules = instance(db, "one").lease(15 * SHORT).on(due(db, "k").await.timeout(10 * SHORT), move |_| {
        let (count, waits) = (count.clone(), waits.clone());
        async move {
            count.fetch_add(1, Relaxed);
            block_in_place(|| {
                while waits.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            Never::Ok(())
        }
    });
    (schedules, begun, hangs)
}

/// Waits until the lease has ended for longer than a renewal may be late.
pub async fn is_no_longer_renewed<DB: TestDatabase>(db: &TestDb<DB>) {
    eventually("its lease has ended", async || {
        let row = info(db, "k").await;
        row.lost_since.is_some_and(|since| row.now - since > TimeDelta::seconds(2))
    })
    .await;
}

async fn a_shutdown_tells_of_work_that_goes_on<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedules, begun, hangs) = hanging(&db).await;
    let running = schedules.start().await.unwrap();
    eventually("it is begun", async || begun.load(Relaxed) == 1).await;
    is_no_longer_renewed(&db).await;
    assert!(!running.shutdown(PATIENCE).await);
    hangs.store(false, Relaxed);
}

/// Its lease ends, and no other instance takes over.
async fn work_that_hangs_occupies_one_thread<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedules, begun, hangs) = hanging(&db).await;
    let schedules = schedules.on(due(&db, "other").await, async |_| Never::Ok(()));
    let running = schedules.start().await.unwrap();
    eventually("it is begun", async || begun.load(Relaxed) == 1).await;
    is_no_longer_renewed(&db).await;
    for number in 1..=3 {
        instance(&db, "operator").trigger("other").await.unwrap();
        eventually("others are run", async || runs(&db, "other").await.len() > number).await;
    }
    assert_eq!(begun.load(Relaxed), 1);
    hangs.store(false, Relaxed);
    // On a busy machine the second run may reach its timeout too.
    let again = eventually("it is run again", async || told(&db, "k").await.starts_with("L1 "));
    if timeout(2 * PATIENCE, again).await.is_err() {
        panic!("it is run again: {} {:#?}", told(&db, "k").await, info(&db, "k").await);
    }
    assert!(running.shutdown(PATIENCE).await);
}
