//! Runs whose work is the transaction that ends the tick, and whose COMMIT or its reply is lost:
//! the tick has its effect once.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

use harness::{
    PATIENCE, TestDatabase, TestDb, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{Schedule, Schedules, Tick, Tx, jobs::TickOutcome};
use sqlx::Pool;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    sync::mpsc,
    time::{sleep, timeout},
};

use crate::{
    child::{self, say},
    ticks::{LONG, SHORT, due, instance, told},
    ticks_transaction::{Done, EFFECT, LEASE, effects, table, with},
};

harness::tests!(
    servers(
        a_commit_without_a_reply_is_resolved,
        a_commit_that_is_under_way_when_the_lease_is_lost_is_waited_for,
        a_stop_after_a_commit_leaves_a_success_without_a_server,
        a_commit_that_did_not_arrive_is_repeated,
        a_process_that_is_killed_before_its_commit_arrives_leaves_the_tick
    ),
    servers.long(a_commit_cut_off_for_good_has_its_effect_once)
);

/// Runs the tick over a proxy. After the work's last statement in its first run, this many chunks
/// pass this way, and the next is held, while `between` runs: the check, the end and the COMMIT.
async fn run_held<DB: TestDatabase>(
    db: &TestDb<DB>,
    (way, after): (Way, usize),
    between: impl AsyncFnOnce(&Proxy),
) -> (TickOutcome, Done, u32) {
    let (schedule, proxy, runs) = (due(db, "k").await, Arc::new(db.proxy().await), Arc::new(AtomicU32::new(0)));
    let (pool, held, counted) = (proxy.pool(1), proxy.clone(), runs.clone());
    warm(db, &pool, "warm").await;
    let (schedules, mut done) = with(instance(db, "one"), schedule, &pool, move |mut tx| {
        let (first, held) = (runs.fetch_add(1, SeqCst) == 0, held.clone());
        async move {
            DB::execute_on(&mut tx, EFFECT).await?;
            if first {
                held.hold_after(way, after);
            }
            Ok(())
        }
    });
    let run = async { schedules.try_tick("k").await.unwrap() };
    let outcome = timeout(3 * PATIENCE, proxy.while_held(way, run, between)).await.expect("it ends");
    (outcome, done.recv().await.unwrap(), counted.load(SeqCst))
}

/// Prepares the statements of a transaction on a connection of the pool.
async fn warm<DB: TestDatabase>(db: &TestDb<DB>, pool: &Pool<DB>, name: &str) {
    let select = async |mut tx: Tx<DB>| DB::execute_on(&mut tx, "SELECT 1").await.map(drop);
    let (schedules, _done) = with(instance(db, "one"), due(db, name).await, pool, select);
    assert_eq!(schedules.try_tick(name).await.unwrap(), TickOutcome::Succeeded);
}

/// How many round trips lie between the work's last statement and the COMMIT: the check, and the
/// end, which is two statements on MySQL and MariaDB.
fn before_commit<DB: TestDatabase>(db: &TestDb<DB>) -> usize {
    if db.server.name == "postgres" { 2 } else { 3 }
}

async fn a_commit_without_a_reply_is_resolved<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (outcome, done, runs) = run_held(&db, (Way::Replies, before_commit(&db)), async |proxy| {
        assert_eq!(effects(&db).await, 1, "it is committed, and the run does not know it yet");
        proxy.cut();
    })
    .await;
    assert!(done.is_ok() && outcome == TickOutcome::Succeeded && runs == 1, "{runs}: {outcome:?} {done:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// The commit has ended the claim, and a renewal finds that out before the reply has come. A commit
/// under way is waited for until the lease ends, which leaves three seconds for the reply.
async fn a_commit_that_is_under_way_when_the_lease_is_lost_is_waited_for<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (schedule, proxy) = (due(&db, "k").await, Arc::new(db.proxy().await));
    let (held, after, pool) = (proxy.clone(), before_commit(&db), proxy.pool(1));
    warm(&db, &pool, "warm").await;
    let ((began, mut begun), (sender, mut done)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
    let schedules = instance(&db, "one").time_limit(3 * PATIENCE).lease(3 * PATIENCE);
    let schedules = schedules.on(schedule, move |tick: Tick<DB>| {
        began.send(tick.cancellation_token()).unwrap();
        let (pool, held, sender) = (pool.clone(), held.clone(), sender.clone());
        async move {
            let done = tick.transaction(&pool, async |mut tx| {
                DB::execute_on(&mut tx, EFFECT).await?;
                held.hold_after(Way::Replies, after);
                Ok(())
            });
            let done: Done = done.await;
            sender.send(done.is_ok()).unwrap();
            done
        }
    });
    let running = harness::spawn(async move { schedules.try_tick("k").await });
    let told = timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    proxy.held(Way::Replies).await;
    timeout(2 * PATIENCE, told.cancelled()).await.expect("a renewal finds the claim ended");
    // Work that is stopped is dropped by then.
    sleep(5 * SHORT).await;
    proxy.open();
    let outcome = timeout(PATIENCE, running).await.unwrap().unwrap().unwrap();
    assert_eq!((outcome, done.recv().await), (TickOutcome::Succeeded, Some(true)), "the work has had its reply");
    assert_eq!(effects(&db).await, 1);
}

/// The instance cannot ask what has become of its tick, and need not.
async fn a_stop_after_a_commit_leaves_a_success_without_a_server<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (schedule, proxy, pool) = (due(&db, "k").await, db.proxy().await, db.pool_of(1).await);
    let (committed, mut commits) = mpsc::unbounded_channel();
    let schedules = Schedules::<DB>::new(proxy.pool(4)).time_limit(PATIENCE);
    let schedules = schedules.on(schedule, move |tick: Tick<DB>| {
        let (pool, committed) = (pool.clone(), committed.clone());
        async move {
            let done: Done =
                tick.transaction(&pool, async |mut tx| DB::execute_on(&mut tx, EFFECT).await.map(drop)).await;
            done.unwrap();
            committed.send(()).unwrap();
            std::future::pending::<Done>().await
        }
    });
    let stop = async {
        timeout(PATIENCE, commits.recv()).await.unwrap().unwrap();
        proxy.hold_everything();
    };
    let outcome = timeout(2 * PATIENCE, schedules.try_tick_until("k", stop)).await.expect("it ends").unwrap();
    assert_eq!(outcome, TickOutcome::Succeeded);
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

async fn a_commit_that_did_not_arrive_is_repeated<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (outcome, done, runs) = run_held(&db, (Way::Requests, before_commit(&db)), async |proxy| {
        assert_eq!(effects(&db).await, 0);
        proxy.cut();
    })
    .await;
    assert!(done.is_ok() && outcome == TickOutcome::Succeeded && runs == 2, "{runs}: {outcome:?} {done:?}");
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "S1"));
}

