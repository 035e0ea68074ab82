//! Notifications of releases on PostgreSQL: which locks listen, and for how long. No waiter relies
//! on them.

use std::time::Duration;

use harness::{
    Need, PATIENCE, SESSION, TestDatabase, TestDb, acquired, database_of, direct_url, eventually, pool, pools_sessions,
    proxy::Way, refused, with_database,
};
use rowlock::{Lease, LeaseLock};
use sqlx::postgres::PgListener;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

/// A pooler in transaction mode before the server.
const POOLER: Need =
    Need { what: "a pooler in transaction mode", is_met: |_| direct_url().is_some() && !pools_sessions() };

harness::tests!(
    postgres[SESSION](
        a_lock_object_listens_on_one_connection_while_a_task_waits,
        a_connection_that_listens_is_kept_for_the_next_who_waits,
        a_listener_that_is_terminated_hangs_no_waiter_and_comes_back,
        a_listener_that_receives_nothing_any_more_hangs_no_waiter,
        a_listener_that_never_opens_hangs_no_waiter,
        a_release_is_notified_once_if_awaited_and_never_otherwise,
        a_row_that_a_transaction_has_locked_is_requested_with_pauses
    ),
    postgres[SESSION].alone(a_notification_of_a_release_precedes_the_next_request),
    postgres[POOLER](behind_a_pooler_no_connection_listens_or_is_disturbed)
);

/// How long the connection is kept open for the next waiter.
const LINGER: Duration = Duration::from_secs(5);
/// A waiter polls once a second without notifications. The rest is what a slow machine may take in
/// addition.
const BOUND: Duration = Duration::from_secs(4);

const LISTENERS: &str = "FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";

async fn listeners<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    db.number(&format!("SELECT COUNT(*) {LISTENERS}")).await.unwrap()
}

/// Returns the only listener's process on the server.
async fn listener<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    eventually("one listens", || async { listeners(db).await == 1 }).await;
    db.number(&format!("SELECT pid {LISTENERS}")).await.unwrap()
}

/// Waits until the row is marked, which makes the holder's release send a notification.
async fn awaited<DB: TestDatabase>(db: &TestDb<DB>, key: &str) {
    let sql = format!("SELECT COUNT(*) FROM t_resource_lock WHERE awaited AND key_resource = '{key}'");
    eventually("the row says that a task waits", || async { db.number(&sql).await == Some(1) }).await;
}

/// Starts a waiter. The task returns its lease and the time of the grant.
fn waiting<DB: TestDatabase>(lock: &LeaseLock<DB>, key: &str) -> JoinHandle<(Lease<DB>, Instant)> {
    let (lock, key) = (lock.clone(), key.to_owned());
    harness::spawn(async move { (acquired(lock.acquire(&key, Duration::MAX).await), Instant::now()) })
}

/// Releases the key. Returns the next lease, and how long it took until the next waiter was granted
/// the key.
async fn handed_over<DB: TestDatabase>(
    holder: Lease<DB>,
    next: JoinHandle<(Lease<DB>, Instant)>,
) -> (Lease<DB>, Duration) {
    let freed = Instant::now();
    holder.release().await.unwrap();
    let (lease, granted) = timeout(PATIENCE, next).await.expect("it is granted its key").unwrap();
    (lease, granted - freed)
}

async fn a_lock_object_listens_on_one_connection_while_a_task_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    for _ in 0..3 {
        acquired(lock.acquire("k", PATIENCE).await).release().await.unwrap();
    }
    let holders = [acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await)];
    refused(lock.try_acquire("k").await);
    assert_eq!(listeners(&db).await, 0, "no task has waited");
    let (one, two) = (LeaseLock::new(db.pool_of(1).await), LeaseLock::new(db.pool_of(1).await));
    let all = [waiting(&one, "k"), waiting(&one.clone(), "k"), waiting(&one, "l"), waiting(&two, "k")];
    eventually("both listen", || async { listeners(&db).await == 2 }).await;
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        assert_eq!(listeners(&db).await, 2);
    }
    all.iter().for_each(JoinHandle::abort);
    let gone = Instant::now();
    while listeners(&db).await > 0 {
        assert!(gone.elapsed() < LINGER + BOUND);
        sleep(Duration::from_millis(10)).await;
    }
    assert!(gone.elapsed() > LINGER - Duration::from_millis(200), "{:?}", gone.elapsed());
    drop(holders);
}

