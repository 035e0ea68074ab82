//! Ticks whose work commits together with them, in a database whose sessions are SERIALIZABLE
//! unless they say otherwise.

use std::time::Duration;

use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{
    Schedule, Tick,
    jobs::{CatchUp, TickOutcome},
};
use sqlx::Pool;
use tokio::time::sleep;

use crate::{
    isolation::pool_of_at,
    ticks::{Never, SHORT, due, idle, instance},
};

harness::tests!(
    servers[DIRECT].each(transactions_that_conflict_are_repeated),
    servers[DIRECT].alone(an_own_transaction_of_milliseconds_does_not_fail),
    postgres[DIRECT](a_pooler_that_rejects_the_mark_of_own_sessions_is_used_without_it)
);

const TICKS: i64 = 90;

/// Returns the database over a pool whose sessions are SERIALIZABLE: by the database's default on
/// PostgreSQL, and by a hook of the pool elsewhere.
pub async fn serializable<DB: TestDatabase>(db: &TestDb<DB>) -> TestDb<DB> {
    if db.server.name == "postgres" {
        let sql = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable',
                   current_database()); END $$";
        db.execute(sql).await;
        let pool = db.pool_of(10).await;
        assert_eq!(DB::text(&pool, "SHOW transaction_isolation").await.as_deref(), Some("serializable"));
        return db.over(pool);
    }
    db.over(pool_of_at(db, 10, "serializable").await)
}

/// Returns the effect of a tick, which takes milliseconds.
async fn effect<DB: TestDatabase>(name: &str, tx: &mut DB::Connection) -> Result<(), sqlx::Error> {
    DB::execute_on(tx, &format!("INSERT INTO effect (name) VALUES ('{name}')")).await?;
    sleep(Duration::from_millis(fastrand::u64(1..8))).await;
    Ok(())
}

/// Runs ticks on two instances that have this many schedules of this work, without retries, and so
/// many that do nothing, until enough have ended. None may fail.
async fn none_fails<DB: TestDatabase, F>(
    db: &TestDb<DB>,
    (schedules, idle): (usize, usize),
    work: impl Fn(Tick<DB>, Pool<DB>) -> F + Clone + Send + Sync + 'static,
) where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    db.execute("CREATE TABLE effect (name varchar(40) NOT NULL)").await;
    let reader = db.over(db.pool_of(1).await);
    let db = serializable(db).await;
    let mut running = Vec::new();
    for number in 0..2 {
        let mut one = instance(&db, &format!("instance {number}"));
        for number in 0..schedules {
            let schedule = Schedule::every(&format!("k{number}"), SHORT);
            let (pool, work) = (db.pool.clone(), work.clone());
            one = one.on(schedule.catch_up(CatchUp::All(1_000)), move |tick| work(tick, pool.clone()));
        }
        for number in 0..idle {
            let schedule = Schedule::every(&format!("idle{number}"), SHORT);
            one = one.on(schedule, async |_| Never::Ok(()));
        }
        running.push(one.start().await.unwrap());
    }
    let count = async |status| {
        let sql = format!("SELECT COUNT(*) FROM t_resource_schedule_run WHERE name LIKE 'k%' AND {status}");
        reader.number(&sql).await.unwrap()
    };
    eventually("the ticks have ended", || async { count("1 = 1").await >= TICKS }).await;
    for running in running {
        assert!(running.shutdown(PATIENCE).await);
    }
    let error = reader.cell("max(error)", "t_resource_schedule_run WHERE status = 'F'").await;
    assert_eq!(count("status <> 'S'").await, 0, "of {}: {error:?}", count("1 = 1").await);
    assert_eq!(reader.number("SELECT COUNT(*) FROM effect").await, Some(count("status = 'S'").await));
}

/// Only the statements of the instances are beside the transaction: they claim the other schedules,
/// and record their ends. On a busy machine it takes longer than milliseconds, and may conflict.
async fn an_own_transaction_of_milliseconds_does_not_fail<DB: TestDatabase>(db: TestDb<DB>) {
    none_fails(&db, (1, 16), async |tick: Tick<DB>, pool: Pool<DB>| {
        let mut tx = pool.begin().await.unwrap();
        effect::<DB>(tick.name(), &mut tx).await.map_err(|error| error.to_string())?;
        tick.finish_in(&mut tx).await.map_err(|error| error.to_string())?;
        tx.commit().await.map_err(|error| error.to_string())
    })
    .await;
}

/// The transactions of the schedules conflict with each other.
async fn transactions_that_conflict_are_repeated<DB: TestDatabase>(db: TestDb<DB>) {
    none_fails(&db, (3, 0), async |tick: Tick<DB>, pool: Pool<DB>| {
        let name = tick.name().to_owned();
        let done = tick.transaction(&pool, |mut tx| {
            let name = name.clone();
            async move { effect::<DB>(&name, &mut tx).await }
        });
        done.await.map_err(|error| error.to_string())
    })
    .await;
}

/// The server's answer to a wrong startup message has the code of PgBouncer's answer to a setting
/// that it does not know.
async fn a_pooler_that_rejects_the_mark_of_own_sessions_is_used_without_it<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedule, proxy) = (due(&db, "k").await, db.proxy().await);
    proxy.replace("rowlock.own_session=on", "rowlock\0\0own_sessio=on");
    let over = db.over(proxy.pool(2));
    assert_eq!(idle(&over, schedule).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
}
