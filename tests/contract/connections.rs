//! What an application does to its own connections has no effect on its locks.

use std::{convert::Infallible, future::poll_fn, pin::pin, task::Poll, time::Duration};

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::{Error, LeaseLock, Reason, Retry, Status, VersionLock, VersionedTable, errors::DatabaseFault};
use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    bank::{LEASE, Lock, OPENING, VERSION, accounts, balance, deduct},
    ledger::{COLUMNS, ledger, row},
};

harness::tests!(
    everywhere(
        a_claim_after_a_begin_that_was_dropped_is_committed,
        a_claim_after_a_begin_as_text_is_committed,
        a_place_in_a_queue_is_committed,
        a_transaction_is_one_of_its_own,
        a_change_of_a_value_is_committed,
        a_migration_is_committed,
        a_lease_that_a_closed_pool_leaves_behind_is_told
    ),
    servers(
        a_pool_that_is_used_up_stops_nothing,
        new_options_of_the_pool_are_taken_over,
        connections_that_went_away_while_idle_are_found_out,
        the_first_look_at_the_table_is_waited_for_within_the_callers_limit,
        a_connection_that_is_slow_to_open_serves_a_later_request
    ),
    servers[DIRECT](
        settings_of_a_session_do_not_reach_a_lock,
        the_connections_of_a_lock_are_closed_with_the_pool,
        a_shutdown_closes_the_connections_that_are_idle
    )
);

const SHORT: Duration = Duration::from_secs(3);

/// Leaves the pool's only connection inside a transaction, as `begin()` does if its future is
/// dropped at its first await.
async fn begin_and_drop<DB: TestDatabase>(pool: &Pool<DB>) {
    let since = Instant::now();
    loop {
        let mut begin = pin!(pool.begin());
        let waits = poll_fn(|context| Poll::Ready(begin.as_mut().poll(context).is_pending())).await;
        // On a connection that was just returned, the answer may be there at once. That transaction
        // is rolled back.
        if waits && pool.num_idle() == 0 && pool.size() == 1 {
            return;
        }
        assert!(since.elapsed() < PATIENCE, "it never waited for the server");
        sleep(Duration::from_millis(5)).await;
    }
}

/// The same with a `BEGIN` that the driver treats as an ordinary statement. Later changes on the
/// connection are not committed.
async fn begin_as_text<DB: TestDatabase>(pool: &Pool<DB>) {
    let mut conn = pool.acquire().await.unwrap();
    DB::execute_on(&mut conn, "BEGIN").await.unwrap();
}

/// Rolls back on the pool's connection, as an error or a clean-up of the application does.
async fn roll_back<DB: TestDatabase>(pool: &Pool<DB>) {
    let mut conn = pool.acquire().await.unwrap();
    // SQLite returns an error if there is nothing to roll back.
    let _ = DB::execute_on(&mut conn, "ROLLBACK").await;
}

/// Returns a lock on connections of its own, and one on the application's.
fn locks<DB: TestDatabase>(pool: &Pool<DB>) -> [LeaseLock<DB>; 2] {
    let builder = || LeaseLock::builder(pool.clone());
    [builder(), builder().share_pool()].map(|lock| lock.build().unwrap().lease(SHORT))
}

/// Checks that a claim, its renewals and its end are reported as done only once they are committed.
async fn stands_where<DB: TestDatabase>(db: &TestDb<DB>, poison: impl AsyncFn(&Pool<DB>)) {
    let pool = db.pool_of(1).await;
    let other = db.lock();
    for lock in locks(&pool) {
        poison(&pool).await;
        let lease = acquired(lock.try_acquire("k").await);
        assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Held);
        roll_back(&pool).await;
        assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Held);
        for _ in 0..3 {
            poison(&pool).await;
            sleep(SHORT / 2).await;
            assert!(lease.is_held());
            assert_eq!(refused(other.try_acquire("k").await).reason, Reason::Held);
        }
        poison(&pool).await;
        lease.renew().await.unwrap();
        poison(&pool).await;
        lease.release().await.unwrap();
        roll_back(&pool).await;
        acquired(other.try_acquire("k").await).release().await.unwrap();
        poison(&pool).await;
        acquired(lock.try_acquire("k").await).abandon().await.unwrap();
        roll_back(&pool).await;
        let next = acquired(other.try_acquire("k").await);
        poison(&pool).await;
        lock.force_release("k", Status::Succeeded).await.unwrap().unwrap();
        roll_back(&pool).await;
        assert!(matches!(next.renew().await, Err(Error::Lost { .. })));
    }
}

async fn a_claim_after_a_begin_that_was_dropped_is_committed<DB: TestDatabase>(db: TestDb<DB>) {
    stands_where(&db, begin_and_drop).await;
}

async fn a_claim_after_a_begin_as_text_is_committed<DB: TestDatabase>(db: TestDb<DB>) {
    stands_where(&db, begin_as_text).await;
}

