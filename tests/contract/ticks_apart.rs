//! Runs whose connections fall silent, whose server gives no more of them, or whose runtime stands
//! still.

use std::{convert::Infallible, time::Duration};

use harness::{
    PATIENCE, TestDatabase, TestDb, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{Error, Schedule, Schedules, Tick, errors::NotFound, jobs::TickOutcome};
use tokio::{
    runtime::{Builder, Runtime},
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use crate::{
    isolation::pool_of_at,
    ticks::{Never, SHORT, due, idle, info, instance, told},
};

harness::tests!(
    everywhere(a_runtime_that_stands_still_keeps_its_run),
    servers(
        silent_connections_lose_no_run,
        a_run_without_answers_is_lost_before_its_lease_ends,
        a_run_whose_row_is_locked_is_lost_before_its_lease_ends,
        a_run_is_renewed_though_no_connection_can_be_opened,
        an_end_survives_connections_that_fall_silent,
        an_end_is_recorded_after_an_outage_that_outlasts_the_lease,
        operators_are_told_what_is_unknown,
        each_tick_is_run_once_under_serializable
    )
);

const LEASE: Duration = Duration::from_secs(6);

/// A run that goes on until it is told how to end.
pub struct Run<DB: TestDatabase> {
    pub tick: Tick<DB>,
    finish: watch::Sender<Option<Result<(), &'static str>>>,
    outcome: JoinHandle<Result<TickOutcome, Error>>,
}

impl<DB: TestDatabase> Run<DB> {
    pub async fn begin(schedules: Schedules<DB>, schedule: Schedule) -> Self {
        Self::begin_named(schedules, schedule, "k").await
    }

    pub async fn begin_named(schedules: Schedules<DB>, schedule: Schedule, name: &str) -> Self {
        let (began, mut begun) = mpsc::unbounded_channel();
        let (finish, finished) = watch::channel(None);
        let schedules = schedules.on(schedule, move |tick: Tick<DB>| {
            began.send(tick).unwrap();
            let mut finished = finished.clone();
            async move {
                let result = finished.wait_for(Option::is_some).await.ok().and_then(|result| *result);
                result.unwrap_or(Err("the test has ended"))
            }
        });
        let name = name.to_owned();
        let outcome = harness::spawn(async move { schedules.try_tick(&name).await });
        let tick = timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
        Self { tick, finish, outcome }
    }

    /// Ends the work, which succeeds.
    pub async fn end(self) -> TickOutcome {
        self.end_with(Ok(())).await
    }

    pub async fn end_with(self, result: Result<(), &'static str>) -> TickOutcome {
        self.finish.send(Some(result)).unwrap();
        self.ended().await
    }

    /// Waits for the end of the run, whose work goes on.
    pub async fn ended(self) -> TickOutcome {
        timeout(PATIENCE, self.outcome).await.unwrap().unwrap().unwrap()
    }
}

/// The request is carried out, and its reply is lost. Then no connection can be opened.
async fn operators_are_told_what_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "other").on(due(&db, "k").await, async |_| Never::Ok(()));
    // How many replies come before that to the commit.
    for (name, trigger, replies) in [("trigger", true, 3), ("pause", false, 4)] {
        let proxy = db.proxy().await;
        let operator = Schedules::<DB>::new(proxy.pool(4)).time_limit(20 * SHORT);
        let ask = async |name| if trigger { operator.trigger(name).await } else { operator.pause(name).await };
        due(&db, "another").await;
        ask("another").await.unwrap(); // prepares the statements
        let unknown = ask("unknown").await;
        assert!(matches!(unknown, Err(Error::NotFound(NotFound::Schedule { .. }))), "{unknown:?}");
        let answer = proxy.during(Way::Replies, replies, ask("k"), async |proxy| {
            eventually("it is carried out", || async {
                let row = info(&db, "k").await;
                if trigger { row.triggered.is_some() } else { row.paused }
            })
            .await;
            proxy.cut();
            proxy.hold_new();
        });
        let error = answer.await.unwrap_err();
        assert!(error.to_string().contains("it may have been carried out"), "{name}: {error}");
    }
    schedules.resume("k").await.unwrap();
    for _ in 0..2 {
        assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded, "the trigger, and the tick");
    }
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }), "it was triggered once");
}

async fn through<DB: TestDatabase>(db: &TestDb<DB>, proxy: &Proxy) -> Run<DB> {
    let schedule = due(db, "k").await;
    let schedules = Schedules::new(proxy.pool(4)).lease(LEASE).time_limit(LEASE / 4);
    Run::begin(schedules, schedule).await
}

async fn renewed<DB: TestDatabase>(db: &TestDb<DB>) {
    let before = info(db, "k").await.due;
    eventually("it is renewed", || async { info(db, "k").await.due > before }).await;
}

