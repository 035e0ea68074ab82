//! What could run a tick once more, or before its time: ends that cannot be recorded as they are,
//! claims that are undone, and times that are replaced between attempts.

use std::{fmt, sync::Arc, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, events, eventually};
use rowlock::{Schedule, Tick, jobs::TickOutcome};
use tokio::{
    sync::{Barrier, mpsc},
    task::yield_now,
    time::{sleep, timeout},
};

use crate::ticks::{LONG, Never, SHORT, back, due, idle, info, instance, runs, steal, told};

harness::tests!(
    everywhere(
        a_claim_that_is_undone_under_other_times_loses_no_tick,
        other_times_have_no_slot_before_the_last_run,
        work_that_ends_while_it_is_stopped_has_ended,
        an_error_of_any_characters_is_recorded,
        an_end_that_is_refused_holds_up_no_other,
        the_causes_of_an_error_are_recorded,
        work_that_panics_fails
    ),
    sqlite(a_claim_that_is_granted_after_the_shutdown_is_put_back),
    everywhere.each(a_schedule_that_is_refused_holds_up_no_other),
    servers(a_locked_schedule_holds_up_no_other),
    everywhere(an_end_waits_for_a_server_that_takes_no_writes)
);

/// The old instance is stopped while it waits for the key, after other times took effect.
async fn a_claim_that_is_undone_under_other_times_loses_no_tick<DB: TestDatabase>(db: TestDb<DB>) {
    let old = due(&db, "k").await.exclusive_with("key");
    let slot = info(&db, "k").await.slot;
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let old = idle(&db, old).start().await.unwrap();
    eventually("it waits for the key", || async { info(&db, "k").await.running }).await;
    let new = idle(&db, Schedule::every("k", 2 * LONG));
    assert!(matches!(new.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }), "it is run");
    old.shutdown(SHORT).await;
    let row = info(&db, "k").await;
    assert!(row.run_slot == Some(slot) && row.slot > slot && row.due <= row.now, "{row:?}");
    assert_eq!(new.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 S2");
    assert!(runs(&db, "k").await.iter().all(|run| run.slot == slot));
    assert_eq!(info(&db, "k").await.slot, row.slot, "the next tick is that of the other times");
    by_hand.release().await.unwrap();
}

/// The server's clock was set back after a run, or a standby with a slower one was promoted.
async fn other_times_have_no_slot_before_the_last_run<DB: TestDatabase>(db: TestDb<DB>) {
    idle(&db, Schedule::every("k", LONG)).try_tick("k").await.unwrap();
    let last = info(&db, "k").await.slot;
    db.execute("UPDATE t_resource_schedule SET run_slot = slot").await;
    back(&db, "k", Duration::ZERO).await;
    idle(&db, Schedule::every("k", LONG / 10)).try_tick("k").await.unwrap();
    let row = info(&db, "k").await;
    assert!(row.slot > last && row.due == row.slot, "{last}, then {row:?}");
}

/// Work that does not let itself be dropped at once, and succeeds by then: a second run would
/// repeat it.
async fn work_that_ends_while_it_is_stopped_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    for by_timeout in [false, true] {
        let name = format!("by timeout {by_timeout}");
        let mut schedule = due(&db, &name).await;
        if by_timeout {
            schedule = schedule.timeout(SHORT);
        }
        let (began, mut begun) = mpsc::unbounded_channel();
        let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
            let began = began.clone();
            async move {
                began.send(()).unwrap();
                while !tick.cancellation_token().is_cancelled() {
                    std::thread::sleep(SHORT / 20);
                }
                Never::Ok(())
            }
        });
        let running = schedules.start().await.unwrap();
        timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
        if by_timeout {
            eventually("it has ended", || async { !info(&db, &name).await.running }).await;
        }
        running.shutdown(SHORT).await;
        assert_eq!(told(&db, &name).await, "S1", "{name}");
        assert!(matches!(schedules.try_tick(&name).await.unwrap(), TickOutcome::NotDue { .. }), "{name}");
    }
}

/// PostgreSQL's texts have no NUL, and those of a database in LATIN1 no arrow.
async fn an_error_of_any_characters_is_recorded<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "one").on(due(&db, "k").await, async |_| Err::<(), _>("left \0 \u{2192} right"));
    let outcome = timeout(PATIENCE, schedules.try_tick("k")).await.unwrap().unwrap();
    assert!(matches!(outcome, TickOutcome::Failed { again: false, .. }), "{outcome:?}");
    let runs = runs(&db, "k").await;
    let error = runs[0].error.as_deref().unwrap();
    assert!(runs.len() == 1 && error.starts_with("left ") && error.ends_with(" right"), "{runs:?}");
}

/// As `anyhow` formats an error.
struct WithCause;

impl fmt::Display for WithCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if f.alternate() { "no report: the disk is full" } else { "no report" })
    }
}

