//! `rowlock doctor`: what it finds, and what it advises.

use harness::{DIRECT, TestDatabase, TestDb, direct_url};
use serde_json::Value;

use crate::program::{Ended, Program as _, at, ended};

harness::tests!(
    everywhere(a_healthy_database_has_no_problem, what_is_missing_is_named),
    sqlite(a_database_that_only_reads_is_a_problem, a_file_without_wal_is_noted_with_the_modes_that_may_lose_it),
    servers(a_server_out_of_reach_is_a_problem, a_table_that_is_locked_is_a_problem),
    servers[DIRECT](rights_that_are_missing_are_named, the_advice_for_a_connection_depends_on_its_error),
    postgres[DIRECT](
        a_search_path_that_leads_nowhere_is_a_problem,
        a_migration_without_the_right_to_create_a_table_fails
    )
);

async fn doctor(url: &str) -> Ended {
    ended(at(url, "doctor --json --connect-timeout 2s", &[])).await
}

fn result<'a>(found: &'a Value, check: &str) -> &'a Value {
    let mut checks = found["checks"].as_array().unwrap().iter();
    checks.find(|of| of["check"] == check).unwrap_or_else(|| panic!("no {check}: {found}"))
}

async fn a_healthy_database_has_no_problem<DB: TestDatabase>(db: TestDb<DB>) {
    let healthy = db.rowlock("doctor --json", &[]).await.with(0);
    let found = healthy.json();
    assert_eq!(found["healthy"], true);
    let checks: Vec<&str> =
        found["checks"].as_array().unwrap().iter().map(|of| of["check"].as_str().unwrap()).collect();
    for check in [
        "connection",
        "server",
        "place",
        "tables of locks",
        "tables of schedules",
        "rights to claim",
        "rights to queue",
        "rights to schedule",
        "rights to record runs",
        "rights to announce instances",
        "rights to keep times",
        "clock",
        "time zones",
    ] {
        assert!(checks.contains(&check), "{check}: {found}");
        assert_eq!(result(&found, check)["result"], "ok", "{found}");
    }
    let server = result(&found, "server")["found"].as_str().unwrap().to_owned();
    let name = match db.server.name {
        "postgres" => "PostgreSQL 1",
        "mysql" => "MySQL",
        "mariadb" => "MariaDB",
        _ => "SQLite 3",
    };
    assert!(server.contains(name), "{server}");
    let binary_log = ["mysql", "mariadb"].contains(&db.server.name);
    assert_eq!(checks.contains(&"binary log"), binary_log, "{found}");
    if db.server.name == "postgres" {
        let works = result(&found, "notifications");
        if direct_url().is_some() {
            assert_eq!(works["result"], "note", "behind a pooler: {found}");
        } else {
            assert_eq!((&works["result"], &works["advice"]), (&"ok".into(), &Value::Null), "{works}");
            assert!(!checks.contains(&"pooler"), "{found}");
        }
    }
    let text = db.rowlock("doctor", &[]).await.with(0).out;
    assert!(text.contains("ok") && text.contains(&server) && !text.contains("problem"), "{text}");
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0), "nothing is changed");
}

/// The journal modes MEMORY and OFF belong to a connection and are not stored in the file.
async fn a_file_without_wal_is_noted_with_the_modes_that_may_lose_it<DB: TestDatabase>(db: TestDb<DB>) {
    let pool = db.pool_of(1).await;
    db.pool.close().await;
    for mode in ["DELETE", "MEMORY", "OFF"] {
        DB::execute(&pool, &format!("PRAGMA journal_mode = {mode}")).await.unwrap();
        let found = db.rowlock("doctor --json", &[]).await.with(0).json();
        let journal = result(&found, "journal");
        let advice = journal["advice"].as_str().unwrap();
        assert_eq!((&journal["result"], &journal["found"]), (&"note".into(), &"DELETE".into()), "{mode}: {found}");
        assert!(advice.contains("MEMORY or OFF") && advice.contains("a crash may then destroy the file"), "{journal}");
    }
    DB::execute(&pool, "PRAGMA journal_mode = WAL").await.unwrap();
    let found = db.rowlock("doctor --json", &[]).await.with(0).json();
    let journal = result(&found, "journal");
    assert_eq!((&journal["result"], &journal["found"]), (&"ok".into(), &"WAL".into()), "{found}");
    assert_eq!(journal["advice"], Value::Null, "{found}");
    let found = doctor("sqlite::memory:").await.with(78).json();
    let journal = result(&found, "journal");
    assert_eq!((&journal["result"], &journal["found"]), (&"ok".into(), &"MEMORY".into()), "{found}");
}

