//! Nodes that go on and do not hear each other. The side that has no majority grants nothing.

use std::{path::PathBuf, time::Duration};

use tokio::{task::JoinHandle, time::sleep};

use crate::{
    nodes::Cluster,
    watch::{Wanted, Watch, work},
};

crate::suite::tests!(GALERA(
    no_key_is_held_twice_while_a_node_is_partitioned_away,
    a_cluster_without_a_majority_grants_nothing
));

const KEYS: [&str; 2] = ["one", "two"];
pub const LEASE: Duration = Duration::from_secs(3);

/// Two workers at each node.
pub fn workers(cluster: &Cluster, watch: &Watch) -> Vec<JoinHandle<()>> {
    let worker = |place: usize| {
        let node = place % 3 + 1;
        let lock = cluster.lock(node).lease(LEASE);
        tokio::spawn(work(Wanted::Key(lock, &KEYS), format!("node {node}"), watch.clone()))
    };
    (0..6).map(worker).collect()
}

async fn go_on(watch: &Watch) {
    for node in 1..=3 {
        watch.goes_on(&format!("node {node}"), "when all nodes hear each other").await;
    }
}

/// The others go on, while the clients of one node stay connected to it.
pub async fn no_key_is_held_twice_while_a_node_is_partitioned_away(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let watch = Watch::of(&cluster);
    let workers = workers(&cluster, &watch);
    go_on(&watch).await;
    cluster.silence(3).await;
    cluster.goes_on_without(3).await;
    watch.goes_on("node 1", "without node 3").await;
    let before = watch.entered("node 3");
    sleep(2 * LEASE).await;
    watch.goes_on("node 2", "without node 3").await;
    assert_eq!(watch.entered("node 3"), before, "node 3 has granted a key");
    cluster.unite().await;
    go_on(&watch).await;
    watch.end(workers).await;
    watch.tell("a node partitioned away");
    watch.assert_right();
}

/// Each node is alone. A claim that a node accepts then, and that is committed once they hear each
/// other again, has no holder and ends with its lease.
pub async fn a_cluster_without_a_majority_grants_nothing(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let watch = Watch::of(&cluster);
    let workers = workers(&cluster, &watch);
    go_on(&watch).await;
    cluster.silence(2).await;
    cluster.silence(3).await;
    cluster.lost_majority(1).await;
    let entered = || [1, 2, 3].map(|node| watch.entered(&format!("node {node}")));
    let before = entered();
    sleep(3 * LEASE).await;
    assert_eq!(entered(), before, "a node has granted a key");
    cluster.unite().await;
    go_on(&watch).await;
    watch.end(workers).await;
    watch.tell("no majority");
    watch.assert_right();
}
