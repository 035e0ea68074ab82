//! Transactions under a lease on a cluster, which may refuse a COMMIT (Galera with error 1213, a
//! group with 3101). `group` runs these tests too.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use rowlock::{
    Error, LeaseLock, Retry, RunError, Status, Tx,
    errors::{Certainty, DatabaseFault, TransactionFault},
};
use sqlx::MySql;
use tokio::time::sleep;

use crate::{
    nodes::{Cluster, Kind, pool, pool_of},
    relay::Relay,
};

crate::suite::tests!(GALERA(
    no_update_is_lost_with_workers_on_all_nodes,
    a_commit_that_the_cluster_refuses_is_tried_again_under_the_same_lease,
    a_holder_that_another_node_took_over_from_cannot_commit,
    a_node_that_is_behind_does_not_decide_a_commit,
    a_commit_whose_node_is_killed_is_not_guessed
));

const PERSISTENT: Retry = Retry { attempts: 100_000, within: Duration::from_secs(120) };

/// Reads, and writes a value computed from what it read: only exclusion keeps the balance exact.
async fn pay(mut tx: Tx<MySql>) -> Result<(), sqlx::Error> {
    let balance: i64 = sqlx::query_scalar("SELECT balance FROM account WHERE id = 1").fetch_one(&mut *tx).await?;
    sqlx::query("UPDATE account SET balance = ? WHERE id = 1").bind(balance + 1).execute(&mut *tx).await?;
    let token = tx.claim().token.get();
    sqlx::query("INSERT INTO payment (token) VALUES (?)").bind(token).execute(&mut *tx).await?;
    Ok(())
}

pub async fn paid(cluster: &Cluster) -> (i64, i64) {
    let balance = cluster.number(1, "SELECT balance FROM account WHERE id = 1").await;
    (balance, cluster.number(1, "SELECT COUNT(*) FROM payment").await)
}

pub async fn no_update_is_lost_with_workers_on_all_nodes(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let mut workers = Vec::new();
    for place in 0..6 {
        let lock = cluster.lock(place % 3 + 1).retry(PERSISTENT);
        workers.push(tokio::spawn(async move {
            for _ in 0..10 {
                lock.transaction("account", pay).await.unwrap();
            }
        }));
    }
    for worker in workers {
        worker.await.unwrap();
    }
    assert_eq!(paid(&cluster).await, (60, 60));
}

/// Another program writes the same row of the application at another node, and commits first.
pub async fn a_commit_that_the_cluster_refuses_is_tried_again_under_the_same_lease(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let lock = cluster.lock(1).min_interval(Duration::from_secs(3600));
    let (runs, other) = (Arc::new(AtomicU32::new(0)), cluster.pools[1].clone());
    let work = |tx| {
        let (runs, other) = (runs.clone(), other.clone());
        async move {
            pay(tx).await?;
            if runs.fetch_add(1, SeqCst) == 0 {
                sqlx::raw_sql("UPDATE account SET balance = balance + 100 WHERE id = 1").execute(&other).await?;
            }
            Ok::<_, sqlx::Error>(())
        }
    };
    lock.transaction("account", work).await.unwrap();
    assert_eq!(runs.load(SeqCst), 2, "the lease stands, so its minimum interval is no obstacle");
    assert_eq!(paid(&cluster).await, (101, 1));
}

pub async fn a_holder_that_another_node_took_over_from_cannot_commit(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let (first, second) = (cluster.lock(1), cluster.lock(2));
    let lock = first.retry(Retry { attempts: 1, within: Duration::from_secs(10) });
    let work = |tx| {
        let second = second.clone();
        async move {
            pay(tx).await?;
            // The row is locked at this node alone.
            second.force_release("account", Status::Succeeded).await.unwrap();
            second.try_acquire("account").await.unwrap().acquired().unwrap().detach();
            Ok::<_, sqlx::Error>(())
        }
    };
    let error = lock.transaction("account", work).await.unwrap_err();
    let expected = match cluster.kind {
        Kind::Galera => matches!(error, RunError::Other(Error::Conflict { .. })),
        // The COMMIT of a group's member fails with an error that leaves its outcome open, and the
        // row that would tell is the next holder's.
        Kind::Group => matches!(
            error,
            RunError::Other(Error::Conflict { .. } | Error::Transaction(TransactionFault::CommitUnknown { .. }))
        ),
    };
    assert!(expected, "{error:?}");
    assert_eq!(paid(&cluster).await, (0, 0));
}

