//! A read-write lock beside dropped futures, lost messages and delayed statements.

use std::time::Duration;

use harness::{
    PATIENCE, TestDatabase, TestDb, acquired, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{Attempt, Lease, LeaseLock, ReadWriteLock, Retry, RunError, Status};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cancelled::{Stage, at_every_stop_between},
    line::{LIMIT, Line, timed_out},
};

harness::tests!(
    everywhere(
        a_dropped_wait_of_a_writer_leaves_nothing,
        a_dropped_downgrade_leaves_nothing,
        a_dropped_upgrade_leaves_nothing,
        a_writer_that_loses_the_name_while_it_waits_is_not_let_in,
        transactions_of_readers_and_writers_exclude_each_other,
        work_runs_on_both_sides
    ),
    servers(
        no_reader_is_beside_a_writer_after_a_lost_message,
        a_reader_whose_claim_may_stand_is_not_told_that_nothing_changed,
        a_reader_whose_claim_may_stand_is_not_refused,
        a_reader_is_not_put_back_by_the_late_reply_of_its_batch,
        a_reader_whose_claim_has_no_reply_asks_for_it_again,
        a_downgrade_whose_claim_has_no_reply_asks_for_it_again
    ),
    everywhere.long(
        a_dropped_try_of_a_writer_leaves_nothing,
        a_dropped_wait_of_a_reader_leaves_nothing,
        a_dropped_wait_for_readers_leaves_nothing,
        a_dropped_try_of_a_reader_leaves_nothing
    ),
    servers.long(neither_side_is_let_in_beside_the_other_however_late_it_is)
);

const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

fn of<DB: TestDatabase>(stage: &Stage<'_, DB>) -> ReadWriteLock<DB> {
    stage.lock.read_write(&stage.key)
}

/// Whether the name's row exists when the operation begins. Where it does, the stage is warm.
#[derive(Clone, Copy, PartialEq)]
enum Before {
    Missing,
    Free,
    AbandonedByAWriter,
}

/// Drops the operation at one point after another. Both sides can be had afterwards.
async fn at_each_stop<DB: TestDatabase, P>(
    db: &TestDb<DB>,
    before: Before,
    prepare: impl AsyncFn(&Stage<'_, DB>) -> P,
    act: impl AsyncFn(&Stage<'_, DB>, P),
) {
    let prepare = async |stage: &Stage<'_, DB>| {
        let lock = db.lock_for(LONG).read_write(&stage.key);
        match before {
            Before::Missing => {}
            Before::Free => acquired(lock.writer().try_acquire().await).release().await.unwrap(),
            Before::AbandonedByAWriter => acquired(lock.writer().try_acquire().await).abandon().await.unwrap(),
        }
        if before != Before::Missing {
            stage.warm().await;
        }
        prepare(stage).await
    };
    at_every_stop_between(
        db,
        prepare,
        act,
        async |_| {},
        async |stage| {
            let (since, lock) = (Instant::now(), db.lock_for(LONG).read_write(&stage.key));
            let writer = acquired(lock.writer().acquire(PATIENCE).await);
            writer.release().await.unwrap();
            acquired(lock.readers().acquire(PATIENCE).await).release().await.unwrap();
            assert!(since.elapsed() < PATIENCE, "{}: nothing is kept longer than a lease", stage.key);
        },
    )
    .await;
}

async fn a_dropped_try_of_a_reader_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    for before in [Before::Missing, Before::Free, Before::AbandonedByAWriter] {
        at_each_stop(&db, before, async |_| {}, async |stage, ()| drop(of(stage).readers().try_acquire().await)).await;
    }
}

async fn a_dropped_wait_of_a_reader_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    for before in [Before::Missing, Before::AbandonedByAWriter] {
        at_each_stop(
            &db,
            before,
            async |_| {},
            async |stage, ()| drop(acquired(of(stage).readers().acquire(PATIENCE).await)),
        )
        .await;
    }
}

async fn a_dropped_try_of_a_writer_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    at_each_stop(&db, Before::Free, async |_| {}, async |stage, ()| drop(of(stage).writer().try_acquire().await)).await;
}

async fn a_dropped_wait_of_a_writer_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    for before in [Before::Missing, Before::Free] {
        at_each_stop(
            &db,
            before,
            async |_| {},
            async |stage, ()| drop(acquired(of(stage).writer().acquire(PATIENCE).await)),
        )
        .await;
    }
}

