//! Waiting on a cluster: in order, and for several keys. `group` runs these tests too.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{sleep, timeout};

use crate::{nodes::Cluster, watch::Watch};

crate::suite::tests!(GALERA(waiters_on_all_nodes_are_served_in_the_order_of_arrival, philosophers_on_all_nodes_eat));

const MINUTE: Duration = Duration::from_secs(60);

/// The waiters arrive at longer intervals than the delay of a node in this test.
pub async fn waiters_on_all_nodes_are_served_in_the_order_of_arrival(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let holder = cluster.lock(1).try_acquire("k").await.unwrap().acquired().unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for number in 0..9 {
        let lock = cluster.lock(3 - number % 3).fair(true);
        let served = served.clone();
        waiters.push(tokio::spawn(async move {
            let lease = lock.acquire("k", MINUTE).await.unwrap();
            served.lock().unwrap().push((number, lease.token()));
            lease.release().await.unwrap();
        }));
        places(&cluster, i64::try_from(number).unwrap() + 1).await;
    }
    holder.release().await.unwrap();
    for waiter in waiters {
        timeout(MINUTE, waiter).await.unwrap().unwrap();
    }
    let served = served.lock().unwrap();
    let numbers: Vec<usize> = served.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..9).collect::<Vec<_>>());
    assert!(served.is_sorted_by(|(_, one), (_, next)| one < next), "{served:?}");
}

/// Waits until all nodes show this number of tickets.
async fn places(cluster: &Cluster, count: i64) {
    while cluster.number(1, "SELECT COUNT(*) FROM t_resource_lock_queue").await < count {
        sleep(Duration::from_millis(10)).await;
    }
    for node in [2, 3] {
        assert_eq!(cluster.number(node, "SELECT COUNT(*) FROM t_resource_lock_queue").await, count);
    }
}

/// Each philosopher needs two forks at once, and its neighbours use other nodes. All of them eat,
/// and no fork is held twice.
pub async fn philosophers_on_all_nodes_eat(folder: PathBuf) {
    const FORKS: [&str; 6] = ["fork 0", "fork 1", "fork 2", "fork 3", "fork 4", "fork 5"];
    const MEALS: usize = 8;
    let cluster = Cluster::new(folder).await;
    let watch = Watch::of(&cluster);
    let mut table = Vec::new();
    for seat in 0..6 {
        let lock = cluster.lock(seat % 3 + 1).fair(seat >= 3);
        let watch = watch.clone();
        table.push(tokio::spawn(async move {
            let (forks, who) = ([FORKS[seat], FORKS[(seat + 1) % 6]], format!("seat {seat}"));
            for _ in 0..MEALS {
                let set = lock.acquire_all(forks, MINUTE).await.unwrap();
                for fork in forks {
                    watch.enter(fork, set.token(fork).unwrap().get(), &who);
                }
                sleep(Duration::from_millis(5)).await;
                for fork in forks {
                    watch.leave(fork);
                }
                set.release().await.unwrap();
            }
        }));
    }
    for seat in table {
        timeout(2 * MINUTE, seat).await.unwrap().unwrap();
    }
    watch.assert_right();
}
