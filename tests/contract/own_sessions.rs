//! The sessions of a lock: they replace each other when they fall silent, their state is known, and
//! there are few of them.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, acquired, database_of, eventually,
    proxy::{Proxy, Way},
    refused,
};
use rowlock::{
    Attempt, Error, Lease, LeaseLock, LeaseSet, Reason, Schedules, Status, admin::ListOptions, errors::DatabaseFault,
    jobs::TickOutcome,
};
use sqlx::{Pool, pool::PoolOptions};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    connections::connections,
    ticks::{due, told},
    ticks_apart::Run,
};

harness::tests!(
    servers(
        silent_sessions_lose_no_lease_of_any_duration,
        silent_idle_sessions_hold_up_one_call,
        a_lock_that_begins_on_silent_sessions_opens_another_one,
        a_request_that_is_not_sent_again_meets_one_silent_session,
        a_claim_that_arrives_after_its_caller_has_given_up_takes_nothing,
        a_waiter_lines_up_though_its_sessions_took_long_to_open
    ),
    servers[DIRECT](
        a_renewal_that_arrives_after_the_abandonment_takes_nothing,
        a_renewal_that_arrives_soon_after_the_abandonment_is_undone,
        settings_of_hooks_reach_no_lock,
        locks_of_one_pool_need_two_connections,
        a_wrong_password_costs_few_logins_and_is_named,
        a_release_outlasts_a_password_that_is_refused
    ),
    servers[DIRECT].long(a_transaction_that_is_left_open_ends_by_itself),
    postgres[DIRECT](
        defaults_of_the_database_reach_no_lock,
        a_default_of_read_only_stands,
        sessions_have_a_name,
        locks_of_one_pool_listen_on_one_connection
    )
);

const LEASE: Duration = Duration::from_secs(3);

pub async fn until<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> Option<DateTime<Utc>> {
    db.lock().inspect(key).await.unwrap().unwrap().until
}

/// Waits until each of the leases has been renewed.
pub async fn renewed<'a, DB: TestDatabase>(db: &TestDb<DB>, leases: impl IntoIterator<Item = &'a Lease<DB>>) {
    let mut waited_for = Vec::new();
    for lease in leases {
        waited_for.push((lease, until(db, lease.key().as_str()).await));
    }
    eventually("all are renewed", async || {
        for (lease, before) in &waited_for {
            let key = lease.key().as_str();
            assert!(lease.is_held(), "{key}");
            if until(db, key).await <= *before {
                return false;
            }
        }
        true
    })
    .await;
}

/// As after a fail-over in a cloud. New connections are answered.
async fn silent_sessions_lose_no_lease_of_any_duration<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool::<DB>(4));
    let mut leases = Vec::new();
    for number in [1, 1, 2, 3, 5] {
        let key = format!("k{}", leases.len());
        leases.push(acquired(lock.clone().lease(number * LEASE).try_acquire(&key).await));
    }
    // Two sessions for renewals are open.
    proxy.delay_each(Duration::from_millis(20));
    let (one, other) = tokio::join!(leases[0].renew(), leases[3].renew());
    one.and(other).unwrap();
    proxy.delay_each(Duration::ZERO);
    for _ in 0..2 {
        renewed(&db, &leases[..3]).await;
        proxy.silence();
    }
    renewed(&db, &leases[..3]).await;
    for lease in leases {
        assert!(lease.is_held(), "{}", lease.key());
        lease.release().await.unwrap();
    }
}

/// Opens sessions, until five are idle and none is being opened.
async fn open_sessions<DB: TestDatabase>(proxy: &Proxy, lock: &LeaseLock<DB>) {
    proxy.delay_each(Duration::from_millis(20));
    // An opening takes fewer requests.
    while !matches!(proxy.carried(), (5.., 20..)) {
        let tasks = (0..8).map(|number| {
            let lock = lock.clone();
            async move { acquired(lock.try_acquire(&format!("k{number}")).await).release().await.unwrap() }
        });
        tasks.collect::<JoinSet<()>>().join_all().await;
    }
    proxy.delay_each(Duration::ZERO);
}

