//! A failure of one lease does not affect another: rows that the server refuses to change, and
//! connections that fall silent.

use std::time::Duration;

use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, acquired, database_of, events, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{
    Error, Lease, LeaseLock,
    errors::{Certainty, DatabaseFault},
};
use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout};

use crate::{line::standing, own_sessions::renewed};

harness::tests!(
    everywhere(
        a_row_that_cannot_be_renewed_loses_no_other_lease,
        a_row_that_cannot_be_abandoned_keeps_no_other_key,
        a_release_that_the_server_refuses_is_tried_again,
        a_release_that_is_refused_to_the_end_changed_nothing
    ),
    mysql_and_mariadb(a_claim_whose_commit_may_have_been_made_is_unknown),
    servers(
        a_release_without_the_right_to_it_fails_at_once,
        a_request_on_a_silent_connection_is_sent_on_another,
        leases_are_renewed_though_no_connection_can_be_opened,
        a_connection_that_becomes_idle_serves_a_request_for_which_none_opens,
        a_renewal_that_comes_after_the_release_tells_of_no_loss,
        a_waiter_on_a_silent_connection_holds_up_no_other
    ),
    postgres[DIRECT](a_claim_that_meets_a_panic_is_unknown, a_server_that_takes_no_writes_is_asked_by_few_sessions)
);

/// Long enough for a slow machine to renew within a twelfth of it.
const LEASE: Duration = Duration::from_secs(5);

/// Makes the server refuse to change the rows of the keys in the table `refused`, with this error.
pub async fn refuse_with<DB: TestDatabase>(db: &TestDb<DB>, sqlstate: &str, number: i32) {
    let function = format!(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF EXISTS (SELECT 1 FROM refused WHERE of_key = NEW.key_resource) THEN
                 RAISE EXCEPTION 'not this one' USING ERRCODE = '{sqlstate}';
             END IF;
             RETURN NEW; END $$"
    );
    let trigger = match db.server.name {
        "postgres" => {
            "CREATE TRIGGER refuse BEFORE UPDATE ON t_resource_lock FOR EACH ROW EXECUTE FUNCTION refuse()".to_owned()
        }
        "sqlite" => "CREATE TRIGGER refuse BEFORE UPDATE ON t_resource_lock
             WHEN EXISTS (SELECT 1 FROM refused WHERE of_key = NEW.key_resource)
             BEGIN SELECT RAISE(ABORT, 'not this one'); END"
            .to_owned(),
        _ => format!(
            "CREATE TRIGGER refuse BEFORE UPDATE ON t_resource_lock FOR EACH ROW BEGIN
                 IF EXISTS (SELECT 1 FROM refused WHERE of_key = CONVERT(NEW.key_resource USING utf8mb4)) THEN
                     SIGNAL SQLSTATE 'HY000' SET MESSAGE_TEXT = 'not this one', MYSQL_ERRNO = {number};
                 END IF; END"
        ),
    };
    db.execute("CREATE TABLE refused (of_key varchar(100) PRIMARY KEY)").await;
    if db.server.name == "postgres" {
        db.execute(&function).await;
    }
    db.execute(&trigger).await;
}

/// Refuses with the error of a full disk.
pub async fn refuse<DB: TestDatabase>(db: &TestDb<DB>) {
    refuse_with(db, "53100", 1021).await;
}

/// The server is stopped while it commits, a node leaves its group, or a proxy loses its server.
async fn a_claim_whose_commit_may_have_been_made_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    for number in [1053, 1180, 1317, 1598, 1969, 2006, 2013, 3100, 9001] {
        refuse_with(&db, "58030", number).await;
        assert_unknown(&db, &db.pool).await;
        db.execute("DROP TRIGGER refuse").await;
        db.execute("DROP TABLE refused").await;
    }
}

/// A lack of space as a PANIC: the record of the commit may be on the disk already.
async fn a_claim_that_meets_a_panic_is_unknown<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db).await;
    let proxy = db.proxy().await;
    proxy.replace("SERROR\0VERROR\0C53100", "SPANIC\0VPANIC\0C53100");
    assert_unknown(&db, &proxy.pool(2)).await;
}

