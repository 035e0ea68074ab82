//! Messages that are held or lost, at each point of a run: a tick has one success, and none is left
//! out.

use std::{
    cell::Cell,
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, Utc};
use harness::{
    DIRECT, PATIENCE, TestDatabase, TestDb, eventually,
    proxy::{Proxy, Way},
};
use rowlock::{
    Schedule, Schedules, Tick,
    admin::RunStatus,
    jobs::{CatchUp, TickOutcome},
};
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use crate::{
    line::WAYS,
    ticks::{LONG, SHORT, back, due, idle, info, instance, runs, told},
    ticks_apart::Run,
    ticks_orders::{acts_after_each_reply, is_claimed},
};

harness::tests!(
    servers(
        an_end_between_a_look_and_a_claim_is_seen,
        a_pause_between_a_look_and_a_claim_is_seen,
        a_trigger_between_a_look_and_a_claim_is_run_too,
        a_message_that_is_lost_loses_no_tick_and_repeats_no_success,
        ticks_that_were_skipped_without_a_reply_are_not_lost,
        a_skip_that_is_sent_again_skips_one_tick
    ),
    servers[DIRECT](a_pass_that_was_made_and_given_up_is_not_handed_back, a_commit_without_a_reply_is_not_handed_back),
    mysql_and_mariadb(a_claim_that_is_carried_out_late_is_undone_beside_a_locked_run)
);

/// How long the instance behind the proxy sends a request again.
pub const LIMIT: Duration = SHORT.saturating_mul(4);
/// More than a run has.
pub const MESSAGES: usize = 30;

/// Makes two ticks of a schedule due that are both to be run.
async fn two_due<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Schedule {
    let schedule = due(db, name).await.catch_up(CatchUp::All(1_000));
    back(db, name, LONG).await;
    schedule
}

/// An instance behind the proxy, whose connection has sent each statement before. Its lease is so
/// long that no test waits for its end.
pub async fn behind<DB: TestDatabase>(db: &TestDb<DB>, proxy: &Proxy, schedule: &Schedule) -> Schedules<DB> {
    behind_with(db, proxy, schedule, Ok(())).await
}

/// The same, with work that ends in this way.
pub async fn behind_with<DB: TestDatabase>(
    db: &TestDb<DB>,
    proxy: &Proxy,
    schedule: &Schedule,
    ends: Result<(), &'static str>,
) -> Schedules<DB> {
    let over = db.over(proxy.pool(1));
    let schedules = instance(&over, "behind").share_pool().time_limit(LIMIT).lease(LONG / 10);
    let warm = Schedule::after("warm", SHORT);
    let schedules = schedules.on(schedule.clone(), async move |_| ends);
    let schedules = schedules.on(warm, async |_| Ok::<_, Infallible>(()));
    eventually("it is warm", || async { matches!(schedules.try_tick("warm").await, Ok(TickOutcome::Succeeded)) }).await;
    schedules
}

/// Waits until a message is held, or the task has ended without it.
pub async fn held_or_over<T>(proxy: &Proxy, way: Way, task: &JoinHandle<T>) -> bool {
    let over = async {
        while !task.is_finished() {
            sleep(SHORT / 20).await;
        }
    };
    tokio::select! {
        () = proxy.held(way) => true,
        () = over => false,
    }
}

/// Each slot of the history has one success, and none is left out before the slot that is next.
async fn assert_once<DB: TestDatabase>(db: &TestDb<DB>, name: &str, first: DateTime<Utc>, at: &str) {
    let runs = runs(db, name).await;
    let succeeded = runs.iter().filter(|run| run.status == RunStatus::Succeeded).map(|run| run.slot);
    let mut expected = first;
    for slot in succeeded {
        assert_eq!(slot, expected, "{at}: {runs:?}");
        expected = slot + LONG;
    }
    assert_eq!(info(db, name).await.slot, expected, "{at}: {runs:?}");
}