async fn what_is_missing_is_named<DB: TestDatabase>(db: TestDb<DB>) {
    let problem = async |check: &str, says: &str| {
        let ended = db.rowlock("doctor --json", &[]).await.with(78);
        let found = ended.json();
        let of = result(&found, check);
        assert_eq!((&found["healthy"], &of["result"]), (&false.into(), &"problem".into()), "{of}");
        assert!(of["found"].as_str().unwrap().contains(says), "{says}: {of}");
        assert!(of["advice"].as_str().unwrap().contains("run `rowlock migrate` once"), "{of}");
    };
    db.execute("DROP TABLE t_resource_change").await;
    problem("tables of schedules", "t_resource_change, or a part of it, is missing").await;
    let found = db.rowlock("doctor --json", &[]).await.with(78).json();
    let rights = result(&found, "rights to record changes");
    assert!(
        rights["result"] == "problem" && rights["advice"].as_str().unwrap().starts_with("run `rowlock migrate`"),
        "{rights}"
    );
    db.execute("ALTER TABLE t_resource_schedule RENAME COLUMN paused TO pasued").await;
    let listed = db.rowlock("schedules", &[]).await.with(78);
    assert!(listed.err.starts_with("rowlock: t_resource_schedule, or another one of schedules lacks"), "{listed:?}");
    assert!(listed.err.contains("paused") && listed.err.contains("run `rowlock migrate` once"), "{listed:?}");
    db.execute("DROP TABLE t_resource_schedule").await;
    problem("tables of schedules", "do not exist").await;
    db.execute("ALTER TABLE t_resource_lock RENAME COLUMN confirms TO confrims").await;
    problem("tables of locks", "lacks confirms").await;
    db.execute("DROP TABLE t_resource_lock").await;
    problem("tables of locks", "t_resource_lock does not exist").await;
    let text = db.rowlock("doctor", &[]).await.with(78).out;
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("run `rowlock migrate` once")).collect();
    assert_eq!((lines.len(), text.matches("problem").count()), (2, 2), "{text}");
    db.rowlock("migrate", &[]).await.with(0);
    db.rowlock("doctor", &[]).await.with(0);
}

async fn a_search_path_that_leads_nowhere_is_a_problem<DB: TestDatabase>(db: TestDb<DB>) {
    let found = doctor(&format!("{}?options[search_path]=nowhere", db.url)).await.with(78).json();
    assert_eq!(result(&found, "place")["result"], "problem", "{found}");
}

/// A statement of the program's own would wait for the other transaction.
async fn a_table_that_is_locked_is_a_problem<DB: TestDatabase>(db: TestDb<DB>) {
    let mut other = db.pool_of(1).await.acquire().await.unwrap();
    let (lock, unlock) = match db.server.name {
        "postgres" => ("BEGIN; LOCK TABLE t_resource_order", "ROLLBACK"),
        _ => ("LOCK TABLES t_resource_order WRITE", "UNLOCK TABLES"),
    };
    DB::execute_on(&mut other, lock).await.unwrap();
    let found = doctor(&db.url).await.with(78).json();
    DB::execute_on(&mut other, unlock).await.unwrap();
    let locked = result(&found, "rights to order");
    assert_eq!((&locked["result"], &locked["found"]), (&"problem".into(), &"no reply within 5s".into()), "{locked}");
    assert_eq!(result(&found, "clock")["result"], "ok", "the checks go on: {found}");
}

async fn a_migration_without_the_right_to_create_a_table_fails<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("DROP TABLE t_resource_order").await;
    let user = db.user("hunter2", &[("SELECT, INSERT, UPDATE", "ALL TABLES IN SCHEMA public")]).await;
    let denied = ended(at(&user.url, "migrate", &[])).await;
    user.remove(&db).await;
    let denied = denied.with(78);
    assert!(denied.out.contains("tables of schedules are missing, and could not be created"), "{denied:?}");
}

async fn a_database_that_only_reads_is_a_problem<DB: TestDatabase>(db: TestDb<DB>) {
    let url = db.url.split('?').next().unwrap();
    let found = doctor(&format!("{url}?mode=ro")).await.with(78).json();
    let rights = result(&found, "rights to claim");
    assert_eq!(
        (&rights["result"], result(&found, "clock")["found"].as_str()),
        (&"problem".into(), Some("this machine's"))
    );
    assert!(rights["found"].as_str().unwrap().starts_with("INSERT, UPDATE on t_resource_lock is denied"), "{rights}");
}

