//! What the functions in SQL promise: the same row as the lock's, for callers in any language.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use harness::{TestDb, acquired, refused};
use rowlock::{Key, LeaseLock, Reason, leases::Holder};
use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    failures_apart,
    functions::{Answer, Ask, Functions},
};

harness::tests!(servers(
    a_key_is_held_against_functions_and_locks_alike,
    a_crashed_claim_is_taken_over_across_the_two,
    the_same_holder_repeats_its_claim,
    a_change_says_done_or_lost,
    a_claim_that_is_put_back_was_never_made,
    a_confirmation_keeps_the_claim_to_the_end_of_the_transaction,
    a_claim_waits_for_no_locked_row,
    a_full_disk_grants_nothing_and_changes_nothing,
    one_of_many_first_claims_is_granted,
    functions_and_locks_never_overlap,
    keys_are_the_locks_keys,
    labels_are_the_locks_labels
));

const SHORT: Duration = Duration::from_millis(300);
const WAIT: Duration = Duration::from_secs(20);

pub async fn installed<DB: Functions>(db: &TestDb<DB>) {
    rowlock::migration::migrate_functions(&db.pool).await.unwrap();
}

pub async fn ask<DB: Functions>(pool: &Pool<DB>, ask: &Ask<'_>) -> Answer {
    DB::call_try_acquire(&mut *pool.acquire().await.unwrap(), ask).await.unwrap()
}

pub async fn change<DB: Functions>(
    pool: &Pool<DB>,
    what: &str,
    key: &str,
    claim: &Answer,
    last: Option<&str>,
) -> String {
    let mut conn = pool.acquire().await.unwrap();
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    DB::call_change(&mut conn, what, key, holder, token, last).await.unwrap().unwrap_or_default()
}

async fn a_key_is_held_against_functions_and_locks_alike<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let lease = acquired(db.lock().try_acquire("k").await);
    let answer = ask(&db.pool, &Ask::of("k")).await;
    assert_eq!((answer.granted, answer.reason.as_deref()), (false, Some("held")));
    assert!(answer.retry_after.unwrap() > Duration::from_secs(20), "{answer:?}");
    let first = lease.token().get();
    lease.release().await.unwrap();

    let claim = ask(&db.pool, &Ask { label: Some("psql"), ..Ask::of("k") }).await;
    assert!(claim.granted && claim.token > Some(first), "{claim:?}");
    assert_eq!(db.column("k", "status").await.as_deref(), Some("P"));
    let refusal = refused(db.lock().try_acquire("k").await);
    assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::Held, "psql"));
    // The lock takes the claim up, as that of any other process.
    let lease = db.lock().attach("k", claim.holder.unwrap()).await.unwrap();
    assert_eq!(Some(lease.token().get()), claim.token);
    lease.fail().await.unwrap();
    assert_eq!(change(&db.pool, "renew", "k", &claim, None).await, "lost");
    let answer = ask(&db.pool, &Ask { rules: "article", ..Ask::of("k") }).await;
    assert_eq!(answer.reason.as_deref(), Some("last_run_failed"));
}

async fn a_crashed_claim_is_taken_over_across_the_two<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask { lease: SHORT, label: Some("first"), ..Ask::of("k") }).await;
    let second = db.lock_for(SHORT).acquire("k", Duration::from_secs(20)).await;
    let second = acquired(second);
    assert_eq!(second.taken_over_from().map(|prior| prior.token.get()), claim.token);
    let token = second.token().get();
    second.detach();
    let mut third = ask(&db.pool, &Ask::of("k")).await;
    while !third.granted {
        tokio::time::sleep(third.retry_after.unwrap()).await;
        third = ask(&db.pool, &Ask::of("k")).await;
    }
    assert_eq!(third.previous.as_ref().map(|previous| previous.0), Some(token));
    assert!(third.token > Some(token));
    for what in ["renew", "release", "abandon"] {
        assert_eq!(change(&db.pool, what, "k", &claim, None).await, "lost", "{what}");
    }
    assert_eq!(change(&db.pool, "abandon", "k", &third, None).await, "done");
    acquired(db.lock().try_acquire("k").await);
}

async fn the_same_holder_repeats_its_claim<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let again = Ask { holder: Some(Holder::unique()), ..Ask::of("k") };
    let (one, two) = (ask(&db.pool, &again).await, ask(&db.pool, &again).await);
    assert!(two.granted && one.token == two.token && one.expires_at < two.expires_at, "{one:?} {two:?}");
}