async fn a_place_in_a_queue_is_committed<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    for lock in locks(&pool) {
        let lock = lock.fair(true);
        let holder = acquired(db.lock().try_acquire("k").await);
        begin_as_text(&pool).await;
        let waiter = harness::spawn(async move { lock.acquire("k", PATIENCE).await });
        let waits = async || db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await == Some(1);
        eventually("its place is seen", waits).await;
        roll_back(&pool).await;
        assert!(waits().await);
        holder.release().await.unwrap();
        acquired(waiter.await.unwrap()).release().await.unwrap();
    }
}

/// The transaction is not rolled back with one that was left open, and does not commit that one.
async fn a_transaction_is_one_of_its_own<DB: TestDatabase>(db: TestDb<DB>) {
    accounts(&db).await;
    let pool = db.pool_of(1).await;
    let retry = Retry { attempts: 100, within: PATIENCE };
    let lease = LeaseLock::new(pool.clone()).retry(retry);
    let version = VersionLock::new(pool.clone(), "account", "id", "version").retry(retry);
    let locks: [(_, Lock<DB>); 2] = [(LEASE, std::sync::Arc::new(lease)), (VERSION, std::sync::Arc::new(version))];
    for (account, lock) in locks {
        let mut conn = pool.acquire().await.unwrap();
        DB::execute_on(&mut conn, "BEGIN").await.unwrap();
        DB::execute_on(&mut conn, "UPDATE account SET balance = 0 WHERE id = 'other'").await.unwrap();
        drop(conn);
        deduct(&*lock, account, 1).await.unwrap();
        roll_back(&pool).await;
        assert_eq!((balance(&db, account).await, balance(&db, "other").await), (OPENING - 1, OPENING));
        begin_and_drop(&pool).await;
        deduct(&*lock, account, 1).await.unwrap();
        roll_back(&pool).await;
        assert_eq!(balance(&db, account).await, OPENING - 2);
        // On PostgreSQL, a failed transaction accepts no statement but its end.
        begin_as_text(&pool).await;
        DB::execute_on(&mut pool.acquire().await.unwrap(), "SELECT nonsense").await.unwrap_err();
        deduct(&*lock, account, 1).await.unwrap();
        assert_eq!(balance(&db, account).await, OPENING - 3);
    }
}

async fn a_change_of_a_value_is_committed<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let pool = db.pool_of(1).await;
    let table = || VersionedTable::new(pool.clone(), COLUMNS);
    let mut version = 0;
    for table in [table(), table().share_pool()] {
        for change in 0..3 {
            begin_as_text(&pool).await;
            match change {
                0 => drop(table.update("a", |balance| Ok::<_, Infallible>(*balance)).await.unwrap()),
                1 => drop(table.deduct("a", 1).await.unwrap()),
                _ => drop(table.deposit("a", 1).await.unwrap()),
            }
            roll_back(&pool).await;
            version += 1;
            assert_eq!(row(&db).await, (if change == 1 { 99 } else { 100 }, version));
        }
    }
}

async fn a_migration_is_committed<DB: TestDatabase>(db: TestDb<DB>) {
    for table in ["t_resource_lock", "t_resource_lock_queue"] {
        db.execute(&format!("DROP TABLE {table}")).await;
    }
    let pool = db.pool_of(1).await;
    begin_as_text(&pool).await;
    rowlock::migrate(&pool).await.unwrap();
    roll_back(&pool).await;
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
}

/// The application uses all of its pool's connections. Claims, renewals and releases go on.
async fn a_pool_that_is_used_up_stops_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    ledger(&db).await;
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::new(pool.clone()).lease(SHORT);
    let table = VersionedTable::new(pool.clone(), COLUMNS);
    let only = pool.acquire().await.unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    lease.renew().await.unwrap();
    table.deduct("a", 1).await.unwrap();
    lease.release().await.unwrap();
    drop(only);
}

/// Returns how many connections this test's database has. The pool of `db` has one of them: a pool
/// of several opens another one if the last statement's is not back yet.
pub async fn connections<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let sql = match db.server.name {
        "postgres" => "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()",
        "mysql" => "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE()",
        _ => "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()",
    };
    db.number(sql).await.unwrap()
}

/// Settings that the application's statements make in a session do not apply to the lock's
/// statements.
async fn settings_of_a_session_do_not_reach_a_lock<DB: TestDatabase>(db: TestDb<DB>) {
    let told = match db.server.name {
        "postgres" => {
            db.execute(
                "CREATE SCHEMA elsewhere; CREATE TABLE elsewhere.t_resource_lock (LIKE t_resource_lock INCLUDING ALL)",
            )
            .await;
            "SET search_path = elsewhere"
        }
        _ => "USE information_schema",
    };
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::new(pool.clone()).lease(SHORT);
    DB::execute_on(&mut pool.acquire().await.unwrap(), told).await.unwrap();
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Held);
    lease.release().await.unwrap();
}

