//! Forced releases and the deletion of old rows where other programs write the table too, and
//! tokens that a forced release never lowers.

use std::time::Duration;

use harness::{Table, TestDatabase, TestDb, acquired};
use rowlock::{
    Error, Status,
    admin::{ForcedRelease, ListOptions, LockState},
};

use crate::{
    article::{Answer, put},
    neighbours::{PLACES, long_ago, neighbours, whole},
};

harness::tests!(
    everywhere(what_another_program_has_locked_since_is_not_released),
    everywhere.each(
        a_forced_release_never_lowers_a_token,
        a_forced_release_ends_in_the_time_of_other_programs,
        the_age_of_a_row_is_in_the_time_of_other_programs
    ),
    mysql_and_mariadb.each(a_row_without_a_date_is_released)
);

const HOUR: Duration = Duration::from_secs(3600);

/// On both tables, with programs east and west of Greenwich.
fn cases() -> impl Iterator<Item = (Table, i32)> {
    Table::BOTH.into_iter().flat_map(|table| PLACES.map(|place| (table, place)))
}

/// The article's program keeps the token, the holder and the end of the run before.
async fn what_another_program_has_locked_since_is_not_released<DB: TestDatabase>(db: TestDb<DB>) {
    for (table, place) in cases() {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, place).await;
        acquired(ours.try_acquire("k").await).release().await.unwrap();
        for round in 1..=2 {
            let seen = ours.inspect("k").await.unwrap().unwrap();
            let later = long_ago(&program, -61 * round);
            assert_eq!(later.take("k").await, Answer::Taken);
            let before = whole(&db, "k").await;
            let now = match ours.force_release_if_unchanged(&seen, Status::Failed).await.unwrap() {
                ForcedRelease::Changed(now) => now.unwrap(),
                ForcedRelease::Released(token) => panic!("released under {token}, on {table:?} at {place}"),
            };
            assert_eq!((now.state, now.by.as_str()), (LockState::HeldByAnotherProgram, "10.0.0.7"));
            assert_eq!((now.token, now.holder, now.ended), (seen.token, None, seen.ended), "its begin alone is new");
            assert!(now.since > seen.since);
            assert_eq!(whole(&db, "k").await, before, "on {table:?} at {place}");
            later.give("k", "S").await;
        }
        let seen = ours.inspect("k").await.unwrap().unwrap();
        let released = ours.force_release_if_unchanged(&seen, Status::Failed).await.unwrap();
        assert!(matches!(released, ForcedRelease::Released(token) if token > seen.token), "on {table:?} at {place}");
    }
}

/// Fencing would otherwise let the old holder in.
async fn a_forced_release_never_lowers_a_token<DB: TestDatabase>(db: TestDb<DB>) {
    const AHEAD: i64 = 4_000_000_000_000_000;
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    db.set("k", &format!("token = {AHEAD}")).await;
    let lease = acquired(lock.try_acquire("k").await);
    assert_eq!(lease.token().get(), AHEAD + 1);
    let token = lock.force_release("k", Status::Succeeded).await.unwrap().unwrap();
    assert_eq!(token.get(), AHEAD + 2);
    let seen = lock.inspect("k").await.unwrap().unwrap();
    assert_eq!(seen.token, token);
    match lock.force_release_if_unchanged(&seen, Status::Failed).await.unwrap() {
        ForcedRelease::Released(token) => assert_eq!(token.get(), AHEAD + 3),
        other => panic!("{other:?}"),
    }
    assert_eq!(db.number("SELECT token FROM t_resource_lock").await, Some(AHEAD + 3));
    assert!(matches!(lease.renew().await, Err(Error::Lost { .. })));
    assert_eq!(acquired(lock.try_acquire("k").await).token().get(), AHEAD + 4);
}

async fn a_forced_release_ends_in_the_time_of_other_programs<DB: TestDatabase>(db: TestDb<DB>) {
    for (table, place) in cases() {
        put(&db, table).await;
        let (program, ours) = neighbours(&db, place).await;
        acquired(ours.try_acquire("k").await).detach();
        ours.force_release("k", Status::Succeeded).await.unwrap().unwrap();
        let ended = program.time("k", "end_time").await.unwrap();
        assert!((program.now() - ended).num_minutes().abs() < 2, "{ended} on {table:?} at {place}");
        let row = ours.inspect("k").await.unwrap().unwrap();
        assert!((row.now - row.ended.unwrap()).num_minutes().abs() < 2, "{row:?} on {table:?} at {place}");
        assert_eq!(program.take("k").await, Answer::WithinMinInterval);
        assert_eq!(long_ago(&program, -61).take("k").await, Answer::Taken);
    }
}

async fn the_age_of_a_row_is_in_the_time_of_other_programs<DB: TestDatabase>(db: TestDb<DB>) {
    for (table, place) in cases() {
        put(&db, table).await;
        let (_, ours) = neighbours(&db, place).await;
        let local = |minutes: i64| DB::begun(table, minutes * 60_000 - i64::from(place) * 1000);
        let none = || String::from("NULL");
        for (key, begin, end) in [
            ("began half an hour ago", local(30), none()),
            ("ended half an hour ago", local(600), local(30)),
            ("began long ago", local(180), none()),
            ("ended long ago", local(180), local(120)),
        ] {
            db.execute(&format!(
                "INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, end_time, client_ip, time)
                 VALUES ('{key}', 'S', 0, {begin}, {end}, '10.0.0.7', 60)"
            ))
            .await;
        }
        let forgotten = ours.forget(HOUR).await.unwrap();
        let left = ours.list(&ListOptions::default()).await.unwrap();
        let left: Vec<_> = left.iter().map(|entry| entry.key.as_str()).collect();
        assert_eq!(left, ["began half an hour ago", "ended half an hour ago"], "on {table:?} at {place}");
        assert_eq!(forgotten, 2);
    }
}

/// A date of zeros is read as none.
async fn a_row_without_a_date_is_released<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    acquired(lock.try_acquire("k").await).release().await.unwrap();
    let mut lax = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut lax, "SET sql_mode = ''").await.unwrap();
    for column in ["begin_time", "end_time"] {
        let zero = format!("UPDATE t_resource_lock SET {column} = 0 WHERE key_resource = 'k'");
        assert_eq!(DB::execute_on(&mut lax, &zero).await.unwrap(), 1);
        let seen = lock.inspect("k").await.unwrap().unwrap();
        assert!(seen.since.is_none(), "{seen:?}");
        let released = lock.force_release_if_unchanged(&seen, Status::Failed).await.unwrap();
        assert!(matches!(released, ForcedRelease::Released(token) if token > seen.token), "{column}: {released:?}");
    }
}
