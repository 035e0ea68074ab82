//! What is listed of schedules and of their history, and what is forgotten of it.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb};
use rowlock::{
    Schedule, Tick,
    admin::{RunInfo, RunOptions, RunStatus},
};

use crate::ticks::{LONG, Never, due, idle, instance, told};

harness::tests!(everywhere(
    schedules_are_listed_in_the_order_of_their_names,
    what_an_instance_that_lives_says_of_a_schedule_is_listed,
    the_latest_runs_of_all_schedules_have_the_last_success,
    runs_are_selected_by_name_outcome_and_age,
    the_history_is_forgotten_by_age,
    the_last_success_of_a_schedule_is_not_forgotten,
    the_attempts_at_a_tick_that_goes_on_are_not_forgotten
));

async fn schedules_are_listed_in_the_order_of_their_names<DB: TestDatabase>(db: TestDb<DB>) {
    let mut schedules = instance(&db, "one");
    for number in 0..501 {
        schedules = schedules.on(Schedule::every(&format!("k{number:03}"), LONG), async |_| Never::Ok(()));
    }
    schedules = schedules.on(Schedule::cron("é", "0 2 * * *"), async |_| Never::Ok(()));
    assert!(schedules.start().await.unwrap().shutdown(PATIENCE).await);
    let listed = schedules.list().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|schedule| schedule.name.as_str()).collect();
    assert_eq!(names.len(), 502);
    assert!(names.is_sorted() && names[501] == "é", "{names:?}");
    assert_eq!((listed[501].times.as_str(), listed[501].zone.as_str()), ("cron 0 2 * * *", "UTC"));
}

async fn what_an_instance_that_lives_says_of_a_schedule_is_listed<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::every("k", LONG).description("Prüft alles.\n\tAsk the team.");
    let schedule = schedule.jitter(Duration::from_secs(3600));
    let first = idle(&db, schedule.clone()).start().await.unwrap();
    let listed = async || instance(&db, "reader").inspect("k").await.unwrap().unwrap();
    let info = listed().await;
    assert_eq!(info.description, "Prüft alles.\n\tAsk the team.");
    assert_eq!(Some(info.slot), schedule.upcoming(info.now).unwrap().next(), "the later time is that of the tick");
    // The times are the same, and the instance that came last describes them.
    let second = idle(&db, schedule.description("another one")).start().await.unwrap();
    assert_eq!((listed().await.description.as_str(), listed().await.instances), ("another one", 2));
    assert!(second.shutdown(PATIENCE).await && first.shutdown(PATIENCE).await);
    assert_eq!(listed().await.description, "");
}

/// Writes runs into the history: the schedule, how many minutes ago its slot was, the attempt, the
/// status. Each took a minute.
pub async fn ran<DB: TestDatabase>(db: &TestDb<DB>, runs: &[(&str, i64, u32, &str)]) {
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
        idle(&db, Schedule::every(name, LONG)).try_tick(name).await.unwrap();
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
        idle(&db, Schedule::every(name, LONG)).try_tick(name).await.unwrap();
    }
    ran(&db, &[("a", 60, 1, "S"), ("a", 50, 1, "S"), ("a", 40, 1, "F"), ("a", 30, 0, "M"), ("b", 20, 1, "S")]).await;
    ran(&db, &[("b", 15, 1, "L"), ("c", 9, 1, "F"), ("removed", 5, 1, "S")]).await;
    for deleted in [6, 0] {
        assert_eq!(schedules.forget_history(Duration::ZERO).await.unwrap(), deleted);
        assert_eq!(named(&schedules.runs(&RunOptions::default()).await.unwrap()), ["b20", "a50"]);
    }
}

async fn the_attempts_at_a_tick_that_goes_on_are_not_forgotten<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = due(&db, "k").await.retry(2, Duration::ZERO);
    let schedules = instance(&db, "one").on(schedule, async |tick: Tick<DB>| match tick.attempt() {
        1 | 2 => Err("not yet"),
        _ => Ok(()),
    });
    for failed in ["F1", "F1 F2"] {
        schedules.try_tick("k").await.unwrap();
        assert_eq!(schedules.forget_history(Duration::ZERO).await.unwrap(), 0);
        assert_eq!(told(&db, "k").await, failed);
    }
    schedules.try_tick("k").await.unwrap();
    assert_eq!(schedules.forget_history(Duration::ZERO).await.unwrap(), 2);
    assert_eq!(told(&db, "k").await, "S3");
}
