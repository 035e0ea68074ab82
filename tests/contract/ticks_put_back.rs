//! Claims that are undone: the row is as before, for the next claim and for the run of another
//! instance.

use std::time::Duration;

use chrono::Utc;
use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way};
use rowlock::{
    Error, Schedule, Schedules,
    errors::Action,
    jobs::{CatchUp, TickOutcome},
};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    ticks::{LONG, Never, SHORT, back, due, info, instance, steal, told},
    ticks_apart::Run,
    ticks_exclusive::{due_with_key, ended, is_run, work},
    ticks_listed::ran,
    ticks_replies::{LIMIT, behind, held_or_over},
};

harness::tests!(
    everywhere(
        a_triggered_run_that_is_stopped_while_it_waits_is_put_back,
        a_second_attempt_that_is_put_back_is_no_takeover,
        of_two_lost_attempts_the_second_one_is_shown_again,
        the_note_of_a_claim_that_follows_one_that_was_put_back_is_shown
    ),
    servers(a_claim_that_is_undone_twice_leaves_the_run_of_another_instance_alone),
    servers[DIRECT](
        a_claim_that_arrives_after_its_limit_takes_nothing,
        a_renewal_that_arrives_after_its_limit_extends_nothing
    )
);

/// Its slot is the time of the trigger. That of the next tick stays.
async fn a_triggered_run_that_is_stopped_while_it_waits_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", Schedule::every("k", LONG).exclusive_with("key"));
    assert!(matches!(ended(one.try_tick()).await, TickOutcome::NotDue { retry_after: Some(_) }));
    let before = info(&db, "k").await;
    let by_hand = acquired(db.lock().try_acquire("key").await);
    one.schedules.trigger("k").await.unwrap();
    let running = one.schedules.start().await.unwrap();
    is_run(&db).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    let row = info(&db, "k").await;
    assert!(!row.running && row.attempt == 0 && row.triggered.is_some(), "{row:?}");
    assert_eq!(row.slot, before.slot, "the next tick keeps its time: {row:?}");
    assert!(row.due <= row.now, "the trigger does not wait for it: {row:?}");
    by_hand.release().await.unwrap();
    let run = one.try_tick();
    let tick = one.tick().await;
    assert!(tick.is_triggered() && tick.attempt() == 1, "{tick:?}");
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    let after = info(&db, "k").await;
    assert_eq!((after.slot, after.due, after.triggered), (before.slot, before.slot, None));
    assert_eq!(told(&db, "k").await, "S1");
}

/// The first attempt has failed. The first attempt at another tick was lost.
async fn a_second_attempt_that_is_put_back_is_no_takeover<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await.retry(3, Duration::ZERO));
    ran(&db, &[("k", 1_000_000, 1, "L")]).await;
    one.finish.send(Some(false)).unwrap();
    assert!(matches!(ended(one.try_tick()).await, TickOutcome::Failed { again: true, .. }));
    one.tick().await;
    one.finish.send(None).unwrap();
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let running = one.schedules.start().await.unwrap();
    is_run(&db).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    let row = info(&db, "k").await;
    assert!(!row.running && row.lost_since.is_none(), "no run was lost: {row:?}");
    assert!(row.attempt == 1 && row.by == "one" && row.due <= row.now, "{row:?}");
    by_hand.release().await.unwrap();
    let run = one.try_tick();
    let tick = one.tick().await;
    assert!(tick.attempt() == 2 && tick.taken_over_from().is_none(), "{tick:?}");
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 F1 S2");
}

/// The processes of both have died.
async fn of_two_lost_attempts_the_second_one_is_shown_again<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await.catch_up(CatchUp::Once));
    for _ in 0..2 {
        steal(&db, "k").await;
    }
    db.execute("UPDATE t_resource_schedule SET run_slot = slot, begin_time = slot").await;
    let first = "INSERT INTO t_resource_schedule_run
                     (name, slot, attempt, token, client_ip, begin_time, end_time, status)
                 SELECT name, slot, 1, 1, 'first', slot, slot, 'L' FROM t_resource_schedule";
    assert_eq!(db.execute(first).await, 1);
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let running = one.schedules.start().await.unwrap();
    eventually("it is taken over", || async { info(&db, "k").await.by == "one" }).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    let row = info(&db, "k").await;
    assert!(row.by == "thief" && row.attempt == 2 && row.lost_since.is_some(), "{row:?}");
    by_hand.release().await.unwrap();
    let run = one.try_tick();
    let tick = one.tick().await;
    assert_eq!((tick.attempt(), tick.taken_over_from().unwrap().label.as_str()), (3, "thief"));
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 L2 S3");
}

/// The slot and the attempt are those of the first claim, which had a note too.
async fn the_note_of_a_claim_that_follows_one_that_was_put_back_is_shown<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await);
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let running = one.schedules.start().await.unwrap();
    eventually("it says what it waits for", || async { info(&db, "k").await.waits_for() == Some("key") }).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    by_hand.release().await.unwrap();
    let run = one.try_tick();
    let tick = one.tick().await;
    assert_eq!(tick.attempt(), 1);
    tick.note("1 of 3").await.unwrap();
    assert_eq!(info(&db, "k").await.note.as_deref(), Some("1 of 3"));
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
}

