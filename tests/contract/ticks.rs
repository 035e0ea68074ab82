//! Schedules: each tick runs on one instance, and again elsewhere if that one dies.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use chrono::{DateTime, Utc};
use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Error, Schedule, Schedules, Tick,
    admin::{RunInfo, RunStatus, ScheduleInfo},
    errors::{NotFound, Setup},
    jobs::TickOutcome,
};
use tokio::{sync::mpsc, time::timeout};

use crate::ticks_apart::Run;

harness::tests!(everywhere(
    each_tick_runs_on_one_of_three_instances,
    a_tick_is_passed_with_what_is_known_of_it,
    a_tick_that_is_not_due_is_told_when_it_is,
    an_instance_that_dies_is_taken_over_from,
    a_run_that_is_lost_is_cancelled_and_its_late_end_refused,
    a_fixed_delay_counts_from_the_end_of_the_run,
    the_work_of_an_instance_is_bounded,
    without_the_tables_locks_work_and_schedules_say_what_is_missing,
    a_schedule_that_is_added_twice_is_refused
));

pub const SHORT: Duration = Duration::from_millis(100);
pub const LONG: Duration = Duration::from_secs(100 * 24 * 60 * 60);

pub type Never = Result<(), Infallible>;

/// An instance without schedules, which looks often.
pub fn instance<DB: TestDatabase>(db: &TestDb<DB>, label: &str) -> Schedules<DB> {
    Schedules::new(db.pool.clone()).label(label).poll_interval(SHORT)
}

/// An instance with one schedule that does nothing but succeed.
pub fn idle<DB: TestDatabase>(db: &TestDb<DB>, schedule: Schedule) -> Schedules<DB> {
    instance(db, "idle").on(schedule, async |_| Ok::<_, Infallible>(()))
}

/// Moves the slot of a schedule back by a time, so that it is due.
pub async fn back<DB: TestDatabase>(db: &TestDb<DB>, name: &str, by: Duration) {
    let by = span(db, by);
    let set = format!("UPDATE t_resource_schedule SET due_at = slot - {by}, slot = slot - {by} WHERE name = '{name}'");
    assert_eq!(db.execute(&set).await, 1, "{name}");
}

fn span<DB: TestDatabase>(db: &TestDb<DB>, time: Duration) -> String {
    match db.server.name {
        "sqlite" => format!("{}", time.as_micros()),
        "postgres" => format!("interval '{} microseconds'", time.as_micros()),
        _ => format!("INTERVAL {} MICROSECOND", time.as_micros()),
    }
}

/// Registers a schedule whose period is long, and makes its tick due.
pub async fn due<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Schedule {
    let schedule = Schedule::every(name, LONG);
    idle(db, schedule.clone()).try_tick(name).await.unwrap();
    back(db, name, LONG).await;
    schedule
}

/// An instance that only reads, and waits for the server for as long as a test does.
pub fn reader<DB: TestDatabase>(db: &TestDb<DB>) -> Schedules<DB> {
    instance(db, "reader").time_limit(PATIENCE)
}

pub async fn info<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> ScheduleInfo {
    let all = reader(db).list().await.unwrap();
    all.into_iter().find(|schedule| schedule.name == name).unwrap()
}

pub async fn runs<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Vec<RunInfo> {
    let mut runs = reader(db).history(name, 1_000).await.unwrap();
    runs.reverse();
    runs
}

/// The history as letters and attempts: `F1 S2`.
pub async fn told<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> String {
    let letter = |run: &RunInfo| match run.status {
        RunStatus::Succeeded => 'S',
        RunStatus::Failed => 'F',
        RunStatus::Lost => 'L',
        RunStatus::Missed => 'M',
        _ => '?',
    };
    let missed = |run: &RunInfo| if run.missed > 0 { format!("({})", run.missed) } else { String::new() };
    let runs = runs(db, name).await;
    let told = runs.iter().map(|run| format!("{}{}{}", letter(run), run.attempt, missed(run)));
    told.collect::<Vec<_>>().join(" ")
}

/// What instances have run: which one, and which slot.
type Ran = Arc<Mutex<Vec<(usize, DateTime<Utc>)>>>;

