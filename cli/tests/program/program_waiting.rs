//! How many wait for a key: `list` and `show`.

use harness::{DIRECT, TestDatabase, TestDb, acquired, eventually};
use serde_json::Value;

use crate::program::{Program as _, at, ended, rowlock};

harness::tests!(
    everywhere(those_that_wait_in_order_are_counted),
    postgres[DIRECT](keys_are_listed_without_the_queue),
    sqlite(help_says_what_is_listed_and_shows_a_file_of_jobs)
);

async fn those_that_wait_in_order_are_counted<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    acquired(db.lock().try_acquire("other").await).abandon().await.unwrap();
    assert_eq!(db.show("k").await["waiting"], 0);
    let waiters = [db.start("run k --fair --wait 10m -- true", &[]), db.start("run k --fair --wait 10m -- true", &[])];
    eventually("both wait", async || db.show("k").await["waiting"] == 2).await;
    let list = db.rowlock("list --json", &[]).await.with(0).json();
    assert_eq!((&list[0]["waiting"], &list[1]["waiting"]), (&2.into(), &0.into()), "{list}");
    let cells = |line: &str| {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let table = db.rowlock("list", &[]).await.with(0).out;
    let rows: Vec<_> = table.lines().map(cells).collect();
    assert_eq!((rows[0][5].as_str(), rows[1][5].as_str(), rows[2][5].as_str()), ("WAITING", "2", "-"), "{table}");
    let shown = db.rowlock("show k", &[]).await.with(0).out;
    assert!(shown.lines().any(|line| cells(line) == ["WAITING", "2"]), "{shown}");
    drop(waiters);
}

/// A user that may read the keys, but not the queue.
async fn keys_are_listed_without_the_queue<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let user = db.user("hunter2", &[("SELECT", "t_resource_lock")]).await;
    let as_user = async |words: &str| ended(at(&user.url, words, &[])).await;
    let (list, shown) = (as_user("list --json").await, as_user("show k --json").await);
    user.remove(&db).await;
    let (list, keys) = (list.err.clone(), list.with(0).json());
    assert_eq!((&keys[0]["key"], &keys[0]["waiting"]), (&"k".into(), &Value::Null));
    assert!(list.starts_with("rowlock: how many wait is not known: ") && list.lines().count() == 1, "{list}");
    assert!(!list.contains(" at line "), "{list}");
    assert_eq!(shown.with(0).json()["waiting"], Value::Null);
}

async fn help_says_what_is_listed_and_shows_a_file_of_jobs<DB: TestDatabase>(db: TestDb<DB>) {
    let help = async |words: &str| {
        ended(rowlock(words, &[])).await.with(0).out.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for words in ["list --help", "watch --help"] {
        let says = "Only keys that are claimed: held, expired, or held by another program";
        assert!(help(words).await.contains(says), "{words}: {}", help(words).await);
    }
    let cron = ended(rowlock("cron --help", &[])).await.with(0).out;
    let example: String = cron
        .lines()
        .skip_while(|line| !line.trim().starts_with("[nightly-report]"))
        .map(|line| format!("{}\n", line.trim()))
        .collect();
    let file = example.replace("/opt/app/report", "true");
    let stage = crate::program::Stage::new();
    std::fs::write(stage.file("jobs.toml"), &file).unwrap();
    let mut running = crate::program_cron::cron(&db, "", &stage.file("jobs.toml"));
    running.complains("jobs.toml: 1 job").await;
}