async fn a_change_says_done_or_lost<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    let hour = if db.server.name == "postgres" { "1 hour" } else { "3600" };
    assert_eq!(change(&db.pool, "renew", "k", &claim, Some(hour)).await, "done");
    assert!(ask(&db.pool, &Ask::of("k")).await.retry_after.unwrap() > Duration::from_secs(3000));
    // A renewal never shortens a lease.
    assert_eq!(change(&db.pool, "renew", "k", &claim, None).await, "done");
    assert!(ask(&db.pool, &Ask::of("k")).await.retry_after.unwrap() > Duration::from_secs(3000));
    // A reply that was lost: the second request has the same outcome.
    for _ in 0..2 {
        assert_eq!(change(&db.pool, "release", "k", &claim, Some("F")).await, "done");
    }
    assert_eq!(db.column("k", "status").await.as_deref(), Some("F"));
    let next = ask(&db.pool, &Ask::of("k")).await;
    for what in ["renew", "release", "abandon", "put_back"] {
        assert_eq!(change(&db.pool, what, "k", &claim, None).await, "lost", "{what}");
        let other = Answer { holder: Some(Holder::unique()), ..next.clone() };
        assert_eq!(change(&db.pool, what, "k", &other, None).await, "lost", "{what}, by another holder");
    }
    for _ in 0..2 {
        assert_eq!(change(&db.pool, "abandon", "k", &next, None).await, "done");
    }
    assert!(ask(&db.pool, &Ask::of("k")).await.granted);
}

async fn a_claim_that_is_put_back_was_never_made<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let first = ask(&db.pool, &Ask { label: Some("first"), ..Ask::of("k") }).await;
    change(&db.pool, "release", "k", &first, Some("F")).await;
    let columns = ["status", "client_ip", "begin_time", "end_time", "lock_flag", "holder", "expires_at"];
    let row = async || {
        let mut row = Vec::new();
        for column in columns {
            row.push(db.cell(column, "t_resource_lock WHERE key_resource = 'k'").await);
        }
        row
    };
    let before = row().await;
    // It is asked for again, as after a lost reply.
    let asked = Ask { label: Some("second"), holder: Some(Holder::unique()), ..Ask::of("k") };
    let (one, claim) = (ask(&db.pool, &asked).await, ask(&db.pool, &asked).await);
    assert!(claim.granted && one.token == claim.token, "{one:?} {claim:?}");
    let other = Answer { holder: Some(Holder::unique()), ..claim.clone() };
    assert_eq!(change(&db.pool, "put_back", "k", &other, None).await, "lost");
    for _ in 0..2 {
        assert_eq!(change(&db.pool, "put_back", "k", &claim, None).await, "done");
    }
    assert_eq!(row().await, before);
    // Its token was used: the next one is higher.
    assert!(ask(&db.pool, &Ask::of("k")).await.token > claim.token);
    assert_eq!(change(&db.pool, "put_back", "k", &claim, None).await, "lost");
}

async fn a_confirmation_keeps_the_claim_to_the_end_of_the_transaction<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask { lease: SHORT, ..Ask::of("k") }).await;
    let (holder, token) = (claim.holder.unwrap(), claim.token.unwrap());
    let mut conn = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut conn, "BEGIN").await.unwrap();
    DB::call_change(&mut conn, "confirm", "k", holder, token, None).await.unwrap();
    tokio::time::sleep(2 * SHORT).await;
    // The lease is over, and still nothing takes the key: its row is locked.
    assert_eq!(ask(&db.pool, &Ask::of("k")).await.reason.as_deref(), Some("busy"));
    assert_eq!(refused(db.lock().try_acquire("k").await).reason, Reason::Busy);
    assert_eq!(change(&db.pool, "renew", "k", &claim, None).await, "busy");
    DB::execute_on(&mut conn, "COMMIT").await.unwrap();
    let next = ask(&db.pool, &Ask::of("k")).await;
    assert_eq!(next.previous.map(|previous| previous.0), Some(token));

    DB::execute_on(&mut conn, "BEGIN").await.unwrap();
    let error = DB::call_change(&mut conn, "confirm", "k", holder, token, None).await.unwrap_err();
    assert!(error.to_string().contains("is lost"), "{error}");
    let code = error.as_database_error().and_then(|error| error.code().map(|code| code.to_string()));
    assert_eq!(code.as_deref(), Some(if db.server.name == "postgres" { "RL001" } else { "45000" }));
    DB::execute_on(&mut conn, "ROLLBACK").await.unwrap();
}

