//! Schedules while servers stop: instances with a tick each second, whose work is committed
//! together with its tick, and what the table of runs and the effects show in the end.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use harness::TestDatabase;
use rowlock::{
    Schedule, Schedules, Tick,
    admin::RunStatus,
    jobs::{CatchUp, Running, TickOutcome},
};
use sqlx::{Connection as _, MySql, Pool};
use tokio::time::{Instant, sleep};

use crate::nodes::{Cluster, Kind, Trouble, Wandering};

crate::suite::tests!(GALERA(
    each_tick_runs_once_while_nodes_stop_and_return,
    a_node_that_is_behind_makes_no_success_of_a_rollback
));

/// How many schedules there are.
const COUNT: usize = 5;
const LEASE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(90);

/// Two instances at each node. One node is asked to stop, another is killed, and each restarts.
pub async fn each_tick_runs_once_while_nodes_stop_and_return(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    cluster.execute(TABLE).await;
    let pools: Vec<_> = cluster.pools.iter().chain(&cluster.pools).cloned().collect();
    let ticking = Ticking::start(&pools).await;
    sleep(Duration::from_secs(4)).await;
    // A group with one primary has the other troubles (`group_primary`).
    let all = cluster.kind == Kind::Galera;
    for (node, trouble) in cluster.troubles().iter().filter(|(_, trouble)| all || *trouble == Trouble::Kill) {
        cluster.trouble(*node, *trouble).await;
        sleep(LEASE).await;
        ticking.goes_on(&cluster.pools[0]).await;
        cluster.start(*node).await;
        ticking.goes_on(&cluster.pools[node - 1]).await;
    }
    ticking.ends(&cluster.pools[0], "nodes stopped and killed").await;
    cluster.caught_up().await;
    for node in [2, 3] {
        judged(&cluster.pools[node - 1], "the same at another node").await;
    }
}

/// As behind a balancer: the end of a run is sent to a node that does not know of its claim, and
/// then to one that does. The work ended its tick in a transaction that was rolled back.
pub async fn a_node_that_is_behind_makes_no_success_of_a_rollback(folder: PathBuf) {
    let cluster = Arc::new(Cluster::new(folder).await);
    let wandering = Arc::new(Wandering::new(&cluster.urls[0]));
    let work = {
        let (cluster, wandering) = (cluster.clone(), wandering.clone());
        move |tick: Tick<MySql>| rolled_back(cluster.clone(), wandering.clone(), tick)
    };
    let schedule = Schedule::every("s", Duration::from_secs(1));
    let schedules = Schedules::new(wandering.pool.clone()).share_pool().on(schedule, work);
    let behind = cluster.behind(2).await;
    let since = Instant::now();
    while matches!(schedules.try_tick("s").await.unwrap(), TickOutcome::NotDue { .. }) {
        assert!(since.elapsed() < PATIENCE, "the tick does not come");
        sleep(Duration::from_millis(50)).await;
    }
    behind.over().await;
    let successes = "SELECT COUNT(*) FROM t_resource_schedule_run WHERE status = 'S'";
    assert_eq!(cluster.number(1, successes).await, 0);
}

async fn rolled_back(cluster: Arc<Cluster>, wandering: Arc<Wandering>, tick: Tick<MySql>) -> Result<(), String> {
    let mut tx = cluster.pools[0].begin().await.unwrap();
    tick.finish_in(&mut tx).await.unwrap();
    tx.rollback().await.unwrap();
    wandering.turn_to(&cluster.urls[1], &cluster.urls[0]).await;
    Err("rolled back".to_owned())
}

/// The application's table: a row for each tick whose work was committed.
pub const TABLE: &str =
    "CREATE TABLE tick_done (name varchar(20) NOT NULL, slot bigint NOT NULL, run varchar(36) PRIMARY KEY)";

/// Instances that run the same schedules.
pub struct Ticking(Vec<Running>);

impl Ticking {
    /// Starts an instance on each pool.
    pub async fn start<DB: TestDatabase>(pools: &[Pool<DB>]) -> Self {
        let mut running = Vec::new();
        for pool in pools {
            running.push(schedules(pool).start().await.unwrap());
        }
        Self(running)
    }

