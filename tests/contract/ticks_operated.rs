//! What operators and deploys do with schedules: pause, trigger, other times.

use std::time::Duration;

use chrono::{DateTime, TimeDelta};
use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Error, RunInfo, RunOptions, RunStatus, Schedule, Tick, TickOutcome};
use tokio::{sync::mpsc, time::timeout};

use crate::ticks::{LONG, Never, SHORT, back, back_and_due, due, idle, info, instance, runs, told};

harness::tests!(
    postgres(infinite_times_of_one_schedule_stop_no_other),
    everywhere(
        a_paused_schedule_runs_when_it_is_resumed,
        a_trigger_runs_beside_the_ticks,
        a_schedule_is_run_now,
        a_trigger_during_a_run_is_run_after_it,
        a_trigger_between_attempts_loses_no_attempt,
        a_trigger_makes_one_attempt_at_once_and_not_all,
        an_unknown_schedule_is_told,
        a_restart_leaves_the_slot_alone,
        other_times_replace_the_slot,
        the_end_of_a_run_leaves_other_times_alone,
        schedules_are_listed_in_the_order_of_their_names,
        the_latest_runs_of_all_schedules_have_the_last_success,
        the_runs_since_a_time_come_latest_first,
        runs_are_selected_by_name_outcome_and_age,
        the_history_is_forgotten_by_age,
        the_last_success_of_a_schedule_is_not_forgotten
    ),
    everywhere.each(an_instance_leaves_alone_what_has_other_times)
);

/// An operator writes PostgreSQL's "never" into the tables.
async fn infinite_times_of_one_schedule_stop_no_other<DB: TestDatabase>(db: TestDb<DB>) {
    let (never, other) = (due(&db, "never").await, Schedule::after("k", SHORT).unwrap());
    idle(&db, never.clone()).try_tick("never").await.unwrap();
    let schedules = instance(&db, "all").poll_interval(SHORT).unwrap();
    let schedules = schedules.on(never, async |_| Never::Ok(())).on(other, async |_| Never::Ok(()));
    let running = schedules.start().await.unwrap();
    for time in ["'infinity'", "'-infinity'"] {
        for set in ["paused = true", "paused = false"] {
            let times =
                ["slot", "due_at", "run_slot", "begin_time"].map(|column| format!("{column} = {time}")).join(", ");
            db.execute(&format!("UPDATE t_resource_schedule SET {set}, {times} WHERE name = 'never'")).await;
            db.execute(&format!(
                "UPDATE t_resource_schedule_run SET end_time = {time}, begin_time = {time} WHERE name = 'never'"
            ))
            .await;
            let before = runs(&db, "k").await.len();
            eventually("the other one runs", || async { runs(&db, "k").await.len() > before + 3 }).await;
            assert_eq!(instance(&db, "reader").list().await.unwrap().len(), 2);
            instance(&db, "reader").runs(&RunOptions::default()).await.unwrap();
        }
    }
    assert!(running.shutdown(PATIENCE).await);
}

async fn a_paused_schedule_runs_when_it_is_resumed<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due(&db, "k").await);
    schedules.pause("k").await.unwrap();
    assert!(info(&db, "k").await.paused);
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    schedules.trigger("k").await.unwrap();
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    schedules.resume("k").await.unwrap();
    for _ in 0..2 {
        assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded, "the trigger, and the tick");
    }
    assert_eq!(told(&db, "k").await, "S1 S1");
}

async fn a_trigger_runs_beside_the_ticks<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let schedules = instance(&db, "one").on(Schedule::every("k", LONG).unwrap(), move |tick: Tick<DB>| {
        sender.send(tick).unwrap();
        async { Never::Ok(()) }
    });
    let running = schedules.start().await.unwrap();
    let before = info(&db, "k").await;
    for number in 1..=3 {
        schedules.trigger("k").await.unwrap();
        let tick = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
        assert!(tick.is_triggered() && tick.slot() != before.slot && tick.attempt() == 1, "{tick:?}");
        eventually("it is recorded", || async { runs(&db, "k").await.len() == number }).await;
        let after = info(&db, "k").await;
        assert!((after.slot, after.due) == (before.slot, before.due) && after.triggered.is_none(), "{after:?}");
    }
    assert!(running.shutdown(PATIENCE).await);
    assert_eq!(told(&db, "k").await, "S1 S1 S1");
}

