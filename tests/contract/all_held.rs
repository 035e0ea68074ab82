//! One of each thing that an application holds, all at the same time, beside one fault: none is
//! lost, and each ends as if nothing had happened.
//!
//! The things are a key, a set, a permit, a reader, a writer, a leader's term and a run of a
//! schedule. Where the fault leaves the application its own connections, it also makes payments:
//! one in a transaction under a lease, and one from a balance.

use std::time::Duration;

use chrono::{DateTime, Utc};
use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
    refused,
};
use rowlock::{
    Lease, LeaseLock, LeaseSet, Reason, Schedules, VersionedTable, admin::ListOptions, balances::Columns,
    jobs::TickOutcome, leaders::Leadership,
};
use sqlx::{Pool, pool::PoolOptions};
use tokio::join;

use crate::{
    bank::{self, LEASE as FENCED, OPENING, VERSION, accounts, balance},
    ticks::{due, info, told},
    ticks_apart::Run,
};

harness::tests!(
    everywhere(a_migration_takes_none, settings_of_sessions_take_none, settings_of_shared_sessions_take_none),
    servers(
        a_lost_reply_takes_none,
        a_lost_request_takes_none,
        a_silent_connection_takes_none,
        a_server_that_restarts_takes_none,
        a_pool_that_is_used_up_takes_none
    ),
    servers[DIRECT](connections_that_the_server_ends_take_none),
    sqlite(a_full_disk_takes_none)
);

/// Far longer than a renewal and its repetition take on a busy machine.
const LEASE: Duration = Duration::from_secs(6);

struct AllHeld<DB: TestDatabase> {
    /// A key, a permit, a reader and a writer.
    leases: [Lease<DB>; 4],
    set: LeaseSet<DB>,
    term: Leadership<DB>,
    run: Run<DB>,
}

impl<DB: TestDatabase> AllHeld<DB> {
    async fn over(db: &TestDb<DB>, pool: Pool<DB>) -> Self {
        Self::of(db, LeaseLock::new(pool.clone()), Schedules::new(pool)).await
    }

    async fn of(db: &TestDb<DB>, lock: LeaseLock<DB>, schedules: Schedules<DB>) -> Self {
        accounts(db).await;
        let lock = lock.lease(LEASE);
        let leases = [
            acquired(lock.acquire("key", PATIENCE).await),
            acquired(lock.semaphore("permit", 1).acquire(PATIENCE).await),
            acquired(lock.read_write("read").readers().acquire(PATIENCE).await),
            acquired(lock.read_write("written").writer().acquire(PATIENCE).await),
        ];
        let set = acquired(lock.acquire_all(["first", "second"], PATIENCE).await);
        let term = lock.election("term").campaign().await.unwrap();
        let schedule = due(db, "k").await;
        let run = Run::begin(schedules.lease(LEASE), schedule).await;
        Self { leases, set, term, run }
    }

    #[track_caller]
    fn assert_held(&self) {
        for lease in &self.leases {
            assert!(lease.is_held(), "{}", lease.key());
        }
        assert!(self.set.is_held(), "the set");
        assert!(self.term.is_held(), "the term");
        assert!(!self.run.tick.cancellation_token().is_cancelled(), "the run");
    }

    /// Waits until each of them has been renewed.
    async fn are_renewed(&self, db: &TestDb<DB>) {
        let before = ends(db).await;
        eventually("all are renewed", async || {
            self.assert_held();
            let after = ends(db).await;
            assert_eq!(after.len(), before.len(), "{after:?}");
            after.iter().zip(&before).all(|(after, before)| after.0 == before.0 && after.1 > before.1)
        })
        .await;
    }

