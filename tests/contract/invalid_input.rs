//! Invalid input and unsuitable databases: a clear error, and nothing is changed.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired, events, eventually, pool, refused};
use rowlock::{
    Error, LeaseLock,
    errors::{DatabaseFault, Invalid, Setup},
};
use sqlx::pool::PoolOptions;

harness::tests!(
    everywhere(
        bad_keys_are_refused_before_anything_is_sent,
        bad_settings_are_refused,
        a_missing_table_says_what_to_run,
        a_missing_column_says_what_to_run,
        an_inexact_key_column_is_refused,
        a_table_whose_key_is_not_unique_is_refused,
        a_read_only_database_is_an_error,
        far_times_are_answered,
        an_unreachable_database_is_an_error_not_a_refusal,
        events_tell_the_story
    ),
    servers(a_narrow_key_column_limits_the_key, unfit_columns_of_an_existing_table_are_refused)
);

async fn bad_keys_are_refused_before_anything_is_sent<DB: TestDatabase>(db: TestDb<DB>) {
    // The pool is closed, which shows that nothing is sent.
    let nowhere = db.pool_of(1).await;
    nowhere.close().await;
    let lock = LeaseLock::new(nowhere);
    for bad in ["", " k", "k ", "k\t", "\u{3000}k", "k\0", &"x".repeat(256), &"é".repeat(128)] {
        let error = lock.try_acquire(bad).await.unwrap_err();
        assert!(matches!(error, Error::Invalid(_)), "{bad:?}: {error:?}");
        assert!(!error.is_retryable());
    }
}

async fn bad_settings_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let says = |faults: Invalid, says: &str| assert!(faults.to_string().contains(says), "{faults}");
    let bad = async |lock: LeaseLock<DB>, rule: &str| {
        says(lock.check().unwrap_err(), rule);
        let Err(Error::Invalid(faults)) = lock.try_acquire("k").await else { panic!("{rule}") };
        says(faults, rule);
        assert!(matches!(lock.inspect("k").await, Err(Error::Invalid(_))), "{rule}");
    };
    for lease in [Duration::ZERO, Duration::from_millis(99), Duration::from_secs(31 * 86400), Duration::MAX] {
        bad(db.lock().lease(lease), "from 100 ms to 30 days").await;
    }
    for distance in [Duration::from_secs(86400 * 4000), Duration::MAX] {
        bad(db.lock().min_interval(distance), "at most ten years").await;
    }
    for limit in [Duration::ZERO, Duration::from_secs(3601), Duration::MAX] {
        let Err(Error::Invalid(faults)) = db.builder().time_limit(limit).label("a\nb").build() else { panic!() };
        says(faults.clone(), "from 1 ms to one hour");
        says(faults, "control characters");
    }
    let Err(Error::Invalid(faults)) = db.builder().label("x".repeat(46)).build() else { panic!() };
    says(faults, "45 characters");
    acquired(db.builder().label("é".repeat(45)).build().unwrap().try_acquire("k").await);
}

async fn a_missing_table_says_what_to_run<DB: TestDatabase>(db: TestDb<DB>) {
    let warm = db.lock();
    acquired(warm.try_acquire("k").await).release().await.unwrap();
    db.execute("DROP TABLE t_resource_lock").await;
    for lock in [warm, db.lock()] {
        let error = lock.try_acquire("k").await.unwrap_err();
        assert!(matches!(error, Error::Setup(Setup::TableMissing)), "{error:?}");
        assert!(error.to_string().contains("rowlock::migrate"), "{error}");
    }
}

async fn a_missing_column_says_what_to_run<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("ALTER TABLE t_resource_lock DROP COLUMN claimed_at").await;
    db.execute("ALTER TABLE t_resource_lock DROP COLUMN confirms").await;
    let error = db.lock().try_acquire("k").await.unwrap_err();
    assert!(error.to_string().contains("lacks claimed_at, confirms: call rowlock::migrate"), "{error}");
}

async fn an_inexact_key_column_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    match db.server.name {
        "postgres" => {
            db.execute("CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
                .await;
            db.execute("ALTER TABLE t_resource_lock ALTER COLUMN key_resource TYPE varchar(255) COLLATE loose").await;
        }
        "sqlite" => {
            let columns = db.text("SELECT sql FROM sqlite_schema WHERE name = 't_resource_lock'").await.unwrap();
            db.execute("DROP TABLE t_resource_lock").await;
            db.execute(&columns.replacen(
                "TEXT    NOT NULL PRIMARY KEY",
                "TEXT COLLATE NOCASE NOT NULL PRIMARY KEY",
                1,
            ))
            .await;
        }
        _ => {
            db.execute("ALTER TABLE t_resource_lock MODIFY key_resource VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci NOT NULL").await;
        }
    }
    let error = db.lock().try_acquire("k").await.unwrap_err();
    assert!(
        matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("key_resource"),
        "{error:?}"
    );
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
}

