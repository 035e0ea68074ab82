//! What one instance runs at the same time, beside others, and for how long it holds what it runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use harness::{PATIENCE, TestDatabase, TestDb, eventually};
use rowlock::{Error, LeaseLock, Schedule, Schedules, Tick, admin::ScheduleInfo};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    ticks::{LONG, SHORT, back, due, info, instance, reader, told},
    ticks_ended::{hanging, is_no_longer_renewed},
};

harness::tests!(everywhere(
    a_group_runs_no_more_than_its_limit,
    runs_of_an_instance_whose_place_is_taken_count,
    work_that_has_blocked_a_thread_leaves_its_place_at_once,
    a_group_needs_a_limit,
    a_schedule_has_a_lease_of_its_own,
    an_instance_leaves_a_part_to_others,
    a_tick_of_a_test_is_one_of_the_tables
));

/// Work that goes on until it is told to end.
#[derive(Clone)]
struct Gate {
    open: watch::Sender<bool>,
    inside: Arc<AtomicUsize>,
}

impl Gate {
    fn closed() -> Self {
        Self { open: watch::Sender::new(false), inside: Arc::default() }
    }

    fn inside(&self) -> usize {
        self.inside.load(Ordering::SeqCst)
    }

    fn add_to<DB: TestDatabase>(&self, schedules: Schedules<DB>, schedule: Schedule) -> Schedules<DB> {
        let gate = self.clone();
        schedules.on(schedule, move |_: Tick<DB>| {
            let (gate, mut opened) = (gate.clone(), gate.open.subscribe());
            async move {
                let _inside = Inside::enter(gate.inside);
                opened.wait_for(|opened| *opened).await.map(drop).unwrap();
                Ok::<_, &str>(())
            }
        })
    }
}

/// A run whose work has begun, and has not ended or been dropped.
struct Inside(Arc<AtomicUsize>);

impl Inside {
    fn enter(all: Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::SeqCst);
        Self(all)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn listed<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<ScheduleInfo> {
    reader(db).list().await.unwrap()
}

async fn a_group_runs_no_more_than_its_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let (group, others) = (Gate::closed(), Gate::closed());
    let mut schedules = instance(&db, "one").poll_interval(SHORT / 10).max_concurrent_runs_in("group", 2);
    for number in 0..5 {
        let of_group = due(&db, &format!("of group {number}")).await.group("group");
        schedules = group.add_to(schedules, of_group);
        schedules = others.add_to(schedules, due(&db, &format!("other {number}")).await);
    }
    let running = schedules.start().await.unwrap();
    let all_run = eventually("they run", || async { (group.inside(), others.inside()) == (2, 5) });
    if timeout(PATIENCE / 2, all_run).await.is_err() {
        let (inside, rows) = ((group.inside(), others.inside()), listed(&db).await);
        panic!("two of the group and all others run: {inside:?} {rows:#?}");
    }
    sleep(5 * SHORT).await;
    assert_eq!(group.inside(), 2);
    // The room of a run that ends is taken by the next one.
    group.open.send_replace(true);
    for number in 0..5 {
        let name = format!("of group {number}");
        eventually("it runs", || async { told(&db, &name).await.ends_with("S1") }).await;
    }
    others.open.send_replace(true);
    assert!(running.shutdown(PATIENCE).await);
}

