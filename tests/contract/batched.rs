//! Batched requests: fewer statements, and each request is answered as if it were sent alone.

use std::{
    future::{poll_fn, ready},
    pin::Pin,
    task::Poll,
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way, refused};
use rowlock::{
    Attempt, Error, Lease, LeaseLock, Reason, Status,
    errors::{Certainty, DatabaseFault},
};
use sqlx::Pool;
use tokio::time::{Instant, timeout};

use crate::{
    failures_apart,
    line::{Line, standing, token},
};

harness::tests!(
    everywhere(
        requests_at_the_same_moment_share_statements,
        switched_off_each_takes_its_own,
        each_is_answered_by_itself,
        a_token_that_is_ahead_of_the_clock_grows_all_the_same,
        of_those_who_want_an_expired_key_one_takes_over,
        of_requests_for_the_same_key_one_is_granted,
        each_release_has_its_own_status,
        a_release_of_what_is_lost_is_that_ones_alone,
        a_row_that_the_server_refuses_to_change_harms_no_other,
        a_request_dropped_before_sending_is_removed,
        more_than_fit_in_one_statement_take_a_few
    ),
    everywhere.each(many_keys_take_few_statements),
    servers(a_lost_reply_is_lost_for_no_request, a_slow_reply_delays_no_other_request)
);

pub type Answer<DB> = Result<Attempt<Lease<DB>>, Error>;
pub type Asking<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Awaits all of them, polled in this order.
pub async fn all<T>(mut asking: Vec<Asking<'_, T>>) -> Vec<T> {
    let mut answers: Vec<Option<T>> = asking.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (asking, answer) in asking.iter_mut().zip(&mut answers) {
            if answer.is_none()
                && let Poll::Ready(got) = asking.as_mut().poll(context)
            {
                *answer = Some(got);
            }
        }
        if answers.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}

/// Polls each of them, in this order. The first one starts before the others arrive. Returns
/// whether all of them wait.
pub async fn begin<'a, T: Send + 'a>(asking: &mut [Asking<'a, T>]) -> bool {
    let mut waiting = true;
    poll_fn(|context| {
        let first = 0..asking.len().min(1);
        for place in first.chain(0..asking.len()) {
            // An answer that has already arrived is kept for the caller that awaits it.
            if let Poll::Ready(answer) = asking[place].as_mut().poll(context) {
                asking[place] = Box::pin(ready(answer));
                waiting = false;
            }
        }
        Poll::Ready(())
    })
    .await;
    waiting
}

/// Starts all of them while the pool's only connection is in use: the requests are sent together
/// after it.
pub async fn together<'a, DB: TestDatabase, T: Send + 'a>(pool: &Pool<DB>, mut asking: Vec<Asking<'a, T>>) -> Vec<T> {
    let taken = pool.acquire().await.unwrap();
    assert!(begin(&mut asking).await, "they wait");
    drop(taken);
    timeout(PATIENCE, all(asking)).await.expect("all of them are answered")
}

pub fn tries<'a, DB: TestDatabase>(
    lock: &'a LeaseLock<DB>,
    keys: impl IntoIterator<Item = &'a str>,
) -> Vec<Asking<'a, Answer<DB>>> {
    keys.into_iter().map(|key| Box::pin(lock.try_acquire(key)) as Asking<'a, _>).collect()
}

/// Creates free rows for the keys. Returns a pool and a lock that has used its table.
pub async fn set_up<DB: TestDatabase>(db: &TestDb<DB>, keys: &[String]) -> (Pool<DB>, LeaseLock<DB>) {
    for key in keys {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
    }
    let pool = db.pool_of(1).await;
    DB::statements(&pool).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    (pool, lock)
}

pub fn numbered(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("key {number}")).collect()
}

pub fn names(keys: &[String]) -> impl Iterator<Item = &str> {
    keys.iter().map(String::as_str)
}

pub async fn counted<DB: TestDatabase, T>(pool: &Pool<DB>, work: impl Future<Output = T>) -> (T, Option<i64>) {
    let before = DB::statements(pool).await;
    let result = work.await;
    let count = DB::statements(pool).await.zip(before).map(|(now, before)| now - before - DB::COUNTING);
    (result, count)
}

/// Checks the number of statements, as this database counts them. SQLite counts none. Half as many
/// more are allowed: on a stalled machine a request waits too long, and is sent in another one.
pub fn assert_statements<DB: TestDatabase>(db: &TestDb<DB>, count: Option<i64>, postgres: i64, mysql: i64, what: &str) {
    if let Some(count) = count {
        let wanted = if db.server.name == "postgres" { postgres } else { mysql };
        assert!((wanted..=wanted + (wanted / 2).max(1)).contains(&count), "{count} for {wanted}: {what}");
    }
}