async fn a_schedule_is_run_now<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let jobs = instance(&db, "one").on(Schedule::every("k", LONG).unwrap(), move |tick: Tick<DB>| {
        sender.send(tick.is_triggered()).unwrap();
        async { Never::Ok(()) }
    });
    // It has no row before the first call.
    for number in 1..=2 {
        assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::Succeeded);
        assert_eq!((ticks.recv().await, runs(&db, "k").await.len()), (Some(true), number));
    }
    let row = info(&db, "k").await;
    assert!(row.slot > row.now && row.triggered.is_none(), "the tick that is next keeps its time: {row:?}");
    jobs.pause("k").await.unwrap();
    assert_eq!(jobs.run_now("k").await.unwrap(), TickOutcome::NotDue { retry_after: None });
    assert!(matches!(jobs.run_now("l").await, Err(Error::UnknownSchedule { .. })));
    assert!(ticks.try_recv().is_err(), "it is paused");
    let failing = instance(&db, "one").on(Schedule::every("m", LONG).unwrap(), async |_| Err::<(), _>("no"));
    let failed = TickOutcome::Failed { error: "no".into(), again: false };
    assert_eq!((failing.run_now("m").await.unwrap(), told(&db, "m").await.as_str()), (failed, "F1"));
}

async fn a_trigger_during_a_run_is_run_after_it<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let slot = info(&db, "k").await.slot;
    let (sender, mut ticks) = mpsc::unbounded_channel();
    let (finish, finished) = tokio::sync::watch::channel(0);
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        sender.send(tick.clone()).unwrap();
        let mut finished = finished.clone();
        let wanted = if tick.is_triggered() { 2 } else { 1 };
        async move { finished.wait_for(|finished| *finished >= wanted).await.map(drop) }
    });
    let running = schedules.start().await.unwrap();
    let first = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    for _ in 0..2 {
        schedules.trigger("k").await.unwrap();
    }
    let during = info(&db, "k").await;
    assert!(during.running && during.triggered.is_some() && during.run_slot == Some(slot), "{during:?}");
    assert!(ticks.try_recv().is_err(), "not two at once");
    finish.send(1).unwrap();
    let second = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert!(!first.is_triggered() && second.is_triggered() && second.attempt() == 1, "{second:?}");
    assert_eq!(info(&db, "k").await.slot, slot + LONG);
    schedules.trigger("k").await.unwrap();
    finish.send(2).unwrap();
    let third = timeout(PATIENCE, ticks.recv()).await.unwrap().unwrap();
    assert!(third.is_triggered() && third.slot() > second.slot(), "{third:?}");
    eventually("all are recorded", || async { told(&db, "k").await == "S1 S1 S1" }).await;
    assert!(running.shutdown(PATIENCE).await);
    assert!(ticks.try_recv().is_err(), "triggers that wait count once");
    assert_eq!(info(&db, "k").await.due, slot + LONG);
}

/// The next attempt is made at once, and the triggered run after it.
async fn a_trigger_between_attempts_loses_no_attempt<DB: TestDatabase>(db: TestDb<DB>) {
    let retries = rowlock::Retries::times(1).backoff(LONG, LONG).unwrap();
    let schedule = due(&db, "k").await.retry(retries).unwrap();
    let slot = info(&db, "k").await.slot;
    let schedules =
        instance(&db, "one").on(
            schedule,
            async |tick: Tick<DB>| {
                if tick.attempt() == 1 && !tick.is_triggered() { Err("no") } else { Ok(()) }
            },
        );
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    schedules.trigger("k").await.unwrap();
    for _ in 0..2 {
        assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    }
    let runs = runs(&db, "k").await;
    assert_eq!(told(&db, "k").await, "F1 S2 S1");
    assert!(runs[0].slot == slot && runs[1].slot == slot && runs[2].slot > slot, "{runs:?}");
    assert_eq!(info(&db, "k").await.due, slot + LONG);
}

