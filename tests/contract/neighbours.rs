//! Programs that run the article's own statements on the same table, in plain SQL. The lock
//! excludes them, and they exclude the lock.

use std::time::Duration;

use chrono::{FixedOffset, TimeDelta};
use harness::{Table, TestDatabase, TestDb, acquired, eventually, refused};
use rowlock::{Error, Lease, LeaseLock, Reason};
use tokio::time::timeout;

use crate::{
    article::{Answer, Program, put},
    child,
};

harness::tests!(
    everywhere(
        a_counter_stays_exact_with_four_of_theirs_and_four_of_ours,
        their_lock_is_refused_in_its_time_and_then_taken_over,
        they_read_our_times_and_keep_our_min_interval,
        their_late_unlock_and_relock_are_found_out,
        a_background_renewal_finds_out_too
    ),
    everywhere.each(their_late_unlock_is_found_out)
);

const PATIENCE: Duration = Duration::from_secs(90);
const MINUTE: Duration = Duration::from_secs(60);
/// The UTC offsets of two time zones, east and west of Greenwich.
pub const PLACES: [i32; 2] = [8 * 3600, -5 * 3600];

/// An article program in a time zone, and a lock that is configured for it.
pub async fn neighbours<DB: TestDatabase>(db: &TestDb<DB>, place: i32) -> (Program<DB>, LeaseLock<DB>) {
    let program = Program::new(db.pool.clone(), db.server.name, TimeDelta::seconds(place.into())).await;
    let ours = db.builder().label("ours").article_clients(FixedOffset::east_opt(place).unwrap()).build().unwrap();
    (program, ours)
}

/// A program that began the given number of minutes ago.
pub fn long_ago<DB: TestDatabase>(program: &Program<DB>, minutes: i64) -> Program<DB> {
    program.at(program.ahead - TimeDelta::minutes(minutes))
}

/// A row that belongs to the article program: free, succeeded, never begun.
async fn row<DB: TestDatabase>(db: &TestDb<DB>, key: &str, minutes: u32) {
    db.execute(&format!(
        "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time) VALUES ('{key}', 'S', 0, NULL, '', {minutes})"
    ))
    .await;
}

#[track_caller]
fn assert_lost(result: Result<(), Error>) {
    assert!(matches!(result, Err(Error::Lost { .. })), "{result:?}");
}

async fn a_counter_stays_exact_with_four_of_theirs_and_four_of_ours<DB: TestDatabase>(db: TestDb<DB>) {
    for table in Table::BOTH {
        put(&db, table).await;
        row(&db, "k", 0).await;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        std::fs::write(&file, "0").unwrap();
        let mut processes: Vec<_> =
            ["count", "count as the article"].repeat(4).iter().map(|job| child::start(&db, job, "k", &file)).collect();
        for process in &mut processes {
            assert!(timeout(PATIENCE, process.wait()).await.unwrap().unwrap().success());
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "80", "on {table:?}");
    }
}

async fn their_lock_is_refused_in_its_time_and_then_taken_over<DB: TestDatabase>(db: TestDb<DB>) {
    for (table, place) in Table::BOTH.into_iter().flat_map(|table| PLACES.map(|place| (table, place))) {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, place).await;
        row(&db, "k", 60).await;
        assert_eq!(long_ago(&program, 50).take("k").await, Answer::Taken);
        let refusal = refused(ours.try_acquire("k").await);
        assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::HeldByAnotherProgram, "10.0.0.7"));
        let left = refusal.retry_after.unwrap();
        assert!(left > 9 * MINUTE && left < 11 * MINUTE, "ten minutes of its hour are left, at {place}: {left:?}");
        let unaware = refused(db.lock().try_acquire("k").await);
        assert_eq!((unaware.reason, unaware.until), (Reason::HeldByAnotherProgram, None));

        row(&db, "l", 60).await;
        assert_eq!(long_ago(&program, 61).take("l").await, Answer::Taken);
        let lease = acquired(ours.try_acquire("l").await);
        assert_eq!(lease.taken_over_from().unwrap().label, "10.0.0.7");
        lease.release().await.unwrap();
    }
}

async fn they_read_our_times_and_keep_our_min_interval<DB: TestDatabase>(db: TestDb<DB>) {
    for (table, place) in Table::BOTH.into_iter().flat_map(|table| PLACES.map(|place| (table, place))) {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, place).await;
        let later = long_ago(&program, -61);
        let near = |time: Option<chrono::NaiveDateTime>| (program.now() - time.unwrap()).num_seconds().abs() < 20;

        let lease = acquired(ours.try_acquire("k").await);
        assert!(near(program.time("k", "begin_time").await), "on {table:?} at {place}");
        assert_eq!(program.take("k").await, Answer::Locked);
        assert_eq!(later.take("k").await, Answer::TimedOut);
        lease.fail().await.unwrap();
        assert!(near(program.time("k", "end_time").await), "on {table:?} at {place}");
        assert_eq!(later.take("k").await, Answer::NotSucceeded);

        acquired(ours.try_acquire("k").await).release().await.unwrap();
        assert_eq!(program.take("k").await, Answer::WithinMinInterval);
        assert_eq!(later.take("k").await, Answer::Taken);
        // The lock also respects the program's minimum interval after the program has ended.
        program.give("k", "S").await;
        db.set("k", &format!("begin_time = {}", DB::begun(table, 50 * 60_000 - i64::from(place) * 1000))).await;
        let refusal = refused(ours.clone().min_interval(60 * MINUTE).try_acquire("k").await);
        assert_eq!(refusal.reason, Reason::WithinMinInterval);
        assert!(refusal.retry_after.unwrap() < 11 * MINUTE, "at {place}: {refusal}");
        acquired(ours.min_interval(40 * MINUTE).try_acquire("k").await);
    }
}

