//! Deploys: which instance's times a schedule has, and how times whose instances are gone are
//! replaced.

use std::time::Duration;

use chrono::DateTime;
use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Error, Retries, Schedule, Schedules, TickOutcome};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::ticks::{LONG, Never, SHORT, back, idle, info, instance, runs, told};

harness::tests!(everywhere(
    a_lower_version_replaces_no_times,
    an_old_instance_that_restarts_does_not_stop_the_schedule,
    times_that_are_gone_are_put_back,
    times_meet_a_run_that_has_just_begun,
    times_without_an_instance_are_replaced,
    a_schedule_that_is_resumed_is_not_overdue,
    a_triggered_run_keeps_its_attempts_under_other_times,
    a_version_beyond_the_column_is_refused
));

/// Several times the pause between two registrations of a running instance.
const A_WHILE: Duration = Duration::from_millis(1_500);

fn every<DB: TestDatabase>(db: &TestDb<DB>, version: u64, period: Duration) -> Schedules<DB> {
    let schedules = idle(db, Schedule::every("k", period).unwrap());
    schedules.version(version).unwrap().poll_interval(SHORT / 10).unwrap().lease(10 * SHORT).unwrap()
}

async fn times<DB: TestDatabase>(db: &TestDb<DB>) -> (String, u64) {
    let row = info(db, "k").await;
    (row.times, row.version)
}

fn text(period: Duration) -> String {
    format!("every {period:?}")
}

async fn a_lower_version_replaces_no_times<DB: TestDatabase>(db: TestDb<DB>) {
    let (old, new) = (text(LONG), text(2 * LONG));
    for (version, period, expected) in [
        (1, LONG, (&old, 1)),
        (2, 2 * LONG, (&new, 2)),
        (1, LONG, (&new, 2)),
        (0, 3 * LONG, (&new, 2)),
        (3, 2 * LONG, (&new, 3)),
        (2, LONG, (&new, 3)),
        (3, LONG, (&old, 3)),
    ] {
        let before = db.number("SELECT COUNT(*) FROM t_resource_schedule").await;
        let slot = if before == Some(0) { None } else { Some((info(&db, "k").await.slot, times(&db).await.0)) };
        every(&db, version, period).try_tick("k").await.unwrap();
        assert_eq!(times(&db).await, (expected.0.clone(), expected.1), "version {version}, {period:?}");
        if let Some((slot, times)) = slot.filter(|(_, times)| times == expected.0) {
            assert_eq!(info(&db, "k").await.slot, slot, "{times} keep their slot");
        }
    }
}

async fn an_old_instance_that_restarts_does_not_stop_the_schedule<DB: TestDatabase>(db: TestDb<DB>) {
    let new = every(&db, 2, 2 * SHORT).start().await.unwrap();
    eventually("it runs", || async { !runs(&db, "k").await.is_empty() }).await;
    let old = every(&db, 1, LONG);
    for _ in 0..2 {
        assert!(old.start().await.unwrap().shutdown(PATIENCE).await);
    }
    let before = runs(&db, "k").await.len();
    eventually("the new instance goes on", || async { runs(&db, "k").await.len() > before + 2 }).await;
    assert_eq!(times(&db).await, (text(2 * SHORT), 2));
    assert!(new.shutdown(PATIENCE).await);
}

/// An instance with other times has read the row. Before it writes its times, another instance runs
/// the tick that would be their first.
async fn times_meet_a_run_that_has_just_begun<DB: TestDatabase>(db: TestDb<DB>) {
    every(&db, 0, LONG).try_tick("k").await.unwrap();
    let new = Schedule::every("k", LONG / 2).unwrap();
    // The first tick of the new times.
    let period = i64::try_from((LONG / 2).as_secs()).unwrap();
    let slot = (info(&db, "k").await.now.timestamp() / period + 1) * period;
    let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
    let other = db.pool_of(1).await;
    let mut tx = other.begin().await.unwrap();
    let ran = match db.server.name {
        "sqlite" => at(slot).timestamp_micros().to_string(),
        "postgres" => format!("'{}'", at(slot).to_rfc3339()),
        _ => format!("'{}'", at(slot).naive_utc()),
    };
    let run = format!("UPDATE t_resource_schedule SET run_slot = {ran}, token = token + 1");
    assert_eq!(DB::execute_on(&mut tx, &run).await.unwrap(), 1);
    let new = idle(&db, new);
    let (tried, ()) = tokio::join!(new.try_tick("k"), async {
        sleep(3 * SHORT).await; // it has read the row, and waits for it
        tx.commit().await.unwrap();
    });
    assert!(matches!(tried.unwrap(), TickOutcome::NotDue { .. }));
    let row = info(&db, "k").await;
    assert_eq!((row.times.as_str(), row.slot), (text(LONG / 2).as_str(), at(slot + period)), "{row:?}");
}