/// The triggers come between attempts, and during one.
async fn a_trigger_makes_one_attempt_at_once_and_not_all<DB: TestDatabase>(db: TestDb<DB>) {
    let retries = rowlock::Retries::times(3).backoff(LONG, LONG).unwrap();
    let schedule = due(&db, "k").await.retry(retries).unwrap();
    let operator = instance(&db, "operator");
    let schedules = instance(&db, "one").on(schedule, move |tick: Tick<DB>| {
        let operator = operator.clone();
        async move {
            if tick.attempt() == 3 {
                operator.trigger("k").await.unwrap();
            }
            if tick.is_triggered() { Ok(()) } else { Err("no") }
        }
    });
    for attempt in 1..=4 {
        let outcome = schedules.try_tick("k").await.unwrap();
        assert!(
            matches!(outcome, TickOutcome::Failed { again, .. } if again == (attempt < 4)),
            "{attempt}: {outcome:?}"
        );
        if attempt < 4 {
            let next = schedules.try_tick("k").await.unwrap();
            assert!(matches!(next, TickOutcome::NotDue { retry_after: Some(pause) } if pause > LONG / 2), "{next:?}");
            schedules.trigger("k").await.unwrap();
        }
    }
    assert_eq!(schedules.try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert_eq!(told(&db, "k").await, "F1 F2 F3 F4 S1");
    assert!(matches!(schedules.try_tick("k").await.unwrap(), TickOutcome::NotDue { .. }), "triggers count once");
}

async fn an_unknown_schedule_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, Schedule::every("k", LONG).unwrap());
    let errors = [
        schedules.pause("l").await.unwrap_err(),
        schedules.resume("l").await.unwrap_err(),
        schedules.trigger("l").await.unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, Error::UnknownSchedule { name, .. } if name.as_str() == "l"), "{error:?}");
    }
    assert!(matches!(schedules.pause(" l").await, Err(Error::InvalidKey(_))));
    assert!(schedules.history("l", 9).await.unwrap().is_empty());
}

async fn a_restart_leaves_the_slot_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await;
    let before = info(&db, "k").await;
    let schedules = idle(&db, schedule);
    schedules.pause("k").await.unwrap();
    for _ in 0..2 {
        assert!(schedules.start().await.unwrap().shutdown(PATIENCE).await);
    }
    let after = info(&db, "k").await;
    assert_eq!((after.slot, after.due, after.attempt), (before.slot, before.due, 0));
}

async fn other_times_replace_the_slot<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = |pattern, zone| Schedule::cron("k", pattern).unwrap().zone(zone).unwrap();
    let mut slots = Vec::new();
    for (pattern, zone) in [("0 3 1 1 *", "UTC"), ("0 4 1 1 *", "UTC"), ("0 4 1 1 *", "Asia/Tokyo")] {
        idle(&db, schedule(pattern, zone)).try_tick("k").await.unwrap();
        let row = info(&db, "k").await;
        assert_eq!((row.times, row.zone), (format!("cron {pattern}"), zone.to_owned()));
        assert_eq!(row.slot, row.due);
        slots.push(row.slot);
    }
    assert_eq!(slots[1] - slots[0], chrono::TimeDelta::hours(1));
    assert_eq!(slots[1] - slots[2], chrono::TimeDelta::hours(9));
    // A failed tick is run again under other times.
    let failing = schedule("0 5 1 1 *", "UTC").retry(rowlock::Retries::times(9)).unwrap();
    let failing = instance(&db, "one").on(failing, async |_| Err::<(), _>("no"));
    failing.try_tick("k").await.unwrap();
    back(&db, "k", 4 * LONG).await;
    assert!(matches!(failing.try_tick("k").await.unwrap(), TickOutcome::Failed { again: true, .. }));
    assert_eq!(idle(&db, schedule("0 6 1 1 *", "UTC")).try_tick("k").await.unwrap(), TickOutcome::Succeeded);
    assert!(told(&db, "k").await.contains("S2"), "{}", told(&db, "k").await);
    let row = info(&db, "k").await;
    assert!(row.attempt == 0 && row.due == row.slot && row.run_slot.is_none(), "{row:?}");
}

