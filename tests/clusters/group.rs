//! MySQL Group Replication with three primaries: the tests of Galera, and what a group does
//! differently. Sessions have the weakest consistency, `EVENTUAL`, unless a test says otherwise.

use std::{path::PathBuf, time::Duration};

use rowlock::{Attempt, Error, LeaseLock, Reason, errors::DatabaseFault};
use sqlx::mysql::MySqlPoolOptions;
use tokio::time::sleep;

use crate::{
    galera::{
        a_look_at_a_node_that_is_behind_lets_no_reader_in, a_node_that_is_behind_grants_nothing,
        a_session_that_waits_for_the_cluster_takes_no_lease_for_lost, no_key_is_held_twice_while_nodes_stop_and_return,
        no_permit_is_held_twice_and_no_two_lead_while_a_node_is_killed,
        no_reader_is_beside_a_writer_while_a_node_is_killed,
    },
    galera_order::{philosophers_on_all_nodes_eat, waiters_on_all_nodes_are_served_in_the_order_of_arrival},
    galera_transactions::{
        a_commit_that_the_cluster_refuses_is_tried_again_under_the_same_lease,
        a_commit_whose_node_is_killed_is_not_guessed, a_holder_that_another_node_took_over_from_cannot_commit,
        a_node_that_is_behind_does_not_decide_a_commit, no_update_is_lost_with_workers_on_all_nodes,
    },
    nodes::{Cluster, Trouble, Wandering},
    partition::a_cluster_without_a_majority_grants_nothing,
    ticks::{a_node_that_is_behind_makes_no_success_of_a_rollback, each_tick_runs_once_while_nodes_stop_and_return},
    watch::{Wanted, Watch, work},
};

crate::suite::tests!(GROUP(
    no_key_is_held_twice_while_nodes_stop_and_return,
    no_permit_is_held_twice_and_no_two_lead_while_a_node_is_killed,
    no_reader_is_beside_a_writer_while_a_node_is_killed,
    a_cluster_without_a_majority_grants_nothing,
    a_node_that_is_behind_grants_nothing,
    a_look_at_a_node_that_is_behind_lets_no_reader_in,
    a_session_that_waits_for_the_cluster_takes_no_lease_for_lost,
    waiters_on_all_nodes_are_served_in_the_order_of_arrival,
    philosophers_on_all_nodes_eat,
    no_update_is_lost_with_workers_on_all_nodes,
    a_commit_that_the_cluster_refuses_is_tried_again_under_the_same_lease,
    a_holder_that_another_node_took_over_from_cannot_commit,
    a_node_that_is_behind_does_not_decide_a_commit,
    a_commit_whose_node_is_killed_is_not_guessed,
    each_tick_runs_once_while_nodes_stop_and_return,
    a_node_that_is_behind_makes_no_success_of_a_rollback,
    of_claims_at_the_same_moment_one_is_granted,
    each_consistency_level_has_one_holder,
    a_reader_at_a_node_that_is_behind_waits_for_the_group,
    a_node_that_was_expelled_lets_no_reader_in
));

/// Row locks are known to one node only, so each node lets its own claim pass. Certification
/// refuses all but one.
async fn of_claims_at_the_same_moment_one_is_granted(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let locks = [1, 2, 3].map(|node| cluster.lock(node));
    let mut last = None;
    for round in 0..100 {
        let [one, two, three] = &locks;
        let attempts = tokio::join!(one.try_acquire("k"), two.try_acquire("k"), three.try_acquire("k"));
        let attempts = [attempts.0, attempts.1, attempts.2].map(|attempt| attempt.unwrap().acquired());
        let granted: Vec<_> = attempts.into_iter().flatten().collect();
        assert_eq!(granted.len(), 1, "{granted:?} in round {round}");
        for lease in granted {
            assert!(last < Some(lease.token()), "{lease:?} in round {round} after {last:?}");
            last = Some(lease.token());
            lease.release().await.unwrap();
        }
        cluster.caught_up().await;
    }
}

