//! Exclusion on a cluster: the first client to commit holds the key, whichever nodes the others
//! use. `group` runs these tests too.

use std::{path::PathBuf, time::Duration};

use rowlock::{Error, LeaseLock, Reason};
use sqlx::mysql::MySqlPoolOptions;
use tokio::time::sleep;

use crate::{
    nodes::{Cluster, Kind, Wandering, pool},
    relay::Relay,
    watch::{Wanted, Watch, lead, share, work},
};

crate::suite::tests!(GALERA(
    no_key_is_held_twice_while_nodes_stop_and_return,
    no_permit_is_held_twice_and_no_two_lead_while_a_node_is_killed,
    no_reader_is_beside_a_writer_while_a_node_is_killed,
    a_node_that_is_behind_grants_nothing,
    a_look_at_a_node_that_is_behind_lets_no_reader_in,
    a_session_that_waits_for_the_cluster_takes_no_lease_for_lost
));

const KEYS: [&str; 3] = ["one", "two", "three"];
const LEASE: Duration = Duration::from_secs(3);

/// Two workers at each node, and two behind a balancer that may send each connection to another
/// node. One node is asked to stop, another is killed, and each restarts.
pub async fn no_key_is_held_twice_while_nodes_stop_and_return(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let relay = Relay::before(&cluster.urls).await;
    let watch = Watch::of(&cluster);
    let mut workers = Vec::new();
    for place in 0..8 {
        let (who, lock) = match place % 4 {
            0 => ("balanced".to_owned(), LeaseLock::new(pool(&relay.url(&cluster.urls[0])))),
            node => (format!("node {node}"), cluster.lock(node)),
        };
        let lock = lock.lease(LEASE);
        workers.push(tokio::spawn(work(Wanted::Key(lock, &KEYS), who, watch.clone())));
    }
    sleep(Duration::from_secs(3)).await;
    for (node, trouble) in cluster.troubles() {
        cluster.trouble(*node, *trouble).await;
        sleep(LEASE).await;
        watch.goes_on("node 1", &format!("without node {node}")).await;
        cluster.start(*node).await;
        watch.goes_on(&format!("node {node}"), "when it is there again").await;
    }
    watch.end(workers).await;
    watch.tell(format!("{:?}", cluster.troubles()));
    watch.assert_right();
    for key in KEYS {
        for node in 1..=3 {
            let sql = format!("SELECT token FROM t_resource_lock WHERE key_resource = '{key}'");
            assert!(cluster.number(node, &sql).await >= watch.last(key), "node {node} has every claim on {key}");
        }
    }
}

/// Two workers and two candidates at each node. Half of the workers know of one permit less, as
/// while a change of their number is deployed.
pub async fn no_permit_is_held_twice_and_no_two_lead_while_a_node_is_killed(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let (watch, mut workers) = (Watch::of(&cluster), Vec::new());
    for place in 0..6 {
        let node = place % 3 + 1;
        let lock = cluster.lock(node).lease(LEASE);
        let semaphore = lock.semaphore("permits", if place < 3 { 2 } else { 3 });
        workers.push(tokio::spawn(work(Wanted::Permit(semaphore), format!("worker at {node}"), watch.clone())));
        let election = lock.election("leader");
        workers.push(tokio::spawn(lead(election, format!("candidate at {node}"), watch.clone())));
    }
    sleep(Duration::from_secs(3)).await;
    cluster.kill(3).await;
    sleep(LEASE).await;
    for who in ["worker at 1", "candidate at 1"] {
        watch.goes_on(who, "without node 3").await;
    }
    cluster.start(3).await;
    for who in ["worker at 3", "candidate at 3"] {
        watch.goes_on(who, "when it is there again").await;
    }
    watch.end(workers).await;
    watch.tell("permits and leaders, a node killed");
    watch.assert_right();
    let granted: Vec<String> = watch.keys().into_iter().collect();
    assert_eq!(granted, ["leader", "permits#1", "permits#2", "permits#3"]);
}