/// Renewals are answered, and extend nothing.
async fn a_run_whose_row_is_locked_is_lost_before_its_lease_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let run = Run::begin(instance(&db, "one").lease(LEASE / 2), schedule).await;
    let mut other = db.pool.begin().await.unwrap();
    DB::execute_on(&mut other, "SELECT 1 FROM t_resource_schedule WHERE name = 'k' FOR UPDATE").await.unwrap();
    timeout(PATIENCE, run.tick.cancellation_token().cancelled()).await.expect("the run is told");
    other.rollback().await.unwrap();
    assert_eq!(run.ended().await, TickOutcome::Lost);
}

async fn a_run_without_answers_is_lost_before_its_lease_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let run = through(&db, &proxy).await;
    proxy.hold_everything();
    timeout(LEASE, run.tick.cancellation_token().cancelled()).await.unwrap();
    assert_eq!(run.ended().await, TickOutcome::Lost);
}

/// After a failover in a cloud, existing connections are neither answered nor closed.
async fn silent_connections_lose_no_run<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let run = through(&db, &proxy).await;
    for _ in 0..2 {
        renewed(&db).await; // so that a connection for renewals is open
        proxy.silence();
    }
    renewed(&db).await;
    renewed(&db).await;
    assert!(!run.tick.cancellation_token().is_cancelled());
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// The connection that has claimed the tick serves its renewals.
async fn a_run_is_renewed_though_no_connection_can_be_opened<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let run = through(&db, &proxy).await;
    proxy.hold_new();
    for _ in 0..4 {
        renewed(&db).await; // more often than once in a lease
    }
    assert!(!run.tick.cancellation_token().is_cancelled());
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

async fn an_end_survives_connections_that_fall_silent<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let run = through(&db, &proxy).await;
    proxy.silence();
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

async fn an_end_is_recorded_after_an_outage_that_outlasts_the_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let schedule = due(&db, "k").await;
    let schedules = Schedules::<DB>::new(proxy.pool(4)).lease(10 * SHORT).time_limit(5 * SHORT);
    let run = Run::begin(schedules.poll_interval(SHORT), schedule).await;
    proxy.cut();
    proxy.hold_new();
    let Run { finish, outcome, .. } = run;
    finish.send_replace(Some(Ok(())));
    // The time limit and the lease are over several times.
    sleep(40 * SHORT).await;
    assert!(!outcome.is_finished());
    proxy.open();
    assert_eq!(timeout(PATIENCE, outcome).await.unwrap().unwrap().unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// Returns a runtime that is driven only until the work is done, and the result of the work.
fn still<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> (Runtime, T) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let driven = std::thread::spawn(move || {
        let done = runtime.block_on(work);
        (runtime, done)
    });
    driven.join().unwrap()
}

/// The run's work stands still with its runtime, and its lease goes on.
async fn a_runtime_that_stands_still_keeps_its_run<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (url, theirs) = (db.url.clone(), schedule.clone());
    let (runtime, run) = still(async move {
        let pool = harness::pool::<DB>(&url, 2).await;
        Run::begin(Schedules::new(pool).lease(LEASE), theirs).await
    });
    let other = idle(&db, schedule);
    let ends = async || db.text("SELECT CAST(due_at AS char(40)) FROM t_resource_schedule").await;
    let mut before = ends().await;
    // More often than once in a lease.
    for _ in 0..4 {
        eventually("it is renewed", async || ends().await != before).await;
        before = ends().await;
        assert_ne!(other.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    }
    let Run { finish, outcome, .. } = run;
    finish.send(Some(Ok(()))).unwrap();
    let outcome = std::thread::spawn(move || {
        runtime.block_on(async { timeout(PATIENCE, outcome).await.unwrap().unwrap().unwrap() })
    });
    assert_eq!(tokio::task::spawn_blocking(|| outcome.join().unwrap()).await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// Statements that the server undoes for contention are sent again.
async fn each_tick_is_run_once_under_serializable<DB: TestDatabase>(db: TestDb<DB>) {
    const SCHEDULES: usize = 6;
    let mut schedules = Vec::new();
    for number in 0..SCHEDULES {
        schedules.push(due(&db, &format!("k{number}")).await);
    }
    let serializable = db.over(pool_of_at(&db, 10, "serializable").await);
    let mut instances = JoinSet::new();
    for number in 0..8 {
        let mut one = instance(&serializable, &format!("instance {number}")).lease(LEASE);
        for schedule in &schedules {
            one = one.on(schedule.clone(), async |_| {
                sleep(2 * LEASE).await;
                Ok::<_, Infallible>(())
            });
        }
        instances.spawn(harness::task(async move {
            let running = one.start().await.unwrap();
            sleep(LEASE).await;
            running.shutdown(PATIENCE).await
        }));
    }
    assert!(instances.join_all().await.into_iter().all(|ended| ended));
    for number in 0..SCHEDULES {
        let name = format!("k{number}");
        eventually("it has ended", || async { !info(&db, &name).await.running }).await;
        assert_eq!(told(&db, &name).await, "S1");
    }
}
