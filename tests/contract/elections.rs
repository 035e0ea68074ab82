//! Leader election: one leads, losses and outages end in another campaign, and observers see it.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_core::Stream as _;
use harness::{PATIENCE, SESSION, TestDatabase, TestDb, eventually};
use rowlock::{
    LeaseLock, Status, Token,
    leaders::{Leader, Leaders},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    sync::{Notify, oneshot},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::child::{self, say};

harness::tests!(
    everywhere(
        one_leads_at_a_time_and_terms_grow,
        a_killed_leader_is_replaced_and_observed,
        a_leader_that_loses_steps_down_and_leads_again,
        a_leader_resigns_only_once_its_work_has_stopped,
        a_leader_that_goes_away_is_replaced_after_the_delay,
        observers_see_each_leader_in_turn,
        the_leaders_are_a_stream
    ),
    servers(an_outage_ends_a_term_and_not_the_campaign),
    postgres[SESSION](an_observer_requests_a_notification_of_a_resignation)
);

const LEASE: Duration = Duration::from_secs(3);

/// Five instances lead for a moment each, again and again. None of them shares anything with
/// another but the database.
async fn one_leads_at_a_time_and_terms_grow<DB: TestDatabase>(db: TestDb<DB>) {
    let highest = Arc::new(std::sync::Mutex::new(Token::new(0)));
    let (leading, mut tasks) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
    for _ in 0..5 {
        let election = db.lock_for(LEASE).election("k");
        let (leading, highest) = (leading.clone(), highest.clone());
        tasks.spawn(harness::task(async move {
            for _ in 0..4 {
                let (this, leading, highest) = (election.clone(), leading.clone(), highest.clone());
                let term = election.lead(async move |held| {
                    assert!(!leading.swap(true, Ordering::SeqCst), "another one leads");
                    assert!(this.is_leader());
                    let before = std::mem::replace(&mut *highest.lock().unwrap(), held.token());
                    assert!(before < held.token(), "terms grow");
                    sleep(Duration::from_millis(5)).await;
                    leading.store(false, Ordering::SeqCst);
                    held.token()
                });
                let term = timeout(PATIENCE * 3, term).await.unwrap().unwrap();
                assert!(term > Token::new(0) && !election.is_leader());
            }
        }));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
}

/// The job of a process: leads until the process is killed.
pub async fn lead<DB: TestDatabase>(pool: sqlx::Pool<DB>, name: &str) {
    let lock = LeaseLock::builder(pool).label("victim").build().unwrap().lease(LEASE);
    let election = lock.election(name);
    let led = election.lead(async |held| {
        say(held.token());
        std::future::pending::<()>().await;
    });
    led.await.unwrap();
}

async fn next<DB: TestDatabase>(leaders: &mut Leaders<DB>) -> Option<Leader> {
    timeout(PATIENCE, leaders.next()).await.unwrap().unwrap()
}

async fn a_killed_leader_is_replaced_and_observed<DB: TestDatabase>(db: TestDb<DB>) {
    let mut leader = child::start(&db, "lead", "k", std::path::Path::new(""));
    let mut lines = BufReader::new(leader.stdout.take().unwrap()).lines();
    let term: i64 = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap().parse().unwrap();
    let election = db.lock_for(LEASE).election("k");
    let mut leaders = election.observe();
    let seen = next(&mut leaders).await.unwrap();
    assert_eq!((seen.term.get(), seen.label.as_str()), (term, "victim"));
    assert!(timeout(2 * LEASE, election.campaign()).await.is_err(), "it renews");
    leader.kill().await.unwrap();
    let leadership = timeout(PATIENCE, election.campaign()).await.unwrap().unwrap();
    assert!(leadership.term().get() > term);
    assert_eq!(leadership.taken_over_from().unwrap().token.get(), term);
    let mut seen = next(&mut leaders).await;
    if seen.is_none() {
        seen = next(&mut leaders).await; // between the two terms
    }
    assert_eq!(seen.unwrap().term, leadership.term());
}

/// Its work is dropped, or it returns because it was told of the loss, which is no resignation.
async fn a_leader_that_loses_steps_down_and_leads_again<DB: TestDatabase>(db: TestDb<DB>) {
    let election = db.lock_for(LEASE).election("k");
    for returns in [false, true] {
        let (terms, ended, began) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)), Notify::new());
        let operator = async {
            began.notified().await;
            let forced = db.lock().force_release("k", Status::Succeeded).await.unwrap().unwrap();
            eventually("it steps down", || async { ended.load(Ordering::SeqCst) }).await;
            forced
        };
        let led = election.lead(async |held| {
            if terms.fetch_add(1, Ordering::SeqCst) == 0 {
                let _work = OnDrop(ended.clone());
                began.notify_one();
                match returns {
                    true => held.cancellation_token().cancelled().await,
                    false => std::future::pending().await,
                }
            }
            held.token()
        });
        let (term, forced) = timeout(PATIENCE, async { tokio::join!(led, operator) }).await.unwrap();
        assert!(term.unwrap() > forced);
        assert_eq!(terms.load(Ordering::SeqCst), 2);
    }
}

struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

async fn a_leader_resigns_only_once_its_work_has_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let election = db.lock_for(LEASE).election("k");
    let leadership = election.campaign().await.unwrap();
    let (term, stop) = (leadership.term(), leadership.cancellation_token());
    let (stopping, told) = oneshot::channel();
    let (finish, finished) = oneshot::channel();
    let work = harness::spawn(async move {
        stop.cancelled().await;
        stopping.send(()).unwrap();
        finished.await.unwrap()
    });
    let resigned = harness::spawn(leadership.resign(work));
    timeout(PATIENCE, told).await.unwrap().unwrap();
    let other = db.lock().election("k");
    assert!(timeout(2 * LEASE, other.campaign()).await.is_err(), "the work has not stopped, and the lease is renewed");
    assert!(election.is_leader());
    finish.send(7).unwrap();
    let (result, freed) = timeout(PATIENCE, resigned).await.unwrap().unwrap();
    assert_eq!(result.unwrap(), 7);
    freed.unwrap();
    assert!(!election.is_leader());
    let next = db.lock().try_acquire("k").await.unwrap().acquired().expect("free at once");
    assert!(next.token() > term && next.taken_over_from().is_none());
}

async fn a_leader_that_goes_away_is_replaced_after_the_delay<DB: TestDatabase>(db: TestDb<DB>) {
    let election = db.lock_for(30 * LEASE).lock_delay(LEASE).election("k");
    let leadership = election.campaign().await.unwrap();
    let term = leadership.term();
    let dropped = Instant::now();
    drop(leadership);
    assert!(!election.is_leader());
    let next = timeout(PATIENCE, election.campaign()).await.unwrap().unwrap();
    assert!(dropped.elapsed() >= LEASE, "{:?}", dropped.elapsed());
    assert!(next.term() > term);
}

async fn observers_see_each_leader_in_turn<DB: TestDatabase>(db: TestDb<DB>) {
    let labelled = |label: &str| db.builder().label(label).build().unwrap().election("k");
    let mut leaders = labelled("observer").observe();
    assert_eq!(next(&mut leaders).await, None);
    let mut before = None;
    for label in ["one", "two", "three"] {
        let leadership = labelled(label).campaign().await.unwrap();
        let seen = next(&mut leaders).await.unwrap();
        assert_eq!((seen.term, seen.label.as_str()), (leadership.term(), label));
        assert!(Some(seen.term) > before && seen.since.is_some() && seen.until > seen.since);
        before = Some(seen.term);
        let waiting = async {
            tokio::join!(next(&mut leaders), async {
                sleep(LEASE / 10).await;
                leadership.resign(async {}).await.1.unwrap();
            })
        };
        assert_eq!(waiting.await.0, None);
    }
}

async fn the_leaders_are_a_stream<DB: TestDatabase>(db: TestDb<DB>) {
    let election = db.lock().election("k");
    let leadership = election.campaign().await.unwrap();
    let mut leaders = election.observe();
    let first = timeout(PATIENCE, poll_fn(|cx| Pin::new(&mut leaders).poll_next(cx))).await.unwrap();
    assert_eq!(first.unwrap().unwrap().unwrap().term, leadership.term());
}

/// Nothing comes through until the term has ended. The next one begins when the server is back.
async fn an_outage_ends_a_term_and_not_the_campaign<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::new(proxy.pool::<DB>(4)).lease(LEASE);
    let election = lock.election("k");
    let terms = AtomicUsize::new(0);
    let led = election.lead(async |held| {
        match terms.fetch_add(1, Ordering::SeqCst) {
            0 => {
                proxy.hold_everything();
                std::future::pending::<()>().await;
            }
            _ => assert!(election.is_leader()),
        }
        held.token()
    });
    let back = async {
        eventually("the term has begun", || async { terms.load(Ordering::SeqCst) == 1 }).await;
        eventually("the leader steps down", || async { !election.is_leader() }).await;
        sleep(2 * LEASE).await; // campaigning in vain
        proxy.cut();
        proxy.open();
    };
    let (term, ()) = timeout(3 * PATIENCE, async { tokio::join!(led, back) }).await.unwrap();
    assert!(term.unwrap() > Token::new(0));
    assert_eq!(terms.load(Ordering::SeqCst), 2);
}

async fn an_observer_requests_a_notification_of_a_resignation<DB: TestDatabase>(db: TestDb<DB>) {
    let leadership = db.lock().election("k").campaign().await.unwrap();
    let mut leaders = db.lock().election("k").observe();
    assert!(next(&mut leaders).await.is_some());
    let resigned = async {
        let awaited = "SELECT COUNT(*) FROM t_resource_lock WHERE awaited";
        eventually("the row says that a task waits", || async { db.number(awaited).await == Some(1) }).await;
        leadership.resign(async {}).await.1.unwrap();
    };
    let (seen, ()) = tokio::join!(next(&mut leaders), resigned);
    assert_eq!(seen, None);
}