async fn the_causes_of_an_error_are_recorded<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "one").on(due(&db, "k").await, async |_| Err::<(), _>(WithCause));
    let outcome = timeout(PATIENCE, schedules.try_tick("k")).await.unwrap().unwrap();
    assert!(matches!(outcome, TickOutcome::Failed { again: false, .. }), "{outcome:?}");
    assert_eq!(runs(&db, "k").await[0].error.as_deref(), Some("no report: the disk is full"));
}

async fn work_that_panics_fails<DB: TestDatabase>(db: TestDb<DB>) {
    for name in ["before it begins", "later"] {
        let schedules = instance(&db, "one").on(due(&db, name).await, move |tick: Tick<DB>| {
            assert!(name == "later", "on purpose");
            async move {
                yield_now().await;
                assert!(tick.attempt() > 1, "on purpose");
                Never::Ok(())
            }
        });
        let outcome = harness::spawn(async move { schedules.try_tick(name).await.unwrap() }).await.unwrap();
        let TickOutcome::Failed { error, again: false } = outcome else { panic!("{name}: {outcome:?}") };
        assert!(error.starts_with("the work panicked") && error.contains("on purpose"), "{name}: {error}");
        assert_eq!(told(&db, name).await, "F1", "{name}");
    }
}

/// The statement waits for another writer while the instance is shut down.
async fn a_claim_that_is_granted_after_the_shutdown_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due(&db, "k").await);
    let due_at = DB::ago(-2_000);
    db.execute(&format!("UPDATE t_resource_schedule SET due_at = {due_at}, slot = {due_at}")).await;
    let other = db.pool_of(1).await;
    let mut conn = other.acquire().await.unwrap();
    let running = schedules.start().await.unwrap();
    DB::execute_on(&mut conn, "BEGIN IMMEDIATE").await.unwrap();
    sleep(23 * SHORT).await;
    let shutdown = harness::spawn(running.shutdown(PATIENCE));
    sleep(SHORT).await;
    DB::execute_on(&mut conn, "COMMIT").await.unwrap();
    assert!(timeout(PATIENCE, shutdown).await.unwrap().unwrap());
    let row = info(&db, "k").await;
    assert!(!row.running && row.attempt == 0 && row.due == row.slot, "{row:?}");
    assert_eq!(told(&db, "k").await, "");
}

/// A trigger refuses to have them claimed. It is warned of once, though others are claimed.
async fn a_schedule_that_is_refused_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    // They are due in this order. The process that ran the second one has died.
    let names = ["first", "second", "third", "fourth"];
    let mut schedules = instance(&db, "one").lease(Duration::from_secs(3600)).max_concurrent_runs(1);
    for (times, name) in (1..).zip(names.iter().rev()) {
        schedules = schedules.on(due(&db, name).await, async |_| Never::Ok(()));
        back(&db, name, times * LONG).await;
    }
    steal(&db, "second").await;
    db.execute("UPDATE t_resource_schedule SET begin_time = slot, run_slot = slot WHERE name = 'second'").await;
    let text = format!("claims are refused on {}", db.server.name);
    let these = "NEW.name IN ('first', 'second') AND NEW.holder IS NOT NULL";
    if db.server.name == "postgres" {
        let raise = format!("BEGIN RAISE EXCEPTION '{text}'; END");
        db.execute(&format!("CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $${raise}$$")).await;
    }
    let refuse = match db.server.name {
        "postgres" => format!("FOR EACH ROW WHEN ({these}) EXECUTE FUNCTION refuse()"),
        "sqlite" => format!("WHEN {these} BEGIN SELECT RAISE(ABORT, '{text}'); END"),
        _ => format!("FOR EACH ROW IF {these} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{text}'; END IF"),
    };
    db.execute(&format!("CREATE TRIGGER refuse BEFORE UPDATE ON t_resource_schedule {refuse}")).await;
    let running = schedules.start().await.unwrap();
    for name in ["third", "fourth"] {
        eventually(name, || async { runs(&db, name).await.len() == 1 }).await;
    }
    for times in 2..4 {
        instance(&db, "operator").trigger("third").await.unwrap();
        eventually("it is run again", || async { runs(&db, "third").await.len() == times }).await;
    }
    let warned = || events::with(&text).into_iter().filter(|line| line.contains("WARN"));
    eventually("it is warned of", || async { warned().count() > 0 }).await;
    assert_eq!(warned().count(), 1, "{:?}", warned().collect::<Vec<_>>());
    let of = if db.server.name == "postgres" { " ON t_resource_schedule" } else { "" };
    db.execute(&format!("DROP TRIGGER refuse{of}")).await;
    for name in ["first", "second"] {
        eventually(name, || async { told(&db, name).await.contains('S') }).await;
    }
    assert!(running.shutdown(PATIENCE).await);
}