    /// Nothing of them is granted to another, and each ends as its holder ends it: the run in a
    /// transaction over this pool.
    async fn end(self, db: &TestDb<DB>, pool: &Pool<DB>) {
        let other = db.lock();
        let held = [
            refused(other.try_acquire("key").await),
            refused(other.semaphore("permit", 1).try_acquire().await),
            refused(other.read_write("read").writer().try_acquire().await),
            refused(other.read_write("written").readers().try_acquire().await),
            refused(other.try_acquire("second").await),
            refused(other.try_acquire("term").await),
        ];
        assert!(held.iter().all(|refusal| refusal.reason == Reason::Held), "{held:?}");
        for lease in self.leases {
            let key = lease.key().clone();
            lease.release().await.unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        self.set.release().await.unwrap();
        self.term.resign(async {}).await.1.unwrap();
        self.run.tick.transaction(pool, async |_| Ok::<_, sqlx::Error>(())).await.unwrap();
        assert_eq!(self.run.end().await, TickOutcome::Succeeded);
        assert_eq!(told(db, "k").await, "S1");
        assert!(other.list(&ListOptions::default().claimed()).await.unwrap().is_empty());
    }
}

/// When each claim and the run end, unless they are renewed.
async fn ends<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<(String, Option<DateTime<Utc>>)> {
    let patient = db.builder().time_limit(PATIENCE).build().unwrap();
    let held = patient.list(&ListOptions::default().claimed()).await.unwrap();
    let held = held.into_iter().filter(|row| row.key != FENCED); // of a payment
    let mut ends: Vec<_> = held.map(|row| (row.key, row.until)).collect();
    let run = info(db, "k").await;
    assert!(run.running, "{run:?}");
    ends.push((run.name, Some(run.due)));
    ends
}

/// What the application pays with: transactions under a lease, and a balance.
struct Payments<DB: TestDatabase>(LeaseLock<DB>, VersionedTable<DB>);

impl<DB: TestDatabase> Payments<DB> {
    fn over(pool: &Pool<DB>) -> Self {
        let columns = Columns { table: "account", key: "id", value: "balance", version: "version" };
        let lock = LeaseLock::builder(pool.clone()).time_limit(PATIENCE).build().unwrap();
        Self(lock, VersionedTable::new(pool.clone(), columns).time_limit(PATIENCE))
    }

    /// Pays once with each.
    async fn pay(&self) {
        bank::deduct(&self.0, FENCED, 1).await.unwrap();
        self.1.deduct(VERSION, 1).await.unwrap();
    }
}

async fn assert_paid<DB: TestDatabase>(db: &TestDb<DB>, times: i64) {
    for account in [FENCED, VERSION] {
        assert_eq!(balance(db, account).await, OPENING - times, "{account}");
    }
}

/// An instance of a new deploy completes the tables, again and again.
async fn a_migration_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    let all = AllHeld::over(&db, db.pool.clone()).await;
    let migrations = async {
        for _ in 0..4 {
            db.execute("DROP TABLE t_resource_lock_queue").await;
            rowlock::migrate(&db.pool).await.unwrap();
            all.are_renewed(&db).await;
        }
    };
    let payments = Payments::over(&db.pool);
    payments.pay().await; // reads the tables' shape
    let paid = async {
        for _ in 0..20 {
            payments.pay().await;
        }
    };
    join!(migrations, paid);
    assert_paid(&db, 21).await;
    all.end(&db, &db.pool).await;
}