async fn a_connection_that_listens_is_kept_for_the_next_who_waits<DB: TestDatabase>(db: TestDb<DB>) {
    let _holder = acquired(db.lock().try_acquire("k").await);
    let lock = LeaseLock::new(db.pool_of(1).await);
    let first = waiting(&lock, "k");
    let one = listener(&db).await;
    first.abort();
    sleep(LINGER / 2).await;
    let second = waiting(&lock, "k");
    sleep(LINGER * 3 / 4).await;
    assert_eq!(listener(&db).await, one, "it was wanted again before it was closed");
    second.abort();
    eventually("it is closed", || async { listeners(&db).await == 0 }).await;
    let third = waiting(&lock, "k");
    assert_ne!(listener(&db).await, one);
    third.abort();
}

/// The waiters have waited for so long that they poll only once a second: without a notification,
/// hardly any of them would be granted its key that quickly.
async fn a_notification_of_a_release_precedes_the_next_request<DB: TestDatabase>(db: TestDb<DB>) {
    const QUICK: Duration = Duration::from_millis(150);
    let lock = LeaseLock::new(db.pool_of(2).await);
    let mut pairs = Vec::new();
    for number in 0..10 {
        let key = format!("key {number}");
        pairs.push((acquired(db.lock().try_acquire(&key).await), waiting(&lock, &key)));
        awaited(&db, &key).await;
    }
    sleep(Duration::from_secs(3)).await;
    let mut took = Vec::new();
    for (holder, next) in pairs {
        took.push(handed_over(holder, next).await.1);
    }
    assert!(took.iter().filter(|took| **took < QUICK).count() >= 8, "{took:?}");
}

async fn a_listener_that_is_terminated_hangs_no_waiter_and_comes_back<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = LeaseLock::new(db.pool_of(1).await);
    let terminate = async |pid: i64| db.execute(&format!("SELECT pg_terminate_backend({pid})")).await;
    let mut holder = acquired(db.lock().try_acquire("k").await);
    for _ in 0..3 {
        let next = waiting(&lock, "k");
        let before = listener(&db).await;
        terminate(before).await;
        let other = format!("SELECT COUNT(*) {LISTENERS} AND pid <> {before}");
        eventually("it listens anew while a task waits", || async { db.number(&other).await == Some(1) }).await;
        awaited(&db, "k").await;
        terminate(listener(&db).await).await;
        let (lease, took) = handed_over(holder, next).await;
        assert!(took < BOUND, "{took:?}");
        holder = handed_over(lease, waiting(&db.lock(), "k")).await.0;
        eventually("both have stopped", || async { listeners(&db).await == 0 }).await;
    }
}

/// The listener's connection stays open, and nothing arrives on it.
async fn a_listener_that_receives_nothing_any_more_hangs_no_waiter<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool(1));
    acquired(lock.try_acquire("l").await).release().await.unwrap();
    let holder = acquired(db.lock().try_acquire("k").await);
    let next = waiting(&lock, "k");
    listener(&db).await;
    awaited(&db, "k").await;
    proxy.swallow_listeners();
    let (mut holder, took) = handed_over(holder, next).await;
    assert!(took < BOUND, "{took:?}");
    proxy.held(Way::Replies).await;
    for _ in 0..3 {
        holder.release().await.unwrap();
        let other = acquired(db.lock().try_acquire("k").await);
        let next = waiting(&lock, "k");
        awaited(&db, "k").await;
        let (lease, took) = handed_over(other, next).await;
        assert!(took < BOUND, "{took:?}");
        holder = lease;
    }
}

async fn a_listener_that_never_opens_hangs_no_waiter<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool(1));
    acquired(lock.try_acquire("l").await).release().await.unwrap();
    proxy.hold_new();
    let holder = acquired(db.lock().try_acquire("k").await);
    let next = waiting(&lock, "k");
    proxy.held(Way::Requests).await;
    sleep(BOUND).await;
    let (_, took) = handed_over(holder, next).await;
    assert!(took < BOUND, "{took:?}");
    assert_eq!(listeners(&db).await, 0);
}

/// Returns the notifications received up to this moment.
async fn told<DB: TestDatabase>(db: &TestDb<DB>, ears: &mut PgListener) -> Vec<String> {
    db.execute("SELECT pg_notify('rowlock', 'the end')").await;
    let mut told = Vec::new();
    loop {
        let word = timeout(PATIENCE, ears.recv()).await.expect("the end is told").unwrap();
        if word.payload() == "the end" {
            return told;
        }
        told.push(word.payload().to_owned());
    }
}