async fn a_claim_waits_for_no_locked_row<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let claim = ask(&db.pool, &Ask::of("k")).await;
    change(&db.pool, "release", "k", &claim, None).await;
    let mut other = db.pool.acquire().await.unwrap();
    DB::execute_on(&mut other, "BEGIN").await.unwrap();
    DB::text_on(&mut other, "SELECT status FROM t_resource_lock WHERE key_resource = 'k' FOR UPDATE").await.unwrap();
    let insert = "INSERT INTO t_resource_lock (key_resource, status, lock_flag) VALUES ('new', 'S', 0)";
    DB::execute_on(&mut other, insert).await.unwrap();
    for key in ["k", "new"] {
        let answer = timeout(WAIT, ask(&db.pool, &Ask::of(key))).await.expect("it waits for nothing");
        assert_eq!((answer.granted, answer.reason.as_deref()), (false, Some("busy")), "{key}");
        assert!(answer.retry_after.is_some(), "{key}");
    }
    DB::execute_on(&mut other, "COMMIT").await.unwrap();
    for key in ["k", "new"] {
        assert!(ask(&db.pool, &Ask::of(key)).await.granted, "{key}");
    }
    // The wait for another's row changes no setting of the session.
    let setting = if db.server.name == "postgres" { "lock_timeout" } else { "innodb_lock_wait_timeout" };
    let sql = if db.server.name == "postgres" {
        format!("SHOW {setting}")
    } else {
        format!("SELECT CAST(@@{setting} AS CHAR)")
    };
    let fresh = db.pool_of(1).await;
    let mut used = db.pool.acquire().await.unwrap();
    let before = DB::text_on(&mut *fresh.acquire().await.unwrap(), &sql).await.unwrap();
    DB::call_try_acquire(&mut used, &Ask::of("newer")).await.unwrap();
    assert_eq!(DB::text_on(&mut used, &sql).await.unwrap(), before);
}

/// The server refuses to change the row, with the error of a full disk.
async fn a_full_disk_grants_nothing_and_changes_nothing<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let free = ask(&db.pool, &Ask::of("free")).await;
    assert_eq!(change(&db.pool, "release", "free", &free, None).await, "done");
    let held = ask(&db.pool, &Ask::of("held")).await;
    failures_apart::refuse(&db).await;
    let row = async |key| {
        db.cell(
            "concat(lock_flag, ' ', token, ' ', expires_at)",
            &format!("t_resource_lock WHERE key_resource = '{key}'"),
        )
        .await
    };
    let rows = (row("free").await, row("held").await);
    for key in ["free", "held"] {
        failures_apart::add(&db, key).await;
    }
    let mut conn = db.pool.acquire().await.unwrap();
    DB::call_try_acquire(&mut conn, &Ask::of("free")).await.unwrap_err();
    let (holder, token) = (held.holder.unwrap(), held.token.unwrap());
    for what in ["renew", "confirm", "release", "abandon"] {
        DB::call_change(&mut conn, what, "held", holder, token, None).await.unwrap_err();
    }
    assert_eq!((row("free").await, row("held").await), rows);
    db.execute("DELETE FROM refused").await;
    assert!(ask(&db.pool, &Ask::of("free")).await.granted);
    assert_eq!(change(&db.pool, "release", "held", &held, None).await, "done");
}

/// Their instances install the functions at once, too.
async fn one_of_many_first_claims_is_granted<DB: Functions>(db: TestDb<DB>) {
    let instances = (0..4).map(|_| {
        let pool = db.pool.clone();
        harness::spawn(async move { rowlock::migration::migrate_functions(&pool).await.unwrap() })
    });
    for instance in instances.collect::<Vec<_>>() {
        instance.await.unwrap();
    }
    for round in 0..5 {
        let key = format!("key {round}");
        let claims = (0..8).map(|_| {
            let (pool, key) = (db.pool.clone(), key.clone());
            harness::spawn(async move { ask(&pool, &Ask::of(&key)).await })
        });
        let mut granted = 0;
        for claim in claims.collect::<Vec<_>>() {
            let answer = claim.await.unwrap();
            granted += i32::from(answer.granted);
            assert!(answer.granted || ["held", "busy"].contains(&answer.reason.as_deref().unwrap()), "{answer:?}");
        }
        assert_eq!(granted, 1, "{key}");
    }
}