/// A pool with what applications set for their own statements, in the hook for new connections.
async fn with_settings<DB: TestDatabase>(db: &TestDb<DB>, more: &str) -> Pool<DB> {
    let usual = match db.server.name {
        "sqlite" => {
            "PRAGMA reverse_unordered_selects = ON; PRAGMA synchronous = OFF; PRAGMA case_sensitive_like = ON;
             PRAGMA recursive_triggers = ON; PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY"
        }
        "postgres" => {
            "SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'sql_standard';
             SET bytea_output = 'escape'; SET extra_float_digits = -15; SET standard_conforming_strings = off;
             SET default_transaction_isolation = 'serializable'; SET default_transaction_deferrable = on;
             SET synchronous_commit = off; SET enable_indexscan = off; SET enable_bitmapscan = off;
             SET plan_cache_mode = 'force_generic_plan'; SET row_security = on; SET array_nulls = off;
             SET transform_null_equals = on; SET idle_in_transaction_session_timeout = '60s'"
        }
        _ => {
            "SET time_zone = '-09:30', sql_auto_is_null = 1, sql_select_limit = 1000,
                 div_precision_increment = 0, lc_time_names = 'ar_SA', innodb_lock_wait_timeout = 1,
                 collation_connection = 'utf8mb4_bin', sql_warnings = 1,
                 sql_mode = CONCAT(@@sql_mode, ',ANSI_QUOTES,PIPES_AS_CONCAT,HIGH_NOT_PRECEDENCE,IGNORE_SPACE,\
             REAL_AS_FLOAT,NO_UNSIGNED_SUBTRACTION,PAD_CHAR_TO_FULL_LENGTH');
             SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"
        }
    };
    let settings = format!("{usual}; {more}");
    let options = PoolOptions::new().max_connections(10).test_before_acquire(false);
    let options = options.after_connect(move |conn, _| {
        let settings = settings.clone();
        Box::pin(async move { DB::execute_on(conn, &settings).await.map(drop) })
    });
    options.connect(&db.url).await.unwrap()
}

async fn settings_of_sessions_take_none<DB: TestDatabase>(db: TestDb<DB>) {
    let more =
        if db.server.name.starts_with('m') { "SET sql_safe_updates = 1, group_concat_max_len = 4" } else { "SELECT 1" };
    let pool = with_settings(&db, more).await;
    let all = AllHeld::over(&db, pool.clone()).await;
    Payments::over(&pool).pay().await;
    all.are_renewed(&db).await;
    assert_paid(&db, 1).await;
    all.end(&db, &pool).await;
}

/// The settings apply to the library's own statements too. Two more would not do: on MariaDB
/// `sql_safe_updates` refuses a change of several keys, and a `group_concat_max_len` of a few
/// characters cuts the list of tables short.
async fn settings_of_shared_sessions_take_none<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = with_settings(&db, "SELECT 1").await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let all = AllHeld::of(&db, lock, Schedules::new(pool.clone()).share_pool()).await;
    all.are_renewed(&db).await;
    all.end(&db, &pool).await;
}

async fn held_over<DB: TestDatabase>(db: &TestDb<DB>) -> (Proxy, AllHeld<DB>) {
    let proxy = db.proxy().await;
    let all = AllHeld::over(db, proxy.pool(8)).await;
    all.are_renewed(db).await;
    (proxy, all)
}

/// Loses what is sent this way, once for the locks' renewals and once for those of the run, or
/// twice for one of them.
async fn lose<DB: TestDatabase>(db: TestDb<DB>, way: Way) {
    let (proxy, all) = held_over(&db).await;
    for _ in 0..3 {
        proxy.hold(way);
        proxy.held(way).await;
        proxy.cut();
        all.are_renewed(&db).await;
    }
    all.end(&db, &db.pool).await;
}

async fn a_lost_reply_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    lose(db, Way::Replies).await;
}

async fn a_lost_request_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    lose(db, Way::Requests).await;
}

/// The connection is neither answered nor closed any more. Others are.
async fn a_silent_connection_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, all) = held_over(&db).await;
    proxy.hold(Way::Requests);
    proxy.held(Way::Requests).await;
    proxy.let_others_pass();
    for _ in 0..3 {
        all.are_renewed(&db).await;
    }
    all.end(&db, &db.pool).await;
}

/// All connections are lost, and for a while no other is accepted.
async fn a_server_that_restarts_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    // Who speaks first on a new connection.
    let first = if db.server.name == "postgres" { Way::Requests } else { Way::Replies };
    let (proxy, all) = held_over(&db).await;
    for _ in 0..2 {
        proxy.cut();
        proxy.hold_everything();
        proxy.held(first).await;
        proxy.cut();
        all.are_renewed(&db).await;
    }
    all.end(&db, &db.pool).await;
}