/// Runs a round for each number of messages that pass before one is held, until three rounds in a
/// row had no message to hold: a connection that was not kept is checked, so that some runs have
/// more messages than others. Returns how many rounds had one.
async fn at_each_message(mut round: impl AsyncFnMut(usize) -> bool) -> u32 {
    let (mut held, mut over) = (0, 0);
    for passed in 0.. {
        if round(passed).await {
            (held, over) = (held + 1, 0);
        } else {
            over += 1;
        }
        if over == 3 {
            break;
        }
    }
    held
}

/// A run ends after its lease, while another instance is between any two of its messages. The end
/// leaves the token as it is, moves the slot, and leaves the row due.
async fn an_end_between_a_look_and_a_claim_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let held = at_each_message(async |passed| {
        let name = format!("k{passed}");
        let schedule = two_due(&db, &name).await;
        let first = info(&db, &name).await.slot;
        let late = Run::begin_named(instance(&db, "late").lease(PATIENCE), schedule.clone(), &name).await;
        let schedules = behind(&db, &proxy, &schedule).await;
        let ended = DB::ago(1);
        db.execute(&format!("UPDATE t_resource_schedule SET due_at = {ended} WHERE name = '{name}'")).await;
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let other = harness::spawn(async move { schedules.try_tick(&own).await });
        let was_held = held_or_over(&proxy, Way::Replies, &other).await;
        let late = late.end().await;
        proxy.open();
        let other = timeout(PATIENCE, other).await.unwrap().unwrap();
        assert_once(&db, &name, first, &format!("{passed} replies, then {late:?}, {other:?}")).await;
        was_held
    });
    assert!(held.await > 1, "both a look and a claim are held");
}

/// The schedule is paused before its tick is claimed, after any of the replies that come until
/// then.
async fn a_pause_between_a_look_and_a_claim_is_seen<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = instance(&db, "operator");
    let in_time = async |name: &str| due(&db, name).await;
    let pause = async |name: &str| operator.pause(name).await.ok();
    let has_not_run = async |name: &str, _: Schedule, ()| assert_eq!(told(&db, name).await, "", "{name}");
    acts_after_each_reply(&db, false, in_time, is_claimed, pause, has_not_run).await;
}

/// The claim is decided before the trigger, and carried out after it.
async fn a_trigger_between_a_look_and_a_claim_is_run_too<DB: TestDatabase>(db: TestDb<DB>) {
    let operator = instance(&db, "operator");
    let in_time = async |name: &str| due(&db, name).await;
    let trigger = async |name: &str| operator.trigger(name).await.ok();
    let both_are_run = async |name: &str, schedule: Schedule, ()| {
        let rest = idle(&db, schedule);
        let is_over = || async { matches!(rest.try_tick(name).await, Ok(TickOutcome::NotDue { .. })) };
        eventually("nothing is left", is_over).await;
        assert_eq!(told(&db, name).await, "S1 S1", "{name}");
    };
    acts_after_each_reply(&db, false, in_time, is_claimed, trigger, both_are_run).await;
}

/// The connection is lost at each message of a run, before or after the server has executed it.
async fn a_message_that_is_lost_loses_no_tick_and_repeats_no_success<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let lost = async |way, passed| {
        let name = format!("{way:?}{passed}");
        let schedule = two_due(&db, &name).await;
        let first = info(&db, &name).await.slot;
        let schedules = behind(&db, &proxy, &schedule).await;
        proxy.hold_after(way, passed);
        let own = name.clone();
        let cut = harness::spawn(async move { schedules.try_tick(&own).await });
        let was_held = held_or_over(&proxy, way, &cut).await;
        proxy.cut();
        let outcome = timeout(PATIENCE, cut).await.unwrap().unwrap();
        let other = idle(&db, schedule);
        eventually("all ticks are past", || async {
            let outcome = other.try_tick(&name).await.unwrap();
            let later = |after: Duration| after > Duration::from_secs(60);
            // A claim whose reply was lost stands until it is undone in the background, perhaps
            // just now.
            let row = info(&db, &name).await;
            matches!(outcome, TickOutcome::NotDue { retry_after: Some(after) } if later(after))
                && !row.running
                && row.due > Utc::now()
        })
        .await;
        let at = format!("{way:?} {passed}, then {outcome:?}, {}", told(&db, &name).await);
        assert_once(&db, &name, first, &at).await;
        assert_eq!(info(&db, &name).await.slot, first + 2 * LONG, "{at}");
        was_held
    };
    for way in WAYS {
        assert!(at_each_message(async |passed| lost(way, passed).await).await > 1, "{way:?} are lost");
    }
}

