//! PostgreSQL servers that Patroni manages and that are not what their clients take them for: a
//! primary that was replaced and goes on, and a standby that lags.

use std::{
    convert::Infallible,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{
    Attempt, Error, LeaseLock, ReadWriteLock, Reason, ResourceLock as _, RunError, Schedule, Schedules, Tick,
    admin::LockState,
    errors::DatabaseFault,
    jobs::{CatchUp, TickOutcome},
};
use sqlx::{PgPool, Postgres};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    patroni_nodes::{Cluster, Mode},
    standby::{assert_paid, pay},
    wandering::Wandering,
};

crate::suite::tests!(PATRONI(
    a_primary_that_was_replaced_grants_nothing,
    a_primary_that_was_replaced_lets_no_reader_or_writer_in,
    a_standby_that_lags_grants_nothing_and_loses_nothing,
    an_asynchronous_primary_that_was_replaced_grants_to_its_clients,
    what_no_asynchronous_standby_saw_is_granted_again_under_a_higher_token
));

const LEASE: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(30);

/// A primary whose Patroni is dead goes on after another one was promoted, with clients that are
/// connected to it directly, as by an old DNS entry. Returns both.
async fn replaced(cluster: &Cluster) -> (usize, usize) {
    let last = cluster.primary().await.unwrap();
    cluster.kill_patroni(last);
    let next = cluster.next_primary(last).await;
    assert_eq!(cluster.one(last, "SELECT NOT pg_is_in_recovery()").await, Some(true), "it goes on");
    (last, next)
}

fn impatient(cluster: &Cluster, node: usize) -> LeaseLock<Postgres> {
    LeaseLock::builder(cluster.pool_of(node)).time_limit(Duration::from_secs(2)).build().unwrap()
}

/// Each commit there waits for a standby that has gone. Reads are answered with what was there.
async fn a_primary_that_was_replaced_grants_nothing(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let last = cluster.primary().await.unwrap();
    let old = impatient(&cluster, last);
    for key in ["free", "account", "held"] {
        old.try_acquire(key).await.unwrap().acquired().unwrap().release().await.unwrap();
    }
    let held = old.clone().lease(LEASE).try_acquire("held").await.unwrap().acquired().unwrap();
    let (last, next) = replaced(&cluster).await;
    let new = cluster.lock_at(next).lease(LEASE);
    let current = new.try_acquire("free").await.unwrap().acquired().unwrap();

    let seen = old.inspect("free").await.unwrap().unwrap();
    assert!(seen.state != LockState::Held, "it answers with what was there: {seen:?}");
    let error = old.try_acquire("free").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::TimedOut { .. })), "{error:?}");
    let error = held.renew().await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    let error = old.transaction("account", pay).await.unwrap_err();
    assert!(matches!(error, RunError::Other(_)), "{error:?}");

    cluster.start(last).await;
    assert_eq!(new.try_acquire("held").await.unwrap().refused().unwrap().reason, Reason::Held);
    current.release().await.unwrap();
    let pool = cluster.pool_of(next);
    let paid: i64 = sqlx::query_scalar("SELECT count(*) FROM payment").fetch_one(&pool).await.unwrap();
    assert_eq!(paid, 0);
}

/// Clients with connections to both: the claim is committed at the new primary, and the look that
/// follows it reaches the old one, which does not know of the other side.
async fn a_primary_that_was_replaced_lets_no_reader_or_writer_in(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let last = cluster.primary().await.unwrap();
    let (to_read, to_write) = (Wandering::new(cluster.url_of(last)), Wandering::new(cluster.url_of(last)));
    let (readers, writers) = (known(&to_read).await, known(&to_write).await);
    let (last, next) = replaced(&cluster).await;
    let others = cluster.lock_at(next).lease(LEASE).read_write("k");

    let writer = others.writer().acquire(PATIENCE).await.unwrap();
    to_read.turn_to(cluster.url_of(next), cluster.url_of(last)).await;
    not_let_in(readers.readers().try_acquire().await, "while another one writes");
    writer.release().await.unwrap();

    let reader = others.readers().acquire(PATIENCE).await.unwrap();
    to_write.turn_to(cluster.url_of(next), cluster.url_of(last)).await;
    not_let_in(writers.writer().try_acquire().await, "while another one reads");
    reader.release().await.unwrap();
    cluster.start(last).await;
}

/// The lock "k" of a client that has read and written.
async fn known(wandering: &Wandering<Postgres>) -> ReadWriteLock<Postgres> {
    let lock = wandering.lock().read_write("k");
    lock.writer().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    lock.readers().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    lock
}

fn not_let_in<T: std::fmt::Debug>(attempt: Result<Attempt<T>, Error>, when: &str) {
    println!("{when}: {attempt:?}");
    match attempt {
        Ok(Attempt::Acquired(lease)) => panic!("{lease:?} {when}"),
        Ok(Attempt::Refused(refusal)) => assert_eq!(refusal.reason, Reason::Held),
        Err(Error::Database(DatabaseFault::ReadOnly { .. })) => {}
        Err(error) => assert!(error.is_retryable(), "{error:?}"),
    }
}