/// Of a rolling deploy, the instances with the newest times run the schedule.
async fn an_instance_leaves_alone_what_has_other_times<DB: TestDatabase>(db: TestDb<DB>) {
    let (sender, mut ran) = mpsc::unbounded_channel();
    let of = |label: &'static str, period: Duration| {
        let sender = sender.clone();
        let schedules = instance(&db, label).max_concurrent_runs(1).unwrap();
        let schedules = schedules.on(Schedule::every("other", SHORT).unwrap(), async |_| Never::Ok(()));
        schedules.on(Schedule::every("k", period).unwrap(), move |_| {
            sender.send(label).unwrap();
            async { Never::Ok(()) }
        })
    };
    let (old, new) = (of("old", LONG), of("new", 2 * LONG));
    let old = old.start().await.unwrap();
    let new = new.start().await.unwrap();
    eventually("its times apply", || async { info(&db, "k").await.times == format!("every {:?}", 2 * LONG) }).await;
    for _ in 0..5 {
        // The same slot again, which its row in the history would refuse.
        db.execute("DELETE FROM t_resource_schedule_run WHERE name = 'k'").await;
        back_and_due(&db, "k", 2 * LONG, &DB::ago(1)).await;
        assert_eq!(timeout(PATIENCE, ran.recv()).await.unwrap(), Some("new"));
        eventually("it has ended", || async { !info(&db, "k").await.running }).await;
    }
    db.execute("DELETE FROM t_resource_schedule_run WHERE name = 'k'").await;
    back_and_due(&db, "k", 2 * LONG, &DB::ago(-2_000)).await;
    assert!(new.shutdown(PATIENCE).await);
    assert!(ran.try_recv().is_err(), "nothing was due");
    assert_eq!(timeout(PATIENCE, ran.recv()).await.unwrap(), Some("old"), "its times are in effect again");
    assert!(old.shutdown(PATIENCE).await);
}

/// The old instance's run ends after other times took effect.
async fn the_end_of_a_run_leaves_other_times_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let every = |name: &str, periods| Schedule::every(name, periods * LONG).unwrap();
    let in_zone = |name: &str, zone| Schedule::cron(name, "0 4 1 1 *").unwrap().zone(zone).unwrap();
    for (name, old, new, succeeds, expected) in [
        ("k", every("k", 1), every("k", 2), true, "S1"),
        ("l", every("l", 1), every("l", 2), false, "F1"),
        ("m", in_zone("m", "UTC"), in_zone("m", "Asia/Tokyo"), true, "S1"),
        ("n", in_zone("n", "UTC"), in_zone("n", "Asia/Tokyo"), false, "F1"),
    ] {
        let old = old.retry(rowlock::Retries::times(9)).unwrap();
        idle(&db, old.clone()).try_tick(name).await.unwrap();
        let row = info(&db, name).await;
        // A slot has whole milliseconds.
        back(&db, name, Duration::from_secs((row.slot - row.now).num_seconds().unsigned_abs() + 1)).await;
        let (began, mut begun) = mpsc::unbounded_channel();
        let (finish, finished) = tokio::sync::watch::channel(false);
        let old = instance(&db, "old").on(old, move |_| {
            began.send(()).unwrap();
            let mut finished = finished.clone();
            async move {
                finished.wait_for(|finished| *finished).await.unwrap();
                if succeeds { Ok(()) } else { Err("no") }
            }
        });
        let running = tokio::spawn(async move { old.try_tick(name).await.unwrap() });
        timeout(PATIENCE, begun.recv()).await.unwrap().unwrap();
        let new = idle(&db, new);
        assert!(matches!(new.try_tick(name).await.unwrap(), TickOutcome::NotDue { .. }), "it is run");
        let during = info(&db, name).await;
        assert!(during.running && during.attempt == 1 && during.due < during.slot, "{during:?}");
        finish.send(true).unwrap();
        timeout(PATIENCE, running).await.unwrap().unwrap();
        let after = info(&db, name).await;
        assert_eq!((after.running, after.slot), (false, during.slot), "{after:?}");
        // A failed attempt is made again.
        assert!(if succeeds { after.due == after.slot } else { after.due <= after.now }, "{after:?}");
        assert_eq!(after.attempt, u32::from(!succeeds), "{after:?}");
        assert_eq!(told(&db, name).await, expected);
    }
}

