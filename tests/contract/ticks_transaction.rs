//! Runs whose work is the transaction that ends the tick.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, events, eventually};
use rowlock::{Error, RunError, Schedule, Schedules, Tick, Tx, errors::TransactionFault, jobs::TickOutcome};
use sqlx::Pool;
use tokio::{
    join,
    sync::{Semaphore, mpsc},
    task::block_in_place,
    time::{sleep, timeout},
};

use crate::{
    bank::{LEASE as ACCOUNT, accounts, write_in},
    contention::contention,
    ended::{deadlock, endings},
    ticks::{SHORT, due, idle, info, instance, steal, told},
    work::end_by_an_error,
};

harness::tests!(
    everywhere(
        the_work_and_its_tick_are_committed_together,
        work_that_fails_fails_the_run,
        contention_is_repeated_within_the_attempt,
        a_transaction_that_has_ended_before_commits_no_tick,
        a_tick_is_committed_once,
        a_transaction_waits_for_a_connection,
        transactions_at_once_follow_each_other,
        work_that_fails_after_its_commit_is_reported,
        work_that_goes_on_after_its_commit_is_no_loss,
        a_run_that_is_dropped_within_its_transaction_leaves_nothing,
        an_own_transaction_that_has_ended_is_refused
    ),
    servers(a_lost_run_commits_nothing, a_transaction_may_take_longer_than_the_lease),
    mysql_and_mariadb(
        work_that_commits_implicitly_makes_no_success,
        a_deadlock_within_an_own_transaction_makes_no_success
    )
);

pub const EFFECT: &str = "INSERT INTO effect (id) VALUES (1)";
/// Long enough for a busy machine.
pub const LEASE: Duration = Duration::from_secs(6);

pub type Done = Result<(), RunError<sqlx::Error>>;

pub async fn effects<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number("SELECT COUNT(*) FROM effect").await.unwrap()
}

pub async fn table<DB: TestDatabase>(db: &TestDb<DB>) {
    db.execute("CREATE TABLE effect (id BIGINT)").await;
}

/// Adds a schedule whose work is this transaction. What comes of the transaction is sent.
pub fn with<DB: TestDatabase, F>(
    schedules: Schedules<DB>,
    schedule: Schedule,
    pool: &Pool<DB>,
    work: impl Fn(Tx<DB>) -> F + Send + Sync + 'static,
) -> (Schedules<DB>, mpsc::UnboundedReceiver<Done>)
where
    F: Future<Output = Result<(), sqlx::Error>> + Send + 'static,
{
    let (sender, done) = mpsc::unbounded_channel();
    let (pool, work) = (pool.clone(), Arc::new(work));
    let schedules = schedules.on(schedule, move |tick: Tick<DB>| {
        let (pool, work, sender) = (pool.clone(), work.clone(), sender.clone());
        async move {
            let done = tick.transaction(&pool, |tx| work(tx)).await;
            let said = done.as_ref().copied().map_err(ToString::to_string);
            // Not every test asks.
            sender.send(done).ok();
            said
        }
    });
    (schedules, done)
}

/// Runs the tick `k`, whose work is this transaction.
async fn run<DB: TestDatabase, F>(
    db: &TestDb<DB>,
    work: impl Fn(Tx<DB>) -> F + Send + Sync + 'static,
) -> (TickOutcome, Done)
where
    F: Future<Output = Result<(), sqlx::Error>> + Send + 'static,
{
    let schedule = due(db, "k").await;
    let (schedules, mut done) = with(instance(db, "one"), schedule, &db.pool_of(1).await, work);
    let outcome = timeout(2 * PATIENCE, schedules.try_tick("k")).await.expect("it ends").unwrap();
    (outcome, done.recv().await.unwrap())
}

async fn the_work_and_its_tick_are_committed_together<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (outcome, done) = run(&db, async |mut tx| DB::execute_on(&mut tx, EFFECT).await.map(drop)).await;
    assert!(done.is_ok() && outcome == TickOutcome::Succeeded, "{outcome:?} {done:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
    let after = info(&db, "k").await;
    assert!(!after.running && after.due == after.slot && after.attempt == 0, "{after:?}");
}

async fn work_that_fails_fails_the_run<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (outcome, done) = run(&db, async |mut tx| {
        DB::execute_on(&mut tx, EFFECT).await?;
        Err(sqlx::Error::RowNotFound)
    })
    .await;
    assert!(matches!(done, Err(RunError::Work(sqlx::Error::RowNotFound))), "{done:?}");
    assert!(matches!(outcome, TickOutcome::Failed { again: false, .. }), "{outcome:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (0, "F1"));
}