async fn assert_unknown<DB: TestDatabase>(db: &TestDb<DB>, pool: &Pool<DB>) {
    let lock = LeaseLock::builder(pool.clone()).time_limit(Duration::from_millis(300)).build().unwrap();
    acquired(lock.acquire("k", PATIENCE).await).release().await.unwrap();
    add(db, "k").await;
    let error = lock.try_acquire("k").await.unwrap_err();
    let unknown = matches!(
        &error,
        Error::Database(DatabaseFault::Failed { outcome: Certainty::Unknown, .. })
            | Error::Database(DatabaseFault::TimedOut { outcome: Certainty::Unknown, .. })
            | Error::Database(DatabaseFault::NoConnection { outcome: Certainty::Unknown, .. })
    );
    assert!(unknown, "{error:?}");
}

pub async fn add<DB: TestDatabase>(db: &TestDb<DB>, key: &str) {
    db.execute(&format!("INSERT INTO refused VALUES ('{key}')")).await;
}

async fn leases<DB: TestDatabase>(lock: &LeaseLock<DB>, count: usize) -> Vec<Lease<DB>> {
    let mut leases = Vec::new();
    for number in 0..count {
        leases.push(acquired(lock.try_acquire(&format!("key {number}")).await));
    }
    leases
}

async fn held_for<DB: TestDatabase>(leases: &[Lease<DB>], time: Duration) {
    let since = Instant::now();
    while since.elapsed() < time {
        for lease in leases {
            assert!(lease.is_held(), "{} after {:?}", lease.key(), since.elapsed());
        }
        sleep(LEASE / 100).await;
    }
}

async fn a_row_that_cannot_be_renewed_loses_no_other_lease<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db).await;
    let lock = db.lock_for(LEASE);
    let mut leases = leases(&lock, 50).await;
    add(&db, "key 13").await;
    let refused = leases.remove(13);
    timeout(PATIENCE, refused.lost()).await.expect("it is lost when its time is up");
    held_for(&leases, LEASE).await;
}

/// The other leases are abandoned at once, and the refused one as soon as the server permits the
/// change.
async fn a_row_that_cannot_be_abandoned_keeps_no_other_key<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db).await;
    let lock = db.lock_for(Duration::from_secs(300));
    let leases = leases(&lock, 50).await;
    add(&db, "key 13").await;
    drop(leases);
    eventually("all others are abandoned", || async { standing(&db).await == 1 }).await;
    db.execute("DELETE FROM refused").await;
    eventually("the refused one is abandoned", || async { standing(&db).await == 0 }).await;
}

async fn a_release_that_the_server_refuses_is_tried_again<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db).await;
    let lease = acquired(db.lock_for(Duration::from_secs(300)).try_acquire("k").await);
    add(&db, "k").await;
    let mut release = harness::spawn(lease.release());
    let early = timeout(Duration::from_millis(300), &mut release).await;
    assert!(early.is_err(), "it is not given up: {early:?}");
    db.execute("DELETE FROM refused").await;
    timeout(PATIENCE, release).await.expect("it is tried again").unwrap().unwrap();
    assert_eq!(db.column("k", "status").await.as_deref(), Some("S"));
}

async fn a_release_that_is_refused_to_the_end_changed_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    refuse(&db).await;
    let lease = acquired(db.lock_for(LEASE / 2).try_acquire("k").await);
    add(&db, "k").await;
    let since = Instant::now();
    let error = lease.release().await.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
        "{error:?}"
    );
    assert!(since.elapsed() > LEASE / 4, "it was tried while the lease lasted");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("P"));
}

/// The error is permanent: a retry does not help.
async fn a_release_without_the_right_to_it_fails_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    refuse_with(&db, "42501", 1142).await;
    let lease = acquired(db.lock_for(Duration::from_secs(300)).try_acquire("k").await);
    add(&db, "k").await;
    let released = timeout(PATIENCE, lease.release()).await.expect("it is not tried again");
    let error = released.unwrap_err();
    assert!(
        matches!(error, Error::Database(DatabaseFault::Failed { outcome: Certainty::NothingChanged, .. })),
        "{error:?}"
    );
}

/// The server accepts no further connections. The connections for requests serve the renewals too.
async fn leases_are_renewed_though_no_connection_can_be_opened<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::new(proxy.pool(2)).lease(LEASE);
    acquired(lock.try_acquire("first").await).release().await.unwrap();
    proxy.hold_new();
    let leases = leases(&lock, 3).await;
    for _ in 0..2 {
        renewed(&db, &leases).await;
    }
    for lease in leases {
        lease.abandon().await.unwrap();
    }
}