async fn each_tick_runs_on_one_of_three_instances<DB: TestDatabase>(db: TestDb<DB>) {
    let ran = Ran::default();
    let mut running = Vec::new();
    for number in 0..3 {
        let ran = ran.clone();
        let schedules = instance(&db, &format!("instance {number}")).on(
            Schedule::every("k", 2 * SHORT).catch_up(rowlock::jobs::CatchUp::All(1_000)),
            move |tick: Tick<DB>| {
                ran.lock().unwrap().push((number, tick.slot()));
                async { Ok::<_, Infallible>(()) }
            },
        );
        running.push(schedules.start().await.unwrap());
    }
    eventually("twelve ticks", || async { ran.lock().unwrap().len() >= 12 }).await;
    for running in running {
        assert!(running.shutdown(PATIENCE).await);
    }
    let runs = runs(&db, "k").await;
    let slots: Vec<_> = runs.iter().map(|run| run.slot).collect();
    assert!(runs.iter().all(|run| run.status == RunStatus::Succeeded && run.attempt == 1), "{runs:?}");
    assert!(slots.windows(2).all(|pair| pair[1] - pair[0] == chrono::TimeDelta::milliseconds(200)), "{slots:?}");
    let mut ran: Vec<_> = ran.lock().unwrap().iter().map(|ran| ran.1).collect();
    ran.sort_unstable();
    assert_eq!(ran, slots, "each once");
}

async fn a_tick_is_passed_with_what_is_known_of_it<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        async { Never::Ok(()) }
    });
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    let tick = ticks.recv().await.unwrap();
    assert_eq!((tick.name(), tick.slot(), tick.attempt(), tick.missed()), ("k", slot, 1, 0));
    assert!(tick.is_late() && !tick.is_triggered() && tick.taken_over_from().is_none(), "{tick:?}");
    let [run] = &runs(&db, "k").await[..] else { panic!("one run") };
    assert_eq!((run.slot, run.attempt, run.status, run.by.as_str()), (slot, 1, RunStatus::Succeeded, "one"));
    assert_eq!(run.token, tick.token());
    assert!(run.ended >= run.began && run.error.is_none(), "{run:?}");
    let after = info(&db, "k").await;
    assert!(!after.running && after.slot > slot && after.due == after.slot && after.attempt == 0, "{after:?}");
}

async fn a_tick_that_is_not_due_is_told_when_it_is<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG));
    for _ in 0..2 {
        let outcome = schedules.try_tick("k").await.unwrap();
        let TickOutcome::NotDue { retry_after: Some(after) } = outcome else { panic!("{outcome:?}") };
        assert!(after > Duration::ZERO && after <= LONG, "{after:?}");
    }
    assert!(matches!(schedules.try_tick("l").await, Err(Error::NotFound(NotFound::Schedule { .. }))));
    assert_eq!(told(&db, "k").await, "");
}

/// Runs the tick of these schedules on a runtime of its own. If that is shut down, the instance
/// dies without a word.
fn mortal<DB: TestDatabase>(
    db: &TestDb<DB>,
    make: impl FnOnce(Schedules<DB>) -> Schedules<DB> + Send + 'static,
) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let url = db.url.clone();
    runtime.spawn(harness::task(async move {
        let pool = harness::pool::<DB>(&url, 2).await;
        make(Schedules::new(pool)).try_tick("k").await
    }));
    runtime
}

async fn an_instance_that_dies_is_taken_over_from<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let theirs = schedule.clone();
    let first = mortal(&db, move |schedules| {
        schedules.label("first").lease(30 * SHORT).on(theirs, move |tick: Tick<DB>| {
            began.send(tick).unwrap();
            std::future::pending::<Never>()
        })
    });
    let lost = timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    first.shutdown_background();
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let second = instance(&db, "second").on(schedule, move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        async { Never::Ok(()) }
    });
    let outcome = second.try_tick("k").await.unwrap();
    assert!(matches!(outcome, TickOutcome::NotDue { retry_after: Some(_) }), "the lease stands: {outcome:?}");
    let running = second.start().await.unwrap();
    let tick = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert_eq!((tick.slot(), tick.attempt()), (lost.slot(), 2));
    assert!(tick.token() > lost.token());
    let previous = tick.taken_over_from().unwrap();
    assert_eq!((previous.token, previous.label.as_str()), (lost.token(), "first"));
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "L1 S2");
    assert_eq!(runs(&db, "k").await[0].error.as_deref(), Some("taken over: its lease ended"));
}

/// Another instance takes the row, as after a lease that ended.
pub async fn steal<DB: TestDatabase>(db: &TestDb<DB>, name: &str) {
    let holder = DB::uuid("0123456789abcdef0123456789abcdef");
    let set = format!("holder = {holder}, token = token + 1, attempt = attempt + 1, client_ip = 'thief'");
    assert_eq!(db.execute(&format!("UPDATE t_resource_schedule SET {set} WHERE name = '{name}'")).await, 1);
}