/// The row was deleted by an operator, or has the times of an instance that knew no versions.
async fn times_that_are_gone_are_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let running = every(&db, 2, LONG).start().await.unwrap();
    for lose in [
        "DELETE FROM t_resource_schedule",
        "UPDATE t_resource_schedule SET version = 1, spec = 'every 7s'",
        "UPDATE t_resource_schedule SET version = 1",
    ] {
        assert_eq!(db.execute(lose).await, 1);
        eventually(lose, || async {
            db.number("SELECT COUNT(*) FROM t_resource_schedule").await == Some(1)
                && times(&db).await == (text(LONG), 2)
        })
        .await;
    }
    db.execute("UPDATE t_resource_schedule SET version = 3, spec = 'every 7s'").await;
    sleep(A_WHILE).await;
    assert_eq!(times(&db).await, ("every 7s".to_owned(), 3), "of a newer version");
    assert!(running.shutdown(PATIENCE).await);
}

/// All instances are of one version. An old one registers its times last, and is gone.
async fn times_without_an_instance_are_replaced<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ran) = mpsc::unbounded_channel();
    let new = instance(&db, "new").poll_interval(SHORT / 10).unwrap().lease(10 * SHORT).unwrap();
    let new = new.on(Schedule::every("k", 2 * LONG).unwrap(), move |tick| {
        sender.send(tick).unwrap();
        async { Never::Ok(()) }
    });
    let running = new.start().await.unwrap();
    every(&db, 0, LONG).try_tick("k").await.unwrap();
    sleep(A_WHILE).await;
    assert_eq!(times(&db).await, (text(LONG), 0), "they are not overdue");
    new.pause("k").await.unwrap();
    back(&db, "k", 4 * LONG).await;
    sleep(A_WHILE).await;
    assert_eq!(times(&db).await, (text(LONG), 0), "the schedule is paused");
    let slot = info(&db, "k").await.slot;
    db.execute("UPDATE t_resource_schedule SET paused = (1 = 0)").await;
    let tick = timeout(PATIENCE, ran.recv()).await.unwrap().unwrap();
    assert!(tick.slot() >= slot && tick.slot() < chrono::Utc::now(), "the ticks since are not lost: {tick:?}");
    assert_eq!(times(&db).await, (text(2 * LONG), 0));
    eventually("it is recorded", || async { told(&db, "k").await.contains('S') }).await;
    assert!(running.shutdown(PATIENCE).await);
}

/// It was due while it was paused. Instances that know its times may not have looked yet.
async fn a_schedule_that_is_resumed_is_not_overdue<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = every(&db, 0, LONG);
    schedules.try_tick("k").await.unwrap();
    schedules.pause("k").await.unwrap();
    back(&db, "k", 2 * LONG).await;
    let before = info(&db, "k").await;
    schedules.resume("k").await.unwrap();
    let after = info(&db, "k").await;
    assert!(after.due > before.due + LONG && after.slot == before.slot, "{after:?}");
    schedules.resume("k").await.unwrap();
    assert_eq!(info(&db, "k").await.due, after.due);
}

async fn a_version_beyond_the_column_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    assert!(matches!(instance(&db, "one").version(1 << 63), Err(Error::InvalidSetting { .. })));
    every(&db, (1 << 63) - 1, LONG).try_tick("k").await.unwrap();
    assert_eq!(times(&db).await.1, (1 << 63) - 1);
}

/// Another trigger may have come during the run that failed.
async fn a_triggered_run_keeps_its_attempts_under_other_times<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, again) in [("k", false), ("l", true)] {
        let retries = Retries::times(3).backoff(LONG, LONG).unwrap();
        let (old, operator) = (Schedule::every(name, LONG).unwrap().retry(retries).unwrap(), instance(&db, "operator"));
        let old = instance(&db, "old").on(old, move |_| {
            let operator = operator.clone();
            async move {
                if again {
                    operator.trigger(name).await.unwrap();
                }
                Err::<(), _>("no")
            }
        });
        assert!(matches!(old.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }));
        old.trigger(name).await.unwrap();
        assert!(matches!(old.try_tick(name).await.unwrap(), TickOutcome::Failed { again: true, .. }));
        let new = idle(&db, Schedule::every(name, 2 * LONG).unwrap());
        for _ in 0..if again { 2 } else { 1 } {
            assert_eq!(new.try_tick(name).await.unwrap(), TickOutcome::Succeeded, "{name}");
        }
        assert!(matches!(new.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }));
        assert_eq!(told(&db, name).await, if again { "F1 S2 S1" } else { "F1 S2" });
    }
}