pub fn releases<'a, DB: TestDatabase>(
    leases: Vec<Lease<DB>>,
    status: fn(usize) -> Status,
) -> Vec<Asking<'a, Result<(), Error>>> {
    let leases = leases.into_iter().enumerate();
    leases.map(|(place, lease)| Box::pin(lease.end(status(place))) as Asking<'a, _>).collect()
}

pub async fn released<DB: TestDatabase>(pool: &Pool<DB>, leases: Vec<Lease<DB>>, status: fn(usize) -> Status) {
    together(pool, releases(leases, status)).await.into_iter().for_each(Result::unwrap);
}

async fn many_keys_take_few_statements<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(64);
    let (pool, lock) = set_up(&db, &keys).await;
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, names(&keys)))).await;
    assert_statements(&db, count, 1, 1, "all of them");
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    for (lease, key) in leases.iter().zip(&keys) {
        assert_eq!(lease.key().as_str(), key);
        let token = db.number(&format!("SELECT token FROM t_resource_lock WHERE key_resource = '{key}'")).await;
        assert_eq!(token, Some(lease.token().get()), "{key}");
        assert!(lease.time_left() > Duration::from_secs(20));
    }
    assert_eq!(standing(&db).await, 64);
    let ((), count) = counted(&pool, released(&pool, leases, |_| Status::Succeeded)).await;
    assert_statements(&db, count, 1, 1, "all of them");
    assert_eq!(standing(&db).await, 0);
}

async fn more_than_fit_in_one_statement_take_a_few<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(600);
    let rows: Vec<_> = keys.iter().map(|key| format!("('{key}')")).collect();
    db.execute(&format!("INSERT INTO t_resource_lock (key_resource) VALUES {}", rows.join(", "))).await;
    let (pool, lock) = set_up(&db, &[]).await;
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, names(&keys)))).await;
    assert_statements(&db, count, 3, 3, "256 at a time");
    let leases = answers.into_iter().map(acquired).collect();
    assert_eq!(standing(&db).await, 600);
    let ((), count) = counted(&pool, released(&pool, leases, |_| Status::Succeeded)).await;
    assert_statements(&db, count, 3, 3, "256 at a time");
    assert_eq!(standing(&db).await, 0);
}

async fn requests_at_the_same_moment_share_statements<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(64);
    // The first ones may be sent before the last ones have come.
    let few = |count| (1..=16).contains(&count);
    let (pool, lock) = set_up(&db, &keys).await;
    let (answers, count) = counted(&pool, all(tries(&lock, names(&keys)))).await;
    assert!(count.is_none_or(few), "{count:?} statements");
    let releases = answers.into_iter().map(|answer| {
        let lease = acquired(answer);
        Box::pin(lease.release()) as Asking<'_, _>
    });
    let (released, count) = counted(&pool, all(releases.collect())).await;
    released.into_iter().for_each(|released: Result<(), Error>| released.unwrap());
    assert!(count.is_none_or(few), "{count:?} statements");
    assert_eq!(standing(&db).await, 0);
}

async fn switched_off_each_takes_its_own<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(8);
    let (pool, _) = set_up(&db, &keys).await;
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).batching(false).build().unwrap();
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, names(&keys)))).await;
    assert_statements(&db, count, 8, 8, "each by itself");
    let leases = answers.into_iter().map(acquired).collect();
    let ((), count) = counted(&pool, released(&pool, leases, |_| Status::Succeeded)).await;
    assert_statements(&db, count, 8, 8, "each by itself");
}

async fn each_is_answered_by_itself<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "free", "held", "expired", "failed"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    let _held = acquired(db.builder().label("holder").build().unwrap().try_acquire("held").await);
    let crashed = acquired(db.builder().label("crashed").build().unwrap().try_acquire("expired").await);
    db.set("expired", &format!("expires_at = {}", DB::ago(1))).await;
    acquired(db.lock().try_acquire("failed").await).fail().await.unwrap();
    let wanted = tries(&lock, ["first", "free", "held", "missing", "expired", "failed"]);
    let mut answers = together(&pool, wanted).await.into_iter();
    let mut next = || answers.next().unwrap();
    let (first, free) = (acquired(next()), acquired(next()));
    let refusal = refused(next());
    assert_eq!((refusal.key.as_str(), refusal.reason, refusal.by.as_str()), ("held", Reason::Held, "holder"));
    let (missing, expired, failed) = (acquired(next()), acquired(next()), acquired(next()));
    let prior = expired.taken_over_from().expect("it was taken over");
    assert_eq!((prior.label.as_str(), prior.token), ("crashed", crashed.token()));
    for lease in [&first, &free, &missing, &failed] {
        assert!(lease.taken_over_from().is_none(), "{lease:?}");
        assert_eq!(
            lease.claim().holder,
            db.lock().inspect(lease.key().as_str()).await.unwrap().unwrap().holder.unwrap()
        );
    }
}