/// One of them is found to be silent. The others are then given up without a request.
async fn silent_idle_sessions_hold_up_one_call<DB: TestDatabase>(db: TestDb<DB>) {
    for fair in [false, true] {
        let proxy = db.proxy().await;
        let lock = LeaseLock::<DB>::builder(proxy.pool(8)).batching(false).time_limit(PATIENCE).build().unwrap();
        open_sessions(&proxy, &lock).await;
        proxy.silence();
        let lock = lock.fair(fair);
        for number in 0..8 {
            acquired(lock.try_acquire(&format!("k{number}")).await).release().await.unwrap();
        }
        assert_eq!(proxy.asked_in_silence(), 1, "fair: {fair}");
    }
}

/// Its first statement, which reads the shape of the table, is sent on a session that is silent.
async fn a_lock_that_begins_on_silent_sessions_opens_another_one<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool(8);
    let lock = LeaseLock::<DB>::builder(pool.clone()).batching(false).time_limit(PATIENCE).build().unwrap();
    open_sessions(&proxy, &lock).await;
    proxy.silence();
    let other = LeaseLock::<DB>::builder(pool).time_limit(PATIENCE).build().unwrap();
    acquired(other.try_acquire("k").await).detach();
}

/// An operator's request is sent on a session that has answered a ping.
async fn a_request_that_is_not_sent_again_meets_one_silent_session<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(8)).batching(false).time_limit(PATIENCE).build().unwrap();
    open_sessions(&proxy, &lock).await;
    let lease = acquired(db.lock().try_acquire("k").await);
    proxy.silence();
    lock.force_release("k", Status::Failed).await.unwrap();
    assert_eq!(proxy.asked_in_silence(), 1);
    assert!(lease.renew().await.is_err(), "it was released");
}

/// A network may delay a request for longer than its sender waits.
async fn a_claim_that_arrives_after_its_caller_has_given_up_takes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let late = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(Duration::from_millis(500)).build().unwrap();
    eventually("it has sessions", async || late.try_acquire("warm").await.is_ok()).await;
    proxy.hold(Way::Requests);
    let error = late.try_acquire("k").await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Database(DatabaseFault::TimedOut { .. }) | Error::Database(DatabaseFault::NoConnection { .. })
        ),
        "{error:?}"
    );
    let other = db.lock();
    let lease = acquired(other.try_acquire("k").await);
    let token = lease.token();
    lease.release().await.unwrap();
    let replies = proxy.seen(Way::Replies);
    proxy.open();
    eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
    for _ in 0..20 {
        let row = other.inspect("k").await.unwrap().unwrap();
        assert_eq!((row.token, row.status.as_str()), (token, "S"), "{row:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// A lease is abandoned while a renewal of it is on its way.
async fn abandoned<DB: TestDatabase>(db: &TestDb<DB>, limit: Duration) -> (Proxy, LeaseLock<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(limit).build().unwrap();
    let lock = lock.lease(10 * LEASE).lock_delay(Duration::ZERO);
    let lease = acquired(lock.acquire("k", PATIENCE).await);
    lease.renew().await.unwrap(); // prepares the statement
    let renewal = lease.reenter().unwrap();
    {
        let mut renewing = pin!(renewal.renew());
        proxy.hold(Way::Requests);
        tokio::select! {
            renewed = &mut renewing => panic!("{renewed:?}"),
            () = proxy.held(Way::Requests) => {}
        }
        proxy.let_others_pass();
    }
    drop(renewal);
    lease.abandon().await.unwrap();
    (proxy, lock)
}

async fn a_renewal_that_arrives_after_the_abandonment_takes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, lock) = abandoned(&db, LEASE / 3).await;
    assert!(lock.shutdown(PATIENCE).await);
    let abandoned = until(&db, "k").await;
    let replies = proxy.seen(Way::Replies);
    sleep(LEASE / 3).await; // the limit of the renewal
    proxy.open();
    eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
    for _ in 0..20 {
        assert_eq!(until(&db, "k").await, abandoned);
        sleep(Duration::from_millis(10)).await;
    }
    assert!(acquired(db.lock().try_acquire("k").await).taken_over_from().is_some());
}

/// It arrives before its limit, and extends the lease. The shutdown waits until that is undone.
async fn a_renewal_that_arrives_soon_after_the_abandonment_is_undone<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, lock) = abandoned(&db, LEASE).await;
    let abandoned = until(&db, "k").await;
    proxy.open();
    eventually("it is carried out", async || until(&db, "k").await > abandoned).await;
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Held);
    assert!(lock.shutdown(PATIENCE).await);
    assert!(acquired(db.lock().try_acquire("k").await).taken_over_from().is_some());
}

