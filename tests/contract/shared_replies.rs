//! Of the requests for one key, one sends a claim for all of them. These tests drop one of the
//! requests in the course of this, and check the others and the key.

use std::{future::poll_fn, task::Poll};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use tokio::time::timeout;

use crate::{
    batched::{Asking, all, all_but_one_held, line, set_up, together, tries},
    line::standing,
};

harness::tests!(
    servers(a_request_dropped_in_flight_leaves_no_claim),
    everywhere.long(a_request_dropped_where_a_reply_is_shared_takes_it_from_no_other)
);

/// Drops the request after the given number of polls without an answer. It wakes itself, so that it
/// is polled.
fn fickle<'a, T: 'a>(asking: Asking<'a, T>, polls: usize) -> Asking<'a, Option<T>> {
    let (mut asking, mut left) = (Some(asking), polls);
    Box::pin(poll_fn(move |context| {
        let answer = asking.as_mut().map(|asking| asking.as_mut().poll(context));
        match answer {
            Some(Poll::Ready(answer)) => Poll::Ready(Some(answer)),
            Some(Poll::Pending) if left > 0 => {
                left -= 1;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            _ => {
                asking = None;
                Poll::Ready(None)
            }
        }
    }))
}

fn patient<'a, T: 'a>(asking: Asking<'a, T>) -> Asking<'a, Option<T>> {
    Box::pin(async { Some(asking.await) })
}

/// Drops, at every possible point, one of the requests that share an answer: the one that sends the
/// claim for all of them, or another one.
async fn a_request_dropped_where_a_reply_is_shared_takes_it_from_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    for gone in [1, 2] {
        // On a busy machine the answer may be there before the request is polled again.
        eventually("it goes away", || goes_away_after(&db, gone, 1)).await;
        let mut polls = 2;
        while goes_away_after(&db, gone, polls).await {
            polls += 1 + polls / 4;
        }
    }
}

/// Returns whether the request was dropped before it was answered.
async fn goes_away_after<DB: TestDatabase>(db: &TestDb<DB>, gone: usize, polls: usize) -> bool {
    let keys = ["first", "k"].map(String::from);
    let (pool, lock) = set_up(db, &keys).await;
    let wanted = tries(&lock, ["first", "k", "k", "k"]).into_iter().enumerate();
    let wanted = wanted.map(|(place, asking)| if place == gone { fickle(asking, polls) } else { patient(asking) });
    let answers = together(&pool, wanted.collect()).await;
    let went = answers[gone].is_none();
    assert_eq!(answers.iter().flatten().count(), if went { 3 } else { 4 }, "the others are answered");
    let leases: Vec<_> = answers.into_iter().flatten().filter_map(|answer| answer.unwrap().acquired()).collect();
    // The dropped request may have been granted the key, and the others refused for that.
    let least = if went && gone == 1 { 1 } else { 2 };
    assert!((least..=2).contains(&leases.len()), "{gone} after {polls}: {leases:?}");
    for lease in leases {
        lease.release().await.unwrap();
    }
    assert!(lock.shutdown(PATIENCE).await);
    assert_eq!(standing(db).await, 0, "{gone} after {polls}: no key is held");
    went
}

/// The request is dropped before it receives its grant: the key does not stay claimed, and the
/// other requests are answered.
async fn a_request_dropped_in_flight_leaves_no_claim<DB: TestDatabase>(db: TestDb<DB>) {
    let line = line(&db).await;
    for gone in [0, 1] {
        let (first, mut wanted) = all_but_one_held(&line, &["first", "k", "k", "k"]).await;
        assert_eq!(standing(&db).await, 2, "it is granted, and the reply was not read");
        drop(wanted.remove(gone));
        line.proxy.open();
        let answers = timeout(PATIENCE, all(wanted)).await.expect("the others are answered");
        let leases: Vec<_> = answers.into_iter().filter_map(|answer| answer.unwrap().acquired()).collect();
        assert!(if gone == 1 { leases.len() == 1 } else { leases.len() <= 1 }, "{leases:?}");
        for lease in leases.into_iter().chain([first]) {
            lease.release().await.unwrap();
        }
        assert!(line.lock.shutdown(PATIENCE).await);
        assert_eq!(standing(&db).await, 0, "no key is held");
    }
}