    /// Waits until each schedule has caught up with the latest.
    pub async fn goes_on<DB: TestDatabase>(&self, pool: &Pool<DB>) {
        let (since, mut target) = (Instant::now(), None);
        loop {
            let listed = Schedules::new(pool.clone()).list().await;
            if let Ok(all) = &listed {
                let latest = all.iter().map(|schedule| schedule.slot).max();
                target = target.or(latest);
                if all.len() == COUNT && all.iter().all(|schedule| Some(schedule.slot) > target) {
                    return;
                }
            }
            assert!(since.elapsed() < PATIENCE, "the schedules do not go on to {target:?}: {listed:#?}");
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Lets all instances end, and judges what they did.
    pub async fn ends<DB: TestDatabase>(self, pool: &Pool<DB>, what: &str) {
        self.goes_on(pool).await;
        for running in self.0 {
            running.shutdown(PATIENCE).await;
        }
        judged(pool, what).await;
    }
}

fn schedules<DB: TestDatabase>(pool: &Pool<DB>) -> Schedules<DB> {
    let mut schedules = Schedules::new(pool.clone()).lease(LEASE).time_limit(Duration::from_secs(2));
    for number in 0..COUNT {
        let pause = Duration::from_millis(100);
        let schedule = Schedule::every(&format!("s{number}"), Duration::from_secs(1));
        let schedule = schedule.catch_up(CatchUp::All(1_000)).retry(1_000, pause..10 * pause);
        let pool = pool.clone();
        schedules = schedules.on(schedule, move |tick| work(pool.clone(), tick));
    }
    schedules
}

/// The work and its tick are committed together. Each run has a connection of its own, because one
/// that the pool keeps may lead to a primary that has retired.
async fn work<DB: TestDatabase>(pool: Pool<DB>, tick: Tick<DB>) -> Result<(), sqlx::Error> {
    sleep(Duration::from_millis(fastrand::u64(5..200))).await;
    let mut conn = pool.acquire().await?;
    conn.close_on_drop();
    let mut tx = conn.begin().await?;
    let (name, slot, run) = (tick.name(), tick.slot().timestamp(), uuid::Uuid::new_v4());
    let line = format!("INSERT INTO tick_done VALUES ('{name}', {slot}, '{run}')");
    DB::execute_on(&mut tx, &line).await?;
    tick.finish_in(&mut tx).await.map_err(|error| sqlx::Error::Protocol(error.to_string()))?;
    tx.commit().await
}

/// Every slot from the first to the last has succeeded once, with one effect.
async fn judged<DB: TestDatabase>(pool: &Pool<DB>, what: &str) {
    let (mut ticks, mut others, mut latest) = (0, BTreeMap::new(), Duration::ZERO);
    for number in 0..COUNT {
        let name = format!("s{number}");
        let mut successes: BTreeMap<i64, usize> = BTreeMap::new();
        for run in Schedules::new(pool.clone()).history(&name, 100_000).await.unwrap() {
            if run.status == RunStatus::Succeeded {
                *successes.entry(run.slot.timestamp()).or_default() += 1;
                latest = latest.max((run.began - run.slot).to_std().unwrap_or_default());
            } else {
                *others.entry(format!("{:?}", run.status)).or_insert(0) += 1;
            }
        }
        let (first, last) = (*successes.keys().next().unwrap(), *successes.keys().next_back().unwrap());
        for slot in first..=last {
            assert_eq!(successes.get(&slot), Some(&1), "{what}: {name} at {slot}");
            let effects = format!("SELECT COUNT(*) FROM tick_done WHERE name = '{name}' AND slot = {slot}");
            assert_eq!(DB::number(pool, &effects).await, Some(1), "{what}: {name} at {slot}");
        }
        ticks += last - first + 1;
        let effects = format!("SELECT COUNT(*) FROM tick_done WHERE name = '{name}'");
        assert_eq!(DB::number(pool, &effects).await, Some(last - first + 1), "{what}: {name}");
    }
    println!("{what}: {ticks} ticks, each once; the latest began {latest:?} after its time; other runs: {others:?}");
    assert!(ticks >= 10, "{what}: only {ticks} ticks");
}