/// The reply to a claim is lost. The claim is undone at once, and again after the time limit, since
/// the server may have carried it out in between. Another instance has the tick by then.
async fn a_claim_that_is_undone_twice_leaves_the_run_of_another_instance_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let (proxy, began) = (db.proxy().await, Instant::now());
    let mut passed = 0;
    for round in 0.. {
        assert!(began.elapsed() < 2 * PATIENCE, "no reply to a claim was held");
        let name = format!("k{round}");
        let schedule = due(&db, &name).await;
        let schedules = behind(&db, &proxy, &schedule).await;
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let cut = harness::spawn(async move { schedules.try_tick(&own).await });
        // After the last reply, from the first one again.
        passed = if held_or_over(&proxy, Way::Replies, &cut).await { passed + 1 } else { 0 };
        let is_claimed = info(&db, &name).await.running;
        proxy.cut();
        let outcome = timeout(PATIENCE, cut).await.unwrap().unwrap();
        // After a claim with a reply, a call is no error.
        if !is_claimed || outcome.is_ok() {
            continue;
        }
        eventually("it is undone", || async { !info(&db, &name).await.running }).await;
        let asked = proxy.seen(Way::Requests);
        let other = Run::begin_named(instance(&db, "other").lease(LONG / 10), schedule, &name).await;
        eventually("it is undone again", async || proxy.seen(Way::Requests) > asked).await;
        // The request is on its way to the server.
        sleep(SHORT).await;
        let row = info(&db, &name).await;
        assert!(row.running && row.by == "other" && row.attempt == 1, "{row:?}");
        assert_eq!(other.end().await, TickOutcome::Succeeded);
        assert_eq!(told(&db, &name).await, "S1");
        return;
    }
}

/// Calls until the number of requests is the same twice. The last one is the look for what is due.
async fn requests_of_a_call<DB: TestDatabase>(schedules: &Schedules<DB>, seen: impl Fn() -> usize) -> usize {
    let mut sent = (0, 1);
    while sent.0 != sent.1 {
        let before = seen();
        let outcome = schedules.try_tick("k").await.unwrap();
        assert!(matches!(outcome, TickOutcome::NotDue { .. }), "{outcome:?}");
        sent = (sent.1, seen() - before);
    }
    sent.0
}

/// A network delays the request for longer than its instance waits, and than it undoes the claim.
async fn a_claim_that_arrives_after_its_limit_takes_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    // Its sessions know the server's clock.
    let late = instance(&db.over(proxy.pool(4)), "late").time_limit(PATIENCE).lease(LONG / 10);
    let late = late.on(Schedule::every("k", LONG), async |_| Never::Ok(()));
    let late = late.on(Schedule::after("warm", SHORT), async |_| Never::Ok(()));
    eventually("it is warm", || async { matches!(late.try_tick("warm").await, Ok(TickOutcome::Succeeded)) }).await;
    let requests = requests_of_a_call(&late, || proxy.seen(Way::Requests)).await;
    // On MySQL, the claim follows the look.
    let passed = if db.server.name == "postgres" { requests - 1 } else { requests };
    for _ in 0..10 {
        if info(&db, "k").await.due > Utc::now() {
            db.execute("DELETE FROM t_resource_schedule_run WHERE name = 'k'").await;
            back(&db, "k", LONG).await;
        }
        let before = info(&db, "k").await;
        proxy.hold_after(Way::Requests, passed);
        let schedules = late.clone().time_limit(LIMIT);
        let claim = harness::spawn(async move { schedules.try_tick("k").await });
        held_or_over(&proxy, Way::Requests, &claim).await;
        let outcome = timeout(PATIENCE, claim).await.unwrap().unwrap();
        let replies = proxy.seen(Way::Replies);
        proxy.open();
        // On a busy machine, a request before the claim may have been late.
        if !matches!(&outcome, Err(Error::Database(fault)) if fault.action() == Action::Acquire) {
            continue;
        }
        eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
        for _ in 0..20 {
            // A claim that was undone leaves its token.
            let row = info(&db, "k").await;
            assert!(!row.running && row.attempt == 0 && row.token == before.token, "{row:?}");
            sleep(SHORT / 10).await;
        }
        assert_eq!(told(&db, "k").await, "");
        return;
    }
    panic!("no claim was held");
}

/// The run was lost since.
async fn a_renewal_that_arrives_after_its_limit_extends_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let (lease, schedule) = (10 * SHORT, due(&db, "k").await);
    let schedules = Schedules::<DB>::new(proxy.pool(4)).label("late").lease(lease).time_limit(PATIENCE);
    let run = Run::begin(schedules, schedule).await;
    let lost = run.tick.cancellation_token();
    let claimed = info(&db, "k").await.due;
    eventually("it is renewed", || async { info(&db, "k").await.due > claimed || lost.is_cancelled() }).await;
    proxy.hold(Way::Requests);
    timeout(PATIENCE, lost.cancelled()).await.unwrap();
    // A renewal is given up after a third of the lease.
    sleep(lease / 2).await;
    let (before, replies) = (info(&db, "k").await, proxy.seen(Way::Replies));
    let is_held = proxy.asked_in_silence() > 0;
    proxy.open();
    // On a busy machine, the run may have been lost before it was renewed.
    if is_held {
        eventually("it is carried out", async || proxy.seen(Way::Replies) > replies).await;
    }
    for _ in 0..20 {
        assert_eq!(info(&db, "k").await.due, before.due);
        sleep(SHORT / 10).await;
    }
}