async fn a_token_that_is_ahead_of_the_clock_grows_all_the_same<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "ahead", "other"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    db.set("ahead", "token = 5000000000000000").await;
    let answers = together(&pool, tries(&lock, names(&keys))).await;
    let [first, ahead, other] = <[_; 3]>::try_from(answers).unwrap_or_else(|_| panic!("three answers")).map(acquired);
    assert_eq!(ahead.token().get(), 5_000_000_000_000_001);
    assert!(first.token() < ahead.token() && other.token() < ahead.token());
    assert_eq!(standing(&db).await, 3);
}

async fn of_those_who_want_an_expired_key_one_takes_over<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "k", "other"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    let crashed = acquired(db.builder().label("crashed").build().unwrap().try_acquire("k").await);
    db.set("k", &format!("expires_at = {}", DB::ago(1))).await;
    let wanted = ["first", "other"].into_iter().chain(std::iter::repeat_n("k", 20));
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, wanted))).await;
    assert!(count.is_none_or(|count| count < 20), "one goes alone, the others with each other: {count:?}");
    let (granted, refused): (Vec<_>, Vec<_>) =
        answers.into_iter().map(Result::unwrap).partition(|attempt| matches!(attempt, Attempt::Acquired(_)));
    assert_eq!((granted.len(), refused.len()), (3, 19));
    let leases: Vec<_> = granted.into_iter().map(|attempt| attempt.acquired().unwrap()).collect();
    let priors: Vec<_> = leases.iter().filter_map(|lease| lease.taken_over_from()).map(|prior| prior.token).collect();
    assert_eq!(priors, [crashed.token()]);
}

async fn of_requests_for_the_same_key_one_is_granted<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "k"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    let wanted = std::iter::once("first").chain(std::iter::repeat_n("k", 20));
    let (answers, count) = counted(&pool, together(&pool, tries(&lock, wanted))).await;
    assert_statements(&db, count, 2, 3, "those that are granted, and one refusal for all the others");
    let (granted, refusals): (Vec<_>, Vec<_>) =
        answers.into_iter().map(Result::unwrap).partition(|attempt| matches!(attempt, Attempt::Acquired(_)));
    assert_eq!((granted.len(), refusals.len()), (2, 19));
    for refusal in refusals {
        assert_eq!(refusal.refused().unwrap().reason, Reason::Held);
    }
}

async fn each_release_has_its_own_status<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(10);
    let (pool, lock) = set_up(&db, &keys).await;
    let leases = together(&pool, tries(&lock, names(&keys))).await.into_iter().map(acquired).collect();
    let status = |place| if place % 2 == 0 { Status::Succeeded } else { Status::Failed };
    let ((), count) = counted(&pool, released(&pool, leases, status)).await;
    assert_statements(&db, count, 2, 2, "those that succeeded, those that failed");
    for (place, key) in keys.iter().enumerate() {
        let letter = if place % 2 == 0 { "S" } else { "F" };
        assert_eq!(db.column(key, "status").await.as_deref(), Some(letter), "{key}");
    }
}

async fn a_release_of_what_is_lost_is_that_ones_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = numbered(6);
    let (pool, lock) = set_up(&db, &keys).await;
    let leases: Vec<_> = together(&pool, tries(&lock, names(&keys))).await.into_iter().map(acquired).collect();
    db.take_from("key 3").await;
    let releases = releases(leases, |_| Status::Succeeded);
    let (results, count) = counted(&pool, together(&pool, releases)).await;
    assert_statements(&db, count, 1, 6, "all, or none; those of them that stand");
    for (place, result) in results.into_iter().enumerate() {
        match result {
            Ok(()) => assert_ne!(place, 3),
            Err(Error::Lost { key, .. }) => assert_eq!(key.as_str(), "key 3"),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(db.column("key 3", "client_ip").await.as_deref(), Some("thief"));
}

/// The rows of a batch are written in one statement. An error that the server raises for one row
/// fails the request for that row alone.
async fn a_row_that_the_server_refuses_to_change_harms_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "good", "bad", "fine"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    failures_apart::refuse_with(&db, "P0001", 1644).await;
    failures_apart::add(&db, "bad").await;
    let answers = together(&pool, tries(&lock, ["first", "good", "bad", "fine"])).await;
    let [first, good, bad, fine] = <[_; 4]>::try_from(answers).unwrap_or_else(|_| panic!("four answers"));
    drop([acquired(first), acquired(good), acquired(fine)]);
    let error = bad.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
        "{error:?}"
    );
    assert!(format!("{error:?}").contains("not this one"), "{error}");
}