/// A key could then have several rows.
async fn a_table_whose_key_is_not_unique_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let without_key = match db.server.name {
        "postgres" => "ALTER TABLE t_resource_lock DROP CONSTRAINT t_resource_lock_pkey".to_owned(),
        "sqlite" => {
            let columns = db.text("SELECT sql FROM sqlite_schema WHERE name = 't_resource_lock'").await.unwrap();
            db.execute("DROP TABLE t_resource_lock").await;
            columns.replacen("NOT NULL PRIMARY KEY", "NOT NULL", 1)
        }
        _ => "ALTER TABLE t_resource_lock DROP PRIMARY KEY".to_owned(),
    };
    db.execute(&without_key).await;
    let is_refused = async || {
        let migrated = rowlock::migrate(&db.pool).await.unwrap_err();
        let claimed = db.lock().try_acquire("k").await.unwrap_err();
        for error in [migrated, claimed] {
            assert!(
                matches!(error, Error::Setup(Setup::TableUnfit { .. })) && error.to_string().contains("key_resource"),
                "{error:?}"
            );
        }
    };
    is_refused().await;
    db.execute("CREATE UNIQUE INDEX two ON t_resource_lock (key_resource, status)").await;
    is_refused().await;
    if !db.server.name.starts_with('m') {
        db.execute("CREATE UNIQUE INDEX part ON t_resource_lock (key_resource) WHERE lock_flag = 1").await;
        is_refused().await;
        db.execute("CREATE UNIQUE INDEX one ON t_resource_lock (key_resource)").await;
        rowlock::migrate(&db.pool).await.unwrap();
        acquired(db.lock().try_acquire("k").await);
    }
}

/// The article's column is narrower than this crate's, and on MySQL cannot store characters of four
/// bytes.
async fn a_narrow_key_column_limits_the_key<DB: TestDatabase>(db: TestDb<DB>) {
    match db.server.name {
        "postgres" => db.execute("ALTER TABLE t_resource_lock ALTER COLUMN key_resource TYPE varchar(45)").await,
        _ => db.execute("ALTER TABLE t_resource_lock MODIFY key_resource VARCHAR(45) CHARACTER SET utf8mb3 COLLATE utf8mb3_bin NOT NULL").await,
    };
    let lock = db.lock();
    let error = lock.try_acquire(&"x".repeat(46)).await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("45"), "{error:?}");
    if db.server.name != "postgres" {
        assert!(
            matches!(lock.try_acquire("🔒").await, Err(Error::Invalid(ref wrong)) if wrong.to_string().contains("does not fit"))
        );
    }
    for key in ["é".repeat(45), "K".into(), "k".into()] {
        let lease = acquired(lock.try_acquire(&key).await);
        assert_eq!(refused(lock.try_acquire(&key).await).reason, rowlock::Reason::Held);
        lease.renew().await.unwrap();
        lease.release().await.unwrap();
    }
}

/// Other programs may have defined the columns that they share with this crate in these ways.
async fn unfit_columns_of_an_existing_table_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let unfit: &[(&str, &str)] = match db.server.name {
        "postgres" => &[
            ("ALTER TABLE t_resource_lock ALTER COLUMN client_ip TYPE varchar(3)", "client_ip holds 3 characters"),
            ("ALTER TABLE t_resource_lock ALTER COLUMN end_time SET NOT NULL", "end_time"),
            ("ALTER TABLE t_resource_lock SET UNLOGGED", "UNLOGGED"),
        ],
        _ => &[
            (
                "ALTER TABLE t_resource_lock MODIFY client_ip VARCHAR(3) NOT NULL DEFAULT ''",
                "client_ip holds 3 characters",
            ),
            ("ALTER TABLE t_resource_lock MODIFY end_time DATETIME(6) NOT NULL", "end_time"),
            (
                "ALTER TABLE t_resource_lock MODIFY end_time DATETIME(6) NULL, MODIFY begin_time TIMESTAMP(6) NULL",
                "begin_time",
            ),
            (
                "ALTER TABLE t_resource_lock MODIFY begin_time DATETIME(6) NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)",
                "begin_time",
            ),
            (
                "ALTER TABLE t_resource_lock MODIFY begin_time DATETIME(6) NULL, DROP PRIMARY KEY, ADD UNIQUE (key_resource),
                     ADD id INT AUTO_INCREMENT PRIMARY KEY",
                "primary key",
            ),
        ],
    };
    for (statement, says) in unfit {
        db.execute(statement).await;
        let error = db.builder().label("four").build().unwrap().try_acquire("k").await.unwrap_err();
        assert!(error.to_string().contains(says), "{statement}: {error}");
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
}