/// As by a process that is stopped, or whose machine has no power any more.
async fn a_transaction_that_is_left_open_ends_by_itself<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool::<DB>(2));
    for _ in 0..2 {
        acquired(db.lock().try_acquire("k").await).detach();
        lock.force_release("k", Status::Failed).await.unwrap(); // prepares its statements
    }
    proxy.hold_after(Way::Requests, 2); // the begin, and the release of the row
    let forced = harness::spawn(async move { lock.force_release("k", Status::Failed).await });
    proxy.held(Way::Requests).await;
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Busy);
    acquired(db.lock().acquire("k", 6 * PATIENCE).await);
    forced.abort();
}

/// While a session opens, the server's clock is read. It is ahead of what the session knows by the
/// time that the reply took, and each ticket seems late at first.
async fn a_waiter_lines_up_though_its_sessions_took_long_to_open<DB: TestDatabase>(db: TestDb<DB>) {
    const LIMIT: Duration = Duration::from_millis(500);
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(4);
    let warm = LeaseLock::builder(pool.clone()).time_limit(PATIENCE).build().unwrap();
    proxy.delay_each(LIMIT + LIMIT / 4);
    acquired(warm.try_acquire("other").await).release().await.unwrap();
    proxy.delay_each(Duration::ZERO);
    let lock = LeaseLock::builder(pool).time_limit(LIMIT).build().unwrap().fair(true);
    let holder = acquired(db.lock().try_acquire("k").await);
    let waiter = harness::spawn(async move { lock.acquire("k", PATIENCE).await });
    eventually("the waiter is in line", async || {
        assert!(!waiter.is_finished());
        db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await == Some(1)
    })
    .await;
    holder.release().await.unwrap();
    waiter.await.unwrap().unwrap().release().await.unwrap();
}

fn name(what: &str, setting: &str) -> String {
    format!("{} ({what})", setting.replace('\'', ""))
}

/// What is held over a pool whose sessions have a setting.
struct Held<DB: TestDatabase> {
    setting: &'static str,
    lock: LeaseLock<DB>,
    lease: Lease<DB>,
    set: LeaseSet<DB>,
    run: Run<DB>,
}

impl<DB: TestDatabase> Held<DB> {
    async fn over(db: &TestDb<DB>, setting: &'static str, url: &str) -> Self {
        let options = PoolOptions::<DB>::new()
            .max_connections(2)
            .after_connect(move |conn, _| Box::pin(async move { DB::execute_on(conn, setting).await.map(drop) }));
        let pool = options.connect_lazy(url).unwrap();
        let lock = LeaseLock::builder(pool.clone()).time_limit(PATIENCE).build().unwrap().lease(2 * LEASE);
        let name = |what| name(what, setting);
        let lease = match lock.try_acquire(&name("one")).await {
            Ok(Attempt::Acquired(lease)) => lease,
            other => panic!("{setting}: {other:?}"),
        };
        let set = match lock.acquire_all([name("two"), name("three")], PATIENCE).await {
            Ok(set) => set,
            other => panic!("{setting}: {other:?}"),
        };
        let schedules = Schedules::new(pool).lease(2 * LEASE).time_limit(PATIENCE);
        let schedule = due(db, &name("run")).await;
        let run = Run::begin_named(schedules, schedule, &name("run")).await;
        Self { setting, lock, lease, set, run }
    }

    async fn end(self, db: &TestDb<DB>) {
        let Self { setting, lock, lease, set, run } = self;
        assert!(lease.is_held() && set.is_held(), "{setting}");
        lease.renew().await.unwrap_or_else(|error| panic!("{setting}: {error}"));
        let held = lock.list(&ListOptions::default().claimed()).await.unwrap();
        assert!(held.len() >= 3, "{setting}: {held:?}");
        lease.release().await.unwrap_or_else(|error| panic!("{setting}: {error}"));
        set.release().await.unwrap_or_else(|error| panic!("{setting}: {error}"));
        assert_eq!(run.end().await, TickOutcome::Succeeded, "{setting}");
        assert_eq!(told(db, &name("run", setting)).await, "S1", "{setting}");
    }
}