/// An expired reader is there, whose claim the writer takes over.
async fn a_dropped_wait_for_readers_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| {
        let lock = db.lock_for(LONG).read_write(&stage.key);
        acquired(lock.readers().try_acquire().await).abandon().await.unwrap();
    };
    at_each_stop(&db, Before::Free, prepare, async |stage, ()| {
        drop(acquired(of(stage).writer().acquire(PATIENCE).await))
    })
    .await;
}

async fn a_dropped_downgrade_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(of(stage).writer().acquire(PATIENCE).await);
    let act = async |stage: &Stage<'_, DB>, writer| drop(of(stage).downgrade(writer).await);
    at_each_stop(&db, Before::Free, prepare, act).await;
}

async fn a_dropped_upgrade_leaves_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let prepare = async |stage: &Stage<'_, DB>| acquired(of(stage).readers().acquire(PATIENCE).await);
    let act = async |stage: &Stage<'_, DB>, reader: Lease<DB>| drop(of(stage).try_upgrade(&reader).await);
    at_each_stop(&db, Before::Free, prepare, act).await;
}

/// Another holder has the name when the readers have gone.
async fn a_writer_that_loses_the_name_while_it_waits_is_not_let_in<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = || db.lock_for(SHORT).read_write("k");
    acquired(lock().writer().try_acquire().await).release().await.unwrap();
    let reader = acquired(db.lock_for(LONG).read_write("k").readers().try_acquire().await);
    let writing = lock();
    let writer = harness::spawn(async move { writing.writer().acquire(PATIENCE).await });
    let held = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND lock_flag = 1";
    eventually("it waits for the reader", || async { db.number(held).await == Some(1) }).await;
    db.lock().force_release("k", Status::Failed).await.unwrap();
    let another = loop {
        // The writer may claim the name again before this holder does.
        match db.lock_for(LONG).try_acquire("k").await.unwrap() {
            Attempt::Acquired(another) => break another,
            Attempt::Refused(_) => {
                db.lock().force_release("k", Status::Failed).await.unwrap();
            }
        }
    };
    // The writer learns of its loss when its lease is renewed, as after any forced release.
    sleep(2 * SHORT).await;
    reader.release().await.unwrap();
    sleep(2 * SHORT).await;
    assert!(!writer.is_finished() && another.is_held());
    another.release().await.unwrap();
    acquired(timeout(PATIENCE, writer).await.unwrap().unwrap());
}

async fn transactions_of_readers_and_writers_exclude_each_other<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE pair (id int PRIMARY KEY, value bigint)").await;
    db.execute("INSERT INTO pair VALUES (1, 0), (2, 0)").await;
    let mut tasks = tokio::task::JoinSet::new();
    let retry = Retry { attempts: 100_000, within: 6 * PATIENCE };
    for task in 0..6 {
        let lock = db.lock_for(LONG).retry(retry).read_write("k");
        tasks.spawn(harness::task(async move {
            for _ in 0..5 {
                if task % 3 == 0 {
                    let side = lock.writer();
                    let written = side.transaction(|mut tx| async move {
                        DB::execute_on(&mut tx, "UPDATE pair SET value = value + 1 WHERE id = 1").await?;
                        sleep(Duration::from_millis(3)).await;
                        DB::execute_on(&mut tx, "UPDATE pair SET value = value + 1 WHERE id = 2").await
                    });
                    written.await.unwrap();
                } else {
                    let side = lock.readers();
                    let read = side.transaction(|mut tx| async move {
                        let sql = |id| format!("SELECT CAST(value AS char(20)) FROM pair WHERE id = {id}");
                        let first = DB::text_on(&mut tx, &sql(1)).await?;
                        sleep(Duration::from_millis(3)).await;
                        Ok::<_, sqlx::Error>((first, DB::text_on(&mut tx, &sql(2)).await?))
                    });
                    let (first, second) = read.await.unwrap();
                    assert_eq!(first, second, "no writer committed in between");
                }
            }
        }));
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(db.number("SELECT value FROM pair WHERE id = 1").await, Some(10));
}

async fn work_runs_on_both_sides<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock_for(LONG).read_write("k");
    for (side, excluded) in [(lock.readers(), lock.writer()), (lock.writer(), lock.readers())] {
        for wait in [Duration::ZERO, PATIENCE] {
            let ran = side.run(wait, async |held| {
                assert!(held.is_held());
                let refused = excluded.run(Duration::ZERO, async |_| Ok::<_, std::io::Error>(())).await;
                assert!(matches!(refused, Err(RunError::Refused(_))), "{refused:?}");
                Ok::<_, std::io::Error>(7)
            });
            assert_eq!(ran.await.unwrap(), 7);
        }
        acquired(excluded.acquire(PATIENCE).await).release().await.unwrap();
    }
}

