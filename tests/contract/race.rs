//! Contention between processes rather than tasks.

use std::time::Duration;

use harness::{TestDatabase, TestDb, refused};
use rowlock::{Attempt, Reason};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Child,
    time::{sleep, timeout},
};

use crate::child::{self, VICTIMS_LEASE};

harness::tests!(
    everywhere(sixteen_processes_create_the_same_key_once),
    everywhere.each(a_killed_process_is_replaced_within_its_lease),
    everywhere.each(a_counter_stays_exact_with_eight_processes_on_two_keys)
);

const PATIENCE: Duration = Duration::from_secs(60);

async fn a_counter_stays_exact_with_eight_processes_on_two_keys<DB: TestDatabase>(db: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let mut processes = Vec::new();
    let files = ["one", "two"].map(|key| (key, folder.path().join(key)));
    for (key, file) in &files {
        std::fs::write(file, "0").unwrap();
        processes.extend((0..4).map(|_| child::start(&db, "count", key, file)));
    }
    for mut process in processes {
        assert!(timeout(PATIENCE, process.wait()).await.unwrap().unwrap().success());
    }
    for (_, file) in &files {
        assert_eq!(std::fs::read_to_string(file).unwrap(), "40");
    }
}

async fn sixteen_processes_create_the_same_key_once<DB: TestDatabase>(db: TestDb<DB>) {
    let folder = tempfile::tempdir().unwrap();
    let signal = folder.path().join("start");
    let mut processes: Vec<(Child, _)> = (0..16)
        .map(|_| {
            let mut process = child::start(&db, "create", "k", &signal);
            let lines = BufReader::new(process.stdout.take().unwrap()).lines();
            (process, lines)
        })
        .collect();
    for (_, lines) in &mut processes {
        assert_eq!(timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().as_deref(), Some("ready"));
    }
    std::fs::write(&signal, "").unwrap();
    let mut answers = Vec::new();
    for (_, lines) in &mut processes {
        answers.push(timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap());
    }
    answers.sort();
    let winners = answers.iter().filter(|answer| *answer == "acquired").count();
    assert_eq!(winners, 1, "{answers:?}");
    assert!(answers.iter().all(|answer| ["acquired", "held", "busy"].contains(&answer.as_str())), "{answers:?}");
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(1));
}

async fn a_killed_process_is_replaced_within_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let mut holder = child::start(&db, "hold", "k", std::path::Path::new(""));
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let token: i64 = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap().parse().unwrap();
    let lock = db.lock();
    // The holder renews: after two leases it still holds the key.
    sleep(2 * VICTIMS_LEASE).await;
    assert_eq!(refused(lock.try_acquire("k").await).reason, Reason::Held);
    holder.kill().await.unwrap();
    // A renewal that was in flight may extend the claim after the first refusal.
    let mut refusals = 0;
    let next = loop {
        match lock.try_acquire("k").await.unwrap() {
            Attempt::Acquired(lease) => break lease,
            Attempt::Refused(refusal) => {
                let left = refusal.retry_after.unwrap();
                refusals += 1;
                assert!(left <= VICTIMS_LEASE && refusals <= 2, "{refusals} refusals, the last one for {left:?}");
                sleep(left).await;
            }
        }
    };
    let prior = next.taken_over_from().unwrap();
    assert_eq!((prior.token.get(), prior.label.as_str()), (token, "victim"));
    assert!(next.token() > prior.token);
}
