//! What is kept of the changes that operators make: how much of it is read, and for how long it is
//! kept.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired};
use rowlock::Status;

use crate::ticks::reader;

harness::tests!(everywhere(no_more_changes_are_read_than_were_asked_for, a_change_of_a_moment_ago_is_not_forgotten));

const HOUR: Duration = Duration::from_secs(3600);

/// Releases the key by force.
async fn released<DB: TestDatabase>(db: &TestDb<DB>, key: &str) {
    acquired(db.lock().try_acquire(key).await).detach();
    db.lock().force_release(key, Status::Failed).await.unwrap().unwrap();
}

/// The names of the last changes, of a key or of all, the newest first.
async fn names<DB: TestDatabase>(db: &TestDb<DB>, key: Option<&str>, limit: u32) -> Vec<String> {
    db.lock().changes(key, limit).await.unwrap().into_iter().map(|change| change.name).collect()
}

async fn no_more_changes_are_read_than_were_asked_for<DB: TestDatabase>(db: TestDb<DB>) {
    for key in ["a", "b", "a", "c", "a"] {
        released(&db, key).await;
    }
    assert_eq!(names(&db, None, 2).await, ["a", "c"]);
    assert_eq!(names(&db, Some("a"), 2).await, ["a", "a"]);
    assert_eq!(names(&db, None, 9).await, ["a", "c", "a", "b", "a"]);
}

async fn a_change_of_a_moment_ago_is_not_forgotten<DB: TestDatabase>(db: TestDb<DB>) {
    released(&db, "old").await;
    released(&db, "new").await;
    let old = format!("UPDATE t_resource_change SET at = {} WHERE name = 'old'", DB::ago(2 * 3_600_000));
    assert_eq!(db.execute(&old).await, 1);
    reader(&db).forget_history(3 * HOUR).await.unwrap();
    assert_eq!(names(&db, None, 9).await, ["new", "old"]);
    reader(&db).forget_history(HOUR).await.unwrap();
    assert_eq!(names(&db, None, 9).await, ["new"]);
}
