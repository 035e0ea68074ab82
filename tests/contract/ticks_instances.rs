//! What instances and rows remember of each other: beats, times, what is gone and what is removed.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, eventually, proxy::Way};
use rowlock::{
    Error, Schedule, Schedules, Tick,
    admin::InstanceInfo,
    errors::Setup,
    jobs::{Running, TickOutcome},
};
use tokio::{sync::mpsc, time::timeout};

use crate::{
    ticks::{LONG, Never, SHORT, back, due, idle, info, instance, told},
    ticks_apart::Run,
    ticks_deployed::{ahead, ends, every, text, times},
    ticks_replies::{behind, held_or_over},
};

harness::tests!(
    everywhere(
        times_in_another_zone_are_other_times,
        a_row_remembers_all_its_times,
        an_instance_that_is_silent_for_longer_than_it_lives_does_not_count,
        an_instance_whose_beat_is_far_ahead_neither_counts_nor_stays,
        after_a_break_the_beats_are_counted_anew,
        each_call_of_a_crontab_is_a_beat,
        what_is_gone_is_gone_since_it_was_seen_to_be,
        a_reset_leaves_past_runs_and_orders_alone,
        a_reset_forgets_what_was_run_at_a_tick_that_comes_again,
        what_was_handed_back_is_reset,
        a_run_goes_on_beside_a_schedule_that_begins_afresh,
        a_schedule_is_not_removed_beside_a_run_that_goes_on,
        what_is_due_first_is_run_first,
        instances_are_listed_by_their_labels
    ),
    servers(times_that_were_decided_on_an_older_row_do_not_apply)
);

async fn instances<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<InstanceInfo> {
    instance(db, "reader").instances().await.unwrap()
}

/// Ends an instance with these times of `k`, and brings its row back, as after it was killed.
async fn killed<DB: TestDatabase>(db: &TestDb<DB>, label: &str, period: Duration) {
    let running = every(db, label, period).start().await.unwrap();
    db.execute(&format!("CREATE TABLE killed AS SELECT * FROM t_resource_schedule_instance WHERE label = '{label}'"))
        .await;
    ends(running).await;
    assert_eq!(db.execute("INSERT INTO t_resource_schedule_instance SELECT * FROM killed").await, 1);
}

