//! Readers and writers whose lease is over.

use std::{
    task::{Context, Waker},
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, refused};
use rowlock::{Error, Lease, LeaseLock, Reason, ResourceLock as _, errors::NotFound};
use tokio::time::sleep;

use crate::read_write::{LONG, SHORT, on, other, written};

harness::tests!(everywhere(
    an_expired_reader_is_replaced_by_a_writer,
    a_reader_that_may_still_commit_keeps_writers_out,
    an_expired_writer_is_taken_over_by_a_reader,
    an_expired_writer_is_told_to_a_reader_that_hears_of_it,
    an_expired_writer_is_told_once_to_readers_that_enter_together,
    an_expired_reader_is_no_writer,
    a_writer_that_may_still_commit_keeps_readers_out
));

/// Returns a lease that nothing renews any more, once its lease is over.
async fn expired<DB: TestDatabase>(lease: Lease<DB>) -> rowlock::Claim {
    let claim = lease.detach();
    sleep(SHORT + SHORT / 4).await;
    claim
}

async fn an_expired_reader_is_replaced_by_a_writer<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let lock = db.lock_for(SHORT);
    let reader = expired(acquired(on(&lock).readers().acquire(PATIENCE).await)).await;
    let writer = acquired(other(&db).writer().try_acquire().await);
    let late = lock.attach(reader.key.as_str(), reader.holder).await;
    assert!(matches!(late, Err(Error::NotFound(NotFound::Claim { .. }) | Error::Lost { .. })), "{late:?}");
    let mut tx = db.pool.begin().await.unwrap();
    let confirmed = lock.confirm(&reader, &mut tx).await;
    assert!(matches!(confirmed, Err(Error::Lost { .. })), "{confirmed:?}");
    drop(tx);
    assert!(writer.is_held());
}

/// The reader's lease is over, but a transaction has confirmed it.
async fn a_reader_that_may_still_commit_keeps_writers_out<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let lock = db.lock_for(SHORT);
    let reader = acquired(on(&lock).readers().acquire(PATIENCE).await).detach();
    let pool = db.pool_of(1).await;
    let mut tx = pool.begin_with(DB::BEGIN).await.unwrap();
    lock.confirm(&reader, &mut tx).await.unwrap();
    sleep(SHORT + SHORT / 4).await;
    let refusal = refused(other(&db).writer().try_acquire().await);
    // SQLite has no locked rows: the name is busy as well.
    let busy = if db.server.name == "sqlite" { "k" } else { reader.key.as_str() };
    assert_eq!((refusal.reason, refusal.key.as_str()), (Reason::Busy, busy));
    tx.commit().await.unwrap();
    acquired(other(&db).writer().acquire(PATIENCE).await);
}

async fn an_expired_writer_is_taken_over_by_a_reader<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(SHORT);
    let writer = expired(acquired(on(&lock).writer().acquire(PATIENCE).await)).await;
    let reader = acquired(other(&db).readers().try_acquire().await);
    assert_eq!(reader.taken_over_from().map(|prior| prior.token), Some(writer.token), "its work may be half done");
    assert!(reader.writer_token().unwrap() > writer.token);
    let late = lock.attach("k", writer.holder).await;
    assert!(matches!(late, Err(Error::NotFound(NotFound::Claim { .. }) | Error::Lost { .. })), "{late:?}");
    // The name is freed in the background.
    assert!(
        acquired(other(&db).readers().acquire(PATIENCE).await).taken_over_from().is_none(),
        "the first one was told"
    );
}

/// A reader is let in, and its caller has left.
async fn an_expired_writer_is_told_to_a_reader_that_hears_of_it<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(SHORT);
    for _ in 0..50 {
        let writer = expired(acquired(on(&lock).writer().acquire(PATIENCE).await)).await;
        let leaves = db.lock_for(LONG);
        if !is_let_in_unheard(&db, &leaves).await {
            continue;
        }
        assert!(leaves.shutdown(PATIENCE).await);
        let reader = acquired(other(&db).readers().acquire(PATIENCE).await);
        assert_eq!(reader.taken_over_from().map(|prior| prior.token), Some(writer.token));
        return;
    }
    panic!("it always heard of it");
}

/// Two readers share the claim that took over. One is told, and the other leaves afterwards.
async fn an_expired_writer_is_told_once_to_readers_that_enter_together<DB: TestDatabase>(db: TestDb<DB>) {
    for _ in 0..50 {
        let writer = expired(acquired(on(&db.lock_for(SHORT)).writer().acquire(PATIENCE).await)).await;
        let (lock, mut context) = (db.lock_for(LONG), Context::from_waker(Waker::noop()));
        let readers = on(&lock);
        let mut left = Box::pin(readers.readers().acquire(PATIENCE));
        assert!(left.as_mut().poll(&mut context).is_pending());
        let told = acquired(readers.readers().acquire(PATIENCE).await);
        assert_eq!(told.taken_over_from().map(|prior| prior.token), Some(writer.token));
        sleep(Duration::from_millis(300)).await;
        drop(left);
        let entered_under = told.writer_token().unwrap();
        told.release().await.unwrap();
        assert!(lock.shutdown(PATIENCE).await);
        let is_shared =
            db.number("SELECT token FROM t_resource_lock WHERE key_resource = 'k'").await == Some(entered_under.get());
        let next = acquired(other(&db).readers().acquire(PATIENCE).await);
        assert!(next.taken_over_from().is_none(), "it was told already");
        next.release().await.unwrap();
        if is_shared {
            return;
        }
    }
    panic!("they never entered together");
}

/// Waits as a reader, and leaves once a reader's key is held and nothing is in flight.
async fn is_let_in_unheard<DB: TestDatabase>(db: &TestDb<DB>, lock: &LeaseLock<DB>) -> bool {
    let readers = on(lock);
    let mut call = Box::pin(readers.readers().acquire(PATIENCE));
    let held = "SELECT COUNT(*) FROM t_resource_lock WHERE lock_flag = 1 AND key_resource <> 'k'";
    while db.number(held).await != Some(1) {
        if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return false;
        }
        sleep(Duration::from_millis(5)).await;
    }
    sleep(Duration::from_millis(300)).await;
    true
}

/// The next reader takes over the key of one that has crashed.
async fn an_expired_reader_is_no_writer<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let lock = db.lock_for(SHORT);
    let crashed = expired(acquired(on(&lock).readers().acquire(PATIENCE).await)).await;
    let reader = acquired(on(&lock).readers().acquire(PATIENCE).await);
    assert_eq!(reader.key(), &crashed.key, "the number is used again");
    assert!(reader.taken_over_from().is_none() && reader.held().taken_over_from().is_none());
}

/// The writer's lease is over, but a transaction has confirmed it.
async fn a_writer_that_may_still_commit_keeps_readers_out<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(SHORT);
    let writer = acquired(on(&lock).writer().acquire(PATIENCE).await).detach();
    let pool = db.pool_of(1).await;
    let mut tx = pool.begin_with(DB::BEGIN).await.unwrap();
    lock.confirm(&writer, &mut tx).await.unwrap();
    sleep(SHORT + SHORT / 4).await;
    let early = other(&db).readers().try_acquire().await;
    assert!(!matches!(early, Ok(rowlock::Attempt::Acquired(_))), "{early:?}");
    tx.commit().await.unwrap();
    acquired(other(&db).readers().acquire(PATIENCE).await);
}
