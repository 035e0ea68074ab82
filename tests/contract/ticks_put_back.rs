//! Claims that are undone: the row is as before, for the next claim and for the run of another
//! instance.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use chrono::Utc;
use harness::{DIRECT, PATIENCE, TestDatabase, TestDb, acquired, eventually, proxy::Way};
use rowlock::{
    Error, Schedule, Schedules, Tick,
    errors::Action,
    jobs::{CatchUp, Running, TickOutcome},
};
use tokio::{
    runtime::{Builder, Runtime},
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use crate::{
    own_threads::on_a_thread,
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, steal, told},
    ticks_apart::Run,
    ticks_exclusive::{due_with_key, ended, is_run, work},
    ticks_listed::ran,
    ticks_replies::{LIMIT, MESSAGES, behind, held_or_over},
};

harness::tests!(
    everywhere(
        a_triggered_run_that_is_stopped_while_it_waits_is_put_back,
        a_tick_that_stands_for_others_precedes_a_trigger,
        a_second_attempt_that_is_put_back_is_no_takeover,
        of_two_lost_attempts_the_second_one_is_shown_again,
        the_note_of_a_claim_that_follows_one_that_was_put_back_is_shown,
        a_run_that_is_lost_before_it_begins_does_no_work,
        a_run_that_has_not_begun_by_the_shutdown_is_put_back
    ),
    servers(
        a_claim_that_is_undone_twice_leaves_the_run_of_another_instance_alone,
        a_claim_whose_reply_comes_after_its_lease_begins_no_work,
        a_claim_of_a_runtime_that_ends_is_put_back
    ),
    servers[DIRECT](
        a_claim_that_arrives_after_its_limit_takes_nothing,
        a_renewal_that_arrives_after_its_limit_extends_nothing
    )
);

/// Long enough for a busy machine to renew it.
const LEASE: Duration = Duration::from_secs(2);

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
    let (run, tick) = one.run().await;
    assert!(tick.is_triggered() && tick.attempt() == 1, "{tick:?}");
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    let after = info(&db, "k").await;
    assert_eq!((after.slot, after.due, after.triggered), (before.slot, before.slot, None));
    assert_eq!(told(&db, "k").await, "S1");
}

/// It was moved before it was put back. A run that was triggered stands for no tick.
async fn a_tick_that_stands_for_others_precedes_a_trigger<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await.catch_up(CatchUp::Once));
    back(&db, "k", 10 * LONG).await;
    let first = info(&db, "k").await.slot;
    let by_hand = acquired(db.lock().try_acquire("key").await);
    let running = one.schedules.start().await.unwrap();
    eventually("it is moved", || async { info(&db, "k").await.slot == first + 10 * LONG }).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    one.schedules.trigger("k").await.unwrap();
    by_hand.release().await.unwrap();
    one.finish.send(Some(true)).unwrap();
    for (is_triggered, missed) in [(false, 10), (true, 0)] {
        assert_eq!(ended(one.try_tick()).await, TickOutcome::Succeeded);
        let tick = one.tick().await;
        assert_eq!((tick.is_triggered(), tick.missed()), (is_triggered, missed));
    }
    assert_eq!(told(&db, "k").await, "L1(10) S2(10) S1");
}

/// The first attempt has failed, for which the slot was moved. The first attempt at another tick
/// was lost.
async fn a_second_attempt_that_is_put_back_is_no_takeover<DB: TestDatabase>(db: TestDb<DB>) {
    let mut one = work(&db, "one", due_with_key(&db).await.catch_up(CatchUp::Once).retry(3, Duration::ZERO));
    back(&db, "k", 10 * LONG).await;
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
    let (run, tick) = one.run().await;
    assert!(tick.attempt() == 2 && tick.taken_over_from().is_none(), "{tick:?}");
    one.finish.send(Some(true)).unwrap();
    assert_eq!(ended(run).await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "L1 F1(10) S2(10)");
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
    let (run, tick) = one.run().await;
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
    let (run, tick) = one.run().await;
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
        // On a busy machine, that may have been before.
        let again = eventually("it is undone again", async || proxy.seen(Way::Requests) > asked);
        let is_undone_again = timeout(4 * LIMIT, again).await.is_ok();
        // The request is on its way to the server.
        sleep(SHORT).await;
        let row = info(&db, &name).await;
        assert!(row.running && row.by == "other" && row.attempt == 1, "{row:?}");
        assert_eq!(other.end().await, TickOutcome::Succeeded);
        assert_eq!(told(&db, &name).await, "S1");
        if is_undone_again {
            return;
        }
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

/// The reply to a claim comes after its lease. Another instance has taken the tick over by then, or
/// none has.
async fn a_claim_whose_reply_comes_after_its_lease_begins_no_work<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = LEASE / 4;
    let (proxy, mut passed) = (db.proxy().await, 0);
    let mut is_taken_over = true;
    for round in 0.. {
        assert!(round < 10 * MESSAGES, "no reply to a claim was held");
        let (name, works) = (format!("k{round}"), Arc::new(AtomicUsize::new(0)));
        let (schedule, begun) = (due(&db, &name).await, works.clone());
        let late = instance(&db.over(proxy.pool(1)), "late").share_pool().time_limit(PATIENCE).lease(lease);
        let late = late.on(Schedule::after("warm", SHORT), async |_| Never::Ok(())).on(schedule.clone(), move |_| {
            begun.fetch_add(1, SeqCst);
            async { Never::Ok(()) }
        });
        eventually("it is warm", || async { matches!(late.try_tick("warm").await, Ok(TickOutcome::Succeeded)) }).await;
        proxy.hold_after(Way::Replies, passed);
        let own = name.clone();
        let claim = tokio::spawn(async move { late.try_tick(&own).await.unwrap() });
        // After the last reply, from the first one again.
        passed = if held_or_over(&proxy, Way::Replies, &claim).await { passed + 1 } else { 0 };
        let is_claimed = info(&db, &name).await.running && works.load(SeqCst) == 0;
        let other = idle(&db, schedule);
        if is_claimed && is_taken_over {
            eventually("it is taken over", || async { other.try_tick(&name).await.unwrap() == TickOutcome::Succeeded })
                .await;
        } else if is_claimed {
            sleep(2 * lease).await;
        }
        proxy.open();
        let outcome = timeout(PATIENCE, claim).await.unwrap().unwrap();
        if !is_claimed {
            continue;
        }
        assert_eq!(works.load(SeqCst), 0, "{outcome:?}");
        if is_taken_over {
            assert_eq!((outcome, told(&db, &name).await.as_str()), (TickOutcome::Lost, "L1 S2"));
            (is_taken_over, passed) = (false, 0);
            continue;
        }
        let row = info(&db, &name).await;
        assert!(!row.running && row.attempt == 0 && row.due <= row.now, "{row:?}");
        assert_eq!(outcome, TickOutcome::HandedBack);
        assert_eq!(other.try_tick(&name).await.unwrap(), TickOutcome::Succeeded);
        assert_eq!(told(&db, &name).await, "S1");
        return;
    }
}