/// The connection is lost at each reply of a run that passes its tick over.
async fn ticks_that_were_skipped_without_a_reply_are_not_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let mut skipped = 0;
    at_each_message(async |passed| {
        let name = format!("skipped{passed}");
        let schedule = due(&db, &name).await.catch_up(CatchUp::Skip).grace(Duration::ZERO);
        let schedules = behind(&db, &proxy, &schedule).await.time_limit(PATIENCE);
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let cut = harness::spawn(async move { schedules.try_tick(&own).await });
        let was_held = held_or_over(&proxy, Way::Replies, &cut).await;
        let told = told(&db, &name).await;
        proxy.cut();
        let outcome = timeout(PATIENCE, cut).await.unwrap().unwrap();
        if told.starts_with('M') {
            skipped += 1;
            assert_eq!(outcome.unwrap(), TickOutcome::Missed, "after {passed} replies");
        }
        was_held
    })
    .await;
    assert!(skipped > 0);
}

/// The connection is lost at each reply of an order, after the tick has come. If the order was
/// given, the tick is skipped, and the next one is not.
async fn a_skip_that_is_sent_again_skips_one_tick<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let mut missed = 0;
    at_each_message(async |passed| {
        let name = format!("k{passed}");
        let schedule = due(&db, &name).await;
        let slot = info(&db, &name).await.slot;
        let operator = behind(&db, &proxy, &schedule).await.time_limit(PATIENCE);
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let skip = harness::spawn(async move { operator.skip(&own).await });
        let was_held = held_or_over(&proxy, Way::Replies, &skip).await;
        // The transaction of the order may hold the row.
        let comes = idle(&db, schedule).time_limit(LIMIT).try_tick(&name).await;
        proxy.cut();
        let skipped = timeout(PATIENCE, skip).await.unwrap().unwrap().unwrap();
        if matches!(comes, Ok(TickOutcome::Missed)) {
            missed += 1;
            let next = info(&db, &name).await;
            assert_eq!((skipped, next.skipped_until), (slot, None), "after {passed} replies: {next:?}");
        }
        was_held
    })
    .await;
    assert!(missed > 0);
}

/// No reply comes before the instance has given its pass up.
async fn a_pass_that_was_made_and_given_up_is_not_handed_back<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let (given_up, mut rounds) = (Cell::new(false), 0);
    let mut round = async |passed| {
        if given_up.get() {
            return false;
        }
        rounds += 1;
        let name = format!("given_up{rounds}");
        let schedule = due(&db, &name).await.catch_up(CatchUp::Skip).grace(Duration::ZERO);
        let schedules = behind(&db, &proxy, &schedule).await;
        proxy.hold_after(Way::Replies, passed);
        let (own, since) = (name.clone(), Instant::now());
        let run = harness::spawn(async move { schedules.try_tick(&own).await });
        let was_held = held_or_over(&proxy, Way::Replies, &run).await;
        let (told, held) = (told(&db, &name).await, Instant::now());
        if told.starts_with('M') && !run.is_finished() {
            sleep(LIMIT + SHORT).await;
        }
        proxy.open();
        let outcome = match timeout(PATIENCE, run).await.unwrap().unwrap() {
            // On a busy machine, the look may have had no reply in time.
            Err(_) if since.elapsed() >= LIMIT && !told.starts_with('M') => return was_held,
            outcome => outcome.unwrap(),
        };
        // On a busy machine, handing back may have been given up as well, after the same limit.
        let is_late = held.elapsed() > LIMIT + 2 * SHORT;
        if told.starts_with('M') {
            given_up.set(given_up.get() || outcome == TickOutcome::Lost);
            let is_known = matches!(outcome, TickOutcome::Missed | TickOutcome::Lost);
            assert!(is_known || is_late, "{passed} replies: {outcome:?}");
        }
        was_held
    };
    for _ in 0..10 {
        at_each_message(&mut round).await;
        if given_up.get() {
            return;
        }
    }
    panic!("no pass was given up");
}

