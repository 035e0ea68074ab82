//! Exclusion on a Galera cluster: the first client to commit holds the key, whichever nodes the
//! others use.

use std::{path::PathBuf, time::Duration};

use rowlock::{Error, LeaseLock, Reason, Status};
use sqlx::{AssertSqlSafe, mysql::MySqlPoolOptions};
use tokio::time::sleep;

use crate::{
    nodes::{Cluster, pool},
    relay::Relay,
    watch::{Watch, work},
};

const KEYS: [&str; 3] = ["one", "two", "three"];
const LEASE: Duration = Duration::from_secs(3);

/// Two workers at each node, and two behind a balancer that may send each connection to another
/// node. One node is asked to stop, another is killed, and each restarts.
pub async fn no_key_is_held_twice_while_nodes_stop_and_return(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let relay = Relay::before(&cluster.urls).await;
    let watch = Watch::default();
    let mut workers = Vec::new();
    for place in 0..8 {
        let (who, lock) = match place % 4 {
            0 => ("balanced".to_owned(), LeaseLock::new(pool(&relay.url(&cluster.urls[0])))),
            node => (format!("node {node}"), cluster.lock(node)),
        };
        let lock = lock.lease(LEASE).unwrap();
        workers.push(tokio::spawn(work(lock, who, &KEYS, watch.clone())));
    }
    sleep(Duration::from_secs(3)).await;
    for node in [2, 3] {
        if node == 2 {
            cluster.stop(node).await
        } else {
            cluster.kill(node).await
        }
        sleep(LEASE).await;
        watch.goes_on("node 1", &format!("without node {node}")).await;
        cluster.start(node).await;
        watch.goes_on(&format!("node {node}"), "when it is there again").await;
    }
    watch.end(workers).await;
    watch.tell("a node stopped, a node killed");
    watch.assert_right();
    for key in KEYS {
        for node in 1..=3 {
            let sql = format!("SELECT token FROM t_resource_lock WHERE key_resource = '{key}'");
            assert!(cluster.number(node, &sql).await >= watch.last(key), "node {node} has every claim on {key}");
        }
    }
}

/// The node sees the key as free. Its claim must still be certified after the claim that was
/// committed first.
pub async fn a_node_that_is_behind_grants_nothing(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let [first, second] = [1, 2].map(|node| cluster.lock(node));
    for lock in [&first, &second] {
        lock.try_acquire("k").await.unwrap().acquired().unwrap().release(Status::Succeeded).await.unwrap();
        cluster.caught_up().await;
    }
    let behind = cluster.behind(2).await;
    let lease = first.try_acquire("k").await.unwrap().acquired().unwrap();
    let late = tokio::spawn(async move { second.try_acquire("k").await });
    sleep(Duration::from_secs(1)).await;
    assert!(is_free_at(&cluster, 2).await && !late.is_finished(), "the node does not know of the claim");
    behind.over().await;
    assert_eq!(late.await.unwrap().unwrap().refused().unwrap().reason, Reason::Held);
    lease.release(Status::Succeeded).await.unwrap();
}

/// The state on the node at this moment.
async fn is_free_at(cluster: &Cluster, node: usize) -> bool {
    let sql = "SELECT lock_flag = 0 FROM t_resource_lock WHERE key_resource = 'k'";
    sqlx::query_scalar(sql).fetch_one(&cluster.pools[node - 1]).await.unwrap()
}

/// As behind a balancer: the claim is made at one node, and its release is sent to another.
pub async fn a_session_that_waits_for_the_cluster_takes_no_lease_for_lost(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    assert!(matches!(released_behind(&cluster, "hasty", 0).await, Err(Error::Lost { .. })));
    released_behind(&cluster, "patient", 3).await.unwrap();
}

async fn released_behind(cluster: &Cluster, key: &str, sync_wait: u32) -> Result<(), Error> {
    let there = MySqlPoolOptions::new().max_connections(1).test_before_acquire(false).after_connect(move |conn, _| {
        let setting = AssertSqlSafe(format!("SET SESSION wsrep_sync_wait = {sync_wait}"));
        Box::pin(async move { sqlx::raw_sql(setting).execute(conn).await.map(drop) })
    });
    let pool = there.connect(&cluster.urls[0]).await.unwrap();
    let lock = LeaseLock::new(pool.clone()).share_pool();
    let behind = cluster.behind(2).await;
    let lease = lock.try_acquire(key).await.unwrap().acquired().unwrap();
    pool.set_connect_options(cluster.urls[1].parse().unwrap());
    pool.acquire().await.unwrap().close().await.unwrap();
    let release = tokio::spawn(lease.release(Status::Succeeded));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(release.is_finished(), sync_wait == 0);
    behind.over().await;
    cluster.execute("DELETE FROM obstacle").await;
    release.await.unwrap()
}