async fn a_server_out_of_reach_is_a_problem<DB: TestDatabase>(db: TestDb<DB>) {
    let (scheme, rest) = db.url.split_once("://").unwrap();
    let database = rest.split_once('/').unwrap().1;
    let ended = doctor(&format!("{scheme}://me:hunter2@127.0.0.1:1/{database}")).await.with(69);
    assert!(!ended.out.contains("hunter2") && ended.err.is_empty(), "{ended:?}");
    let found = ended.json();
    let connection = result(&found, "connection");
    assert_eq!((&found["healthy"], &connection["result"]), (&false.into(), &"problem".into()));
    assert!(connection["found"].as_str().unwrap().contains("at 127.0.0.1:1, database "), "{connection}");
    assert!(connection["advice"].as_str().unwrap().contains("check that the server runs"), "{connection}");
}

/// A user that may claim, but neither queue, nor schedule, nor delete.
async fn rights_that_are_missing_are_named<DB: TestDatabase>(db: TestDb<DB>) {
    let rights = [
        ("SELECT, INSERT, UPDATE", "t_resource_lock"),
        ("SELECT", "t_resource_lock_queue"),
        ("SELECT", "t_resource_schedule"),
        ("SELECT", "t_resource_schedule_instance"),
    ];
    let user = db.user("hunter2", &rights).await;
    let (limited, name) = (doctor(&user.url).await, user.name.clone());
    user.remove(&db).await;
    let limited = limited.with(78);
    assert!(!limited.out.contains("hunter2"), "{limited:?}");
    let found = limited.json();
    let claim = result(&found, "rights to claim");
    assert_eq!((&claim["result"], claim["advice"].as_str()), (&"note".into(), Some("only `rowlock forget` needs it")));
    let queue = result(&found, "rights to queue");
    let says = "INSERT, UPDATE, DELETE on t_resource_lock_queue is denied, which `--fair` needs";
    assert_eq!((&queue["result"], queue["found"].as_str()), (&"problem".into(), Some(says)));
    let grantee = if db.server.name == "postgres" { name } else { format!("`{name}`@`") };
    let grant = format!("GRANT INSERT, UPDATE, DELETE ON t_resource_lock_queue TO {grantee}");
    assert!(queue["advice"].as_str().unwrap().starts_with(&grant), "{queue}");
    let schedule = result(&found, "rights to schedule");
    assert!(schedule["found"].as_str().unwrap().starts_with("INSERT, UPDATE on t_resource_schedule is"), "{found}");
    for (check, says) in [
        ("rights to announce instances", "INSERT, UPDATE, DELETE on t_resource_schedule_instance is denied"),
        ("rights to keep times", "SELECT, INSERT, UPDATE on t_resource_schedule_times is denied"),
    ] {
        assert!(result(&found, check)["found"].as_str().unwrap().starts_with(says), "{found}");
    }
}

async fn the_advice_for_a_connection_depends_on_its_error<DB: TestDatabase>(db: TestDb<DB>) {
    let (scheme, rest) = db.url.split_once("://").unwrap();
    let (user, address) = rest.rsplit_once('@').unwrap();
    let server = address.split('/').next().unwrap();
    // A server may trust every password, but it knows no such user.
    let stranger = "rowlock_stranger:hunter2";
    for (url, advice) in [
        (format!("{scheme}://{user}@no-such-host.invalid/db"), "no address is known for the host"),
        (format!("{scheme}://{user}@127.0.0.1:1/db"), "no program listens there"),
        (format!("{scheme}://{user}@{server}/rowlock_absent"), "create the database"),
        (format!("{scheme}://{stranger}@{address}"), "the user or the password"),
    ] {
        let ended = doctor(&url).await.with(69);
        let found = ended.json();
        let connection = result(&found, "connection");
        assert!(connection["advice"].as_str().unwrap().contains(advice), "{connection}");
        assert!(!ended.out.contains("hunter2") && !ended.out.contains(" at line "), "{ended:?}");
        let list = crate::program::ended(at(&url, "list", &[])).await.with(69);
        assert!(list.err.contains(advice) && !list.err.contains(" at line "), "{list:?}");
    }
}