/// The schedule has no retries.
async fn contention_is_repeated_within_the_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    accounts(&db).await;
    let (runs, other) = (Arc::new(AtomicU32::new(0)), Arc::new(db.over(db.pool.clone())));
    let counted = runs.clone();
    let (outcome, done) = run(&db, move |mut tx| {
        let (first, other) = (runs.fetch_add(1, SeqCst) == 0, other.clone());
        async move {
            DB::execute_on(&mut tx, EFFECT).await?;
            if first { Err(contention(&other, &mut tx).await) } else { Ok(()) }
        }
    })
    .await;
    assert!(done.is_ok() && outcome == TickOutcome::Succeeded, "{outcome:?} {done:?}");
    assert_eq!(counted.load(SeqCst), 2);
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// The work ignores an error that has ended its transaction: on MySQL and MariaDB it was the victim
/// of a deadlock.
async fn a_transaction_that_has_ended_before_commits_no_tick<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    accounts(&db).await;
    let other = Arc::new(db.over(db.pool.clone()));
    let (outcome, done) = run(&db, move |mut tx| {
        let other = other.clone();
        async move {
            DB::execute_on(&mut tx, EFFECT).await?;
            DB::execute_on(&mut tx, "UPDATE account SET balance = 1 WHERE id = 'lease'").await?;
            end_by_an_error(&other, tx).await;
            Ok(())
        }
    })
    .await;
    assert!(matches!(done, Err(RunError::Other(Error::Transaction(TransactionFault::Over { .. })))), "{done:?}");
    assert!(matches!(outcome, TickOutcome::Failed { .. }), "{outcome:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (0, "F1"));
}

/// What came before the implicit commit stands. The tick does not succeed.
async fn work_that_commits_implicitly_makes_no_success<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (outcome, done) = run(&db, async |mut tx| {
        DB::execute_on(&mut tx, EFFECT).await?;
        DB::execute_on(&mut tx, "CREATE TABLE staging (id BIGINT)").await?;
        DB::execute_on(&mut tx, "INSERT INTO staging VALUES (1)").await.map(drop)
    })
    .await;
    assert!(matches!(done, Err(RunError::Other(Error::Transaction(TransactionFault::Over { .. })))), "{done:?}");
    assert!(matches!(outcome, TickOutcome::Failed { .. }), "{outcome:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "F1"));
}

async fn a_lost_run_commits_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    // No renewal notices the loss.
    let schedules = instance(&db, "one").lease(100 * LEASE);
    let stolen = Arc::new(Semaphore::new(0));
    let wait = stolen.clone();
    let (schedules, mut done) = with(schedules, schedule, &db.pool_of(1).await, move |mut tx| {
        let (began, wait) = (began.clone(), wait.clone());
        async move {
            began.send(()).unwrap();
            wait.acquire().await.unwrap().forget();
            DB::execute_on(&mut tx, EFFECT).await.map(drop)
        }
    });
    let running = harness::spawn(async move { schedules.try_tick("k").await });
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    steal(&db, "k").await;
    stolen.add_permits(1);
    let done = timeout(PATIENCE, done.recv()).await.unwrap().unwrap();
    assert!(matches!(done, Err(RunError::Lost { .. })), "{done:?}");
    assert_eq!(timeout(PATIENCE, running).await.unwrap().unwrap().unwrap(), TickOutcome::Lost);
    assert_eq!((effects(&db).await, info(&db, "k").await.by.as_str()), (0, "thief"));
}