async fn connections_that_the_server_ends_take_none<DB: TestDatabase>(db: TestDb<DB>) {
    let all = AllHeld::over(&db, db.pool_of(8).await).await;
    for _ in 0..3 {
        all.are_renewed(&db).await;
        end_connections(&db).await;
    }
    all.are_renewed(&db).await;
    all.end(&db, &db.pool_of(1).await).await;
}

/// Ends all connections to the test's database but the one that asks for it.
async fn end_connections<DB: TestDatabase>(db: &TestDb<DB>) {
    let db = db.over(db.pool_of(1).await);
    let ids = match db.server.name {
        "postgres" => {
            let others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
            db.number(&format!("SELECT COUNT(pg_terminate_backend(pid)) {others}")).await;
            return;
        }
        "mysql" => {
            "SELECT COALESCE(GROUP_CONCAT(processlist_id), '') FROM performance_schema.threads
                    WHERE processlist_db = DATABASE() AND processlist_id <> CONNECTION_ID()"
        }
        _ => {
            "SELECT COALESCE(GROUP_CONCAT(id), '') FROM information_schema.processlist
              WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        }
    };
    let ids = db.text(ids).await.unwrap();
    for id in ids.split(',').filter(|id| !id.is_empty()) {
        // It may have ended by itself.
        let _ = DB::execute(&db.pool, &format!("KILL {id}")).await;
    }
}

/// The application has taken every connection of its pool, and waits for more.
async fn a_pool_that_is_used_up_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(2).await;
    let all = AllHeld::over(&db, pool.clone()).await;
    let both = (pool.acquire().await.unwrap(), pool.acquire().await.unwrap());
    let (url, theirs) = (db.url.clone(), pool.clone());
    let waits =
        harness::spawn(async move { theirs.acquire().await.map(drop).map_err(|error| format!("{url}: {error}")) });
    for _ in 0..3 {
        all.are_renewed(&db).await;
    }
    drop(both);
    waits.await.unwrap().unwrap();
    all.end(&db, &pool).await;
}

/// What is held stays held, and neither a payment nor the end of a run is made in part.
async fn a_full_disk_takes_none<DB: TestDatabase>(db: TestDb<DB>) {
    let only = db.pool_of(1).await;
    let all = AllHeld::over(&db, only.clone()).await;
    DB::execute(&only, "CREATE TABLE filler (text)").await.unwrap();
    // Each payment needs room.
    let grows = "CREATE TRIGGER grows AFTER UPDATE ON account BEGIN
                     INSERT INTO filler VALUES (hex(randomblob(100000))); END";
    DB::execute(&only, grows).await.unwrap();
    DB::execute(&only, "PRAGMA max_page_count = 1").await.unwrap(); // as many as there are
    let payments = Payments::over(&only);
    let fenced = bank::deduct(&payments.0, FENCED, 1).await.unwrap_err();
    let balance = payments.1.deduct(VERSION, 1).await.unwrap_err();
    assert!([format!("{fenced:?}"), format!("{balance:?}")].iter().all(|error| error.contains("full")), "{balance:?}");
    let mut tx = only.begin_with(DB::BEGIN).await.unwrap();
    all.run.tick.finish_in(&mut tx).await.unwrap();
    let error = DB::execute_on(&mut tx, "UPDATE account SET balance = 0").await.unwrap_err();
    assert!(error.to_string().contains("full"), "{error}");
    drop(tx);
    assert_paid(&db, 0).await;
    all.are_renewed(&db).await;
    DB::execute(&only, "PRAGMA max_page_count = 1000000").await.unwrap();
    payments.pay().await;
    assert_paid(&db, 1).await;
    all.end(&db, &only).await;
}