/// A message of one side that does not arrive while the other side asks.
#[derive(Clone, Copy, PartialEq)]
enum Message {
    Late,
    Lost,
}

async fn neither_side_is_let_in_beside_the_other_however_late_it_is<DB: TestDatabase>(db: TestDb<DB>) {
    beside_each(&db, Message::Late).await;
}

async fn no_reader_is_beside_a_writer_after_a_lost_message<DB: TestDatabase>(db: TestDb<DB>) {
    beside_each(&db, Message::Lost).await;
}

/// Each of the messages of one side is held or lost in turn. The other side is not let in beside
/// it.
async fn beside_each<DB: TestDatabase>(db: &TestDb<DB>, message: Message) {
    for way in [Way::Requests, Way::Replies] {
        for writes in [false, true] {
            for trip in 0.. {
                if !beside(db, way, writes, trip, message).await {
                    assert!(trip > 1, "claims and looks are messages of their own");
                    break;
                }
            }
        }
    }
}

/// Returns whether the message was held.
async fn beside<DB: TestDatabase>(db: &TestDb<DB>, way: Way, writes: bool, trip: usize, message: Message) -> bool {
    let side = |lock: &ReadWriteLock<DB>, writes| if writes { lock.writer().clone() } else { lock.readers().clone() };
    let others = db.lock_for(LONG).read_write("k");
    acquired(others.writer().acquire(PATIENCE).await).release().await.unwrap();
    let proxy: Proxy = db.proxy().await;
    let delayed = LeaseLock::builder(proxy.pool::<DB>(2)).share_pool().build().unwrap().lease(LONG);
    let lock = delayed.read_write("k");
    // The connection is open, and the rows exist.
    acquired(lock.readers().acquire(PATIENCE).await).release().await.unwrap();
    let (own, other) = (side(&lock, writes), side(&others, !writes));
    proxy.hold_after(way, trip);
    let attempt = own.acquire(PATIENCE);
    tokio::pin!(attempt);
    let (lease, was_held) = tokio::select! {
        biased;
        lease = &mut attempt => (lease, false),
        () = proxy.held(way) => {
            if message == Message::Lost {
                proxy.cut();
            } else {
                let let_in = other.try_acquire().await.unwrap();
                proxy.open();
                if let Attempt::Acquired(let_in) = let_in {
                    let early = timeout(Duration::from_millis(300), &mut attempt).await;
                    assert!(early.is_err(), "{way:?} {trip}: let in beside the other: {early:?}");
                    let_in.release().await.unwrap();
                }
            }
            (timeout(2 * PATIENCE, attempt).await.expect("it is let in"), true)
        }
    };
    let lease = acquired(lease);
    assert!(other.try_acquire().await.unwrap().refused().is_some(), "{way:?} {trip}: let in beside the other");
    drop(lease);
    if message == Message::Lost && was_held {
        let is_free = async || other.try_acquire().await.unwrap().acquired().is_some();
        eventually("the name is free", is_free).await;
    }
    // What could not be ended through the proxy would keep its key until its lease ends.
    delayed.shutdown(PATIENCE / 4).await;
    db.execute("DELETE FROM t_resource_lock").await;
    was_held
}

/// A line whose reader's row exists.
async fn line<DB: TestDatabase>(db: &TestDb<DB>) -> (Line<DB>, ReadWriteLock<DB>) {
    let line = Line::with_free_row(db, LONG, LIMIT).await;
    let lock = line.lock.read_write("k");
    acquired(lock.readers().acquire(PATIENCE).await).release().await.unwrap();
    (line, lock)
}

/// The readers' claims that stand.
async fn readers<DB: TestDatabase>(db: &TestDb<DB>) -> i64 {
    let sql = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource LIKE 'k#r%' AND lock_flag = 1";
    db.number(sql).await.unwrap()
}

/// After its first attempt, the reader gets no connection.
async fn a_reader_whose_claim_may_stand_is_not_told_that_nothing_changed<DB: TestDatabase>(db: TestDb<DB>) {
    let (line, lock) = line(&db).await;
    timed_out(line.held(Way::Replies, 0, lock.readers().acquire(6 * LIMIT), async |_| {}).await);
    assert_eq!(readers(&db).await, 1);
}