/// As after a change of the password: new connections are opened with the application's options.
async fn new_options_of_the_pool_are_taken_over<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(1);
    let lock = LeaseLock::new(pool.clone());
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    pool.set_connect_options(db.url.parse().unwrap_or_else(|_| panic!("{}", db.url)));
    drop(proxy);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}

async fn a_shutdown_closes_the_connections_that_are_idle<DB: TestDatabase>(db: TestDb<DB>) {
    let db = db.over(db.pool_of(1).await);
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::new(pool.clone());
    let before = connections(&db).await;
    let lease = acquired(lock.try_acquire("k").await);
    lease.renew().await.unwrap();
    drop(lease);
    assert!(lock.shutdown(PATIENCE).await);
    eventually("they are closed", async || connections(&db).await <= before).await;
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}

/// A caller whose future is not polled delays no other caller, and no caller waits beyond its own
/// limit.
async fn the_first_look_at_the_table_is_waited_for_within_the_callers_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(1);
    // The connection is open, and the first query of the table is not answered.
    let warm = LeaseLock::new(pool.clone());
    acquired(warm.try_acquire("warm").await).release().await.unwrap();
    let lock = LeaseLock::new(proxy.pool::<DB>(2));
    let mut first = pin!(lock.acquire("a", Duration::MAX));
    proxy.hold(Way::Replies);
    let held = async {
        proxy.held(Way::Replies).await;
    };
    tokio::select! {
        _ = &mut first => panic!("nothing was answered"),
        () = held => {}
    }
    let wait = Duration::from_millis(100);
    let since = Instant::now();
    let error = lock.acquire("b", wait).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Database(DatabaseFault::NoConnection { .. }) | Error::Database(DatabaseFault::TimedOut { .. })
        ),
        "{error:?}"
    );
    assert!(since.elapsed() < wait + PATIENCE / 8, "{:?}", since.elapsed());
    // The first future is no longer polled, and its request stays unanswered.
    proxy.let_others_pass();
    let lease = timeout(PATIENCE / 2, lock.acquire("b", PATIENCE)).await.expect("it does not wait for the first");
    acquired(lease).release().await.unwrap();
    proxy.open();
    acquired(timeout(PATIENCE, first).await.unwrap()).release().await.unwrap();
}

/// Closing the application's pool closes the lock's connections, without a further call. An
/// abandonment that the closed pool prevents stays pending.
async fn a_lease_that_a_closed_pool_leaves_behind_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(2).await;
    let lock = LeaseLock::new(pool.clone()).lease(SHORT);
    let lease = acquired(lock.try_acquire("k").await);
    pool.close().await;
    drop(lease);
    assert!(!lock.shutdown(PATIENCE).await);
    let error = lock.try_acquire("k").await.unwrap_err().to_string();
    assert!(error.contains("pool is closed"), "{error}");
    sleep(SHORT).await;
    assert!(lock.shutdown(PATIENCE).await, "it has ended by itself");
}

/// A handshake that takes longer than the limit of a request is not restarted for each request.
async fn a_connection_that_is_slow_to_open_serves_a_later_request<DB: TestDatabase>(db: TestDb<DB>) {
    let limit = Duration::from_millis(500);
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(4)).time_limit(limit).build().unwrap();
    proxy.delay_first(2 * limit);
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::NoConnection { .. })), "{error:?}");
    let granted = async || lock.try_acquire("k").await.is_ok_and(|attempt| attempt.acquired().is_some());
    eventually("it is granted", granted).await;
}

async fn the_connections_of_a_lock_are_closed_with_the_pool<DB: TestDatabase>(db: TestDb<DB>) {
    let db = db.over(db.pool_of(1).await);
    let before = connections(&db).await;
    let pool = db.pool_of(1).await;
    let lock = LeaseLock::new(pool.clone());
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    pool.close().await;
    eventually("they are closed", async || connections(&db).await <= before).await;
    assert!(matches!(lock.try_acquire("k").await, Err(Error::Database(DatabaseFault::Failed { .. }))));
}

/// Connections were closed while they were idle. Requests are sent on other connections.
async fn connections_that_went_away_while_idle_are_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool::<DB>(4));
    let go_away = async || {
        let leases = ["a", "b", "c"].map(|key| lock.acquire(key, PATIENCE));
        for lease in futures(leases).await {
            acquired(lease).release().await.unwrap();
        }
        proxy.cut_off().await;
    };
    go_away().await;
    acquired(LeaseLock::new(proxy.pool::<DB>(4)).try_acquire("k").await).detach();
    go_away().await;
    assert!(lock.inspect("k").await.unwrap().is_some());
    go_away().await;
    assert_eq!(lock.list(&rowlock::admin::ListOptions::default()).await.unwrap().len(), 4);
    go_away().await;
    lock.force_release("k", Status::Succeeded).await.unwrap().unwrap();
    go_away().await;
    lock.forget(Duration::from_secs(1)).await.unwrap();
}

async fn futures<T>([a, b, c]: [impl Future<Output = T>; 3]) -> [T; 3] {
    let (a, b, c) = tokio::join!(a, b, c);
    [a, b, c]
}