async fn hold_under<DB: TestDatabase>(db: &TestDb<DB>, settings: &[&'static str], url: &str) {
    let mut held = Vec::new();
    for setting in settings {
        held.push(Held::over(db, setting, url).await);
    }
    let mut waits = JoinSet::new();
    for Held { setting, lock, .. } in &held {
        let (lock, setting) = (lock.clone(), *setting);
        waits.spawn(harness::task(async move { (setting, lock.acquire(&name("two", setting), LEASE / 3).await) }));
    }
    for (setting, waited) in waits.join_all().await {
        assert!(
            matches!(&waited, Err(Error::Refused(refusal)) if refusal.reason == Reason::Held),
            "{setting}: {waited:?}"
        );
    }
    renewed(db, held.iter().map(|held| &held.lease)).await;
    for held in held {
        held.end(db).await;
    }
}

/// Each of them reached the statements of a lock, before.
async fn settings_of_hooks_reach_no_lock<DB: TestDatabase>(db: TestDb<DB>) {
    let settings: &[&str] = match db.server.name {
        "postgres" => &[
            "SET statement_timeout = 1",
            "SET lock_timeout = 1",
            "SET idle_in_transaction_session_timeout = 1",
            "SET default_transaction_isolation = serializable",
            "SET jit = on; SET jit_above_cost = 0; SET jit_inline_above_cost = 0; SET jit_optimize_above_cost = 0",
            "SET synchronous_commit = off",
            "SET client_min_messages = debug5",
        ],
        name => &[
            "SET completion_type = 1", // CHAIN
            "SET completion_type = 2", // RELEASE
            "SET sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",
            if name == "mysql" { "SET max_execution_time = 1" } else { "SET sql_mode = ORACLE" },
            if name == "mysql" { "SET sql_mode = ''" } else { "SET sql_mode = EMPTY_STRING_IS_NULL" },
            if name == "mysql" { "SET sql_require_primary_key = 1" } else { "SET max_statement_time = 0.001" },
            "SET sql_safe_updates = 1",
            "SET group_concat_max_len = 4",
            "SET timestamp = 1000000000",
            "SET sql_select_limit = 1, lock_wait_timeout = 1, innodb_lock_wait_timeout = 1",
            "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
            "SET autocommit = 0",
        ],
    };
    if db.server.name == "mariadb" {
        // Longer than the shortest of the limits.
        db.execute("CREATE TRIGGER slow BEFORE UPDATE ON t_resource_lock FOR EACH ROW DO SLEEP(0.005)").await;
    }
    hold_under(&db, settings, &db.url).await;
}

async fn defaults_of_the_database_reach_no_lock<DB: TestDatabase>(db: TestDb<DB>) {
    let name = database_of(&db.url);
    // Only new sessions have them.
    let db = db.over(db.pool_of(1).await);
    for setting in [
        "statement_timeout = 1",
        "lock_timeout = 1",
        "idle_in_transaction_session_timeout = 1",
        "default_transaction_isolation = serializable",
        "jit_above_cost = 0",
        "jit_inline_above_cost = 0",
        "jit_optimize_above_cost = 0",
        "synchronous_commit = off",
    ] {
        db.execute(&format!("ALTER DATABASE {name} SET {setting}")).await;
    }
    hold_under(&db, &["SELECT 1"], &db.url).await;
}

/// Platforms set it to stop writes.
async fn a_default_of_read_only_stands<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    db.execute(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", database_of(&db.url))).await;
    let lock = LeaseLock::new(db.pool_of(2).await);
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::ReadOnly { .. })), "{error:?}");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
}

async fn sessions_have_a_name<DB: TestDatabase>(db: TestDb<DB>) {
    let named = async |name: &str| {
        let sessions = "FROM pg_stat_activity WHERE datname = current_database() AND application_name";
        db.number(&format!("SELECT COUNT(*) {sessions} = '{name}'")).await.unwrap()
    };
    let lease = acquired(LeaseLock::new(db.pool_of(1).await).try_acquire("k").await);
    assert!(named("rowlock").await >= 1);
    let separator = if db.url.contains('?') { '&' } else { '?' };
    let pool = harness::pool::<DB>(&format!("{}{separator}application_name=shop", db.url), 1).await;
    let other = acquired(LeaseLock::new(pool).try_acquire("l").await);
    assert!(named("shop").await >= 2, "one of the pool, and one of the lock");
    drop((lease, other));
}