/// The reader is refused beside a writer, and claims a key of its own after that, whose reply does
/// not arrive. It holds the name by then.
async fn a_reader_whose_claim_may_stand_is_not_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let mut stood = false;
    // How many messages precede that reply depends on whether a connection has been kept.
    for _ in 0..5 {
        for trip in 0.. {
            db.execute("DELETE FROM t_resource_lock").await;
            let (line, lock) = line(&db).await;
            let writer = acquired(db.lock_for(LONG).read_write("k").writer().acquire(PATIENCE).await);
            let reader = harness::spawn(async move { lock.readers().acquire(10 * LIMIT).await });
            sleep(2 * LIMIT).await;
            line.proxy.hold_after(Way::Replies, trip);
            writer.release().await.unwrap();
            let attempt = reader.await.unwrap();
            let holds_name = "SELECT COUNT(*) FROM t_resource_lock WHERE key_resource = 'k' AND lock_flag = 1";
            if attempt.is_err() && readers(&db).await == 1 && db.number(holds_name).await == Some(1) {
                stood = true;
                timed_out(attempt);
            } else if stood {
                return; // a later message is held by now
            } else if attempt.is_ok() {
                break;
            }
        }
    }
    panic!("the reply to a reader's claim was not held");
}

/// A request waits for its turn for most of the time limit, and is then sent together with a later
/// one. The reply comes within the time limit of that one only.
async fn a_reader_is_not_put_back_by_the_late_reply_of_its_batch<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, limit) = (db.proxy().await, 4 * LIMIT);
    let pool = proxy.pool::<DB>(1);
    let lock = LeaseLock::builder(pool.clone()).share_pool().time_limit(limit).build().unwrap().lease(LONG);
    let readers_lock = lock.read_write("k");
    acquired(readers_lock.writer().acquire(PATIENCE).await).release().await.unwrap();
    let warm = [
        acquired(readers_lock.readers().acquire(PATIENCE).await),
        acquired(readers_lock.readers().acquire(PATIENCE).await),
    ];
    for reader in warm {
        reader.release().await.unwrap();
    }
    acquired(lock.try_acquire("other").await).release().await.unwrap();
    eventually("the connection is idle", || async { pool.num_idle() == 1 }).await;
    // The first claim is answered late, so that both readers wait for the connection.
    proxy.hold_after(Way::Replies, 0);
    let first = harness::spawn(async move { lock.try_acquire("other").await });
    proxy.held(Way::Replies).await;
    let reading = |lock: &ReadWriteLock<DB>| {
        let lock = lock.clone();
        harness::spawn(async move { lock.readers().acquire(PATIENCE).await })
    };
    let one = reading(&readers_lock);
    sleep(limit / 2).await;
    let two = reading(&readers_lock);
    sleep(limit / 4).await;
    proxy.hold_after(Way::Requests, 0);
    proxy.hold_after(Way::Replies, usize::MAX);
    proxy.held(Way::Requests).await;
    sleep(limit / 2).await;
    proxy.open();
    let both = [acquired(one.await.unwrap()), acquired(two.await.unwrap())];
    drop(acquired(first.await.unwrap()));
    // What was put back would be put back by now.
    sleep(limit / 2).await;
    assert_eq!((readers(&db).await, both.iter().all(Lease::is_held)), (2, true));
}

/// The next attempt is made by the same holder: no claim is left behind.
async fn a_reader_whose_claim_has_no_reply_asks_for_it_again<DB: TestDatabase>(db: TestDb<DB>) {
    let (line, lock) = line(&db).await;
    let open = async |proxy: &Proxy| {
        sleep(2 * LIMIT).await;
        assert_eq!(readers(&db).await, 1);
        proxy.cut();
    };
    let reader = acquired(line.held(Way::Replies, 0, lock.readers().acquire(PATIENCE), open).await);
    assert_eq!(readers(&db).await, 1);
    reader.release().await.unwrap();
    assert_eq!(readers(&db).await, 0);
}

async fn a_downgrade_whose_claim_has_no_reply_asks_for_it_again<DB: TestDatabase>(db: TestDb<DB>) {
    let (line, lock) = line(&db).await;
    let writer = acquired(lock.writer().acquire(PATIENCE).await);
    let open = async |proxy: &Proxy| {
        sleep(2 * LIMIT).await;
        assert_eq!(readers(&db).await, 1);
        proxy.cut();
    };
    let reader = line.held(Way::Replies, 0, lock.downgrade(writer), open).await.unwrap();
    assert_eq!(readers(&db).await, 1);
    reader.release().await.unwrap();
    assert_eq!(readers(&db).await, 0);
}