async fn a_tick_is_committed_once<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (schedule, pool) = (due(&db, "k").await, db.pool_of(1).await);
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let pool = pool.clone();
        async move {
            let effect = async |mut tx: Tx<DB>| DB::execute_on(&mut tx, EFFECT).await.map(drop);
            tick.transaction(&pool, effect).await?;
            let again = tick.transaction(&pool, effect).await;
            assert!(matches!(again, Err(RunError::Lost { .. })), "{again:?}");
            again
        }
    });
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// The work of the run has taken the only connection.
async fn a_transaction_waits_for_a_connection<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (schedule, pool) = (due(&db, "k").await, db.pool_of(1).await);
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let pool = pool.clone();
        async move {
            let taken = pool.acquire().await.unwrap();
            let given_back = async {
                sleep(5 * SHORT).await;
                drop(taken);
            };
            let effect = async |mut tx: Tx<DB>| DB::execute_on(&mut tx, EFFECT).await.map(drop);
            let done: Done = join!(tick.transaction(&pool, effect), given_back).0;
            done
        }
    });
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// The second transaction runs if the first one was rolled back, and is refused if that was
/// committed.
async fn transactions_at_once_follow_each_other<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    for commits in [true, false] {
        let name = format!("commits: {commits}");
        let (schedule, pool) = (due(&db, &name).await, db.pool_of(2).await);
        let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
            let pool = pool.clone();
            async move {
                let (begun, is_over) = (Semaphore::new(0), AtomicU32::new(0));
                let first = tick.transaction(&pool, async |mut tx: Tx<DB>| {
                    DB::execute_on(&mut tx, EFFECT).await?;
                    begun.add_permits(1);
                    sleep(5 * SHORT).await;
                    let beside = tick.finish_in(&mut tx).await;
                    assert!(matches!(beside, Err(Error::Conflict { .. })), "{beside:?}");
                    is_over.store(1, SeqCst);
                    if commits { Ok(()) } else { Err(sqlx::Error::RowNotFound) }
                });
                let second = async {
                    begun.acquire().await.unwrap().forget();
                    let effect = async |mut tx: Tx<DB>| {
                        assert_eq!(is_over.load(SeqCst), 1, "the second runs beside the first");
                        DB::execute_on(&mut tx, EFFECT).await.map(drop)
                    };
                    tick.transaction(&pool, effect).await
                };
                let (first, second): (Done, Done) = join!(first, second);
                if commits {
                    first.unwrap();
                    assert!(matches!(second, Err(RunError::Lost { .. })), "{second:?}");
                } else {
                    assert!(matches!(first, Err(RunError::Work(_))), "{first:?}");
                    second.unwrap();
                }
                Ok::<_, sqlx::Error>(())
            }
        });
        assert_eq!(schedules.try_tick(&name).await.unwrap(), TickOutcome::Succeeded, "{name}");
        assert_eq!(told(&db, &name).await, "S1", "{name}");
    }
    assert_eq!(effects(&db).await, 2);
}

/// The tick has succeeded. What became of the work is in the log.
async fn work_that_fails_after_its_commit_is_reported<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    for (end, error) in [("error", "error=\"no mail was sent\""), ("panic", "the work panicked")] {
        let name = format!("{end} on {}", db.server.name);
        let (schedule, pool) = (due(&db, &name).await, db.pool_of(1).await);
        let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
            let pool = pool.clone();
            async move {
                let effect = async |mut tx: Tx<DB>| DB::execute_on(&mut tx, EFFECT).await.map(drop);
                tick.transaction(&pool, effect).await.unwrap();
                assert!(end == "error", "panic");
                Err::<(), _>("no mail was sent".to_owned())
            }
        });
        // What `due` ran is in the log too.
        let logged = |text: &str| events::with(&name).iter().filter(|event| event.contains(text)).count();
        let before = logged(": run ");
        assert_eq!(schedules.try_tick(&name).await.unwrap(), TickOutcome::Succeeded, "{name}");
        assert_eq!(told(&db, &name).await, "S1", "{name}");
        assert_eq!((logged(error), logged(": run ") - before), (1, 1), "{:?}", events::with(&name));
    }
}

