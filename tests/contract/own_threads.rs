//! No lease and no call depends on a runtime of the application: it may be blocked, paused, driven
//! by turns, shut down, or missing.

use std::{
    convert::Infallible,
    future::{Future, pending, poll_fn},
    panic::resume_unwind,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::{
    Error, LeaseLock, Reason, Schedule, Schedules, Status, Tick, VersionedTable, admin::ListOptions, jobs::TickOutcome,
};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    join,
    runtime::{Builder, Runtime},
    sync::{Notify, oneshot},
    time::{sleep, timeout},
};

use crate::{
    fair::KEPT,
    ledger::{COLUMNS, ledger, row},
    ticks::{due, info, instance, told},
    waiters::places,
};

harness::tests!(
    servers(a_wait_ends_while_the_request_of_another_has_no_reply, a_waiter_keeps_its_place_without_its_runtime),
    everywhere(
        work_that_blocks_its_thread_keeps_its_lease,
        a_run_that_blocks_the_only_worker_is_run_once,
        leases_go_on_without_their_runtimes,
        a_lease_that_is_dropped_without_its_runtime_is_abandoned,
        a_loss_is_told_without_the_runtime_of_its_lease,
        calls_work_outside_of_a_runtime,
        a_transaction_is_dropped_outside_of_a_runtime,
        a_wait_that_was_refused_goes_on_unpolled,
        a_call_that_is_not_polled_again_holds_up_no_other,
        calls_work_while_the_clock_of_the_runtime_is_paused,
        a_tick_is_run_while_the_clock_of_the_runtime_is_paused
    )
);

/// Long enough for a busy machine to renew it.
const LEASE: Duration = Duration::from_secs(2);
const WORK: Duration = Duration::from_secs(5);

/// Acts on a thread that belongs to no runtime.
pub fn on_a_thread<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> impl Future<Output = T> {
    let (reply, result) = oneshot::channel();
    let acting = thread::spawn(move || drop(reply.send(act())));
    async move {
        match timeout(2 * PATIENCE, result).await.expect("it ends") {
            Ok(result) => result,
            Err(_) => resume_unwind(acting.join().expect_err("it has a panic")),
        }
    }
}

fn single_threaded() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Drives a future on this thread, as an executor does that has neither timers nor I/O.
fn parked<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(thread::current())).into();
    let (mut context, mut future) = (Context::from_waker(&waker), pin!(future));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => return result,
            Poll::Pending => thread::park(),
        }
    }
}

async fn work_that_blocks_its_thread_keeps_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let (url, (began, begun)) = (db.url.clone(), oneshot::channel());
    let worked = Arc::new(AtomicBool::new(false));
    let (has_worked, (release, released)) = (worked.clone(), mpsc::channel());
    let working = on_a_thread(move || {
        single_threaded().block_on(async move {
            let lock = LeaseLock::new(harness::pool::<DB>(&url, 2).await).lease(LEASE);
            let lease = acquired(lock.try_acquire("k").await);
            began.send(lease.token()).unwrap();
            thread::sleep(WORK);
            has_worked.store(true, SeqCst);
            released.recv().unwrap();
            assert!(lease.is_held());
            lease.release().await.unwrap();
        });
    });
    let token = timeout(PATIENCE, begun).await.unwrap().unwrap();
    let other = db.lock();
    while !worked.load(SeqCst) {
        refused(other.try_acquire("k").await);
        assert_eq!(other.inspect("k").await.unwrap().unwrap().token, token);
        sleep(LEASE / 40).await;
    }
    release.send(()).unwrap();
    working.await;
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
    assert_eq!(other.inspect("k").await.unwrap().unwrap().token, token);
}

