//! Rows that other programs have written, with values that the library itself never writes: in
//! columns of the application that hold more than the library's. And a column that was widened
//! later than the library's copy of it.

use chrono::FixedOffset;
use harness::{Table, TestDatabase, TestDb, acquired, refused};
use rowlock::{Error, Reason, admin::ListOptions, errors::Setup};

use crate::article::put;

harness::tests!(
    servers.each(
        a_label_may_be_longer_than_a_claim_remembers,
        minutes_of_any_size_refuse_a_claim,
        a_time_that_was_widened_without_its_copy_is_refused
    ),
    postgres(a_run_that_began_before_all_times_is_answered)
);

/// Changes the article's columns, before a lock has looked at the table.
async fn widen<DB: TestDatabase>(db: &TestDb<DB>) {
    let (time, label) = match db.server.name {
        "postgres" => ("ALTER COLUMN time TYPE bigint", "ALTER COLUMN client_ip TYPE varchar(100)"),
        _ => ("MODIFY time BIGINT NOT NULL DEFAULT 60", "MODIFY client_ip VARCHAR(100) NOT NULL DEFAULT ''"),
    };
    db.execute(&format!("ALTER TABLE t_resource_lock {time}, {label}")).await;
}

/// Of a row that is free, and of a claim that is taken over.
async fn a_label_may_be_longer_than_a_claim_remembers<DB: TestDatabase>(db: TestDb<DB>) {
    widen(&db).await;
    let lock = db.lock();
    acquired(lock.try_acquire_all(["k", "l"]).await).release().await.unwrap();
    let long = format!("client_ip = '{}'", "x".repeat(60));
    for key in ["k", "l"] {
        db.set(key, &long).await;
    }
    acquired(lock.try_acquire_all(["k", "l"]).await).release().await.unwrap();
    db.set("k", &long).await;
    acquired(lock.try_acquire("k").await).detach();
    db.set("k", &format!("{long}, expires_at = {}", DB::ago(1))).await;
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(lease.taken_over_from().unwrap().label, "x".repeat(45));
    lease.release().await.unwrap();
}

async fn minutes_of_any_size_refuse_a_claim<DB: TestDatabase>(db: TestDb<DB>) {
    widen(&db).await;
    let lock = db.builder().article_clients(FixedOffset::east_opt(0).unwrap()).build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    for minutes in ["3000000000", "9223372036854775807"] {
        let theirs = format!("lock_flag = 1, end_time = NULL, begin_time = {}, time = {minutes}", DB::ago(1_000));
        db.set("k", &theirs).await;
        assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::HeldByAnotherProgram, "{minutes}");
    }
}

/// A claim would be lost at its first renewal: its two times would round differently.
async fn a_time_that_was_widened_without_its_copy_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    put(&db, Table::Articles).await;
    let change = match db.server.name {
        "postgres" => "ALTER COLUMN begin_time TYPE timestamptz(3)",
        _ => "MODIFY begin_time DATETIME(6) NULL",
    };
    db.execute(&format!("ALTER TABLE t_resource_lock {change}")).await;
    let claimed = db.lock().try_acquire("k").await.unwrap_err();
    assert_eq!(claimed.to_string(), rowlock::migrate(&db.pool).await.unwrap_err().to_string());
    assert!(matches!(claimed, Error::Setup(Setup::TableUnfit { .. })), "{claimed:?}");
    let told = claimed.to_string();
    db.execute(told.split_once("; ").unwrap().1).await;
    rowlock::migrate(&db.pool).await.unwrap();
    let lease = acquired(db.lock().try_acquire("k").await);
    lease.renew().await.unwrap();
    lease.release().await.unwrap();
}

async fn a_run_that_began_before_all_times_is_answered<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    db.set("k", "lock_flag = 1, begin_time = '-infinity', end_time = NULL").await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::HeldByAnotherProgram);
    assert_eq!(lock.list(&ListOptions::default()).await.unwrap().len(), 1);
    db.set("k", "lock_flag = 0").await;
    acquired(lock.try_acquire("k").await).release().await.unwrap();
}