/// The COMMIT, or its reply, is in transit until the lease is over, and the instance reaches the
/// server no more. Another instance has the tick then.
async fn a_commit_cut_off_for_good_has_its_effect_once<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    for way in [Way::Requests, Way::Replies] {
        let name = format!("{way:?}");
        let (schedule, proxy) = (due(&db, &name).await, Arc::new(db.proxy().await));
        let (held, after, pool) = (proxy.clone(), before_commit(&db), proxy.pool(1));
        warm(&db, &pool, &format!("warm {way:?}")).await;
        let schedules = Schedules::<DB>::new(proxy.pool(4)).lease(LEASE);
        let (cut_off, _done) = with(schedules, schedule.clone(), &pool, move |mut tx| {
            let held = held.clone();
            async move {
                DB::execute_on(&mut tx, EFFECT).await?;
                held.hold_after(way, after);
                Ok(())
            }
        });
        let own = name.clone();
        let run = harness::spawn(async move { cut_off.try_tick(&own).await });
        proxy.held(way).await;
        proxy.hold_everything();
        let outcome = timeout(3 * PATIENCE, run).await.expect("it ends").unwrap().unwrap();
        assert_eq!(outcome, TickOutcome::Lost, "{way:?}");
        // The server learns that its client is gone, and what it has not committed ends.
        proxy.cut_off().await;
        let pool = db.pool_of(1).await;
        let (other, _done) = with(instance(&db, "other"), schedule, &pool, async |mut tx| {
            DB::execute_on(&mut tx, EFFECT).await.map(drop)
        });
        let expected = if way == Way::Requests { "L1 S2" } else { "S1" };
        eventually("it has succeeded", || async {
            other.try_tick(&name).await.unwrap();
            told(&db, &name).await == expected
        })
        .await;
        assert_eq!(effects(&db).await, if way == Way::Requests { 1 } else { 2 }, "{way:?}");
    }
}

/// The job of a process: one run, whose COMMIT the test holds.
pub async fn commit<DB: TestDatabase>(pool: Pool<DB>) {
    let schedule = Schedule::every("k", LONG);
    let schedules = Schedules::new(pool.clone()).label("victim").lease(child::VICTIMS_LEASE);
    let warm = Schedule::after("warm", SHORT);
    let (schedules, _done) =
        with(schedules, warm, &pool, async |mut tx| DB::execute_on(&mut tx, "SELECT 1").await.map(drop));
    let (schedules, _done) = with(schedules, schedule, &pool, async |mut tx| {
        DB::execute_on(&mut tx, EFFECT).await?;
        say("worked");
        let mut line = String::new();
        BufReader::new(tokio::io::stdin()).read_line(&mut line).await.unwrap();
        Ok(())
    });
    // The statements of a transaction are prepared.
    assert_eq!(schedules.try_tick("warm").await.unwrap(), TickOutcome::Succeeded);
    schedules.try_tick("k").await.unwrap();
}

async fn a_process_that_is_killed_before_its_commit_arrives_leaves_the_tick<DB: TestDatabase>(db: TestDb<DB>) {
    table(&db).await;
    let (schedule, proxy) = (due(&db, "k").await, db.proxy().await);
    let mut behind = db.over(db.pool.clone());
    behind.url.clone_from(&proxy.url);
    let mut victim = child::start(&behind, "commit", "", Path::new(""));
    let mut said = BufReader::new(victim.stdout.take().unwrap()).lines();
    assert_eq!(timeout(PATIENCE, said.next_line()).await.unwrap().unwrap().as_deref(), Some("worked"));
    proxy.hold_after(Way::Requests, before_commit(&db));
    victim.stdin.take().unwrap().write_all(b"\n").await.unwrap();
    proxy.held(Way::Requests).await;
    victim.kill().await.unwrap();
    proxy.cut();
    assert_eq!(effects(&db).await, 0);
    let pool = db.pool_of(1).await;
    let (other, _done) =
        with(instance(&db, "other"), schedule, &pool, async |mut tx| DB::execute_on(&mut tx, EFFECT).await.map(drop));
    eventually("it is taken over", || async { other.try_tick("k").await.unwrap() == TickOutcome::Succeeded }).await;
    assert_eq!((effects(&db).await, told(&db, "k").await.as_str()), (1, "L1 S2"));
}
