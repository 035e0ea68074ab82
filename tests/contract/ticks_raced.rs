//! Many instances, and processes that are killed: each tick exactly once.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Schedule, Schedules, Tick, admin::RunStatus, jobs::CatchUp};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    child,
    ticks::{LONG, SHORT, due, info, instance, runs, told},
};

harness::tests!(
    everywhere(sixteen_instances_claim_each_tick_once, ticks_survive_processes_that_are_killed),
    postgres[harness::DIRECT].alone(the_cost_of_idling_is_that_of_the_looks, a_run_takes_two_statements)
);

const SCHEDULES: usize = 12;

/// Sixteen tasks ask for the same due ticks at the same time.
async fn sixteen_instances_claim_each_tick_once<DB: TestDatabase>(db: TestDb<DB>) {
    let mut schedules = Vec::new();
    for number in 0..SCHEDULES {
        schedules.push(due(&db, &format!("k{number}")).await);
    }
    let (count, start) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Barrier::new(16)));
    let mut tasks = JoinSet::new();
    for number in 0..16 {
        let mut instance = instance(&db, &format!("instance {number}")).time_limit(PATIENCE);
        for schedule in &schedules {
            let count = count.clone();
            instance = instance.on(schedule.clone(), move |_| {
                count.fetch_add(1, Ordering::Relaxed);
                async { Ok::<_, Infallible>(()) }
            });
        }
        let (start, count) = (start.clone(), count.clone());
        tasks.spawn(harness::task(async move {
            start.wait().await;
            let running = instance.start().await.unwrap();
            eventually("all are claimed", || async { count.load(Ordering::Relaxed) >= SCHEDULES }).await;
            sleep(5 * SHORT).await;
            running.shutdown(PATIENCE).await
        }));
    }
    assert!(tasks.join_all().await.into_iter().all(|ended| ended));
    for number in 0..SCHEDULES {
        assert_eq!(told(&db, &format!("k{number}")).await, "S1");
    }
    assert_eq!(count.load(Ordering::Relaxed), SCHEDULES);
}

/// The job of a process: two schedules whose work is an effect in a table, one of them committed
/// with its tick.
pub async fn work<DB: TestDatabase>(pool: sqlx::Pool<DB>) {
    let plain = pool.clone();
    let schedule = |name| Schedule::every(name, 5 * SHORT).catch_up(CatchUp::All(1_000));
    let insert = |tick: &Tick<DB>| {
        let (name, slot, attempt) = (tick.name(), tick.slot().timestamp_millis(), tick.attempt());
        format!("INSERT INTO effect (name, slot, attempt) VALUES ('{name}', {slot}, {attempt})")
    };
    let schedules = Schedules::new(pool.clone()).lease(6 * SHORT).poll_interval(2 * SHORT);
    let schedules = schedules
        .on(schedule("plain"), move |tick: Tick<DB>| {
            let pool = plain.clone();
            async move {
                let mut conn = pool.acquire().await?;
                DB::execute_on(&mut conn, &insert(&tick)).await?;
                drop(conn);
                sleep(Duration::from_millis(fastrand::u64(0..200))).await;
                Ok::<_, sqlx::Error>(())
            }
        })
        .on(schedule("together"), move |tick: Tick<DB>| {
            let pool = pool.clone();
            async move {
                sleep(Duration::from_millis(fastrand::u64(0..200))).await;
                let sql = insert(&tick);
                let done = tick.transaction(&pool, |mut tx| {
                    let sql = sql.clone();
                    async move { DB::execute_on(&mut tx, &sql).await.map(drop) }
                });
                done.await
            }
        });
    let _running = schedules.start().await.unwrap();
    child::say("started");
    std::future::pending().await
}

/// Four processes run ticks; again and again one of them is killed and replaced.
async fn ticks_survive_processes_that_are_killed<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("CREATE TABLE effect (name VARCHAR(20) NOT NULL, slot BIGINT NOT NULL, attempt BIGINT NOT NULL)").await;
    let start = || child::start(&db, "tick", "", std::path::Path::new(""));
    let mut processes: Vec<_> = (0..4).map(|_| start()).collect();
    for kill in 0.. {
        // A machine with other work needs longer from one kill to the next for a run to succeed.
        sleep(Duration::from_millis(600 + 60 * kill)).await;
        assert!(kill < 50, "ten ticks of each have succeeded");
        if kill >= 12 && succeeded(&db, "plain").await >= 10 && succeeded(&db, "together").await >= 10 {
            break;
        }
        let victim = fastrand::usize(0..processes.len());
        processes[victim].kill().await.unwrap();
        processes[victim] = start();
    }
    for name in ["plain", "together"] {
        let reader = instance(&db, "reader");
        reader.pause(name).await.unwrap();
        eventually("the last run has ended", || async {
            !info(&db, name).await.running || info(&db, name).await.due < chrono::Utc::now() - 2 * SHORT
        })
        .await;
    }
    for mut process in processes {
        process.kill().await.unwrap();
    }
    for name in ["plain", "together"] {
        judge(&db, name).await;
    }
}

