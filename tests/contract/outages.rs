//! A wait survives an outage. Temporary errors are waited out; permanent errors end the wait at
//! once.

use std::time::Duration;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, events, eventually, pool, proxy::Way};
use rowlock::{
    Error, Lease, LeaseLock, Reason,
    errors::{Certainty, DatabaseFault, Setup},
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    line::{self, Line},
    waiters::places,
};

harness::tests!(
    everywhere(
        a_wait_outlives_a_transaction_that_is_longer_than_the_time_limit,
        what_does_not_pass_by_itself_ends_a_wait
    ),
    servers(
        a_wait_outlives_an_outage,
        a_wait_outlives_an_outage_that_was_there_before_it,
        a_grant_whose_reply_is_lost_in_an_outage_is_found_after_it,
        a_wait_that_ends_in_an_outage_tells_what_is_known,
        a_waiter_whose_turn_comes_in_an_outage_is_not_refused
    ),
    mysql_and_mariadb(a_wait_that_ends_in_silence_is_no_refusal),
    postgres[DIRECT](a_wait_outlives_a_limit_to_statements),
    sqlite(a_wait_outlives_a_full_disk)
);

/// Long enough for a busy machine to open a session.
const LIMIT: Duration = Duration::from_secs(1);
/// How long an outage lasts: several time limits.
const OUTAGE: Duration = Duration::from_millis(3500);

fn waiting<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str, wait: Duration) -> JoinHandle<Result<Lease<DB>, Error>> {
    let (lock, key) = (lock.clone(), key.to_owned());
    harness::spawn(async move { lock.acquire(&key, wait).await })
}

#[track_caller]
fn has_not_given_up<T: std::fmt::Debug>(task: &mut JoinHandle<T>) {
    assert!(!task.is_finished(), "it has given up");
}

async fn refused_once(key: &str) {
    eventually("it asks", || async { events::about(key).iter().any(|line| line.contains(": refused ")) }).await;
}

async fn a_wait_outlives_an_outage<DB: TestDatabase>(db: TestDb<DB>) {
    for fair in [false, true] {
        let key = format!("outlives {fair} on {}", db.server.name);
        let holder = acquired(db.lock().try_acquire(&key).await);
        let proxy = db.proxy().await;
        let lock = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(LIMIT).build().unwrap().fair(fair);
        // The order of the two waiters is unspecified. Each releases the key itself.
        let mut tasks = [0, 1].map(|_| {
            let waiting = waiting(&lock, &key, Duration::MAX);
            harness::spawn(async move { acquired(waiting.await.unwrap()).release().await })
        });
        refused_once(&key).await;
        if fair {
            // A ticket whose creation gets no reply would block its own waiter until the ticket
            // lapses.
            eventually("both have their places", || async { places(&db).await == 2 }).await;
        }
        proxy.hold_everything();
        sleep(OUTAGE).await;
        tasks.iter_mut().for_each(has_not_given_up);
        holder.release().await.unwrap();
        proxy.cut();
        for task in tasks {
            timeout(PATIENCE, task).await.expect("it is granted").unwrap().unwrap();
        }
    }
}

async fn a_wait_outlives_an_outage_that_was_there_before_it<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(LIMIT).build().unwrap();
    proxy.hold_everything();
    let since = Instant::now();
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(error.is_retryable() && since.elapsed() < PATIENCE / 4, "one try is bounded: {error}");
    let mut task = waiting(&lock, "k", Duration::MAX);
    sleep(OUTAGE).await;
    has_not_given_up(&mut task);
    proxy.cut();
    acquired(timeout(PATIENCE, task).await.unwrap().unwrap()).release().await.unwrap();
}