/// At rest one for requests and one for renewals. They end with the last lock and lease.
async fn locks_of_one_pool_need_two_connections<DB: TestDatabase>(db: TestDb<DB>) {
    let db = db.over(db.pool_of(1).await);
    let before = connections(&db).await;
    let pool = db.pool_of(1).await;
    let with_pool = connections(&db).await;
    let mut leases = Vec::new();
    for number in 0..10 {
        let lock = LeaseLock::new(pool.clone()).lease(PATIENCE);
        leases.push((acquired(lock.try_acquire(&format!("k{number}")).await), lock));
    }
    for (lease, _) in &leases {
        lease.renew().await.unwrap();
    }
    let opened = connections(&db).await - with_pool;
    assert!((1..=2).contains(&opened), "{opened} connections");
    drop((leases, pool));
    let since = Instant::now();
    eventually("they are closed", async || connections(&db).await <= before).await;
    assert!(since.elapsed() < LEASE, "{:?}", since.elapsed());
}

/// As after a change of the password. A server may lock an account after some failed logins.
async fn a_wrong_password_costs_few_logins_and_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(2);
    let mut leases = Vec::new();
    for number in 0..20 {
        let lock = LeaseLock::new(pool.clone()).lease(PATIENCE / 2);
        leases.push((acquired(lock.try_acquire(&format!("k{number}")).await), lock));
    }
    let long = acquired(leases[0].1.clone().lease(3 * PATIENCE).try_acquire("long").await);
    let before = refuse_logins(&proxy, &pool).await;
    sleep(LEASE + LEASE / 6).await; // most of them want to be renewed
    let error = leases[0].1.try_acquire("other").await.unwrap_err();
    let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    // Of MySQL, whose authentication by a password needs TLS or a further feature of the driver.
    let of_login = |cause: String| cause.contains(UNKNOWN) || cause.contains("RSA auth");
    assert!(causes.map(ToString::to_string).any(of_login), "{error:?}");
    let logins = proxy.accepted() - before;
    assert!((1..=15).contains(&logins), "{logins} logins");
    log_in_with(&pool, &proxy.url);
    eventually("it is renewed", async || long.renew().await.is_ok()).await;
    eventually("it is granted", async || leases[0].1.try_acquire("other").await.is_ok()).await;
}

const UNKNOWN: &str = "unknown_here";

fn log_in_with<DB: TestDatabase>(pool: &Pool<DB>, url: &str) {
    pool.set_connect_options(url.parse().unwrap_or_else(|_| panic!("{url}")));
}

/// Ends all connections. New ones log in as no user of the server does. Returns how many there
/// were.
async fn refuse_logins<DB: TestDatabase>(proxy: &Proxy, pool: &Pool<DB>) -> u64 {
    let (scheme, rest) = proxy.url.split_once("://").unwrap();
    let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    log_in_with(pool, &format!("{scheme}://{UNKNOWN}:wrong@{host}")); // a password may not be asked for
    proxy.cut_off().await;
    proxy.accepted()
}

/// As between a change of a password and its arrival at the program.
async fn a_release_outlasts_a_password_that_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(2);
    let lock = LeaseLock::new(pool.clone()).lease(PATIENCE);
    let lease = acquired(lock.try_acquire("k").await);
    let before = refuse_logins(&proxy, &pool).await;
    let released = harness::spawn(lease.release());
    eventually("a login is refused", async || proxy.accepted() > before + 1).await;
    log_in_with(&pool, &proxy.url);
    timeout(PATIENCE, released).await.unwrap().unwrap().unwrap();
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
}

/// All locks of one pool share the connection that listens.
async fn locks_of_one_pool_listen_on_one_connection<DB: TestDatabase>(db: TestDb<DB>) {
    const LISTENERS: &str =
        "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    let holder = acquired(db.lock().try_acquire("k").await);
    let pool = db.pool_of(2).await;
    let mut waiting: Vec<_> = (0..20)
        .map(|_| {
            let lock = LeaseLock::new(pool.clone());
            harness::spawn(async move {
                acquired(lock.acquire("k", 2 * PATIENCE).await).release().await.unwrap();
            })
        })
        .collect();
    eventually("one listens", async || db.number(LISTENERS).await == Some(1)).await;
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        assert_eq!(db.number(LISTENERS).await, Some(1));
        sleep(Duration::from_millis(10)).await;
    }
    holder.release().await.unwrap();
    for waiter in waiting.drain(..) {
        timeout(2 * PATIENCE, waiter).await.unwrap().unwrap();
    }
}