/// Workers at each node with each level.
async fn each_consistency_level_has_one_holder(folder: PathBuf) {
    const LEVELS: [&str; 5] = ["EVENTUAL", "BEFORE_ON_PRIMARY_FAILOVER", "BEFORE", "AFTER", "BEFORE_AND_AFTER"];
    let cluster = Cluster::new(folder).await;
    let (watch, mut workers) = (Watch::of(&cluster), Vec::new());
    for (place, level) in LEVELS.into_iter().cycle().take(15).enumerate() {
        let setting = format!("SET SESSION group_replication_consistency = '{level}'");
        let options = MySqlPoolOptions::new().max_connections(4).after_connect(move |conn, _| {
            let setting = sqlx::AssertSqlSafe(setting.clone());
            Box::pin(async move { sqlx::raw_sql(setting).execute(conn).await.map(drop) })
        });
        let lock = LeaseLock::new(options.connect_lazy(&cluster.urls[place % 3]).unwrap());
        workers.push(tokio::spawn(work(
            Wanted::Key(lock, &["one", "two", "three", "four"]),
            level.to_owned(),
            watch.clone(),
        )));
    }
    for level in LEVELS {
        watch.goes_on(level, "beside the others").await;
    }
    watch.end(workers).await;
    watch.tell("consistency levels");
    watch.assert_right();
}

/// The claim of a reader at a node that is behind is committed: no other client writes that row.
/// The look that follows it waits until the node knows of the writer.
async fn a_reader_at_a_node_that_is_behind_waits_for_the_group(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let [writers, readers] = [1, 2].map(|node| cluster.lock(node).read_write("k"));
    for lock in [&writers, &readers] {
        lock.writer().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
        lock.readers().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
        cluster.caught_up().await;
    }
    let behind = cluster.behind(2).await;
    let writer = writers.writer().try_acquire().await.unwrap().acquired().unwrap();
    let late = tokio::spawn(async move { readers.readers().try_acquire().await });
    sleep(Duration::from_secs(1)).await;
    assert!(!late.is_finished(), "{:?}", late.await);
    behind.over().await;
    assert_eq!(late.await.unwrap().unwrap().refused().unwrap().reason, Reason::Held);
    writer.release().await.unwrap();
}

/// A node that has been paused takes itself for a member of the group, until it hears of its
/// expulsion. A reader that claims at another node must not believe what it sees there.
async fn a_node_that_was_expelled_lets_no_reader_in(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    not_believed(&cluster, 1, Trouble::Pause).await;
}

/// Pauses a node or splits it off, lets a writer in at another one, and has a reader look at the
/// first, which goes on.
pub async fn not_believed(cluster: &Cluster, last: usize, trouble: Trouble) {
    let last_url = &cluster.urls[last - 1];
    let wandering = Wandering::new(last_url);
    let readers = wandering.lock().read_write("k");
    readers.writer().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    readers.readers().try_acquire().await.unwrap().acquired().unwrap().release().await.unwrap();
    cluster.caught_up().await;
    cluster.trouble(last, trouble).await;
    let other = cluster.next_primary(last).await;
    let writers = cluster.lock(other).lease(Duration::from_secs(60)).read_write("k");
    let writer = writers.writer().acquire(Duration::from_secs(20)).await.unwrap();
    wandering.turn_to(&cluster.urls[other - 1], last_url).await;
    if trouble == Trouble::Pause {
        cluster.resume(last);
    } else {
        assert_eq!(cluster.held_at(last).await, Some(0), "it knows nothing of the writer");
    }
    let late = readers.readers().try_acquire().await;
    println!("at a node that was expelled: {late:?}");
    match late {
        Ok(Attempt::Acquired(reader)) => panic!("{reader:?} beside {writer:?}"),
        Err(Error::Database(DatabaseFault::TimedOut { .. })) => {}
        // A node that was paused soon knows that it is no member.
        Ok(Attempt::Refused(refusal)) if trouble == Trouble::Pause => assert_eq!(refusal.reason, Reason::Held),
        Err(error) if trouble == Trouble::Pause => assert!(error.is_retryable(), "{error:?}"),
        other => panic!("{other:?}"),
    }
    cluster.start(last).await;
    let late = readers.readers().try_acquire().await;
    println!("once it is a member again: {late:?}");
    match late {
        Ok(Attempt::Refused(refusal)) => assert_eq!(refusal.reason, Reason::Held),
        Err(Error::Database(DatabaseFault::ReadOnly { .. })) => {}
        other => panic!("{other:?} beside {writer:?}"),
    }
    writer.release().await.unwrap();
}