/// As when a program reads its schedules anew while one of them runs.
async fn runs_of_an_instance_whose_place_is_taken_count<DB: TestDatabase>(db: TestDb<DB>) {
    for in_group in [false, true] {
        let gate = Gate::closed();
        let [first, second] = ["first", "second"].map(|name| format!("{name} {in_group}"));
        let one = |schedules: Schedules<DB>| match in_group {
            true => schedules.max_concurrent_runs_in("group", 1),
            false => schedules.max_concurrent_runs(1),
        };
        let of = async |name: &str| {
            let schedule = due(&db, name).await;
            if in_group { schedule.group("group") } else { schedule }
        };
        let before = gate.add_to(one(instance(&db, "one")), of(&first).await).start().await.unwrap();
        eventually("the first runs", || async { gate.inside() == 1 }).await;
        // The first is gone from the application. The instance polls when it has a place, or late.
        let late = one(instance(&db, "one").poll_interval(Duration::from_secs(3600)));
        let schedules = gate.add_to(late, of(&second).await).in_place_of(&before);
        let running = schedules.start().await.unwrap();
        let ends = harness::spawn(before.shutdown(PATIENCE));
        // An instance that may run one more claims the second at once.
        sleep(5 * SHORT).await;
        assert!(!listed(&db).await.iter().any(|row| row.name == second && row.running), "{second} is claimed");
        gate.open.send_replace(true);
        assert!(ends.await.unwrap());
        eventually("the second has run", || async { told(&db, &second).await.ends_with("S1") }).await;
        assert!(running.shutdown(PATIENCE).await);
    }
}

/// Its run was over before. An instance without a place does not poll, and looks at each beat.
async fn work_that_has_blocked_a_thread_leaves_its_place_at_once<DB: TestDatabase>(db: TestDb<DB>) {
    let (schedules, begun, hangs) = hanging(&db).await;
    let schedules = schedules.poll_interval(Duration::from_secs(3600)).max_concurrent_runs(1);
    let running = schedules.start().await.unwrap();
    let is_begun = async |times| eventually("it is begun", async || begun.load(Ordering::Relaxed) == times).await;
    is_begun(1).await;
    is_no_longer_renewed(&db).await;
    let beat = async || {
        let instances = reader(&db).instances().await.unwrap();
        instances.into_iter().find(|instance| !instance.calls).unwrap().beat
    };
    let before = beat().await;
    eventually("it beats", async || beat().await > before).await;
    let last = beat().await;
    hangs.store(false, Ordering::Relaxed);
    is_begun(2).await;
    assert_eq!(beat().await, last);
    assert!(running.shutdown(PATIENCE).await);
}

async fn a_group_needs_a_limit<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::every("k", LONG).group("imports");
    let error = Gate::closed().add_to(instance(&db, "one"), schedule).start().await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("max_concurrent_runs_in"), "{error}");
    let idle = Gate::closed().add_to(instance(&db, "one"), Schedule::every("k", LONG));
    let error = idle.max_concurrent_runs_in("import", 2).start().await.unwrap_err();
    assert!(matches!(error, Error::Invalid(_)) && error.to_string().contains("import"), "{error}");
    for wrong in [0, 10_001] {
        let checked = instance(&db, "one").max_concurrent_runs_in("imports", wrong).check();
        assert!(checked.is_err_and(|fault| fault.to_string().contains("10,000")), "{wrong}");
    }
}

async fn a_schedule_has_a_lease_of_its_own<DB: TestDatabase>(db: TestDb<DB>) {
    let (gate, lease, of_all) = (Gate::closed(), 20 * SHORT, Duration::from_secs(3_600));
    let short = due(&db, "short").await.lease(lease).exclusive_with("key");
    let schedules = gate.add_to(instance(&db, "one").lease(of_all), short);
    let running = gate.add_to(schedules, due(&db, "of all").await).start().await.unwrap();
    eventually("both run", || async { gate.inside() == 2 }).await;
    // It is renewed.
    sleep(2 * lease).await;
    let left = |row: &ScheduleInfo| (row.due - row.now).to_std().unwrap();
    let (short, other) = (info(&db, "short").await, info(&db, "of all").await);
    assert!(left(&short) <= lease && short.attempt == 1, "{short:?}");
    assert!(left(&other) > of_all / 2, "{other:?}");
    let key = LeaseLock::new(db.pool.clone()).inspect("key").await.unwrap().unwrap();
    assert!((key.until.unwrap() - key.now).to_std().unwrap() <= lease, "{key:?}");
    gate.open.send_replace(true);
    assert!(running.shutdown(PATIENCE).await);
    for wrong in [Duration::from_millis(99), LONG] {
        assert!(Schedule::every("k", LONG).lease(wrong).check().is_err());
    }
}