async fn succeeded<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> usize {
    runs(db, name).await.iter().filter(|run| run.status == RunStatus::Succeeded).count()
}

/// Each slot has one success, the attempts before it were lost or failed, and none is left out.
async fn judge<DB: TestDatabase>(db: &TestDb<DB>, name: &str) {
    let runs = runs(db, name).await;
    let mut attempts: HashMap<_, Vec<_>> = HashMap::new();
    for run in &runs {
        attempts.entry(run.slot).or_default().push((run.attempt, run.status));
    }
    let mut slots: Vec<_> = attempts.keys().copied().collect();
    slots.sort_unstable();
    assert!(slots.len() >= 10, "{name}: {runs:?}");
    assert!(
        slots.windows(2).all(|pair| pair[1] - pair[0] == chrono::TimeDelta::milliseconds(500)),
        "{name}: {slots:?}"
    );
    let open = info(db, name).await;
    for (slot, mut attempts) in attempts {
        attempts.sort_unstable_by_key(|attempt| attempt.0);
        let numbers: Vec<u32> = attempts.iter().map(|attempt| attempt.0).collect();
        assert_eq!(numbers, (1..=u32::try_from(numbers.len()).unwrap()).collect::<Vec<_>>(), "{name} {slot}: {runs:?}");
        let succeeded = attempts.iter().filter(|attempt| attempt.1 == RunStatus::Succeeded).count();
        let is_open = open.slot == slot;
        assert_eq!(succeeded, usize::from(!is_open), "{name} {slot}: {attempts:?}");
        let effects =
            format!("SELECT COUNT(*) FROM effect WHERE name = '{name}' AND slot = {}", slot.timestamp_millis());
        let effects = db.number(&effects).await.unwrap();
        if name == "together" {
            assert_eq!(effects, i64::from(!is_open), "exactly once: {slot}");
        } else {
            let begun = i64::try_from(attempts.len()).unwrap() + i64::from(is_open && open.running);
            assert!(effects >= i64::from(!is_open) && effects <= begun, "{slot}: {effects} of {attempts:?}");
        }
    }
}

/// Idle instances of a small and a large number of schedules send as many statements.
async fn the_cost_of_idling_is_that_of_the_looks<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    for count in [2, 2_000] {
        let mut schedules = Schedules::new(pool.clone()).share_pool().poll_interval(2 * SHORT);
        for number in 0..count {
            let schedule = Schedule::every(&format!("k{number}"), LONG);
            schedules = schedules.on(schedule, async |_| Ok::<_, Infallible>(()));
        }
        let running = schedules.start().await.unwrap();
        // The rows are read until the instance judges.
        sleep(40 * SHORT).await;
        let before = DB::statements(&pool).await.unwrap();
        sleep(50 * SHORT).await;
        let looks = DB::statements(&pool).await.unwrap() - before;
        // A pause is at least nine tenths of the interval. Once in thirty polls the rows are read.
        assert!((15..=32).contains(&looks), "{looks} looks in 25 intervals for {count} schedules");
        assert!(running.shutdown(PATIENCE).await);
    }
}

/// One claims, and one ends. Those that are due together are claimed together.
async fn a_run_takes_two_statements<DB: TestDatabase>(db: TestDb<DB>) {
    const RUNS: i64 = 30;
    let pool = db.pool_of(1).await;
    let mut schedules = Schedules::new(pool.clone()).share_pool().poll_interval(Duration::from_secs(60));
    for number in 0..RUNS {
        let schedule = due(&db, &format!("k{number}")).await;
        schedules = schedules.on(schedule, async |_| Ok::<_, Infallible>(()));
    }
    let before = DB::statements(&pool).await.unwrap();
    let running = schedules.start().await.unwrap();
    sleep(20 * SHORT).await;
    let sent = DB::statements(&pool).await.unwrap() - before;
    assert!(running.shutdown(PATIENCE).await);
    for number in 0..RUNS {
        assert_eq!(told(&db, &format!("k{number}")).await, "S1");
    }
    assert!((RUNS..=2 * RUNS).contains(&sent), "{sent} statements for {RUNS} runs");
}
