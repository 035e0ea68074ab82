//! The numbers that the feature `metrics` publishes, by their documented names.

#![allow(clippy::unwrap_used, missing_docs)]

use std::{collections::HashMap, time::Duration};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use rowlock::{Attempt, Columns, LeaseLock, Status, VersionedTable};
use sqlx::{SqlitePool, sqlite::SqlitePoolOptions};

/// One test only, because the recorder is global to the process.
#[tokio::test]
async fn what_happens_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    let pool: SqlitePool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
    rowlock::migrate(&pool).await.unwrap();
    let lock = LeaseLock::new(pool.clone()).lease(Duration::from_millis(300)).unwrap();

    let lease = lock.try_acquire("k").await.unwrap().acquired().unwrap();
    assert!(lock.try_acquire("k").await.unwrap().refused().is_some());
    lease.release(Status::Succeeded).await.unwrap();
    assert!(matches!(lock.acquire("k", Duration::ZERO).await.unwrap(), Attempt::Acquired(_)));
    assert!(lock.shutdown(Duration::from_secs(20)).await);

    let lost = lock.try_acquire("l").await.unwrap().acquired().unwrap();
    lock.force_release("l", Status::Succeeded).await.unwrap();
    lost.lost().await;
    let kept = lock.try_acquire("m").await.unwrap().acquired().unwrap();
    let only = pool.acquire().await.unwrap(); // no renewal gets a connection
    kept.lost().await;
    drop((only, lost, kept));

    sqlx::raw_sql("CREATE TABLE a (id TEXT PRIMARY KEY, n INTEGER NOT NULL, v INTEGER NOT NULL); INSERT INTO a VALUES ('x', 9, 0)")
        .execute(&pool)
        .await
        .unwrap();
    let table = VersionedTable::new(pool.clone(), Columns { table: "a", key: "id", value: "n", version: "v" }).unwrap();
    sqlx::raw_sql(
        "CREATE TRIGGER t BEFORE UPDATE ON a WHEN old.v = 0 BEGIN UPDATE a SET v = 5; SELECT raise(ignore); END",
    )
    .execute(&pool)
    .await
    .unwrap();
    assert_eq!(table.deduct("x", 1).await.unwrap().attempts, 2);

    let found: HashMap<String, DebugValue> = snapshotter
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            let labels: String =
                key.key().labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
            (format!("{}{labels}", key.key().name()), value)
        })
        .collect();
    let count = |name: &str| match found.get(name) {
        Some(DebugValue::Counter(count)) => *count,
        other => panic!("{name}: {other:?} in {:?}", found.keys()),
    };
    let seen = |name: &str| match found.get(name) {
        Some(DebugValue::Histogram(values)) => values.len(),
        other => panic!("{name}: {other:?} in {:?}", found.keys()),
    };
    assert_eq!(count("rowlock_acquired_total"), 4);
    assert_eq!(count("rowlock_refused_total reason=held"), 1);
    assert_eq!(count("rowlock_lost_total"), 2);
    assert_eq!(count("rowlock_conflicts_total"), 1);
    assert!(count("rowlock_renewals_failed_total") >= 1);
    assert_eq!(seen("rowlock_wait_seconds"), 4);
    assert_eq!(seen("rowlock_hold_seconds"), 4);
}