/// The program unlocks after its time is over, when the lock holds the key. Its unlock statement
/// does not check the holder.
async fn their_late_unlock_is_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    for table in Table::BOTH {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, PLACES[0]).await;
        let ours = ours.min_interval(30 * MINUTE);
        for key in ["renewed", "released", "abandoned", "dropped"] {
            row(&db, key, 60).await;
            assert_eq!(long_ago(&program, 61).take(key).await, Answer::Taken);
            let lease = acquired(ours.try_acquire(key).await);
            program.give(key, "S").await;
            nothing_is_harmed(&db, &ours, lease).await;
            // What the program wrote counts: the row is free, its status is S, and the lock began
            // it a moment ago.
            assert_eq!(refused(ours.try_acquire(key).await).reason, Reason::WithinMinInterval);
            assert_eq!(program.take(key).await, Answer::WithinMinInterval);
        }
        let again = acquired(db.lock().try_acquire("renewed").await);
        again.renew().await.unwrap();
        again.release().await.unwrap();
    }
}

/// A program's late unlock lets another program of its kind acquire the key while the lock's holder
/// works.
async fn their_late_unlock_and_relock_are_found_out<DB: TestDatabase>(db: TestDb<DB>) {
    for table in Table::BOTH {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, PLACES[1]).await;
        let moved = format!("begin_time = {}", DB::begun(table, -5_000 - i64::from(PLACES[1]) * 1000));
        // The next program locks a moment after the lock's own claim; in the same second, for
        // columns of whole seconds; and with the time of the unlock erased.
        for relock in [moved.as_str(), "begin_time = claimed_at", &format!("{moved}, end_time = NULL")] {
            for key in ["renewed", "released", "abandoned", "dropped"] {
                db.execute(&format!("DELETE FROM t_resource_lock WHERE key_resource = '{key}'")).await;
                row(&db, key, 60).await;
                assert_eq!(long_ago(&program, 61).take(key).await, Answer::Taken);
                let lease = acquired(ours.try_acquire(key).await);
                let token = lease.token();
                program.give(key, "S").await;
                assert_eq!(long_ago(&program, -61).take(key).await, Answer::Taken);
                db.set(key, relock).await;
                nothing_is_harmed(&db, &ours, lease).await;
                // By the rules the program now holds the key. The lock is refused until the
                // program's time is over or it unlocks.
                let refusal = refused(ours.try_acquire(key).await);
                assert_eq!((refusal.reason, refusal.by.as_str()), (Reason::HeldByAnotherProgram, "10.0.0.7"));
                assert_eq!(program.take(key).await, Answer::Locked);
                program.give(key, "S").await;
                let next = acquired(ours.try_acquire(key).await);
                assert!(next.token() > token && next.taken_over_from().is_none());
                next.release().await.unwrap();
            }
        }
    }
}

/// Does what the key names with a lease that another program overwrote. The lease detects the loss,
/// and leaves the row unchanged.
async fn nothing_is_harmed<DB: TestDatabase>(db: &TestDb<DB>, ours: &LeaseLock<DB>, lease: Lease<DB>) {
    let key = lease.key().clone();
    let before = whole(db, key.as_str()).await;
    match key.as_str() {
        "renewed" => {
            assert_lost(lease.renew().await);
            assert!(!lease.is_held());
        }
        "released" => assert_lost(lease.fail().await),
        "abandoned" => assert_lost(lease.abandon().await),
        _ => drop(lease),
    }
    assert!(ours.shutdown(PATIENCE).await);
    assert_eq!(whole(db, key.as_str()).await, before);
}

async fn a_background_renewal_finds_out_too<DB: TestDatabase>(db: TestDb<DB>) {
    for table in Table::BOTH {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, PLACES[0]).await;
        let ours = ours.lease(Duration::from_secs(3));
        for relock in [false, true] {
            let key = if relock { "relocked" } else { "unlocked" };
            row(&db, key, 60).await;
            assert_eq!(long_ago(&program, 61).take(key).await, Answer::Taken);
            let lease = acquired(ours.try_acquire(key).await);
            let until = db.column(key, "CAST(expires_at AS char(80))").await;
            eventually("it is renewed", async || db.column(key, "CAST(expires_at AS char(80))").await != until).await;
            assert!(lease.is_held());
            program.give(key, "F").await;
            if relock {
                program.give(key, "S").await;
                assert_eq!(long_ago(&program, -61).take(key).await, Answer::Taken);
            }
            let before = whole(&db, key).await;
            timeout(PATIENCE, lease.lost()).await.unwrap();
            drop(lease);
            assert!(ours.shutdown(PATIENCE).await);
            assert_eq!(whole(&db, key).await, before, "nothing of the row changed, on {table:?}");
        }
    }
}

pub async fn whole<DB: TestDatabase>(db: &TestDb<DB>, key: &str) -> String {
    let columns = crate::upgrade::all_columns(db.server.name);
    db.text(&format!("SELECT {columns} FROM t_resource_lock WHERE key_resource = '{key}'")).await.unwrap()
}