/// Another transaction has locked the row that is due first, and an instance has one place.
async fn a_locked_schedule_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let names = ["first", "second", "third"];
    let mut schedules = instance(&db, "one").max_concurrent_runs(1);
    for (times, name) in (1..).zip(names.iter().rev()) {
        schedules = schedules.on(due(&db, name).await, async |_| Never::Ok(()));
        back(&db, name, times * LONG).await;
    }
    let mut other = db.pool.begin().await.unwrap();
    let lock = "SELECT 1 FROM t_resource_schedule WHERE name = 'first' FOR UPDATE";
    DB::execute_on(&mut other, lock).await.unwrap();
    let running = schedules.start().await.unwrap();
    for name in ["second", "third"] {
        eventually(name, || async { told(&db, name).await.contains('S') }).await;
    }
    assert_eq!(told(&db, "first").await, "");
    other.rollback().await.unwrap();
    eventually("it is run", || async { told(&db, "first").await.contains('S') }).await;
    assert!(running.shutdown(PATIENCE).await);
}

/// Runs end at one moment, and the database refuses the record of one.
async fn an_end_that_is_refused_holds_up_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let names: Vec<String> = (0..20).map(|number| format!("k{number}")).collect();
    let all_run = Arc::new(Barrier::new(names.len()));
    let mut schedules = instance(&db, "one").lease(Duration::from_secs(3600)).max_concurrent_runs(20);
    for name in &names {
        let all_run = all_run.clone();
        let work = move |_| {
            let all_run = all_run.clone();
            async move {
                all_run.wait().await;
                Never::Ok(())
            }
        };
        schedules = schedules.on(due(&db, name).await, work);
    }
    let refuse = match db.server.name {
        "sqlite" => "WHEN NEW.name = 'k7' BEGIN SELECT RAISE(ABORT, 'refused'); END",
        "postgres" => "FOR EACH ROW WHEN (NEW.name = 'k7') EXECUTE FUNCTION refuse()",
        _ => "FOR EACH ROW IF NEW.name = 'k7' THEN SIGNAL SQLSTATE '45000'; END IF",
    };
    if db.server.name == "postgres" {
        let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$";
        db.execute(refuse).await;
    }
    db.execute(&format!("CREATE TRIGGER refuse BEFORE INSERT ON t_resource_schedule_run {refuse}")).await;
    let running = schedules.start().await.unwrap();
    for name in names.iter().filter(|name| *name != "k7") {
        eventually(name, || async { told(&db, name).await == "S1" }).await;
    }
    let refused = info(&db, "k7").await;
    assert!(refused.running && told(&db, "k7").await.is_empty(), "{refused:?}");
    let of = if db.server.name == "postgres" { " ON t_resource_schedule_run" } else { "" };
    db.execute(&format!("DROP TRIGGER refuse{of}")).await;
    eventually("it is recorded", || async { told(&db, "k7").await == "S1" }).await;
    assert!(running.shutdown(PATIENCE).await);
}

/// Has the server refuse rows of a table as one that takes no writes.
pub async fn refuse_writes<DB: TestDatabase>(db: &TestDb<DB>, table: &str) {
    let refuse = if db.server.name == "sqlite" {
        // Of the only connection of the pool.
        db.execute("PRAGMA query_only = 1").await;
        return;
    } else if db.server.name == "postgres" {
        let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE USING ERRCODE = '25006'; END $$";
        db.execute(refuse).await;
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    } else {
        "FOR EACH ROW SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'running with --read-only'"
    };
    db.execute(&format!("CREATE TRIGGER refuse BEFORE INSERT ON {table} {refuse}")).await;
}

pub async fn take_writes<DB: TestDatabase>(db: &TestDb<DB>, table: &str) {
    if db.server.name == "sqlite" {
        db.execute("PRAGMA query_only = 0").await;
        return;
    }
    let of = if db.server.name == "postgres" { format!(" ON {table}") } else { String::new() };
    db.execute(&format!("DROP TRIGGER refuse{of}")).await;
}

/// A server renews its lease until then.
async fn an_end_waits_for_a_server_that_takes_no_writes<DB: TestDatabase>(db: TestDb<DB>) {
    let (began, mut begun) = mpsc::unbounded_channel();
    let finish = Arc::new(Barrier::new(2));
    let finished = finish.clone();
    let one = db.over(db.pool_of(1).await);
    // A file that takes no writes takes no renewals.
    let lease = if db.server.name == "sqlite" { LONG / 10 } else { 15 * SHORT };
    let schedules = instance(&one, "one").share_pool().lease(lease).time_limit(5 * SHORT);
    let schedules = schedules.on(due(&db, "k").await, move |_| {
        began.send(()).unwrap();
        let finished = finished.clone();
        async move {
            finished.wait().await;
            Never::Ok(())
        }
    });
    let run = harness::spawn(async move { schedules.try_tick("k").await.unwrap() });
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    refuse_writes(&one, "t_resource_schedule_run").await;
    finish.wait().await;
    // Longer than what a server refuses for good is sent.
    sleep(25 * SHORT).await;
    assert!(!run.is_finished() && info(&db, "k").await.running);
    take_writes(&one, "t_resource_schedule_run").await;
    assert_eq!(timeout(PATIENCE, run).await.unwrap().unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}