async fn schedules_are_listed_in_the_order_of_their_names<DB: TestDatabase>(db: TestDb<DB>) {
    let mut schedules = instance(&db, "one");
    for number in 0..501 {
        schedules = schedules.on(Schedule::every(&format!("k{number:03}"), LONG).unwrap(), async |_| Never::Ok(()));
    }
    schedules = schedules.on(Schedule::cron("é", "0 2 * * *").unwrap(), async |_| Never::Ok(()));
    assert!(schedules.start().await.unwrap().shutdown(PATIENCE).await);
    let listed = schedules.list().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|schedule| schedule.name.as_str()).collect();
    assert_eq!(names.len(), 502);
    assert!(names.is_sorted() && names[501] == "é", "{names:?}");
    assert_eq!((listed[501].times.as_str(), listed[501].zone.as_str()), ("cron 0 2 * * *", "UTC"));
}

/// Writes runs into the history: the schedule, how many minutes ago its slot was, the attempt, the
/// status. Each took a minute.
async fn ran<DB: TestDatabase>(db: &TestDb<DB>, runs: &[(&str, i64, u32, &str)]) {
    for (name, ago, attempt, status) in runs {
        let (slot, end) = (DB::ago(ago * 60_000), DB::ago((ago - 1) * 60_000));
        db.execute(&format!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status)
             VALUES ('{name}', {slot}, {attempt}, {ago}, 'me', {slot}, {end}, '{status}')"
        ))
        .await;
    }
}

/// Describes runs by their schedules and tokens, which are their ages in minutes.
fn named(runs: &[RunInfo]) -> Vec<String> {
    runs.iter().map(|run| format!("{}{}", run.name, run.token)).collect()
}

async fn the_latest_runs_of_all_schedules_have_the_last_success<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "reader");
    assert!(schedules.latest_runs(9).await.unwrap().is_empty());
    for name in ["a", "b", "c"] {
        idle(&db, Schedule::every(name, LONG).unwrap()).try_tick(name).await.unwrap();
    }
    ran(&db, &[("b", 15, 1, "S"), ("a", 60, 1, "S"), ("a", 50, 1, "S"), ("a", 40, 1, "F"), ("a", 30, 0, "M")]).await;
    ran(&db, &[("a", 20, 1, "L"), ("a", 10, 1, "F"), ("removed", 5, 1, "S")]).await;
    let latest = async |each| named(&schedules.latest_runs(each).await.unwrap());
    assert_eq!(latest(2).await, ["a50", "a20", "a10", "b15"]);
    assert_eq!(latest(3).await, ["a50", "a30", "a20", "a10", "b15"]);
    assert_eq!(latest(99).await, ["a60", "a50", "a40", "a30", "a20", "a10", "b15"], "each once");
    for each in [0, 1] {
        assert_eq!(latest(each).await, ["a50", "a10", "b15"]);
    }
    db.execute("UPDATE t_resource_schedule_run SET slot = (SELECT slot FROM (SELECT slot FROM t_resource_schedule_run WHERE token = 10) x), attempt = 2 WHERE token = 20").await;
    let runs = schedules.latest_runs(1).await.unwrap();
    assert_eq!(named(&runs), ["a50", "a10", "a20", "b15"], "all attempts at the slot");
    let (last, success) = (&runs[2], &runs[3]);
    assert_eq!((last.attempt, last.status, last.by.as_str()), (2, RunStatus::Lost, "me"));
    assert_eq!((success.name.as_str(), success.status, success.error.as_deref()), ("b", RunStatus::Succeeded, None));
    assert_eq!((success.ended - success.began).num_seconds(), 60);
}

async fn the_runs_since_a_time_come_latest_first<DB: TestDatabase>(db: TestDb<DB>) {
    ran(&db, &[("a", 40, 1, "F"), ("b", 10, 1, "S"), ("removed", 20, 1, "L"), ("a", 30, 0, "M")]).await;
    let schedules = instance(&db, "reader");
    let since = async |since, limit| schedules.runs_since(since, limit).await.unwrap();
    let all = since(DateTime::UNIX_EPOCH, 99).await;
    assert_eq!(named(&all), ["b10", "removed20", "a30", "a40"]);
    assert_eq!(since(DateTime::UNIX_EPOCH, 3).await, all[..3]);
    assert_eq!(since(all[1].ended, 99).await, all[..2], "one that ended then is among them");
    assert_eq!(since(all[1].ended + TimeDelta::microseconds(1), 99).await, all[..1]);
    assert!(since(all[0].ended + TimeDelta::microseconds(1), 99).await.is_empty());
}