/// One poll claims all ticks. The run of each blocks the worker for longer than the lease, before
/// the other runs begin.
async fn a_run_that_blocks_the_only_worker_is_run_once<DB: TestDatabase>(db: TestDb<DB>) {
    const NAMES: [&str; 4] = ["k1", "k2", "k3", "k4"];
    let url = db.url.clone();
    let (mut theirs, mut other) = (Vec::new(), instance(&db, "other"));
    for name in NAMES {
        theirs.push(due(&db, name).await);
        other = other.on(theirs[theirs.len() - 1].clone(), async |_| Err::<(), _>("it is claimed already"));
    }
    let ((began, begun), (stop, stopped)) = (mpsc::channel(), oneshot::channel::<()>());
    let worked = Arc::new(AtomicUsize::new(0));
    let has_worked = worked.clone();
    let working = on_a_thread(move || {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async move {
            let mut schedules = Schedules::new(harness::pool::<DB>(&url, 2).await).lease(LEASE);
            for schedule in theirs {
                let (began, has_worked) = (began.clone(), has_worked.clone());
                schedules = schedules.on(schedule, move |tick: Tick<DB>| {
                    let (began, has_worked) = (began.clone(), has_worked.clone());
                    async move {
                        began.send(tick.name().to_owned()).unwrap();
                        thread::sleep(LEASE * 3 / 2);
                        has_worked.fetch_add(1, SeqCst);
                        Ok::<_, Infallible>(())
                    }
                });
            }
            drop(began);
            let running = schedules.start().await.unwrap();
            stopped.await.unwrap();
            running.shutdown(PATIENCE).await
        })
    });
    for name in NAMES {
        eventually("it is claimed", || async { info(&db, name).await.running }).await;
    }
    while worked.load(SeqCst) < NAMES.len() {
        for name in NAMES {
            let outcome = other.try_tick(name).await.unwrap();
            assert!(matches!(outcome, TickOutcome::NotDue { .. }), "{name}: {outcome:?}");
        }
        sleep(LEASE / 40).await;
    }
    stop.send(()).unwrap();
    assert!(working.await, "it is shut down");
    for name in NAMES {
        assert_eq!(told(&db, name).await, "S1", "{name}");
    }
    let mut begun: Vec<_> = begun.iter().collect();
    begun.sort_unstable();
    assert_eq!(begun, NAMES);
}

async fn until<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> Option<DateTime<Utc>> {
    db.lock().inspect(key).await.unwrap().unwrap().until
}

async fn leases_go_on_without_their_runtimes<DB: TestDatabase>(db: TestDb<DB>) {
    const KEYS: [&str; 3] = ["shut down", "not driven", "driven for each call"];
    let url = db.url.clone();
    let (leases, runtimes) = on_a_thread(move || {
        let first = single_threaded();
        let pool = first.block_on(harness::pool::<DB>(&url, 2));
        let lock = LeaseLock::new(pool).lease(LEASE);
        let runtimes = KEYS.map(|_| single_threaded());
        let leases = KEYS.iter().zip(&runtimes).map(|(key, runtime)| acquired(runtime.block_on(lock.try_acquire(key))));
        let leases: Vec<_> = leases.collect();
        let [shut_down, still, by_calls] = runtimes;
        shut_down.shutdown_background();
        first.shutdown_background();
        (leases, (still, by_calls))
    })
    .await;
    for _ in 0..2 {
        for lease in &leases {
            let before = until(&db, lease.key().as_str()).await;
            eventually("it is renewed", async || until(&db, lease.key().as_str()).await > before).await;
            assert!(lease.is_held(), "{}", lease.key());
        }
    }
    let [shut_down, still, by_calls] = <[_; 3]>::try_from(leases).unwrap();
    on_a_thread(move || {
        runtimes.1.block_on(by_calls.renew()).unwrap();
        runtimes.1.block_on(by_calls.release()).unwrap();
        // Of other runtimes.
        runtimes.1.block_on(shut_down.release()).unwrap();
        runtimes.1.block_on(still.fail()).unwrap();
        drop(runtimes);
    })
    .await;
    for (key, status) in KEYS.iter().zip(["S", "F", "S"]) {
        assert_eq!(db.column(key, "status").await.as_deref(), Some(status), "{key}");
    }
}

