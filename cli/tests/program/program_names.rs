//! Names of semaphores and of read-write locks, which may have no row of their own.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired, eventually};
use serde_json::json;

use crate::program::Program as _;

harness::tests!(everywhere(
    a_semaphore_is_shown_with_its_permits,
    a_read_write_lock_is_shown_with_its_readers,
    a_refusal_by_the_queue_names_the_semaphore
));

async fn a_semaphore_is_shown_with_its_permits<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("node-1").build().unwrap().lease(Duration::from_secs(3600));
    let [one, _two, three] = ["s#1", "s#2", "s#3"].map(|key| (lock.clone(), key));
    acquired(one.0.try_acquire(one.1).await).release().await.unwrap();
    let _held = acquired(three.0.try_acquire(three.1).await);
    let _others = [acquired(lock.try_acquire("s#x").await), acquired(lock.try_acquire("s2#1").await)];
    let text = db.rowlock("show s", &[]).await.with(0).out;
    assert!(text.starts_with("s is the name of a semaphore: 1 permit is held\n\nKEY"), "{text}");
    assert!(text.contains("s#3") && text.contains("node-1"), "{text}");
    assert!(!text.contains("s#1") && !text.contains("s#x") && !text.contains("s2"), "{text}");
    let shown = db.show("s").await;
    assert_eq!((&shown["key"], &shown["readers"]), (&json!("s"), &json!([])));
    assert_eq!((&shown["permits"][0]["key"], &shown["permits"][0]["by"]), (&json!("s#3"), &json!("node-1")));
    assert_eq!(shown["permits"].as_array().unwrap().len(), 1);
    db.rowlock("show s#", &[]).await.with(75);
}

async fn a_read_write_lock_is_shown_with_its_readers<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("node-1").build().unwrap().lease(Duration::from_secs(3600));
    let both = lock.read_write("r");
    let _readers = [
        acquired(both.readers().acquire(Duration::ZERO).await),
        acquired(both.readers().acquire(Duration::ZERO).await),
    ];
    let text = db.rowlock("show r", &[]).await.with(0).out;
    assert!(text.contains("r is the name of a read-write lock: 2 readers\n\nKEY") && text.contains("r#r"), "{text}");
    assert_eq!(db.show("r").await["readers"].as_array().unwrap().len(), 2);
}

async fn a_refusal_by_the_queue_names_the_semaphore<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock_for(Duration::from_secs(3600)).try_acquire("s#1").await);
    let waiting = db.start("run s --permits 1 --fair --wait 10m -- true", &[]);
    let tickets = "SELECT COUNT(*) FROM t_resource_lock_queue";
    eventually("it waits", async || db.number(tickets).await == Some(1)).await;
    let refused = db.rowlock("run s --permits 1 --fair -- true", &[]).await.with(75);
    assert!(refused.err.starts_with("rowlock: refused: s: "), "{refused:?}");
    drop(waiting);
}