/// The claim has no reply yet. Its lease is longer than the test.
async fn a_claim_of_a_runtime_that_ends_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    for passed in 0..MESSAGES {
        let name = format!("passed {passed}");
        let (schedules, own) = (behind(&db, &proxy, &due(&db, &name).await).await, name.clone());
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        proxy.hold_after(Way::Replies, passed);
        let call = runtime.spawn(async move { schedules.try_tick(&own).await });
        held_or_over(&proxy, Way::Replies, &call).await;
        let is_claimed = info(&db, &name).await.running;
        runtime.shutdown_background();
        proxy.open();
        if is_claimed {
            eventually("it is put back", async || !info(&db, &name).await.running).await;
            assert_eq!(told(&db, &name).await, "");
            return;
        }
    }
    panic!("no claim was held");
}

/// Two ticks that one poll has claimed. The run of one of them blocks the only worker of its
/// runtime, before that of the other one begins.
struct Blocked {
    runtime: Runtime,
    running: Running,
    begun: mpsc::UnboundedReceiver<String>,
    go_on: Arc<AtomicBool>,
    first: &'static str,
    second: &'static str,
}

async fn blocked<DB: TestDatabase>(db: &TestDb<DB>) -> Blocked {
    let (theirs, url) = ([due(db, "k").await, due(db, "l").await], db.url.clone());
    let (go_on, (began, mut begun)) = (Arc::new(AtomicBool::new(false)), mpsc::unbounded_channel());
    let goes_on = go_on.clone();
    let start = async move {
        let mut one = Schedules::new(harness::pool::<DB>(&url, 2).await).label("one").lease(LEASE);
        for schedule in theirs {
            let (began, goes_on) = (began.clone(), goes_on.clone());
            one = one.on(schedule, move |tick: Tick<DB>| {
                let (began, goes_on) = (began.clone(), goes_on.clone());
                async move {
                    began.send(tick.name().to_owned()).unwrap();
                    while !goes_on.load(SeqCst) {
                        thread::sleep(SHORT / 20);
                    }
                    Never::Ok(())
                }
            });
        }
        one.start().await.unwrap()
    };
    let (runtime, running) = on_a_thread(move || {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let running = runtime.block_on(start);
        (runtime, running)
    })
    .await;
    let begins = timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    let (first, second) = if begins == "k" { ("k", "l") } else { ("l", "k") };
    eventually("the other one is claimed too", || async { info(db, second).await.running }).await;
    Blocked { runtime, running, begun, go_on, first, second }
}

/// A renewal notices it while the runtime is blocked.
async fn a_run_that_is_lost_before_it_begins_does_no_work<DB: TestDatabase>(db: TestDb<DB>) {
    let Blocked { runtime, running, mut begun, go_on, first, second } = blocked(&db).await;
    steal(&db, second).await;
    sleep(LEASE).await;
    go_on.store(true, SeqCst);
    eventually("the other one has ended", || async { told(&db, first).await == "S1" }).await;
    assert!(timeout(PATIENCE, running.shutdown(Duration::MAX)).await.unwrap());
    assert!(begun.try_recv().is_err(), "it does not begin");
    let row = info(&db, second).await;
    assert!(row.by == "thief" && row.attempt == 2 && told(&db, second).await.is_empty(), "{row:?}");
    runtime.shutdown_background();
}

/// The limit is long, since runs that have begun may end.
async fn a_run_that_has_not_begun_by_the_shutdown_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    let Blocked { runtime, running, mut begun, go_on, first, second } = blocked(&db).await;
    let mut shutdown = Box::pin(running.shutdown(Duration::MAX));
    assert!(timeout(SHORT, &mut shutdown).await.is_err(), "a run is under way");
    go_on.store(true, SeqCst);
    assert!(timeout(PATIENCE, shutdown).await.unwrap());
    assert!(begun.try_recv().is_err(), "it does not begin");
    let row = info(&db, second).await;
    assert!(!row.running && row.attempt == 0 && row.due <= row.now, "{row:?}");
    assert_eq!((told(&db, first).await.as_str(), told(&db, second).await.as_str()), ("S1", ""));
    runtime.shutdown_background();
}