/// Long before the lease would end by itself.
async fn a_lease_that_is_dropped_without_its_runtime_is_abandoned<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(30 * PATIENCE);
    let other = db.lock();
    let (shut_down, still, theirs) = on_a_thread(move || {
        let (shut_down, still) = (single_threaded(), single_threaded());
        let leases = (
            acquired(shut_down.block_on(lock.try_acquire("shut down"))),
            acquired(still.block_on(lock.try_acquire("not driven"))),
        );
        shut_down.shutdown_background();
        (leases.0, leases.1, still)
    })
    .await;
    let keys = ["shut down", "not driven"];
    for key in keys {
        assert_eq!(refused(other.try_acquire(key).await).reason, Reason::Held);
    }
    // Outside of any runtime.
    on_a_thread(move || drop((shut_down, still))).await;
    for key in keys {
        let lease = acquired(timeout(PATIENCE, other.acquire(key, Duration::MAX)).await.expect("it is abandoned"));
        assert!(lease.taken_over_from().is_some());
    }
    theirs.shutdown_background();
}

/// The clock detects it, because the closed pool prevents renewals.
async fn a_loss_is_told_without_the_runtime_of_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let url = db.url.clone();
    let (lease, pool, still) = on_a_thread(move || {
        let still = single_threaded();
        let pool = still.block_on(harness::pool::<DB>(&url, 1));
        let lease = acquired(still.block_on(LeaseLock::new(pool.clone()).lease(LEASE).try_acquire("k")));
        (lease, pool, still)
    })
    .await;
    let token = lease.cancellation_token();
    // The future would wait for the connections that the other runtime has.
    drop(pool.close());
    timeout(PATIENCE, lease.lost()).await.expect("it is lost when its time is up");
    assert!(token.is_cancelled() && !lease.is_held());
    still.shutdown_background();
}

/// It waits for longer than a ticket lives without heartbeats. A waiter that has given up leaves
/// its place.
async fn a_waiter_keeps_its_place_without_its_runtime<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let lock = db.lock().fair(true);
    let (still, waiting) = on_a_thread(move || {
        let (still, kept) = (single_threaded(), lock.clone());
        let mut waiting = Box::pin(async move { kept.acquire("k", Duration::MAX).await });
        let waited = still.block_on(async { join!(timeout(LEASE, &mut waiting), lock.acquire("k", LEASE / 2)) });
        assert!(waited.0.is_err(), "it waits");
        refused(waited.1);
        (still, waiting)
    })
    .await;
    eventually("the other place is given up", async || places(&db).await == 1).await;
    let place = async || db.number("SELECT MAX(ticket) FROM t_resource_lock_queue").await;
    let before = place().await;
    sleep(KEPT + LEASE).await;
    // Without heartbeats, another waiter would not wait for it, and delete its ticket.
    assert_eq!(refused(db.lock().fair(true).try_acquire("k").await).reason, Reason::Queued);
    assert_eq!(place().await, before);
    holder.release().await.unwrap();
    eventually("its turn comes", async || until(&db, "k").await.is_some()).await;
    on_a_thread(move || drop(acquired(still.block_on(waiting)))).await;
    eventually("the queue is empty", async || places(&db).await == 0).await;
}

async fn calls_work_outside_of_a_runtime<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let (lock, pool) = (db.lock_for(LEASE).lock_delay(Duration::ZERO), db.pool.clone());
    on_a_thread(move || parked(calls(&lock, &pool))).await;
    assert_eq!(row(&db).await.0, 101);
    // Jobs run on the runtime of their caller.
    let schedules = Schedules::new(db.pool.clone());
    let error = on_a_thread(move || parked(schedules.start()).map(drop).unwrap_err()).await;
    assert!(matches!(&error, Error::Invalid(wrong) if wrong.to_string().contains("tokio runtime")), "{error}");
}