/// A reader and a writer at each node, and behind a balancer, where a claim and the look that
/// follows it may be sent to different nodes.
pub async fn no_reader_is_beside_a_writer_while_a_node_is_killed(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let relay = Relay::before(&cluster.urls).await;
    let (watch, mut workers) = (Watch::of(&cluster), Vec::new());
    for place in ["1", "2", "3", "any"] {
        let lock = match place.parse() {
            Ok(node) => cluster.lock(node),
            Err(_) => LeaseLock::new(pool(&relay.url(&cluster.urls[0]))),
        };
        let lock = lock.lease(LEASE).read_write("shared");
        workers.push(tokio::spawn(share(lock.clone(), false, format!("reader at {place}"), watch.clone())));
        workers.push(tokio::spawn(share(lock, true, format!("writer at {place}"), watch.clone())));
    }
    sleep(Duration::from_secs(3)).await;
    cluster.kill(3).await;
    sleep(LEASE).await;
    for who in ["reader at 1", "writer at 2"] {
        watch.goes_on(who, "without node 3").await;
    }
    cluster.start(3).await;
    for who in ["reader at 3", "writer at 3"] {
        watch.goes_on(who, "when it is there again").await;
    }
    watch.end(workers).await;
    watch.tell("readers and writers, a node killed");
    watch.assert_right();
}

/// As behind a balancer: the reader claims at one node, and looks at another, which sees the name
/// as free. The look waits until that node knows of the writer.
pub async fn a_look_at_a_node_that_is_behind_lets_no_reader_in(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let writers = cluster.lock(1).read_write("k");
    let wandering = Wandering::new(&cluster.urls[0]);
    let readers = wandering.lock().read_write("k");
    writers.writer().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    readers.readers().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    cluster.caught_up().await;
    let behind = cluster.behind(2).await;
    let writer = writers.writer().try_acquire().await.unwrap().acquired().unwrap();
    wandering.turn_to(&cluster.urls[0], &cluster.urls[1]).await;
    let late = tokio::spawn(async move { readers.readers().try_acquire().await });
    sleep(Duration::from_secs(1)).await;
    assert!(is_free_at(&cluster, 2).await && !late.is_finished(), "the node does not know of the writer");
    behind.over().await;
    assert_eq!(late.await.unwrap().unwrap().refused().unwrap().reason, Reason::Held);
    writer.release().await.unwrap();
}

/// The node sees the key as free. Its claim must still be certified after the claim that was
/// committed first. A Galera node certifies it once it knows of that claim. A member of a group
/// refuses it at once, as often as it is tried.
pub async fn a_node_that_is_behind_grants_nothing(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let [first, second] = [1, 2].map(|node| cluster.lock(node));
    for lock in [&first, &second] {
        lock.try_acquire("k").await.unwrap().acquired().unwrap().release().await.unwrap();
        cluster.caught_up().await;
    }
    let behind = cluster.behind(2).await;
    let lease = first.try_acquire("k").await.unwrap().acquired().unwrap();
    let late = tokio::spawn(async move { second.try_acquire("k").await });
    match cluster.kind {
        Kind::Galera => {
            sleep(Duration::from_secs(1)).await;
            assert!(is_free_at(&cluster, 2).await && !late.is_finished(), "the node does not know of the claim");
            behind.over().await;
            assert_eq!(late.await.unwrap().unwrap().refused().unwrap().reason, Reason::Held);
        }
        Kind::Group => {
            assert_eq!(late.await.unwrap().unwrap().refused().unwrap().reason, Reason::Busy);
            assert!(is_free_at(&cluster, 2).await, "the node does not know of the claim");
            behind.over().await;
        }
    }
    lease.release().await.unwrap();
}

/// The state on the node at this moment.
async fn is_free_at(cluster: &Cluster, node: usize) -> bool {
    let sql = "SELECT lock_flag = 0 FROM t_resource_lock WHERE key_resource = 'k'";
    sqlx::query_scalar(sql).fetch_one(&cluster.pools[node - 1]).await.unwrap()
}

/// As behind a balancer: the claim is made at one node, and its release is sent to another.
pub async fn a_session_that_waits_for_the_cluster_takes_no_lease_for_lost(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    assert!(matches!(released_behind(&cluster, "hasty", false).await, Err(Error::Lost { .. })));
    released_behind(&cluster, "patient", true).await.unwrap();
}

async fn released_behind(cluster: &Cluster, key: &str, waits: bool) -> Result<(), Error> {
    let setting = cluster.kind.waits(waits);
    let there = MySqlPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .after_connect(move |conn, _| Box::pin(async move { sqlx::raw_sql(setting).execute(conn).await.map(drop) }));
    let pool = there.connect(&cluster.urls[0]).await.unwrap();
    let lock = LeaseLock::builder(pool.clone()).share_pool().build().unwrap();
    let behind = cluster.behind(2).await;
    let lease = lock.try_acquire(key).await.unwrap().acquired().unwrap();
    pool.set_connect_options(cluster.urls[1].parse().unwrap());
    pool.acquire().await.unwrap().close().await.unwrap();
    let release = tokio::spawn(lease.release());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(!release.is_finished(), waits);
    behind.over().await;
    cluster.execute("DELETE FROM obstacle").await;
    release.await.unwrap()
}