async fn a_run_that_is_lost_is_cancelled_and_its_late_end_refused<DB: TestDatabase>(db: TestDb<DB>) {
    for renewed in [true, false] {
        let name = if renewed { "renewed" } else { "ended" };
        let schedule = due(&db, name).await;
        let lease = if renewed { 20 * SHORT } else { PATIENCE };
        let run = Run::begin_named(instance(&db, "one").lease(lease), schedule, name).await;
        let tick = run.tick.clone();
        steal(&db, name).await;
        let outcome = if renewed {
            timeout(PATIENCE, tick.cancellation_token().cancelled()).await.unwrap();
            run.ended().await
        } else {
            run.end().await
        };
        assert_eq!(outcome, TickOutcome::Lost, "{name}");
        let row = info(&db, name).await;
        assert!(row.running && row.by == "thief" && row.slot == tick.slot() && row.attempt == 2, "{row:?}");
        assert_eq!(told(&db, name).await, "", "nothing was recorded");
    }
}

async fn a_fixed_delay_counts_from_the_end_of_the_run<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::after("k", 5 * SHORT);
    let schedules = instance(&db, "one").on(schedule, async |_| {
        tokio::time::sleep(3 * SHORT).await;
        Never::Ok(())
    });
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded, "the first one is at the registration");
    let running = schedules.start().await.unwrap();
    eventually("three runs", || async { runs(&db, "k").await.len() >= 3 }).await;
    assert!(running.shutdown(PATIENCE).await);
    let runs = runs(&db, "k").await;
    for pair in runs.windows(2) {
        // The run takes 300 ms, and the next slot is counted from before its end is recorded.
        let distance = (pair[1].slot - pair[0].began).num_milliseconds();
        assert!(distance >= 799 && pair[1].began >= pair[1].slot, "{distance} ms: {runs:?}");
    }
}

async fn the_work_of_an_instance_is_bounded<DB: TestDatabase>(db: TestDb<DB>) {
    let under_way = Arc::new(Mutex::new((0, 0)));
    let mut schedules = instance(&db, "one").max_concurrent_runs(3);
    for number in 0..12 {
        let schedule = due(&db, &format!("k{number}")).await;
        let under_way = under_way.clone();
        schedules = schedules.on(schedule, move |_| {
            let under_way = under_way.clone();
            async move {
                let count = |by: i32| {
                    let mut under_way = under_way.lock().unwrap();
                    *under_way = (under_way.0 + by, under_way.1.max(under_way.0 + by));
                };
                count(1);
                eventually("three are under way", || async { under_way.lock().unwrap().1 >= 3 }).await;
                tokio::time::sleep(SHORT / 4).await;
                count(-1);
                Never::Ok(())
            }
        });
    }
    let running = schedules.start().await.unwrap();
    eventually("all have run", || async {
        schedules.list().await.unwrap().iter().all(|schedule| schedule.token.get() > 0 && !schedule.running)
    })
    .await;
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(under_way.lock().unwrap().1, 3);
}

async fn without_the_tables_locks_work_and_schedules_say_what_is_missing<DB: TestDatabase>(db: TestDb<DB>) {
    for table in ["t_resource_schedule_run", "t_resource_schedule"] {
        db.execute(&format!("DROP TABLE {table}")).await;
        harness::acquired(db.lock().try_acquire("k").await).release().await.unwrap();
        let schedules = idle(&db, Schedule::every("k", LONG));
        for error in [schedules.start().await.unwrap_err(), schedules.try_tick("k").await.unwrap_err()] {
            assert!(matches!(error, Error::Setup(Setup::ScheduleTablesMissing)), "{error:?}");
            assert!(error.to_string().contains("call rowlock::migrate(&pool) once"), "{error}");
        }
    }
    let listed = instance(&db, "one").list().await.unwrap_err();
    assert!(matches!(listed, Error::Setup(Setup::ScheduleTablesMissing)), "{listed:?}");
    rowlock::migrate(&db.pool).await.unwrap();
    idle(&db, Schedule::every("k", LONG)).try_tick("k").await.unwrap();
}

async fn a_schedule_that_is_added_twice_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG));
    let twice = schedules.on(Schedule::after("k", LONG), async |_| Never::Ok(()));
    let error = twice.start().await.unwrap_err();
    assert!(error.to_string().contains("declared more than once"), "{error}");
    assert!(twice.list().await.unwrap().is_empty(), "nothing was registered");
}