/// The pool opens another connection in place of the one that is closed.
async fn a_transaction_is_dropped_outside_of_a_runtime<DB: TestDatabase>(db: TestDb<DB>) {
    let options = PoolOptions::<DB>::new().min_connections(1).max_connections(2);
    let lock = LeaseLock::new(options.connect(&db.url).await.unwrap()).lease(LEASE);
    on_a_thread(move || {
        let begun = AtomicBool::new(false);
        let mut paying = Box::pin(lock.transaction("k", async |_tx| {
            begun.store(true, SeqCst);
            pending::<Result<(), Infallible>>().await
        }));
        parked(poll_fn(|context| {
            assert!(paying.as_mut().poll(context).is_pending());
            if begun.load(SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        }));
        drop(paying);
    })
    .await;
    eventually("it is abandoned", async || {
        db.lock().try_acquire("k").await.is_ok_and(|attempt| attempt.acquired().is_some())
    })
    .await;
}

/// A clock that is paused is advanced to the next timer as soon as the runtime is idle.
async fn calls_work_while_the_clock_of_the_runtime_is_paused<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let (lock, pool) = (db.lock_for(LEASE).lock_delay(Duration::ZERO), db.pool.clone());
    on_a_thread(move || paused().block_on(calls(&lock, &pool))).await;
    assert_eq!(row(&db).await.0, 101);
}

fn paused() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Makes each kind of call.
async fn calls<DB: TestDatabase>(lock: &LeaseLock<DB>, pool: &Pool<DB>) {
    const WAIT: Duration = Duration::from_secs(1);
    let lease = acquired(lock.try_acquire("k").await);
    lease.renew().await.unwrap();
    let since = Instant::now();
    assert_eq!(refused(lock.acquire("k", WAIT).await).reason, Reason::Held);
    assert!(since.elapsed() >= WAIT, "{:?}", since.elapsed());
    assert_eq!(lock.inspect("k").await.unwrap().unwrap().holder, Some(lease.claim().holder));
    let releasing = thread::spawn(move || {
        thread::sleep(WAIT);
        parked(lease.release())
    });
    acquired(lock.acquire("k", PATIENCE).await).abandon().await.unwrap();
    releasing.join().unwrap().unwrap();
    acquired(lock.acquire_all(["first", "second"], PATIENCE).await).release().await.unwrap();
    let (semaphore, of_readers) = (lock.semaphore("permits", 1), lock.read_write("read"));
    let permit = acquired(semaphore.try_acquire().await);
    refused(semaphore.acquire(WAIT).await);
    permit.release().await.unwrap();
    acquired(of_readers.readers().acquire(PATIENCE).await).release().await.unwrap();
    acquired(of_readers.writer().acquire(PATIENCE).await).release().await.unwrap();
    let deposit = "UPDATE account SET balance = balance + 1, version = version + 1 WHERE id = 'a'";
    let paid = lock.transaction("k", async |mut tx| DB::execute_on(&mut tx, deposit).await.map(drop)).await;
    paid.unwrap_or_else(|error| panic!("{error:?}"));
    let table = VersionedTable::<DB>::new(pool.clone(), COLUMNS);
    table.deposit("a", 2).await.unwrap();
    table.deduct("a", 2).await.unwrap();
    drop(acquired(lock.try_acquire("dropped").await));
    assert!(lock.shutdown(PATIENCE).await);
    assert!(acquired(lock.try_acquire("dropped").await).taken_over_from().is_some());
    let held = lock.list(&ListOptions::default().claimed()).await.unwrap();
    assert!(held.iter().all(|row| row.key == "dropped"), "{held:?}");
}