/// Each process lives for one tick. The pattern is the same.
async fn times_in_another_zone_are_other_times<DB: TestDatabase>(db: TestDb<DB>) {
    let crontab = |label: &str, zone| idle(&db, Schedule::cron("k", "0 4 1 1 *").zone(zone)).label(label);
    let (older, newer) = (crontab("older", "UTC"), crontab("newer", "Asia/Tokyo"));
    assert!(matches!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    assert!(matches!(newer.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    back(&db, "k", 4 * LONG).await;
    assert_eq!(older.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    assert_eq!(told(&db, "k").await, "");
    assert_eq!(newer.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(info(&db, "k").await.zone, "Asia/Tokyo");
}

/// The order in which they took effect decides between instances that live.
async fn a_row_remembers_all_its_times<DB: TestDatabase>(db: TestDb<DB>) {
    let mut all = Vec::new();
    for periods in 1..=3 {
        ends(every(&db, "one", periods * LONG).start().await.unwrap()).await;
        assert_eq!(times(&db).await, text(periods * LONG));
        let known = db.cell("known", "t_resource_schedule_times WHERE name = 'k'").await.unwrap();
        let known: Vec<String> = known.split(' ').map(str::to_owned).collect();
        all.insert(0, known[0].clone());
        assert_eq!(known, all, "the newest first");
    }
}

async fn an_instance_that_is_silent_for_longer_than_it_lives_does_not_count<DB: TestDatabase>(db: TestDb<DB>) {
    killed(&db, "one", LONG).await;
    // It is forgotten after twice its life.
    for (minutes, lives) in [(30, true), (90, false)] {
        let beat = DB::ago(minutes * 60_000);
        let set = format!("UPDATE t_resource_schedule_instance SET lives = 3600000000, beat_at = {beat}");
        assert_eq!(db.execute(&set).await, 1);
        assert_eq!(info(&db, "k").await.instances, u32::from(lives), "{minutes} minutes ago");
        assert_eq!(instances(&db).await[0].alive, lives, "{minutes} minutes ago");
    }
}

/// It was killed while the clock was wrong.
async fn an_instance_whose_beat_is_far_ahead_neither_counts_nor_stays<DB: TestDatabase>(db: TestDb<DB>) {
    let old = every(&db, "old", LONG).start().await.unwrap();
    killed(&db, "new", 2 * LONG).await;
    let beat = ahead::<DB>(400);
    let set = format!("UPDATE t_resource_schedule_instance SET beat_at = {beat} WHERE label = 'new'");
    assert_eq!(db.execute(&set).await, 1);
    let row = info(&db, "k").await;
    assert_eq!((row.instances, row.instances_with_other_times), (1, 0), "{row:?}");
    eventually("it is forgotten", || async { instances(&db).await.len() == 1 }).await;
    assert_eq!((instances(&db).await[0].label.as_str(), times(&db).await), ("old", text(LONG)));
    ends(old).await;
}

/// The others may not have beaten since an outage, or a step of the clock, so that an instance
/// takes no times from them yet.
async fn after_a_break_the_beats_are_counted_anew<DB: TestDatabase>(db: TestDb<DB>) {
    let running = every(&db, "one", LONG).start().await.unwrap();
    let beats = async || db.number("SELECT beats FROM t_resource_schedule_instance").await.unwrap();
    for break_of in [3_600_000, -3_600_000] {
        let beat = DB::ago(break_of);
        let set = format!("UPDATE t_resource_schedule_instance SET beats = 1000000, beat_at = {beat}");
        assert_eq!(db.execute(&set).await, 1);
        eventually("it beats", async || beats().await != 1_000_000).await;
        assert!(beats().await < 1_000_000, "{} beats after {break_of} ms", beats().await);
    }
    ends(running).await;
}

/// For how long it lives depends on its next tick.
async fn each_call_of_a_crontab_is_a_beat<DB: TestDatabase>(db: TestDb<DB>) {
    let crontab = idle(&db, Schedule::every("k", LONG));
    crontab.try_tick("k").await.unwrap();
    let years_ago = DB::ago(10 * 366 * 24 * 60 * 60 * 1_000);
    for set in [format!("beat_at = {years_ago}"), "lives = 0".to_owned()] {
        assert_eq!(db.execute(&format!("UPDATE t_resource_schedule_instance SET {set}")).await, 1);
        let [one] = &instances(&db).await[..] else { panic!("one instance") };
        assert!(one.calls && !one.alive, "{one:?}");
        crontab.try_tick("k").await.unwrap();
        let [one] = &instances(&db).await[..] else { panic!("one instance") };
        assert!(one.calls && one.alive, "{set}: {one:?}");
    }
}

/// Another instance that had it ends. After a week, a schedule that comes back begins afresh.
async fn what_is_gone_is_gone_since_it_was_seen_to_be<DB: TestDatabase>(db: TestDb<DB>) {
    let service = |label: &str| {
        let schedules = instance(&db, label).poll_interval(Duration::from_secs(3600));
        let schedules = schedules.on(Schedule::every("of all", LONG), async |_| Never::Ok(()));
        schedules.on(Schedule::every("of all too", LONG), async |_| Never::Ok(()))
    };
    let old = service("old").on(Schedule::every("k", LONG), async |_| Never::Ok(()));
    let old = old.on(Schedule::every("l", LONG), async |_| Never::Ok(())).start().await.unwrap();
    // Their service lives on with half of the schedules.
    let new = service("new").start().await.unwrap();
    // The instances beat every 20 seconds.
    let since = DB::ago(3 * 24 * 60 * 60 * 1_000);
    let set = format!("UPDATE t_resource_schedule_times SET gone_at = {since} WHERE name = 'k'");
    assert_eq!(db.execute(&set).await, 1);
    let before = info(&db, "k").await.gone_since.unwrap();
    assert!(info(&db, "l").await.gone_since.is_none());
    ends(old).await;
    assert!(info(&db, "l").await.gone_since.is_some());
    assert_eq!(info(&db, "k").await.gone_since, Some(before));
    ends(new).await;
}

async fn a_reset_leaves_past_runs_and_orders_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let jobs = idle(&db, due(&db, "k").await);
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    let operator = instance(&db, "operator");
    let skipped = operator.skip("k").await.unwrap();
    let until = info(&db, "k").await.now + LONG;
    operator.pause_until("k", until).await.unwrap();
    assert_eq!(operator.reset("k").await.unwrap(), skipped);
    let row = info(&db, "k").await;
    assert_eq!((row.skipped_until, row.paused_until), (Some(skipped), Some(until)), "{row:?}");
    assert_eq!(told(&db, "k").await, "S1");
}

/// The clock was ahead once, and the schedule has run since it was put right.
async fn a_reset_forgets_what_was_run_at_a_tick_that_comes_again<DB: TestDatabase>(db: TestDb<DB>) {
    let jobs = idle(&db, due(&db, "k").await);
    assert_eq!(jobs.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    db.execute("UPDATE t_resource_schedule_run SET slot = (SELECT slot FROM t_resource_schedule)").await;
    assert_eq!(told(&db, "k").await, "S1");
    instance(&db, "operator").reset("k").await.unwrap();
    assert_eq!(told(&db, "k").await, "");
}

/// The history has the run already, since it was stopped.
async fn what_was_handed_back_is_reset<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let (sender, mut begun) = mpsc::unbounded_channel();
    let running = instance(&db, "one").on(schedule, move |_| {
        sender.send(()).unwrap();
        std::future::pending::<Never>()
    });
    let running = running.start().await.unwrap();
    timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
    assert!(!running.shutdown(SHORT).await);
    assert_eq!((told(&db, "k").await.as_str(), info(&db, "k").await.attempt), ("L1", 1));
    let slot = instance(&db, "operator").reset("k").await.unwrap();
    let row = info(&db, "k").await;
    assert!(row.attempt == 0 && !row.running && row.lost_since.is_none(), "{row:?}");
    assert_eq!((row.slot, row.due), (slot, slot));
    assert!(slot > row.now);
    assert_eq!(told(&db, "k").await, "L1");
}

/// No instance had the schedule for more than a week, as far as the row says, and one had it all
/// the same.
async fn a_run_goes_on_beside_a_schedule_that_begins_afresh<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let run = Run::begin(instance(&db, "one").lease(LONG / 10), schedule.clone()).await;
    let slot = run.tick.slot();
    let since = DB::ago(8 * 24 * 60 * 60 * 1_000);
    let set = format!("UPDATE t_resource_schedule_times SET gone_at = {since} WHERE name = 'k'");
    assert_eq!(db.execute(&set).await, 1);
    let again = idle(&db, schedule);
    assert!(matches!(again.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: Some(_) }));
    let row = info(&db, "k").await;
    assert!(row.gone_since.is_none() && row.slot > row.now, "it has begun afresh: {row:?}");
    assert!(row.running && row.attempt == 1 && row.run_slot == Some(slot), "{row:?}");
    assert_eq!(told(&db, "k").await, "", "it is not lost");
    assert_eq!(run.end().await, TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "S1");
}

/// No instance that lives declares it. What is known of other schedules stays.
async fn a_schedule_is_not_removed_beside_a_run_that_goes_on<DB: TestDatabase>(db: TestDb<DB>) {
    idle(&db, Schedule::every("other", LONG)).try_tick("other").await.unwrap();
    let run = Run::begin(instance(&db, "one").lease(LONG / 10), due(&db, "k").await).await;
    db.execute("DELETE FROM t_resource_schedule_instance").await;
    let operator = instance(&db, "operator");
    let refused = operator.remove("k").await;
    assert!(matches!(refused, Err(Error::Setup(Setup::ScheduleUnfit { .. }))), "{refused:?}");
    assert!(info(&db, "k").await.running);
    // Its process dies.
    let over = DB::ago(1_000);
    let set = format!("UPDATE t_resource_schedule SET due_at = {over} WHERE name = 'k'");
    assert_eq!(db.execute(&set).await, 1);
    operator.remove("k").await.unwrap();
    assert!(operator.inspect("k").await.unwrap().is_none());
    let known = "SELECT COUNT(*) FROM t_resource_schedule_times";
    assert_eq!(db.number(known).await, Some(1));
    assert!(info(&db, "other").await.times_since.is_some());
    assert_eq!(run.end().await, TickOutcome::Lost);
}

async fn what_is_due_first_is_run_first<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ran) = mpsc::unbounded_channel();
    let mut schedules: Schedules<DB> = instance(&db, "one").max_concurrent_runs(1);
    for (times, name) in (1..).zip(["a", "b", "c"]) {
        let (schedule, sender) = (due(&db, name).await, sender.clone());
        back(&db, name, times * LONG).await;
        schedules = schedules.on(schedule, move |tick: Tick<DB>| {
            sender.send(tick.name().to_owned()).unwrap();
            async { Never::Ok(()) }
        });
    }
    let running: Running = schedules.start().await.unwrap();
    for expected in ["c", "b", "a"] {
        assert_eq!(timeout(PATIENCE, ran.recv()).await.unwrap().as_deref(), Some(expected));
    }
    ends(running).await;
}

