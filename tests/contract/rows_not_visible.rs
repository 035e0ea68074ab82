//! A row that is created and never seen, because of the application's own triggers.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired};
use tokio::time::Instant;

harness::tests!(everywhere(a_row_that_vanishes_is_told_and_is_not_created_all_the_time));

/// Records each row that is created, and removes it. MySQL's triggers cannot delete the row: it
/// gets another key.
pub async fn vanishing<DB: TestDatabase>(db: &TestDb<DB>) {
    let sql: &[&str] = match db.server.name {
        "postgres" => &[
            "CREATE TABLE journal (of_key text)",
            "CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO journal VALUES (NEW.key_resource); DELETE FROM t_resource_lock WHERE key_resource = NEW.key_resource; RETURN NULL; END $$",
            "CREATE TRIGGER vanish AFTER INSERT ON t_resource_lock FOR EACH ROW EXECUTE FUNCTION vanish()",
        ],
        "sqlite" => &[
            "CREATE TABLE journal (of_key text)",
            "CREATE TRIGGER vanish AFTER INSERT ON t_resource_lock BEGIN INSERT INTO journal VALUES (NEW.key_resource); DELETE FROM t_resource_lock WHERE key_resource = NEW.key_resource; END",
        ],
        _ => &[
            "CREATE TABLE journal (of_key varchar(255))",
            "CREATE TRIGGER note AFTER INSERT ON t_resource_lock FOR EACH ROW INSERT INTO journal VALUES (NEW.key_resource)",
            "CREATE TRIGGER vanish BEFORE INSERT ON t_resource_lock FOR EACH ROW SET NEW.key_resource = UUID()",
        ],
    };
    for sql in sql {
        db.execute(sql).await;
    }
}

async fn a_row_that_vanishes_is_told_and_is_not_created_all_the_time<DB: TestDatabase>(db: TestDb<DB>) {
    vanishing(&db).await;
    for wait in [Duration::ZERO, Duration::MAX] {
        let limit = Duration::from_secs(2);
        let lock = db.builder().time_limit(limit).build().unwrap();
        let since = Instant::now();
        let error = lock.acquire("k", wait).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("\"k\"") && text.contains("not visible") && text.contains("trigger"), "{error:?}");
        assert!(!error.is_retryable());
        assert!(since.elapsed() < 3 * limit, "{:?}", since.elapsed());
    }
    let created = db.number("SELECT COUNT(*) FROM journal").await.unwrap();
    assert!((2..100).contains(&created), "{created} rows were created");
    let drop =
        if db.server.name == "postgres" { "DROP TRIGGER vanish ON t_resource_lock" } else { "DROP TRIGGER vanish" };
    db.execute(drop).await;
    acquired(db.lock().try_acquire("k").await);
}