/// The server grants the claim, and the reply never arrives. No other client could acquire the key
/// for an hour.
async fn a_grant_whose_reply_is_lost_in_an_outage_is_found_after_it<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, Duration::from_secs(3600), LIMIT).await;
    line.proxy.hold(Way::Replies);
    let mut task = waiting(&line.lock, "k", Duration::MAX);
    line.proxy.held(Way::Replies).await;
    eventually("it is granted", || async { db.column("k", "status").await.as_deref() == Some("P") }).await;
    sleep(OUTAGE).await;
    has_not_given_up(&mut task);
    line.proxy.cut();
    let lease = acquired(timeout(PATIENCE, task).await.expect("it is its own").unwrap());
    assert_eq!(
        db.number("SELECT token FROM t_resource_lock WHERE key_resource = 'k'").await,
        Some(lease.token().get())
    );
    lease.release().await.unwrap();
}

async fn a_wait_that_ends_in_an_outage_tells_what_is_known<DB: TestDatabase>(db: TestDb<DB>) {
    // Long enough for a busy machine to send a claim, and shorter than a pause plus a claim that
    // times out.
    let limit = Duration::from_secs(1);
    let wait = 5 * limit;
    let key = format!("ends in an outage on {}", db.server.name);
    let holder = acquired(db.lock().try_acquire(&key).await);
    let line = Line::with_free_row(&db, Duration::from_secs(3600), limit).await;
    // The request was refused before the outage. A claim that was sent since then may have been
    // granted.
    let since = Instant::now();
    let task = waiting(&line.lock, &key, wait);
    refused_once(&key).await;
    line.proxy.hold_everything();
    match task.await.unwrap() {
        // On PostgreSQL the request for a notification may have been the last that was sent.
        Err(Error::Refused(refusal)) if db.server.name == "postgres" => assert_eq!(refusal.reason, Reason::Held),
        result => line::timed_out(result),
    }
    assert!(since.elapsed() >= wait && since.elapsed() < wait + PATIENCE / 4, "{:?}", since.elapsed());
    line.proxy.cut();
    eventually("it is back", || async { line.lock.inspect("k").await.is_ok() }).await;
    // The pool pings a connection that is returned.
    eventually("the connection is idle", || async { line.pool.num_idle() == 1 }).await;
    // A claim was sent, and none before it.
    line.proxy.hold(Way::Replies);
    let error = line.lock.acquire("k", wait).await.unwrap_err();
    let unknown = matches!(
        &error,
        Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })
            | Error::Database(DatabaseFault::NoConnection { outcome: Certainty::Unknown, .. })
    );
    assert!(unknown, "{error:?}");
    line.proxy.open();
    holder.release().await.unwrap();
}

/// The refusals of the holder in the same process ended with its lease. No connection can be opened
/// after that.
async fn a_waiter_whose_turn_comes_in_an_outage_is_not_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let line = Line::with_free_row(&db, line::SHORT, PATIENCE).await;
    let holder = acquired(line.lock.acquire("k", PATIENCE).await);
    let wait = 4 * line::SHORT;
    let mut waiter = waiting(&line.lock, "k", wait);
    sleep(LIMIT).await;
    has_not_given_up(&mut waiter);
    line.proxy.cut();
    line.proxy.hold_new();
    holder.lost().await;
    let ended = timeout(PATIENCE, waiter).await.expect("the wait ends").unwrap();
    let Err(
        Error::Database(DatabaseFault::NoConnection { outcome: Certainty::NothingChanged, limit, .. })
        | Error::Database(DatabaseFault::TimedOut { outcome: Certainty::NothingChanged, limit, .. }),
    ) = ended
    else {
        panic!("{ended:?}");
    };
    assert_eq!(limit, wait);
}

/// No claim has been sent for as long as the time limit when the wait ends.
async fn a_wait_that_ends_in_silence_is_no_refusal<DB: TestDatabase>(db: TestDb<DB>) {
    let key = format!("silence on {}", db.server.name);
    let holder = acquired(db.lock().try_acquire(&key).await);
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(2)).build().unwrap();
    let task = waiting(&lock, &key, Duration::from_secs(5));
    refused_once(&key).await;
    proxy.hold_everything();
    line::timed_out(task.await.unwrap());
    proxy.cut();
    holder.release().await.unwrap();
}