async fn instances_are_listed_by_their_labels<DB: TestDatabase>(db: TestDb<DB>) {
    idle(&db, Schedule::every("k", LONG)).label("m").try_tick("k").await.unwrap();
    for (label, id) in [("a", "f"), ("z", "0")] {
        let id = DB::uuid(&id.repeat(32));
        let copy = format!(
            "INSERT INTO t_resource_schedule_instance
                 (id, label, build, calls, since, beat_at, lives, beats, declares_id, declares)
             SELECT {id}, '{label}', build, calls, since, beat_at, lives, beats, declares_id, declares
             FROM t_resource_schedule_instance WHERE label = 'm'"
        );
        assert_eq!(db.execute(&copy).await, 1);
    }
    let listed = instances(&db).await;
    assert_eq!(listed.iter().map(|one| one.label.as_str()).collect::<Vec<_>>(), ["a", "m", "z"]);
}

/// The row changes after it was read, and before the times are changed.
async fn times_that_were_decided_on_an_older_row_do_not_apply<DB: TestDatabase>(db: TestDb<DB>) {
    let proxy = db.proxy().await;
    let schedules = behind(&db, &proxy, &Schedule::every("k", LONG)).await.time_limit(PATIENCE);
    // The last replies are those to the read of the row, and to the look for what is due.
    let replies = async || {
        db.execute("DELETE FROM t_resource_schedule WHERE name = 'k'").await;
        let mut replies = (0, 1);
        while replies.0 != replies.1 {
            let before = proxy.seen(Way::Replies);
            let outcome = schedules.try_tick("k").await.unwrap();
            assert!(matches!(outcome, TickOutcome::NotDue { retry_after: Some(_) }), "{outcome:?}");
            replies = (replies.1, proxy.seen(Way::Replies) - before);
        }
        replies.0
    };
    let later = format!("slot = {}", ahead::<DB>(200));
    for change in
        ["spec = 'every 7s'", "zone = 'Asia/Tokyo'", "run_slot = slot", "attempt = attempt + 1", later.as_str()]
    {
        let mut rounds = 0..5;
        // On a busy machine, a call may have more messages, so that the change comes too early.
        let refused = async || {
            let replies = replies().await;
            let other = format!("UPDATE t_resource_schedule SET spec = '{}' WHERE name = 'k'", text(2 * LONG));
            assert_eq!(db.execute(&other).await, 1);
            proxy.hold_after(Way::Replies, replies - 2);
            let own = schedules.clone();
            let call = harness::spawn(async move { own.try_tick("k").await.unwrap() });
            held_or_over(&proxy, Way::Replies, &call).await;
            let set = format!("UPDATE t_resource_schedule SET {change} WHERE name = 'k'");
            assert_eq!(db.execute(&set).await, 1);
            let before = info(&db, "k").await;
            proxy.open();
            let outcome = timeout(PATIENCE, call).await.unwrap().unwrap();
            let after = info(&db, "k").await;
            let is_left = (&after.times, &after.zone, after.slot) == (&before.times, &before.zone, before.slot);
            before.times != text(LONG) && is_left && outcome == TickOutcome::NotDue { retry_after: None }
        };
        let mut is_refused = false;
        while !is_refused && rounds.next().is_some() {
            is_refused = refused().await;
        }
        assert!(is_refused, "{change}");
        // What was refused is decided again.
        schedules.try_tick("k").await.unwrap();
        assert_eq!(times(&db).await, text(LONG), "{change}");
    }
}
