//! MySQL Group Replication whose network is split, while all members go on and have clients.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{LeaseLock, Reason};
use tokio::time::{Instant, sleep};

use crate::{
    galera_transactions::{paid, payments},
    group::not_believed,
    nodes::{Cluster, Trouble, until},
    partition::{LEASE, no_key_is_held_twice_while_a_node_is_partitioned_away, workers},
    watch::Watch,
};

crate::suite::tests!(SWITCH(
    no_key_is_held_twice_while_a_node_is_partitioned_away,
    no_claim_is_lost_when_the_primary_is_split_off,
    a_primary_that_is_split_off_lets_no_reader_in
));

/// Longer than the group takes to replace its primary.
const HELD: Duration = Duration::from_secs(60);

/// Clients stay connected to each node. Those of the last primary get nothing but errors, while
/// those of the next one go on.
async fn no_claim_is_lost_when_the_primary_is_split_off(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    cluster.choose_primary(1).await;
    let held = cluster.lock(1).lease(HELD).try_acquire("held").await.unwrap().acquired().unwrap();
    let watch = Watch::of(&cluster);
    let workers = workers(&cluster, &watch);
    let over = Arc::new(AtomicBool::new(false));
    let payer = |node: usize| {
        let lock = LeaseLock::builder(cluster.pools[node - 1].clone()).time_limit(HELD / 4).build().unwrap();
        let (lock, done, over) = (lock.lease(LEASE), Arc::new(AtomicI64::new(0)), over.clone());
        (done.clone(), tokio::spawn(payments(cluster.kind, lock, done, move |_| !over.load(SeqCst))))
    };
    let (paid_first, first) = payer(1);
    watch.goes_on("node 1", "as the primary").await;
    until("there are payments", async || paid_first.load(SeqCst) > 5).await;
    let since = Instant::now();
    cluster.trouble(1, Trouble::Split).await;
    let next = cluster.next_primary(1).await;
    let replaced = since.elapsed();
    assert_eq!(cluster.lock(next).try_acquire("held").await.unwrap().refused().unwrap().reason, Reason::Held);
    assert!(held.is_held(), "the next primary answers too late");
    watch.goes_on(&format!("node {next}"), "as the next primary").await;
    println!("node {next} follows after {replaced:?}, and grants after {:?}", since.elapsed());
    let (paid_next, second) = payer(next);
    until("the next primary takes payments", async || paid_next.load(SeqCst) > 5).await;
    let count = || (watch.entered("node 1"), paid_first.load(SeqCst));
    let before = count();
    sleep(2 * LEASE).await;
    assert_eq!(count(), before, "the last primary has granted a key or committed a payment");
    let since = Instant::now();
    cluster.unite().await;
    println!("the last primary is a member again after {:?}", since.elapsed());
    watch.goes_on(&format!("node {next}"), "when the last primary is there again").await;
    over.store(true, SeqCst);
    watch.end(workers).await;
    let unknown = first.await.unwrap() + second.await.unwrap();
    watch.tell("the primary was split off");
    watch.assert_right();
    let (done, (balance, count)) = (paid_first.load(SeqCst) + paid_next.load(SeqCst), paid(&cluster).await);
    println!("{done} payments, {unknown} in doubt, a balance of {balance}");
    assert_eq!(balance, count);
    assert!((done..=done + unknown).contains(&balance), "{done} payments and {unknown} in doubt, but {balance}");
    let token = held.token();
    drop(held);
    cluster.choose_primary(1).await;
    let again = cluster.lock(1).acquire("held", HELD).await.unwrap();
    assert!(again.token() > token, "{again:?} after {token:?}");
    again.release().await.unwrap();
}

/// It answers reads from its old data for as long as the split lasts.
async fn a_primary_that_is_split_off_lets_no_reader_in(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    cluster.choose_primary(1).await;
    not_believed(&cluster, 1, Trouble::Split).await;
}