async fn a_request_dropped_before_sending_is_removed<DB: TestDatabase>(db: TestDb<DB>) {
    let keys = ["first", "k", "other"].map(String::from);
    let (pool, lock) = set_up(&db, &keys).await;
    let before = db.column("k", "CAST(token AS CHAR(30))").await;
    let mut wanted = tries(&lock, ["first", "k", "other"]);
    let taken = pool.acquire().await.unwrap();
    assert!(begin(&mut wanted).await, "they wait");
    drop((wanted.remove(1), taken));
    for answer in timeout(PATIENCE, all(wanted)).await.unwrap() {
        acquired(answer).release().await.unwrap();
    }
    assert!(lock.shutdown(PATIENCE).await);
    assert_eq!(db.column("k", "CAST(token AS CHAR(30))").await, before, "it was never asked for");
}

/// Returns a lock behind a proxy, on one connection that has prepared the statements for one key
/// and for several keys.
pub async fn line<DB: TestDatabase>(db: &TestDb<DB>) -> Line<DB> {
    for key in KEYS {
        acquired(db.lock().try_acquire(key).await).release().await.unwrap();
    }
    let line = Line::with_free_row(db, PATIENCE, PATIENCE).await;
    let leases = together(&line.pool, tries(&line.lock, KEYS)).await.into_iter().map(acquired).collect();
    released(&line.pool, leases, |_| Status::Succeeded).await;
    line
}

const KEYS: [&str; 3] = ["first", "k", "other"];

/// Requests the keys. The first request is answered, and the proxy holds the reply to the others.
pub async fn all_but_one_held<'a, DB: TestDatabase>(
    line: &'a Line<DB>,
    keys: &[&'a str],
) -> (Lease<DB>, Vec<Asking<'a, Answer<DB>>>) {
    let mut wanted = tries(&line.lock, keys.iter().copied());
    let first = acquired(timeout(PATIENCE, wanted.remove(0)).await.unwrap());
    eventually("its connection is back", async || line.pool.num_idle() == 1).await;
    let taken = line.pool.acquire().await.unwrap();
    assert!(begin(&mut wanted).await, "they wait");
    // The first reply is to the check of the connection.
    line.proxy.hold_after(Way::Replies, 1);
    drop(taken);
    line.proxy.held(Way::Replies).await;
    (first, wanted)
}

async fn a_lost_reply_is_lost_for_no_request<DB: TestDatabase>(db: TestDb<DB>) {
    let line = line(&db).await;
    let (first, wanted) = all_but_one_held(&line, &KEYS).await;
    let granted = token(&db).await;
    assert_eq!(standing(&db).await, 3, "both are granted, and do not know it");
    line.proxy.cut();
    let answers = timeout(PATIENCE, all(wanted)).await.unwrap();
    let leases: Vec<_> = answers.into_iter().map(acquired).collect();
    assert_eq!((leases[0].token().get(), token(&db).await), (granted, granted), "the same claim");
    for lease in leases.iter().chain([&first]) {
        let entry = db.lock().inspect(lease.key().as_str()).await.unwrap().unwrap();
        assert_eq!((entry.token, entry.holder), (lease.token(), Some(lease.claim().holder)), "{lease:?}");
    }
}

async fn a_slow_reply_delays_no_other_request<DB: TestDatabase>(db: TestDb<DB>) {
    let line = line(&db).await;
    let pool = line.proxy.pool::<DB>(2);
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    acquired(lock.try_acquire("warm").await).release().await.unwrap();
    eventually("its connections are idle", || async { pool.num_idle() as u32 == pool.size() }).await;
    let stuck = lock.try_acquire("first");
    let others = async {
        line.proxy.held(Way::Replies).await;
        line.proxy.let_others_pass();
        let since = Instant::now();
        for key in ["k", "other"] {
            acquired(lock.try_acquire(key).await).release().await.unwrap();
        }
        assert!(since.elapsed() < PATIENCE / 8, "{:?}", since.elapsed());
        line.proxy.open();
    };
    line.proxy.hold(Way::Replies);
    let (stuck, ()) = timeout(PATIENCE, async { tokio::join!(stuck, others) }).await.unwrap();
    drop(acquired(stuck));
}