/// Behind a balancer the query for the outcome of a COMMIT reaches another node. That node has the
/// claim, and does not have the COMMIT yet.
pub async fn a_node_that_is_behind_does_not_decide_a_commit(folder: PathBuf) {
    let cluster = Arc::new(Cluster::new(folder).await);
    let relay = Arc::new(Relay::before(&cluster.urls[..1]).await);
    let lock = LeaseLock::new(pool_of(&relay.url(&cluster.urls[0]), 1)).retry(PERSISTENT);
    let (behind, mut is_behind) = tokio::sync::mpsc::channel(1);
    let transaction = tokio::spawn({
        let (cluster, relay) = (cluster.clone(), relay.clone());
        let runs = Arc::new(AtomicU32::new(0));
        let work = move |tx| {
            let (cluster, relay, behind) = (cluster.clone(), relay.clone(), behind.clone());
            let first = runs.fetch_add(1, SeqCst) == 0;
            async move {
                pay(tx).await?;
                if first {
                    cluster.caught_up().await;
                    behind.send(cluster.behind(2).await).await.unwrap();
                    relay.lose_a_commit();
                }
                Ok::<_, sqlx::Error>(())
            }
        };
        async move { lock.transaction("account", work).await }
    });
    relay.lost().await;
    relay.turn_to(&cluster.urls[1..2]);
    relay.open();
    sleep(Duration::from_secs(1)).await;
    is_behind.recv().await.unwrap().over().await;
    transaction.await.unwrap().unwrap();
    assert_eq!(paid(&cluster).await, (1, 1), "asked once, done once");
}

/// Every COMMIT is known to be done or not done, or is reported as unknown.
pub async fn a_commit_whose_node_is_killed_is_not_guessed(folder: PathBuf) {
    let cluster = Cluster::new(folder).await;
    let relay = Relay::before(&cluster.urls[2..]).await;
    let lock = LeaseLock::builder(pool(&relay.url(&cluster.urls[2]))).time_limit(Duration::from_secs(20)).build();
    let done = Arc::new(AtomicI64::new(0));
    let worker = tokio::spawn(payments(cluster.kind, lock.unwrap(), done.clone(), |done| done < 200));
    while done.load(SeqCst) < 50 {
        sleep(Duration::from_millis(1)).await;
    }
    relay.turn_to(&cluster.urls[..2]);
    cluster.kill(3).await;
    let unknown: i64 = worker.await.unwrap();
    let (balance, payments) = paid(&cluster).await;
    cluster.start(3).await;
    println!("200 commits, {unknown} in doubt, a balance of {balance}, {payments} payments");
    // Of a transaction that the node undid without an error, either statement may stand.
    for count in [balance, payments] {
        assert!((200..=200 + unknown).contains(&count), "200 and {unknown} in doubt, but {count}");
    }
    assert!(unknown > 0 || balance == payments, "a balance of {balance}, {payments} payments");
}

/// Pays as long as it is wanted, and counts. Returns the number of payments whose outcome is
/// unknown.
pub async fn payments(kind: Kind, lock: LeaseLock<MySql>, done: Arc<AtomicI64>, wanted: impl Fn(i64) -> bool) -> i64 {
    let lock = lock.retry(PERSISTENT);
    let mut unknown = 0;
    while wanted(done.load(SeqCst)) {
        match lock.transaction("account", pay).await {
            Ok(()) => drop(done.fetch_add(1, SeqCst)),
            Err(RunError::Other(Error::Transaction(TransactionFault::CommitUnknown { .. }))) => unknown += 1,
            // A node undid it for another node's, while a statement was prepared, and told no
            // error.
            Err(RunError::Other(Error::Transaction(TransactionFault::Over { .. }))) if kind == Kind::Galera => {
                unknown += 1
            }
            // The connection was lost within the work, and so was the server that has the count of
            // confirmations. The work commits nothing by itself.
            Err(RunError::Other(Error::Transaction(TransactionFault::Over {
                outcome: Certainty::Unknown, ..
            }))) => {}
            // The member of a group is not the primary, or not yet.
            Err(RunError::Other(Error::Database(DatabaseFault::ReadOnly { .. }))) if kind == Kind::Group => {}
            Err(RunError::Other(error)) if error.is_retryable() => {}
            Err(RunError::Work(_)) => {} // its own statement failed, and it was rolled back
            Err(error) => panic!("{error:?}"),
        }
    }
    unknown
}