async fn a_tick_is_run_while_the_clock_of_the_runtime_is_paused<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let schedules = instance(&db, "paused").lease(LEASE).on(schedule, async |_| {
        thread::sleep(LEASE / 2); // no runtime's timer
        Ok::<_, Infallible>(())
    });
    let outcome = on_a_thread(move || paused().block_on(schedules.try_tick("k"))).await;
    assert_eq!(outcome.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

async fn a_wait_that_was_refused_goes_on_unpolled<DB: TestDatabase>(db: TestDb<DB>) {
    #[derive(Default)]
    struct Woken(Notify);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.notify_one();
        }
    }
    let holder = acquired(db.lock().try_acquire("k").await);
    let (lock, token) = (db.lock(), holder.token());
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    let (mut unpolled, woken) = (Box::pin(lock.acquire("k", 2 * PATIENCE)), Arc::new(Woken::default()));
    let waker = woken.clone().into();
    let mut poll = || assert!(unpolled.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    poll();
    // The refusal may have come within the first poll. Otherwise it wakes the task.
    let _ = timeout(PATIENCE / 2, woken.0.notified()).await;
    poll();
    let behind = harness::spawn({
        let lock = lock.clone();
        async move { lock.acquire("k", 2 * PATIENCE).await }
    });
    holder.release().await.unwrap();
    eventually("it is granted the key", async || {
        let entry = db.lock().inspect("k").await.unwrap().unwrap();
        entry.holder.is_some() && entry.token > token
    })
    .await;
    assert!(!behind.is_finished(), "the first one has it");
    drop(unpolled);
    acquired(timeout(PATIENCE, behind).await.expect("it is its turn").unwrap()).release().await.unwrap();
}

/// Each call is the first one of its lock, which reads what columns the table has.
async fn a_call_that_is_not_polled_again_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let reader = acquired(db.lock().read_write("read").readers().try_acquire().await);
    for turn in 0..6 {
        // A pool of its own has sessions of its own.
        let pool = db.pool_of(2).await;
        let lock = LeaseLock::<DB>::new(pool.clone());
        let schedules = Schedules::<DB>::new(pool).lock(lock.clone());
        let schedules =
            schedules.on(Schedule::cron("k", "0 0 1 1 *").exclusive_with("k"), async |_| Ok::<_, Infallible>(()));
        let key = format!("k{turn}");
        let call: std::pin::Pin<Box<dyn Future<Output = ()> + Send + '_>> = match turn {
            0 => Box::pin(async { drop(lock.inspect("k").await) }),
            1 => Box::pin(async { drop(lock.force_release("k", Status::Failed).await) }),
            2 => Box::pin(async { drop(lock.election("k").observe().next().await) }),
            3 => Box::pin(async { drop(lock.list(&ListOptions::default()).await) }),
            4 => Box::pin(async { drop(lock.read_write("read").try_upgrade(&reader).await) }),
            _ => Box::pin(async { drop(schedules.start().await) }),
        };
        let mut call = call;
        tokio::select! {
            biased;
            () = &mut call => {}
            () = std::future::ready(()) => {}
        }
        acquired(lock.try_acquire(&key).await).release().await.unwrap();
        call.await;
    }
}

async fn a_wait_ends_while_the_request_of_another_has_no_reply<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let proxy = db.proxy().await;
    let lock = LeaseLock::builder(proxy.pool::<DB>(2)).time_limit(2 * PATIENCE).build().unwrap();
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    let first = harness::spawn({
        let lock = lock.clone();
        async move { lock.acquire("k", 2 * PATIENCE).await }
    });
    // It is refused, and asks again.
    let requests = proxy.seen(Way::Requests);
    eventually("it asks", async || proxy.seen(Way::Requests) > requests).await;
    proxy.hold(Way::Replies);
    proxy.held(Way::Replies).await;
    for _ in 0..5 {
        let behind = lock.acquire("k", Duration::from_millis(100));
        let behind = timeout(PATIENCE, behind).await.expect("it ends");
        assert!(behind.is_err(), "{behind:?}");
    }
    proxy.open();
    holder.release().await.unwrap();
    acquired(first.await.unwrap()).release().await.unwrap();
}