/// Callers of the functions and locks, in turn on one key. A plain counter that they read and
/// write under it is exact, and tokens only grow.
async fn functions_and_locks_never_overlap<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let (inside, count, newest) =
        (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let work = move |token: i64| {
        let (inside, count, newest) = (inside.clone(), count.clone(), newest.clone());
        async move {
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "two hold the key");
            assert!(newest.swap(token, SeqCst) < token, "a token fell");
            let read = count.load(SeqCst);
            tokio::time::sleep(Duration::from_millis(1)).await;
            count.store(read + 1, SeqCst);
            assert_eq!(inside.fetch_sub(1, SeqCst), 1);
            read + 1
        }
    };
    let (workers, rounds) = (4, 15);
    let mut tasks = Vec::new();
    for worker in 0..2 * workers {
        let (pool, work, lock) = (db.pool.clone(), work.clone(), db.lock());
        tasks.push(harness::spawn(async move {
            let mut last = 0;
            for _ in 0..rounds {
                if worker % 2 == 0 {
                    let lease = acquired(lock.acquire("k", Duration::from_secs(60)).await);
                    last = work(lease.token().get()).await;
                    lease.release().await.unwrap();
                    continue;
                }
                let mut claim = ask(&pool, &Ask::of("k")).await;
                while !claim.granted {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(1..10))).await;
                    claim = ask(&pool, &Ask::of("k")).await;
                }
                last = work(claim.token.unwrap()).await;
                assert_eq!(change(&pool, "release", "k", &claim, None).await, "done");
            }
            last
        }));
    }
    let mut most = 0;
    for task in tasks {
        most = most.max(task.await.unwrap());
    }
    assert_eq!(most, 2 * workers * rounds);
}

async fn keys_are_the_locks_keys<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let spaces = (1..0x3100u32).filter_map(char::from_u32).filter(|c| c.is_whitespace());
    let mut keys: Vec<String> =
        spaces.flat_map(|space| [format!("{space}k"), format!("k{space}"), format!("a{space}b")]).collect();
    keys.extend(
        ["", "'; DROP TABLE t_resource_lock; --", "%s $1 ? \\ \" `k`", "κλειδί", "a\u{200b}", "🔒"].map(String::from),
    );
    keys.extend([254, 255, 256].map(|length| "k".repeat(length)));
    keys.extend(["é".repeat(127), "é".repeat(128)]);
    for key in keys {
        let (answer, is_key) = (DB::call_try_acquire(&mut conn, &Ask::of(&key)).await, Key::new(&key).is_ok());
        assert_eq!(answer.is_ok(), is_key, "{key:?}: {answer:?}");
        if is_key {
            assert_eq!(refused(db.lock().try_acquire(&key).await).reason, Reason::Held, "{key:?}");
        }
    }
    let day = Duration::from_secs(24 * 3600);
    for bad in [
        Ask { lease: Duration::from_millis(99), ..Ask::of("x") },
        Ask { lease: 31 * day, ..Ask::of("x") },
        Ask { min_interval: 3654 * day, ..Ask::of("x") },
        Ask { rules: "none", ..Ask::of("x") },
    ] {
        DB::call_try_acquire(&mut conn, &bad).await.unwrap_err();
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'x'").await, Some(0));
}

async fn labels_are_the_locks_labels<DB: Functions>(db: TestDb<DB>) {
    installed(&db).await;
    let mut conn = db.pool.acquire().await.unwrap();
    let characters = (1..0x180u32).chain([0x2028, 0x1F512]).filter_map(char::from_u32);
    let mut labels: Vec<String> = characters.map(|one| format!("a{one}b")).collect();
    labels.extend(["", "'; --", "%s \\ ?"].map(String::from));
    labels.extend([45, 46].map(|length| "é".repeat(length)));
    for label in labels {
        let asked = Ask { label: Some(&label), ..Ask::of("k") };
        let answer = DB::call_try_acquire(&mut conn, &asked).await;
        let is_label = LeaseLock::builder(db.pool.clone()).label(&label).build().is_ok();
        assert_eq!(answer.is_ok(), is_label, "{label:?}: {answer:?}");
    }
}