/// The standbys receive everything and apply nothing. One is asked, and one is promoted.
async fn a_standby_that_lags_grants_nothing_and_loses_nothing(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Synchronous).await;
    let last = cluster.primary().await.unwrap();
    let wandering = Wandering::new(cluster.url_of(last));
    let readers = known(&wandering).await;
    let standbys = [last % 3 + 1, (last + 1) % 3 + 1];
    cluster.caught_up(last).await;
    for standby in standbys {
        cluster.pause_replay(standby).await;
    }
    let lock = cluster.lock_at(last).lease(LEASE);
    let writer = lock.read_write("k").writer().acquire(PATIENCE).await.unwrap();
    for _ in 0..5 {
        lock.transaction("account", pay).await.unwrap();
    }

    let at_standby = impatient(&cluster, standbys[0]);
    let seen = at_standby.inspect("k").await.unwrap();
    assert!(seen.is_none_or(|seen| seen.state != LockState::Held), "it answers with what it has applied");
    let error = at_standby.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::ReadOnly { .. })), "{error:?}");
    wandering.turn_to(cluster.url_of(last), cluster.url_of(standbys[0])).await;
    not_let_in(readers.readers().try_acquire().await, "while another one writes");

    cluster.kill(last);
    cluster.promoted(standbys).await;
    for standby in standbys {
        assert!(cluster.lags(standby).await, "node {standby} has applied everything");
        cluster.resume_server(standby);
    }
    let next = cluster.next_primary(last).await;
    let new = cluster.lock_at(next);
    assert_eq!(new.try_acquire("k").await.unwrap().refused().unwrap().reason, Reason::Held);
    assert_paid(&cluster.pool_of(next), 5, 0).await;
    cluster.start(last).await;
    drop(writer);
}

/// Shows what is lost in asynchronous mode while the last primary goes on.
async fn an_asynchronous_primary_that_was_replaced_grants_to_its_clients(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Asynchronous).await;
    let last = cluster.primary().await.unwrap();
    let old = impatient(&cluster, last);
    for key in ["k", "account"] {
        old.try_acquire(key).await.unwrap().acquired().unwrap().release().await.unwrap();
    }
    let (last, next) = replaced(&cluster).await;
    let current = cluster.lock_at(next).lease(LEASE).try_acquire("k").await.unwrap().acquired().unwrap();
    let stray = old.clone().lease(Duration::from_secs(6)).try_acquire("k").await.unwrap().acquired().unwrap();
    assert!(current.is_held() && stray.is_held(), "this is what is lost: two holders");
    assert!(stray.token() > current.token(), "and tokens of two primaries do not tell which one is current");
    old.transaction("account", pay).await.unwrap();

    cluster.start(last).await;
    assert_paid(&cluster.pool_of(next), 0, 0).await; // the payment went with the last primary
    timeout(PATIENCE, stray.lost()).await.unwrap();
    let error = old.try_acquire("k").await.unwrap_err();
    assert!(matches!(error, Error::Database(DatabaseFault::ReadOnly { .. })), "{error:?}");
    current.renew().await.unwrap();
    current.release().await.unwrap();
}

/// Shows what is lost in asynchronous mode with the primary, and what still holds.
async fn what_no_asynchronous_standby_saw_is_granted_again_under_a_higher_token(folder: PathBuf) {
    let cluster = Cluster::new(folder, Mode::Asynchronous).await;
    let lock = LeaseLock::new(cluster.pool()).lease(LEASE);
    lock.try_acquire("k").await.unwrap().acquired().unwrap().release().await.unwrap();
    let first = next_tick(&cluster.pool()).await;
    let last = cluster.primary().await.unwrap();
    cluster.caught_up(last).await;
    cluster.pause_senders(last).await;
    let tick = next_tick(&cluster.pool()).await;
    assert!(tick > first);
    let lost = lock.try_acquire("k").await.unwrap().acquired().unwrap();
    lock.transaction("account", pay).await.unwrap();
    let since = Instant::now();
    cluster.kill(last);
    let next = cluster.next_primary(last).await;
    let new = cluster.lock_at(next).lease(LEASE);
    let second = new.acquire("k", PATIENCE).await.unwrap();
    println!("asynchronous: granted again after {:?}", since.elapsed());
    assert!(lost.is_held() && second.is_held(), "this is what is lost: two holders, until the first one finds out");
    assert!(second.token() > lost.token(), "but what is written to can tell them apart");
    assert_paid(&cluster.pool_of(next), 0, 0).await; // nor was the payment replicated
    assert_eq!(next_tick(&cluster.pool_of(next)).await, tick, "and the tick runs again");

    let mut tx = cluster.pool_of(next).begin().await.unwrap();
    let error = lock.confirm(lost.claim(), &mut tx).await.unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "and no commit under the first goes through: {error:?}");
    tx.rollback().await.unwrap();
    while !matches!(lost.renew().await, Err(Error::Lost { .. })) {
        assert!(since.elapsed() < LEASE, "it finds out as soon as it reaches the new primary");
        sleep(Duration::from_millis(100)).await;
    }
    second.release().await.unwrap();
    cluster.start(last).await;
}

/// Waits for the next tick of a schedule that leaves out none, runs it, and returns its slot.
async fn next_tick(pool: &PgPool) -> i64 {
    let slot = Arc::new(AtomicI64::new(0));
    let run = slot.clone();
    let schedule = Schedule::every("s", Duration::from_secs(1)).catch_up(CatchUp::All(100));
    let schedules = Schedules::new(pool.clone()).on(schedule, move |tick: Tick<Postgres>| {
        run.store(tick.slot().timestamp_millis(), SeqCst);
        async { Ok::<_, Infallible>(()) }
    });
    let since = Instant::now();
    while !matches!(schedules.try_tick("s").await.unwrap(), TickOutcome::Succeeded) {
        assert!(since.elapsed() < PATIENCE, "the tick does not come");
        sleep(Duration::from_millis(50)).await;
    }
    slot.load(SeqCst)
}