async fn runs_are_selected_by_name_outcome_and_age<DB: TestDatabase>(db: TestDb<DB>) {
    ran(&db, &[("a", 40, 1, "F"), ("b", 10, 1, "S"), ("removed", 20, 1, "L"), ("a", 30, 0, "M"), ("a", 5, 1, "S")])
        .await;
    let schedules = instance(&db, "reader");
    let selected = async |options: RunOptions| named(&schedules.runs(&options).await.unwrap());
    let all = RunOptions::default;
    assert_eq!(selected(all()).await, ["a5", "b10", "removed20", "a30", "a40"]);
    assert_eq!(selected(all().limit(2)).await, ["a5", "b10"]);
    assert_eq!(selected(all().unsuccessful()).await, ["removed20", "a30", "a40"]);
    assert_eq!(selected(all().of("a")).await, ["a5", "a30", "a40"]);
    assert_eq!(selected(all().within(Duration::from_secs(25 * 60))).await, ["a5", "b10", "removed20"]);
    let some = all().of("a").unsuccessful().within(Duration::from_secs(35 * 60)).limit(9);
    assert_eq!(selected(some).await, ["a30"]);
    assert!(selected(all().of("A")).await.is_empty(), "names are compared byte by byte");
    assert!(schedules.runs(&all().within(LONG * 99)).await.is_err());
}

async fn the_history_is_forgotten_by_age<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = idle(&db, due(&db, "k").await);
    schedules.try_tick("k").await.unwrap();
    let rows: Vec<String> = (2..=1_100)
        .map(|attempt| {
            format!("('k', {now}, {attempt}, 1, '', {now}, {old}, 'F')", now = DB::ago(0), old = DB::ago(3_600_000))
        })
        .collect();
    for rows in rows.chunks(100) {
        db.execute(&format!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status) VALUES {}",
            rows.join(", ")
        ))
        .await;
    }
    // A run that is being recorded, in a transaction that stays open, delays nothing. On SQLite it
    // has the whole file.
    let mut recording = db.pool_of(1).await.acquire().await.unwrap();
    if db.server.name != "sqlite" {
        let now = DB::ago(0);
        DB::execute_on(&mut recording, DB::BEGIN).await.unwrap();
        let run = format!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status)
                           VALUES ('j', {now}, 1, 1, '', {now}, {now}, 'S')"
        );
        DB::execute_on(&mut recording, &run).await.unwrap();
    }
    assert_eq!(schedules.forget_history(Duration::from_secs(7_200)).await.unwrap(), 0);
    assert_eq!(schedules.forget_history(Duration::from_secs(1_800)).await.unwrap(), 1_099);
    assert_eq!(told(&db, "k").await, "S1");
    assert!(schedules.forget_history(LONG * 99).await.is_err());
}

/// That of a schedule whose row was deleted is forgotten.
async fn the_last_success_of_a_schedule_is_not_forgotten<DB: TestDatabase>(db: TestDb<DB>) {
    let schedules = instance(&db, "reader");
    for name in ["a", "b", "c"] {
        idle(&db, Schedule::every(name, LONG).unwrap()).try_tick(name).await.unwrap();
    }
    ran(&db, &[("a", 60, 1, "S"), ("a", 50, 1, "S"), ("a", 40, 1, "F"), ("a", 30, 0, "M"), ("b", 20, 1, "S")]).await;
    ran(&db, &[("b", 15, 1, "L"), ("c", 9, 1, "F"), ("removed", 5, 1, "S")]).await;
    for deleted in [6, 0] {
        assert_eq!(schedules.forget_history(Duration::ZERO).await.unwrap(), deleted);
        assert_eq!(named(&schedules.runs_since(DateTime::UNIX_EPOCH, 99).await.unwrap()), ["b20", "a50"]);
    }
}
