//! A process that was forked from one that has the library's threads: a copy of the forking thread
//! alone, with a copy of all that the others may have been changing.

#![cfg(unix)]
#![allow(unsafe_code, clippy::unwrap_used, missing_docs)]

use std::{
    future::Future,
    io,
    os::unix::process::CommandExt as _,
    pin::pin,
    process::Command,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use rowlock::{Error, Lease, LeaseLock, Schedule, Schedules, errors::Setup};
use sqlx::{Sqlite, SqlitePool};

const LEASE: Duration = Duration::from_secs(1);
/// What the process that forked receives if the other one found everything as it should be.
const AS_IT_SHOULD_BE: i32 = 10_000;

/// Returns whether the call is refused at once, without a runtime.
fn is_refused<T>(call: impl Future<Output = Result<T, Error>>) -> bool {
    matches!(pin!(call).poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Err(Error::Setup(Setup::Forked))))
}

/// Returns the number of the first check that fails in a forked process.
fn check(lock: &LeaseLock<Sqlite>, schedules: &Schedules<Sqlite>, lease: Lease<Sqlite>) -> i32 {
    let checks = [
        is_refused(lock.try_acquire("other")),
        is_refused(lock.acquire("other", LEASE)),
        is_refused(lock.inspect("k")),
        is_refused(schedules.try_tick("job")),
        is_refused(lease.renew()),
        lease.time_left().is_zero(),
    ];
    drop(lease);
    checks.iter().zip(1..).find(|(passes, _)| !**passes).map_or(AS_IT_SHOULD_BE, |(_, number)| number)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_a_forked_process_are_refused_and_its_drops_end_nothing() {
    let file = format!("{}/fork.db", env!("CARGO_TARGET_TMPDIR"));
    let _ = std::fs::remove_file(&file);
    let url = format!("sqlite:{file}?mode=rwc");
    let pool = SqlitePool::connect(&url).await.unwrap();
    rowlock::migrate(&pool).await.unwrap();
    let lock = LeaseLock::new(pool.clone()).lease(LEASE);
    let job = Schedule::every("job", LEASE);
    let schedules = Schedules::new(pool.clone()).on(job, async |_| Ok::<_, Error>(()));
    let lease = lock.try_acquire("k").await.unwrap().acquired().unwrap();
    // Each process takes it from a copy of its own.
    let held = Arc::new(Mutex::new(Some(lease)));
    let (of_child, its_lock) = (held.clone(), lock.clone());
    let mut command = Command::new("true");
    let in_child = move || {
        let lease = of_child.lock().unwrap().take().unwrap();
        Err(io::Error::from_raw_os_error(check(&its_lock, &schedules, lease)))
    };
    // SAFETY: no other thread allocates or holds a lock that the other process needs: the threads
    // of the library wait, and the test has no other task. What the process does is what is tested.
    unsafe { command.pre_exec(in_child) };
    let says = command.spawn().unwrap_err().raw_os_error();
    assert_eq!(says, Some(AS_IT_SHOULD_BE));
    tokio::time::sleep(3 * LEASE).await;
    let lease = held.lock().unwrap().take().unwrap();
    assert!(!lease.time_left().is_zero(), "it was renewed");
    let other = LeaseLock::new(SqlitePool::connect(&url).await.unwrap());
    assert!(other.try_acquire("k").await.unwrap().refused().is_some(), "the drop in the other process ended nothing");
    lease.release().await.unwrap();
}