/// Of twenty ticks that are due together, an instance that knows of another one claims ten, and the
/// others after a pause that grows with its runs. The other one is busy.
async fn an_instance_leaves_a_part_to_others<DB: TestDatabase>(db: TestDb<DB>) {
    let gate = Gate::closed();
    let schedules = |label: &str, most| {
        let mut schedules = instance(&db, label).poll_interval(SHORT).max_concurrent_runs(most);
        for number in 0..21 {
            schedules = gate.add_to(schedules, Schedule::every(&format!("k{number:02}"), LONG));
        }
        schedules
    };
    let busy = schedules("busy", 1).start().await.unwrap();
    back(&db, "k20", LONG).await;
    eventually("it is busy", || async { gate.inside() == 1 }).await;
    let other = schedules("other", 32).start().await.unwrap();
    let reader = instance(&db, "reader");
    eventually("it knows of the other one", || async {
        let instances = reader.instances().await.unwrap();
        instances.iter().any(|instance| instance.label == "other" && instance.beat - instance.since > A_BEAT)
    })
    .await;
    let set = "UPDATE t_resource_schedule SET due_at = slot WHERE name <> 'k20'";
    for number in 0..20 {
        let slot = format!("slot = {}, due_at = {}", DB::ago(1_000), DB::ago(-3_600_000));
        db.execute(&format!("UPDATE t_resource_schedule SET {slot} WHERE name = 'k{number:02}'")).await;
    }
    db.execute(set).await;
    eventually("all run", || async { gate.inside() == 21 }).await;
    let rows = listed(&db).await;
    let mut began: Vec<_> = rows.iter().filter(|row| row.by == "other").map(|row| row.since.unwrap()).collect();
    began.sort();
    assert_eq!(began.len(), 20);
    let pause = (began[10] - began[9]).to_std().unwrap();
    assert!(pause >= Duration::from_millis(10), "the second ten come later than the first: {pause:?}");
    gate.open.send_replace(true);
    assert!(busy.shutdown(PATIENCE).await && other.shutdown(PATIENCE).await);
}

/// More than the pause between two beats of an instance that polls after [`SHORT`].
const A_BEAT: chrono::TimeDelta = chrono::TimeDelta::milliseconds(350);

async fn a_tick_of_a_test_is_one_of_the_tables<DB: TestDatabase>(db: TestDb<DB>) {
    let schedule = Schedule::cron("report", "30 2 * * *");
    let at = |day: u32| format!("2024-02-{day}T02:30:00Z").parse().unwrap();
    for day in [28, 29] {
        let tick = Tick::for_test(&db.pool, &schedule, at(day)).await.unwrap();
        assert_eq!((tick.name(), tick.slot(), tick.attempt(), tick.missed()), ("report", at(day), 1, 0));
        let running = Tick::for_test(&db.pool, &schedule, at(10)).await.unwrap_err();
        assert!(running.to_string().contains("under way"), "{running}");
        tick.transaction(&db.pool, async |_| Ok::<_, sqlx::Error>(())).await.unwrap();
    }
    assert_eq!(told(&db, "report").await, "S1 S1");
    let again = Tick::for_test(&db.pool, &schedule, at(29)).await.unwrap_err();
    assert!(again.to_string().contains("there was a run"), "{again}");
    let ahead = Tick::for_test(&db.pool, &schedule, "2999-01-01T02:30:00Z".parse().unwrap()).await.unwrap_err();
    assert!(ahead.to_string().contains("has passed"), "{ahead}");
    let none = Tick::for_test(&db.pool, &schedule, "2024-02-20T02:31:00Z".parse().unwrap()).await.unwrap_err();
    assert!(none.to_string().contains("the next one is at 2024-02-21 02:30:00"), "{none}");
    let exclusive = schedule.clone().exclusive_with("key");
    let exclusive = Tick::for_test(&db.pool, &exclusive, at(12)).await.unwrap_err();
    assert!(exclusive.to_string().contains("run_now"), "{exclusive}");
    instance(&db, "operator").pause("report").await.unwrap();
    let paused = Tick::for_test(&db.pool, &schedule, at(11)).await.unwrap_err();
    assert!(paused.to_string().contains("paused"), "{paused}");
}
