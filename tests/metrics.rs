//! The numbers that the feature `metrics` publishes, by their documented names.

#![allow(clippy::unwrap_used, missing_docs)]

use std::{
    collections::{HashMap, hash_map::Entry},
    convert::Infallible,
    time::{Duration, Instant},
};

use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use rowlock::{LeaseLock, Schedule, Schedules, Status, VersionedTable, balances::Columns, jobs::TickOutcome};
use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection, SqlitePool, sqlite::SqlitePoolOptions};

/// One test only, because the recorder is global to the process.
#[tokio::test]
async fn what_happens_is_counted() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    recorder.install().unwrap();
    rowlock::describe_metrics();
    let pool: SqlitePool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
    rowlock::migrate(&pool).await.unwrap();
    let lock = LeaseLock::new(pool.clone()).lease(Duration::from_millis(300));

    let lease = lock.try_acquire("k").await.unwrap().acquired().unwrap();
    assert!(lock.try_acquire("k").await.unwrap().refused().is_some());
    lease.release().await.unwrap();
    drop(lock.acquire("k", Duration::ZERO).await.unwrap());
    assert!(lock.shutdown(Duration::from_secs(20)).await);

    let lost = lock.try_acquire("l").await.unwrap().acquired().unwrap();
    lock.force_release("l", Status::Succeeded).await.unwrap();
    lost.lost().await;
    let kept = lock.try_acquire("m").await.unwrap().acquired().unwrap();
    let only = pool.acquire().await.unwrap(); // no renewal gets a connection
    kept.lost().await;
    drop((only, lost, kept));
    rowlock::label_metrics_by_key(true);
    let taken_over = lock.acquire("m", Duration::from_secs(20)).await.unwrap();
    rowlock::label_metrics_by_key(false);
    taken_over.release().await.unwrap();

    let (ran, mut runs) = tokio::sync::mpsc::channel(1);
    let job = Schedule::after("job", Duration::from_millis(100));
    let schedules = Schedules::new(pool.clone()).on(job, move |_| {
        let ran = ran.clone();
        async move { ran.send(()).await }
    });
    let running = schedules.start().await.unwrap();
    runs.recv().await.unwrap();
    runs.recv().await.unwrap();
    running.shutdown(Duration::from_secs(20)).await;
    // The processes of eleven attempts have died.
    let died = "UPDATE t_resource_schedule SET holder = randomblob(16), attempt = 11, run_slot = slot, begin_time = slot, due_at = 0";
    sqlx::raw_sql(died).execute(&pool).await.unwrap();
    assert!(matches!(schedules.try_tick("job").await.unwrap(), TickOutcome::Failed { .. }), "it is given up");
    assert!(lock.shutdown(Duration::from_secs(20)).await);

    let file = format!("sqlite:{}/metrics.db?mode=rwc", env!("CARGO_TARGET_TMPDIR"));
    execute(
        &file,
        "DROP TABLE IF EXISTS a; CREATE TABLE a (id TEXT PRIMARY KEY, n INTEGER NOT NULL, v INTEGER NOT NULL)",
    );
    execute(&file, "INSERT INTO a VALUES ('x', 9, 0)");
    let columns = Columns { table: "a", key: "id", value: "n", version: "v" };
    let table = VersionedTable::new(SqlitePool::connect(&file).await.unwrap(), columns);
    let mut conflict = Some("UPDATE a SET v = v + 1");
    let updated = table.update("x", |n| {
        if let Some(sql) = conflict.take() {
            execute(&file, sql);
        }
        Ok::<_, Infallible>(n - 1)
    });
    assert_eq!(updated.await.unwrap().attempts, 2);

    // The metrics of the background come from a thread of their own. A snapshot empties histograms.
    let mut found: HashMap<String, DebugValue> = HashMap::new();
    let began = Instant::now();
    let all_there = |found: &HashMap<String, DebugValue>| {
        matches!(found.get("rowlock_hold_seconds"), Some(DebugValue::Histogram(values)) if values.len() >= 5)
            && matches!(found.get("rowlock_held"), Some(DebugValue::Gauge(held)) if held.into_inner() == 0.0)
    };
    while !all_there(&found) {
        assert!(began.elapsed() < Duration::from_secs(20), "holds are missing: {:?}", found.keys());
        for (key, unit, text, value) in snapshotter.snapshot().into_vec() {
            let name = key.key().name();
            let wanted = if name.ends_with("_seconds") { "s" } else { "" };
            assert_eq!(unit.map(|unit| unit.as_canonical_label()), Some(wanted), "{name}");
            assert!(text.is_some(), "{name} is described");
            let labels: String =
                key.key().labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
            match (found.entry(format!("{name}{labels}")), value) {
                (Entry::Occupied(mut before), DebugValue::Histogram(values)) => {
                    if let DebugValue::Histogram(before) = before.get_mut() {
                        before.extend(values);
                    }
                }
                (entry, value) => drop(entry.insert_entry(value)),
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let count = |name: &str| match found.get(name) {
        Some(DebugValue::Counter(count)) => *count,
        other => panic!("{name}: {other:?} in {:?}", found.keys()),
    };
    let gauge = |name: &str| match found.get(name) {
        Some(DebugValue::Gauge(value)) => value.into_inner(),
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
    assert_eq!((count("rowlock_acquired_total key=m"), count("rowlock_taken_over_total key=m")), (1, 1));
    assert!(!found.contains_key("rowlock_taken_over_total"), "the others took a free key");
    assert!(count("rowlock_runs_total outcome=succeeded") >= 1);
    assert_eq!(count("rowlock_runs_total outcome=failed"), 1, "a tick that is given up");
    assert_eq!((gauge("rowlock_held"), gauge("rowlock_waiting")), (0.0, 0.0), "each is over");
    assert_eq!(gauge("rowlock_longest_hold_seconds"), 0.0, "each is over");
    assert_eq!((seen("rowlock_wait_seconds"), seen("rowlock_wait_seconds key=m")), (4, 1));
    assert_eq!(seen("rowlock_hold_seconds"), 5);
    assert!(seen("rowlock_renewal_seconds") >= 1);
    assert!(seen("rowlock_run_seconds outcome=succeeded") >= 1 && seen("rowlock_start_delay_seconds") >= 1);
    assert!(rowlock::METRIC_BUCKETS.is_sorted());
}

/// Executes a text as another process does, also within a call that cannot be awaited.
fn execute(url: &str, sql: &'static str) {
    let url = url.to_owned();
    let executed = std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
            let mut conn = SqliteConnection::connect(&url).await.unwrap();
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.unwrap();
        });
    });
    executed.join().unwrap();
}