/// The run is stopped, and another one takes the tick over at once.
async fn a_run_that_is_dropped_within_its_transaction_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").lease(100 * LEASE);
    let (schedules, _done) = with(schedules, schedule.clone(), &db.pool_of(1).await, move |mut tx| {
        let began = began.clone();
        async move {
            DB::execute_on(&mut tx, EFFECT).await?;
            began.send(()).unwrap();
            std::future::pending().await
        }
    });
    let stop = async { timeout(PATIENCE, begun.recv()).await.unwrap().unwrap() };
    let outcome = timeout(2 * PATIENCE, schedules.try_tick_until("k", stop)).await.unwrap().unwrap();
    assert_eq!(outcome, TickOutcome::HandedBack);
    assert_eq!(effects(&db).await, 0);
    assert_eq!(idle(&db, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
}

/// The lease is renewed while the work runs, because the tick ends in the last statement.
async fn a_transaction_may_take_longer_than_the_lease<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let schedule = due(&db, "k").await;
    let (began, mut begun) = mpsc::unbounded_channel();
    let (finish, finished) = tokio::sync::watch::channel(false);
    let schedules = instance(&db, "one").lease(LEASE);
    let (schedules, mut done) = with(schedules, schedule, &db.pool_of(1).await, move |mut tx| {
        let (began, mut finished) = (began.clone(), finished.clone());
        async move {
            DB::execute_on(&mut tx, EFFECT).await?;
            began.send(()).unwrap();
            finished.wait_for(|finished| *finished).await.unwrap();
            Ok(())
        }
    });
    let running = harness::spawn(async move { schedules.try_tick("k").await });
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    let claimed = info(&db, "k").await.due;
    eventually("the lease of the claim is over", || async { info(&db, "k").await.now > claimed }).await;
    finish.send_replace(true);
    assert_eq!(timeout(PATIENCE, running).await.unwrap().unwrap().unwrap(), TickOutcome::Succeeded);
    assert!(done.recv().await.unwrap().is_ok());
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// Runs the tick `k` once, whose work begins a transaction of its own, and ends the tick in it
/// after `between`. The end has to be refused.
async fn is_refused<DB: TestDatabase, F>(
    db: &TestDb<DB>,
    name: &str,
    between: impl Fn(sqlx::Transaction<'static, DB>) -> F + Send + Sync + 'static,
) where
    F: Future<Output = sqlx::Transaction<'static, DB>> + Send + 'static,
{
    let (schedule, pool, between) = (due(db, name).await, db.pool_of(1).await, Arc::new(between));
    let schedules = instance(db, "one").on(schedule, move |tick: Tick<DB>| {
        let (pool, between) = (pool.clone(), between.clone());
        async move {
            let mut tx = between(pool.begin_with(DB::BEGIN).await.unwrap()).await;
            let refused = tick.finish_in(&mut tx).await;
            assert!(matches!(refused, Err(Error::Transaction(TransactionFault::Over { .. }))), "{refused:?}");
            // On a server that has ended the transaction, nothing is left to be rolled back.
            tx.rollback().await.ok();
            refused
        }
    });
    let outcome = timeout(2 * PATIENCE, schedules.try_tick(name)).await.expect("it ends").unwrap();
    let TickOutcome::Failed { error, .. } = &outcome else { panic!("{name}: {outcome:?}") };
    assert!(error.contains("ended before its commit"), "{name}: {error}");
    assert_eq!(told(db, name).await, "F1", "{name}");
}

async fn an_own_transaction_that_has_ended_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    for (number, &(ending, _)) in endings(db.server.name).iter().enumerate() {
        is_refused(&db, &format!("k{number}"), async move |mut tx| {
            DB::execute_on(&mut tx, ending).await.ok();
            tx
        })
        .await;
    }
}

/// The effect is undone by the deadlock, and the work repeats the statement that met it.
async fn a_deadlock_within_an_own_transaction_makes_no_success<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    accounts(&db).await;
    let other = Arc::new(db.over(db.pool.clone()));
    is_refused(&db, "k", move |mut tx| {
        let other = other.clone();
        async move {
            DB::execute_on(&mut tx, EFFECT).await.unwrap();
            write_in::<DB>(&mut tx, ACCOUNT, 1).await.unwrap();
            deadlock(&other, &mut tx, ACCOUNT).await;
            write_in::<DB>(&mut tx, "other", 2).await.unwrap();
            tx
        }
    })
    .await;
    assert_eq!(effects(&db).await, 0);
}

/// A renewal finds that the claim has ended. Only a run that has not succeeded is lost.
async fn work_that_goes_on_after_its_commit_is_no_loss<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let lease = LEASE / 3;
    for (end, lost) in [("sleeps", 0), ("blocks", 0), ("is replaced", 1)] {
        let (name, db) = (format!("{end} on {}", db.server.name), Arc::new(db.over(db.pool.clone())));
        let (schedule, pool, theirs) = (due(&db, &name).await, db.pool_of(1).await, db.clone());
        let schedules = instance(&db, "one").lease(lease).on(schedule, move |tick: Tick<DB>| {
            let (pool, db) = (pool.clone(), theirs.clone());
            async move {
                if end == "is replaced" {
                    steal(&db, tick.name()).await;
                } else {
                    let effect = async |mut tx: Tx<DB>| DB::execute_on(&mut tx, EFFECT).await.map(drop);
                    tick.transaction(&pool, effect).await.unwrap();
                }
                match end {
                    "blocks" => block_in_place(|| std::thread::sleep(2 * lease)),
                    _ => sleep(2 * lease).await,
                }
                Ok::<_, String>(())
            }
        });
        let outcome = schedules.try_tick(&name).await.unwrap();
        assert_eq!(outcome == TickOutcome::Succeeded, lost == 0, "{name}: {outcome:?}");
        let told = || events::with(&name).iter().filter(|event| event.contains("the run was lost")).count();
        eventually("it is told", || async { told() >= lost }).await;
        // Events of the background come a moment later.
        sleep(SHORT).await;
        assert_eq!(told(), lost, "{:?}", events::with(&name));
    }
}