/// The wait is blocked by an uncommitted insert of another transaction. On SQLite the other
/// transaction blocks the whole file.
async fn a_wait_outlives_a_transaction_that_is_longer_than_the_time_limit<DB: TestDatabase>(db: TestDb<DB>) {
    // A creation that timed out may still arrive late, so each round uses a key of its own.
    for (key, fair) in [("k", false), ("l", true)] {
        let mut other = db.pool_of(1).await.acquire().await.unwrap();
        DB::execute_on(&mut other, DB::BEGIN).await.unwrap();
        let insert = format!("INSERT INTO t_resource_lock (key_resource) VALUES ('{key}')");
        DB::execute_on(&mut other, &insert).await.unwrap();
        let lock = db.builder().time_limit(LIMIT).build().unwrap().fair(fair);
        let mut task = waiting(&lock, key, Duration::MAX);
        sleep(OUTAGE).await;
        has_not_given_up(&mut task);
        DB::execute_on(&mut other, "ROLLBACK").await.unwrap();
        acquired(timeout(PATIENCE, task).await.unwrap().unwrap()).release().await.unwrap();
    }
}

/// The server ends each claim after 100 ms, while another transaction has the whole table locked.
async fn a_wait_outlives_a_limit_to_statements<DB: TestDatabase>(db: TestDb<DB>) {
    let limited = pool::<DB>(&format!("{}?options[statement_timeout]=100ms", db.url), 2).await;
    // Sessions of the library's own have no such limit.
    let lock = LeaseLock::builder(limited).share_pool().build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut other, "BEGIN; LOCK TABLE t_resource_lock").await.unwrap();
    let error = lock.try_acquire("k").await.unwrap_err();
    let undone = matches!(&error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. }));
    assert!(undone && error.is_retryable(), "{error:?}");
    let mut task = waiting(&lock, "k", Duration::MAX);
    sleep(OUTAGE).await;
    has_not_given_up(&mut task);
    DB::execute_on(&mut other, "COMMIT").await.unwrap();
    acquired(timeout(PATIENCE, task).await.unwrap().unwrap()).release().await.unwrap();
}

/// The file has reached the size that its connections allow. A new key needs another page.
async fn a_wait_outlives_a_full_disk<DB: TestDatabase>(db: TestDb<DB>) {
    let only = db.pool_of(1).await;
    let lock = LeaseLock::new(only.clone());
    acquired(lock.try_acquire("known").await).release().await.unwrap();
    DB::execute(&only, "PRAGMA max_page_count = 1").await.unwrap(); // as many as there are
    let error = loop {
        let key = format!("{:0>200}", fastrand::u64(..));
        match lock.try_acquire(&key).await {
            Ok(claim) => acquired(Ok::<_, Error>(claim)).release().await.unwrap(),
            Err(error) => break error,
        }
    };
    let undone = matches!(&error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. }));
    assert!(undone && error.is_retryable(), "{error:?}");
    let mut task = waiting(&lock, &"n".repeat(200), Duration::MAX);
    sleep(OUTAGE).await;
    has_not_given_up(&mut task);
    DB::execute(&only, "PRAGMA max_page_count = 1000000").await.unwrap();
    acquired(timeout(PATIENCE, task).await.unwrap().unwrap()).release().await.unwrap();
}

async fn what_does_not_pass_by_itself_ends_a_wait<DB: TestDatabase>(db: TestDb<DB>) {
    let key = format!("hopeless on {}", db.server.name);
    let holder = acquired(db.lock().try_acquire(&key).await);
    let pool = db.pool_of(1).await;
    let task = waiting(&LeaseLock::new(pool.clone()), &key, Duration::MAX);
    refused_once(&key).await;
    pool.close().await;
    let error = timeout(PATIENCE, task).await.expect("a closed pool ends it").unwrap().unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::Failed { .. })) && !error.is_retryable(), "{error:?}");
    let task = waiting(&LeaseLock::new(db.pool_of(1).await), &key, Duration::MAX);
    db.execute("DROP TABLE t_resource_lock").await;
    let error = timeout(PATIENCE, task).await.expect("a missing table ends it").unwrap().unwrap_err();
    assert!(matches!(error, Error::Setup(Setup::TableMissing)), "{error:?}");
    drop(holder);
}
