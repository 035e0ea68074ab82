//! A machine that sleeps for longer than a lease.

#![allow(clippy::unwrap_used)]

use std::{process::Command, time::Duration};

use sqlx::{
    SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use crate::{
    Error, LeaseLock, Reason, Schedule, Schedules,
    jobs::TickOutcome,
    session::{time::tests::put_to_sleep, timers::timeout},
};

/// Set in the process whose clock the test moves.
const ALONE: &str = "ROWLOCK_TEST_SLEEPS";
const HOUR: Duration = Duration::from_secs(60 * 60);
/// How soon the thread that watches the deadlines reads the clock again, on a busy machine.
const SOON: Duration = Duration::from_secs(5);

/// The clock is that of the whole process, so that the test runs in one of its own.
#[test]
fn leases_are_lost_when_the_machine_wakes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if std::env::var_os(ALONE).is_some() {
        return runtime.block_on(sleep_with_leases());
    }
    let name = format!("{}::leases_are_lost_when_the_machine_wakes", module_path!().split_once("::").unwrap().1);
    let alone =
        Command::new(std::env::current_exe().unwrap()).args(["--exact", &name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&alone.stdout);
    assert!(alone.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&alone.stderr));
}

async fn sleep_with_leases() {
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteConnectOptions::new().filename(folder.path().join("lock.db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(options.journal_mode(SqliteJournalMode::Wal)).await.unwrap();
    crate::migrate(&pool).await.unwrap();
    let lock = LeaseLock::new(pool.clone()).lease(HOUR / 2);
    let one = lock.try_acquire("one").await.unwrap().acquired().unwrap();
    let two = lock.try_acquire("two").await.unwrap().acquired().unwrap();
    let token = one.cancellation_token();
    let (began, begun) = tokio::sync::oneshot::channel();
    let began = std::sync::Arc::new(std::sync::Mutex::new(Some(began)));
    let schedules = Schedules::new(pool.clone()).lease(HOUR / 2);
    let schedules = schedules.on(Schedule::every("run", HOUR), move |tick| {
        let began = began.lock().unwrap().take();
        async move {
            drop(began.unwrap().send(tick.cancellation_token()));
            std::future::pending::<Result<(), std::convert::Infallible>>().await
        }
    });
    schedules.try_tick("run").await.unwrap(); // registers it
    schedules.trigger("run").await.unwrap();
    let run = tokio::spawn(async move { schedules.try_tick("run").await });
    let cancelled = timeout(SOON, begun).await.unwrap().unwrap();

    put_to_sleep(HOUR);

    // At once, before anything can be done under it.
    assert!(!one.is_held() && one.time_left().is_zero());
    timeout(SOON, token.cancelled()).await.unwrap();
    timeout(SOON, cancelled.cancelled()).await.unwrap();
    assert!(matches!(one.renew().await, Err(Error::Lost { .. })));
    assert_eq!(timeout(SOON, run).await.unwrap().unwrap().unwrap(), TickOutcome::Lost);
    // The database's clock did not sleep, and its lease has not ended.
    let refused = lock.try_acquire("two").await.unwrap().refused().unwrap();
    assert_eq!(refused.reason, Reason::Held);
    // No other claim has taken the row.
    two.release().await.unwrap();
    assert!(lock.try_acquire("two").await.unwrap().acquired().unwrap().is_held());
    pool.close().await;
}