async fn alone<DB: TestDatabase>(lock: &LeaseLock<DB>) {
    for _ in 0..5 {
        acquired(lock.acquire("k", PATIENCE).await).release().await.unwrap();
        acquired(lock.try_acquire("k").await).abandon().await.unwrap();
        let set = lock.acquire_all(["k", "l"], PATIENCE).await.unwrap();
        set.fail().await.unwrap();
    }
}

async fn a_release_is_notified_once_if_awaited_and_never_otherwise<DB: TestDatabase>(db: TestDb<DB>) {
    let mut ears = PgListener::connect(&db.url).await.unwrap();
    ears.listen("rowlock").await.unwrap();
    let lock = db.lock();
    let other = LeaseLock::new(db.pool_of(1).await);
    alone(&lock).await;
    assert_eq!(told(&db, &mut ears).await, [""; 0], "no task waits");
    for end in ["released", "abandoned", "dropped"] {
        let holder = acquired(lock.try_acquire("k").await);
        let next = waiting(&other, "k");
        awaited(&db, "k").await;
        match end {
            "released" => holder.release().await.unwrap(),
            "abandoned" => holder.abandon().await.unwrap(),
            _ => drop(holder),
        }
        let (lease, _) = timeout(PATIENCE, next).await.unwrap().unwrap();
        // On a busy machine, a claim that was sent twice may stand.
        lock.shutdown(PATIENCE).await;
        assert_eq!(told(&db, &mut ears).await, ["k"], "{end}");
        // The holder does not know that no other caller waits.
        lease.release().await.unwrap();
        assert!(told(&db, &mut ears).await.len() <= 1);
        alone(&lock).await;
        assert_eq!(told(&db, &mut ears).await, [""; 0], "no task waits any more");
    }
}

/// Another transaction has locked the row, for example the holder's. The waiter cannot mark the row
/// then, and that is not a notification.
async fn a_row_that_a_transaction_has_locked_is_requested_with_pauses<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let mut transaction = db.row_locked().await;
    let next = waiting(&LeaseLock::new(db.pool_of(2).await), "k");
    listener(&db).await;
    let before = DB::statements(&db.pool).await.unwrap();
    sleep(Duration::from_secs(3)).await;
    let sent = DB::statements(&db.pool).await.unwrap() - before;
    assert!(sent < 40, "{sent} statements in 3 s");
    DB::execute_on(&mut transaction, "ROLLBACK").await.unwrap();
    drop(transaction);
    let (lease, _) = handed_over(holder, next).await;
    lease.release().await.unwrap();
}

/// Behind a pooler, other clients get the connection that listens, and a notification in the middle
/// of an answer breaks that answer.
async fn behind_a_pooler_no_connection_listens_or_is_disturbed<DB: TestDatabase>(db: TestDb<DB>) {
    let direct = with_database(&direct_url().unwrap(), database_of(&db.url));
    let server = db.over(pool::<DB>(&direct, 2).await);
    let (asks, listens, holder) = (LeaseLock::new(db.pool_of(1).await), server.lock(), db.lock());
    for _ in 0..10 {
        let [one, two] = [acquired(holder.try_acquire("one").await), acquired(holder.try_acquire("two").await)];
        let (next, heard) = (waiting(&asks, "one"), waiting(&listens, "two"));
        awaited(&db, "two").await;
        eventually("each process that is connected to the server listens", || async { listeners(&server).await == 1 })
            .await;
        for (key, next) in [(one, next), (two, heard)] {
            let (lease, took) = handed_over(key, next).await;
            assert!(took < BOUND, "{took:?}");
            lease.release().await.unwrap();
        }
        // Statements of other clients, on any of the pooler's connections.
        for number in 0..20 {
            assert_eq!(db.number(&format!("SELECT {number}")).await, Some(number));
        }
    }
    let through = db.pool_of(10).await;
    let mut sessions = Vec::new();
    for _ in 0..10 {
        let mut session = through.acquire().await.unwrap();
        DB::execute_on(&mut session, DB::BEGIN).await.unwrap();
        let heard = "SELECT coalesce(max(channel), 'nothing') FROM pg_listening_channels() AS channel";
        assert_eq!(DB::text_on(&mut session, heard).await.unwrap().as_deref(), Some("nothing"));
        sessions.push(session); // in its transaction: the next one uses another connection
    }
}