/// All connections are in use when the request is sent, and no further one can be opened.
async fn a_connection_that_becomes_idle_serves_a_request_for_which_none_opens<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let pool = proxy.pool::<DB>(4);
    let lock = LeaseLock::<DB>::builder(pool.clone()).share_pool().time_limit(PATIENCE).build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    eventually("all are idle", || async { pool.num_idle() == pool.size() as usize }).await;
    let in_use: Vec<_> = std::iter::from_fn(|| pool.try_acquire()).collect();
    assert!((1..4).contains(&in_use.len()), "{pool:?}");
    proxy.hold_new();
    let asks = harness::spawn(async move { lock.try_acquire("k").await });
    sleep(LEASE / 20).await;
    drop(in_use);
    acquired(timeout(PATIENCE / 4, asks).await.expect("it takes an idle connection").unwrap());
}

/// The renewal was sent before the release, and finds the row without the claim.
async fn a_renewal_that_comes_after_the_release_tells_of_no_loss<DB: TestDatabase>(db: TestDb<DB>) {
    let key = format!("renewed late on {}", db.server.name);
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::new(proxy.pool(2)).lease(LEASE);
    let lease = acquired(lock.try_acquire(&key).await);
    proxy.hold(Way::Requests);
    proxy.held(Way::Requests).await;
    proxy.let_others_pass();
    lease.release().await.unwrap();
    proxy.open();
    sleep(LEASE / 3).await;
    assert!(lock.shutdown(PATIENCE).await);
    let lost: Vec<String> = events::about(&key).into_iter().filter(|line| line.contains("lost")).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

/// A request without an answer is sent again on another connection long before it is given up.
async fn a_request_on_a_silent_connection_is_sent_on_another<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = 4 * LEASE;
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::builder(proxy.pool(2)).time_limit(PATIENCE).build().unwrap().lease(lease);
    let (renewed, abandoned) = (acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await));
    let since = Instant::now();
    let silent = async |proxy: &Proxy| proxy.let_others_pass();
    proxy.during(Way::Requests, 0, renewed.renew(), silent).await.unwrap();
    assert!(since.elapsed() < lease / 4, "{:?}", since.elapsed());
    proxy.open();
    let since = Instant::now();
    proxy.during(Way::Requests, 0, abandoned.abandon(), silent).await.unwrap();
    assert!(since.elapsed() < lease / 4, "{:?}", since.elapsed());
    assert_eq!(standing(&db).await, 1);
}

/// Its request is first in the queue, and its wait has no end.
async fn a_waiter_on_a_silent_connection_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let over = LeaseLock::<DB>::builder(proxy.pool(2)).share_pool().time_limit(Duration::from_secs(1));
    let lock = over.build().unwrap();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    proxy.silence();
    let waiting = lock.clone();
    let waiting = harness::spawn(async move { waiting.acquire("k", Duration::MAX).await.map(Lease::detach) });
    eventually("a request is sent", async || proxy.asked_in_silence() > 0).await;
    eventually("another is granted", async || lock.try_acquire("other").await.is_ok()).await;
    timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
}

/// Renewals that it refuses are not sent one by one, each on a session of its own.
async fn a_server_that_takes_no_writes_is_asked_by_few_sessions<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lock = LeaseLock::<DB>::new(proxy.pool(2)).lease(PATIENCE);
    let mut leases = Vec::new();
    for number in 0..32 {
        leases.push(acquired(lock.try_acquire(&format!("k{number}")).await));
    }
    db.execute(&format!("ALTER DATABASE {} SET default_transaction_read_only = on", database_of(&db.url))).await;
    proxy.cut();
    let before = proxy.accepted();
    eventually("renewals are refused", async || proxy.accepted() >= before + 4).await;
    let since = Instant::now();
    let before = proxy.accepted();
    sleep(Duration::from_secs(5)).await;
    let seconds = since.elapsed().as_secs() + 1;
    assert!(proxy.accepted() - before < 4 * seconds, "{} sessions", proxy.accepted() - before);
    drop(leases);
}
