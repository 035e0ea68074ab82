//! Readers that become writers, and writers that become readers.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, Lease, Reason, Status, errors::NotFound};
use tokio::time::{Instant, sleep, timeout};

use crate::read_write::{SHORT, other, written};

harness::tests!(
    everywhere(two_upgrades_do_not_wait_for_each_other, an_upgrade_is_refused_to_a_reader_that_was_replaced),
    everywhere.each(a_downgrade_leaves_no_gap, a_downgrade_is_one_step_to_others)
);

async fn a_downgrade_leaves_no_gap<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = other(&db);
    let writer = acquired(lock.writer().try_acquire().await);
    let token = writer.token();
    let next = other(&db);
    let next = harness::spawn(async move { acquired(next.writer().acquire(PATIENCE).await) });
    sleep(SHORT).await;
    let reader = lock.downgrade(writer).await.unwrap();
    assert_eq!(reader.writer_token(), Some(token));
    sleep(SHORT).await;
    assert!(!next.is_finished() && reader.is_held(), "the next writer waits for the reader");
    reader.release().await.unwrap();
    let writer = timeout(PATIENCE, next).await.unwrap().unwrap();
    writer.release().await.unwrap();
    // Others read beside a writer that was downgraded.
    let reader = lock.downgrade(acquired(lock.writer().try_acquire().await)).await.unwrap();
    acquired(other(&db).readers().try_acquire().await);
    let wrong = lock.downgrade(reader).await;
    assert!(matches!(wrong, Err(Error::NotFound(NotFound::Claim { .. }))), "{wrong:?}");
}

/// A writer that asks all the time is refused.
async fn a_downgrade_is_one_step_to_others<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = other(&db);
    let next = other(&db);
    for _ in 0..20 {
        let writer = acquired(lock.writer().acquire(PATIENCE).await);
        let asks = async {
            loop {
                refused(next.writer().try_acquire().await);
            }
        };
        let reader = tokio::select! {
            reader = lock.downgrade(writer) => reader.unwrap(),
            never = asks => never,
        };
        reader.release().await.unwrap();
    }
}

async fn two_upgrades_do_not_wait_for_each_other<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let locks = [other(&db), other(&db)];
    let readers = [acquired(locks[0].readers().try_acquire().await), acquired(locks[1].readers().try_acquire().await)];
    for _ in 0..5 {
        let both = tokio::join!(locks[0].try_upgrade(&readers[0]), locks[1].try_upgrade(&readers[1]));
        refused(both.0);
        refused(both.1);
        assert!(readers.iter().all(Lease::is_held), "both go on reading");
    }
    let [first, second] = readers;
    second.release().await.unwrap();
    let writer = acquired(retried(|| locks[0].try_upgrade(&first)).await);
    assert_eq!(refused(locks[1].readers().try_acquire().await).reason, Reason::Held);
    writer.release().await.unwrap();
    refused(locks[1].writer().try_acquire().await);
    acquired(locks[1].readers().acquire(PATIENCE).await);
    let wrong = locks[0].try_upgrade(&acquired(db.lock().try_acquire("j").await)).await;
    assert!(matches!(wrong, Err(Error::NotFound(NotFound::Claim { .. }))), "{wrong:?}");
    assert!(first.is_held(), "the first one reads on");
}

/// Repeats an attempt while it is refused, because rows are put back in the background.
async fn retried<DB: TestDatabase, F: Future<Output = Result<rowlock::Attempt<Lease<DB>>, Error>>>(
    attempt: impl Fn() -> F,
) -> Result<rowlock::Attempt<Lease<DB>>, Error> {
    let until = Instant::now() + PATIENCE;
    loop {
        match attempt().await {
            Ok(rowlock::Attempt::Refused(_)) if Instant::now() < until => sleep(Duration::from_millis(5)).await,
            other => return other,
        }
    }
}

async fn an_upgrade_is_refused_to_a_reader_that_was_replaced<DB: TestDatabase>(db: TestDb<DB>) {
    written(&db).await;
    let lock = other(&db);
    let reader = acquired(lock.readers().try_acquire().await);
    db.take_from(reader.key().as_str()).await;
    reader.renew().await.unwrap_err();
    db.lock().force_release(reader.key().as_str(), Status::Failed).await.unwrap();
    let late = lock.try_upgrade(&reader).await;
    assert!(matches!(late, Err(Error::Lost { .. })), "{late:?}");
    eventually("the name is given back", || async { lock.writer().try_acquire().await.unwrap().acquired().is_some() })
        .await;
}