/// The network falls silent while the work commits, and the run is stopped.
async fn a_commit_without_a_reply_is_not_handed_back<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, unknown, mut rounds) = (Arc::new(db.proxy().await), Cell::new(false), 0);
    let mut round = async |passed| {
        rounds += 1;
        let name = format!("stopped{rounds}");
        let (over, silent) = (db.over(proxy.pool(1)), proxy.clone());
        let (schedule, pool) = (due(&db, &name).await, over.pool.clone());
        let schedules =
            instance(&over, "one").time_limit(LIMIT).lease(LONG / 10).on(schedule, move |tick: Tick<DB>| {
                let (silent, pool) = (silent.clone(), pool.clone());
                async move {
                    silent.hold_after(Way::Replies, passed);
                    tick.transaction(&pool, async |_| Ok::<_, sqlx::Error>(())).await
                }
            });
        let (was_held, held) = (Cell::new(false), proxy.held(Way::Replies));
        let stop = async {
            held.await;
            was_held.set(true);
        };
        let outcome = schedules.try_tick_until(&name, stop).await.unwrap();
        proxy.open();
        if told(&db, &name).await == "S1" {
            assert_ne!(outcome, TickOutcome::HandedBack, "{passed}");
            unknown.set(unknown.get() || outcome == TickOutcome::Lost);
        }
        was_held.get()
    };
    // On a busy machine, each run may have another number of messages.
    for _ in 0..10 {
        at_each_message(&mut round).await;
        if unknown.get() {
            return;
        }
    }
    panic!("no commit was held");
}

/// The server carries a claim out after its instance has given it up. Another run's row is locked
/// by a transaction, as by `finish_in`.
async fn a_claim_that_is_carried_out_late_is_undone_beside_a_locked_run<DB: TestDatabase>(db: TestDb<DB>) {
    let (running, late) = (due(&db, "a").await, due(&db, "k").await);
    let holder = DB::uuid("0123456789abcdef0123456789abcdef");
    let run = format!("holder = {holder}, due_at = {}", DB::ago(-3_600_000));
    db.execute(&format!("UPDATE t_resource_schedule SET {run} WHERE name = 'a'")).await;
    db.execute("CREATE TABLE claimed_late (name varbinary(255) PRIMARY KEY)").await;
    db.execute(
        "CREATE TRIGGER late BEFORE UPDATE ON t_resource_schedule FOR EACH ROW
             BEGIN IF NEW.name = 'k' AND OLD.holder IS NULL AND NEW.holder IS NOT NULL
                 AND NOT EXISTS (SELECT 1 FROM claimed_late) THEN
                 INSERT INTO claimed_late VALUES ('k'); DO SLEEP(2);
             END IF; END",
    )
    .await;
    let mut finishing = db.pool_of(1).await.acquire().await.unwrap();
    DB::execute_on(&mut finishing, DB::BEGIN).await.unwrap();
    DB::execute_on(&mut finishing, "UPDATE t_resource_schedule SET missed = 1 WHERE name = 'a'").await.unwrap();
    let schedules = instance(&db, "late").time_limit(LIMIT).lease(LONG / 10);
    let schedules = schedules.on(running, async |_| Ok::<_, Infallible>(()));
    let schedules = schedules.on(late, async |_| Ok::<_, Infallible>(())).start().await.unwrap();
    eventually("it is run", || async { told(&db, "k").await.ends_with("S1") }).await;
    DB::execute_on(&mut finishing, "ROLLBACK").await.unwrap();
    schedules.shutdown(PATIENCE).await;
}
