//! Statements that are in flight while something else happens, judged by the order of messages and
//! by their number.

use std::{pin::pin, time::Duration};

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, events, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{Attempt, LeaseLock, Status};
use tokio::time::{Instant, sleep, timeout};

use crate::ticks_replies::held_or_over;

harness::tests!(servers(
    an_abandonment_ends_the_claim_although_a_renewal_is_in_flight,
    a_request_whose_reply_takes_a_while_is_sent_once,
    a_reader_whose_turn_was_lost_is_not_let_in_beside_a_writer
));

/// How often a test begins again that was held up by the machine for so long that it shows nothing.
const ROUNDS: usize = 10;
/// More messages than a reader sends.
const MESSAGES: usize = 30;

/// After this time without a reply, a statement of a lease of this duration is sent on a second
/// connection.
fn second_is_sent_after(lease: Duration) -> Duration {
    lease / 12
}

fn lock<DB: TestDatabase>(proxy: &Proxy, lease: Duration) -> LeaseLock<DB> {
    LeaseLock::builder(proxy.pool::<DB>(4)).time_limit(PATIENCE).build().unwrap().lease(lease)
}

/// The renewal arrives at the server after the abandonment was asked for. What arrives after the
/// abandonment itself would make the claim stand again.
async fn an_abandonment_ends_the_claim_although_a_renewal_is_in_flight<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = Duration::from_secs(12);
    for round in 0..ROUNDS {
        let key = format!("k{round}");
        let proxy = db.proxy().await;
        let lock = lock::<DB>(&proxy, lease);
        let held = acquired(lock.try_acquire(&key).await);
        proxy.hold(Way::Requests);
        proxy.held(Way::Requests).await;
        let (since, replies) = (Instant::now(), proxy.seen(Way::Replies));
        proxy.let_others_pass();
        let abandoned = harness::spawn(held.abandon());
        // An abandonment that does not wait is carried out by then.
        sleep(second_is_sent_after(lease) / 3).await;
        let alone = since.elapsed() < second_is_sent_after(lease) * 3 / 4;
        proxy.open();
        timeout(PATIENCE, abandoned).await.unwrap().unwrap().unwrap();
        eventually("both have their replies", || async { proxy.seen(Way::Replies) > replies + 1 }).await;
        if alone {
            acquired(db.lock().try_acquire(&key).await);
            return;
        }
    }
    panic!("the renewal was sent on a second connection, each time");
}

/// A second connection is used only if there is no reply in time.
async fn a_request_whose_reply_takes_a_while_is_sent_once<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = Duration::from_secs(20);
    let proxy = db.proxy().await;
    let lock = lock::<DB>(&proxy, lease);
    for round in 0..ROUNDS {
        let renewed = acquired(lock.try_acquire(&format!("k{round}")).await);
        let other = acquired(lock.try_acquire(&format!("l{round}")).await);
        // Afterwards, two connections are open that have prepared the statement.
        for _ in 0..2 {
            let (first, second) = tokio::join!(renewed.renew(), other.renew());
            first.and(second).unwrap();
        }
        // A session that is still being opened sends messages too, which another round does not
        // see.
        sleep(second_is_sent_after(lease) / 8).await;
        let (since, before) = (Instant::now(), proxy.seen(Way::Requests));
        proxy.hold(Way::Replies);
        let mut renewal = pin!(renewed.renew());
        tokio::select! {
            early = &mut renewal => panic!("the reply is held: {early:?}"),
            () = sleep(second_is_sent_after(lease) * 3 / 4) => {}
        }
        let (sent, in_time) = (proxy.seen(Way::Requests) - before, since.elapsed() < second_is_sent_after(lease));
        proxy.open();
        renewal.await.unwrap();
        if in_time && sent == 1 {
            return;
        }
    }
    panic!("it was sent twice, or the machine was late, each time");
}

/// A reader claims the name, to be let in in its turn. While one of its requests is held, the name
/// is freed by force, and a writer is let in. The reader is told of the loss before its own request
/// arrives.
async fn a_reader_whose_turn_was_lost_is_not_let_in_beside_a_writer<DB: TestDatabase>(db: TestDb<DB>) {
    // Which request is the one that claims the reader's key depends on the connections that are
    // opened for others, so each of them is held, several times if need be.
    let turns = (0..ROUNDS).flat_map(|round| (0..MESSAGES).map(move |passed| (round, passed)));
    for (round, passed) in turns {
        let key = format!("turn {round} {passed} on {}", db.server.name);
        if loses_its_turn(&db, &key, passed).await {
            return;
        }
    }
    panic!("no writer was let in, each time");
}

/// Returns whether a writer was let in while the reader's next request after so many was held.
async fn loses_its_turn<DB: TestDatabase>(db: &TestDb<DB>, key: &str, passed: usize) -> bool {
    let proxy = db.proxy().await;
    let lock = lock::<DB>(&proxy, Duration::from_secs(4));
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    let readers = lock.read_write(key);
    proxy.hold_after(Way::Requests, passed);
    let reader = harness::spawn(async move { readers.readers().try_acquire().await });
    held_or_over(&proxy, Way::Requests, &reader).await;
    proxy.let_others_pass();
    let name = format!("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = '{key}' AND lock_flag = 1");
    let mut writer = None;
    if !reader.is_finished() && db.number(&name).await == Some(1) {
        db.lock().force_release(key, Status::Failed).await.unwrap().unwrap();
        let writers = db.lock_for(PATIENCE).read_write(key);
        writer = writers.writer().try_acquire().await.unwrap().acquired();
    }
    if writer.is_some() {
        let lost = || events::about(key).iter().any(|event| event.contains("lost"));
        eventually("the reader is told of the loss", || async { lost() }).await;
    }
    proxy.open();
    let reader = timeout(PATIENCE, reader).await.unwrap().unwrap();
    let Some(writer) = writer else { return false };
    assert!(writer.is_held());
    assert!(!matches!(reader, Ok(Attempt::Acquired(_))), "let in beside the writer, after {passed} requests");
    true
}