/// Other programs may write values at the ends of the calendar. The lock answers, without a panic
/// or a grant.
async fn far_times_are_answered<DB: TestDatabase>(db: TestDb<DB>) {
    let hour = Duration::from_secs(3600);
    let lock = db.lock().min_interval(hour);
    let west = db.builder().article_clients(chrono::FixedOffset::west_opt(5 * 3600).unwrap()).build().unwrap();
    let west = west.min_interval(hour);
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let far = match db.server.name {
        "sqlite" => vec!["9223372036854775807"],
        "postgres" => vec!["'infinity'", "'290000-01-01'"],
        _ => vec!["'9999-12-31 23:59:59'"],
    };
    for far in far {
        db.set("k", &format!("lock_flag = 0, status = 'S', begin_time = {far}")).await;
        assert_eq!(refused(lock.try_acquire("k").await).reason, rowlock::Reason::WithinMinInterval, "{far}");
        assert_eq!(refused(west.try_acquire("k").await).reason, rowlock::Reason::WithinMinInterval, "{far}");
        db.set("k", "lock_flag = 1, time = 2147483647").await;
        assert_eq!(refused(west.try_acquire("k").await).reason, rowlock::Reason::HeldByAnotherProgram, "{far}");
        assert_eq!(lock.list(&rowlock::admin::ListOptions::default()).await.unwrap().len(), 1);
    }
}

async fn a_read_only_database_is_an_error<DB: TestDatabase>(db: TestDb<DB>) {
    acquired(db.lock().try_acquire("k").await).release().await.unwrap();
    let read_only = match db.server.name {
        "sqlite" => pool::<DB>(&db.url.replace("mode=rwc", "mode=ro"), 1).await,
        _ => {
            let statement = if db.server.name == "postgres" {
                "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
            } else {
                "SET SESSION TRANSACTION READ ONLY"
            };
            let options = PoolOptions::<DB>::new().max_connections(1);
            let options = options
                .after_connect(move |conn, _| Box::pin(async move { DB::execute_on(conn, statement).await.map(drop) }));
            options.connect(&db.url).await.unwrap()
        }
    };
    let error = LeaseLock::new(read_only).try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::ReadOnly { .. })), "{error:?}");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
}

async fn an_unreachable_database_is_an_error_not_a_refusal<DB: TestDatabase>(db: TestDb<DB>) {
    let away = db.pool_of(1).await;
    let lock = LeaseLock::new(away.clone());
    let lease = acquired(lock.try_acquire("k").await);
    away.close().await;
    let error = lock.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::Failed { .. })), "{error:?}");
    assert!(matches!(lease.renew().await, Err(Error::Database(DatabaseFault::Failed { .. }))));
    assert!(lease.is_held(), "a failed renewal is unknown, not lost");
}

async fn events_tell_the_story<DB: TestDatabase>(db: TestDb<DB>) {
    let key = format!("story of {}", db.server.name);
    let lock = db.lock();
    let lease = acquired(lock.try_acquire(&key).await);
    refused(lock.try_acquire(&key).await);
    lease.renew().await.unwrap();
    let token = lease.token();
    lease.release().await.unwrap();
    let lease = acquired(lock.try_acquire(&key).await);
    db.take_from(&key).await;
    assert!(lease.renew().await.is_err());
    eventually("the loss is told", || async { events::about(&key).iter().any(|line| line.contains(": lost ")) }).await;
    let events = events::about(&key);
    for event in ["acquired", "refused", "renewed", "released", "lost"] {
        let line = events.iter().find(|line| line.contains(&format!(": {event} ")));
        let line = line.unwrap_or_else(|| panic!("no event {event:?} in {events:#?}"));
        if event != "lost" && event != "refused" {
            assert!(line.contains(&format!("token={token}")), "{line}");
        }
    }
}
