//! The program waits through an outage.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired};
use tokio::time::sleep;

use crate::{
    program::{Stage, Started, at, start},
    program_cron::{job, jobs},
};

harness::tests!(servers(
    the_program_waits_through_an_outage,
    a_cron_that_starts_before_its_database_waits_for_it,
    a_cron_reports_an_outage_once,
    what_all_runs_try_again_is_written_once_and_its_end_too,
    a_cron_that_waits_for_its_database_may_be_stopped
));

/// The time limit is the default, 5 s.
async fn the_program_waits_through_an_outage<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = acquired(db.lock().try_acquire("k").await);
    let proxy = db.proxy().await;
    let mut waiting = start(at(&proxy.url, "run k --wait 10m -vv -- echo", &["it runs"]));
    waiting.complains("refused").await;
    proxy.hold_everything();
    sleep(Duration::from_secs(8)).await;
    assert!(!waiting.is_over(), "{:?}", waiting.ended().await);
    holder.release().await.unwrap();
    proxy.cut();
    assert_eq!(waiting.ended().await.with(0).out, "it runs\n");
}

fn cron_at(stage: &Stage, url: &str) -> Started {
    let file = job(stage, "k", "after = \"1h\"", "echo it runs; sleep 1");
    start(at(url, "cron --connect-timeout 1s", &[file.to_str().unwrap()]))
}

/// The line that says so comes once, however often it tries.
async fn a_cron_that_starts_before_its_database_waits_for_it<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, proxy) = (Stage::new(), db.proxy().await);
    proxy.hold_everything();
    let mut cron = cron_at(&stage, &proxy.url);
    cron.complains("no reply within 1s; check that the server runs").await;
    cron.complains("trying again every 5s").await;
    sleep(Duration::from_secs(7)).await;
    assert!(!cron.is_over());
    proxy.open();
    cron.complains("jobs.toml: 1 job").await;
    cron.says("k: it runs", 1).await;
    let ended = cron.stopped().await;
    assert_eq!(ended.err.matches("trying again").count(), 1, "{ended:?}");
}

/// The end of the run is sent several times. Until it is recorded, the schedule is not claimed.
async fn a_cron_reports_an_outage_once<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, proxy) = (Stage::new(), db.proxy().await);
    let mut cron = cron_at(&stage, &proxy.url);
    cron.says("k: it runs", 1).await;
    proxy.hold_everything();
    cron.complains("the end of a run is not recorded yet").await;
    sleep(Duration::from_secs(8)).await;
    proxy.open();
    let ended = cron.stopped().await;
    assert_eq!(ended.err.matches("the end of a run is not recorded yet").count(), 1, "{ended:?}");
    let others = ended.err.matches(" WARN ").count() - 1;
    assert_eq!(ended.err.matches("no session could be opened").count(), others, "{ended:?}");
    assert!(others <= 1, "{ended:?}");
}

/// The renewals of three runs fail for the same cause, several times each.
async fn what_all_runs_try_again_is_written_once_and_its_end_too<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, proxy) = (Stage::new(), db.proxy().await);
    let names = ["one", "two", "three"];
    let file = jobs(&stage, &names.map(|name| (name, "after = \"1h\"\nlease = \"15s\"", "echo up; exec sleep 1000")));
    let mut cron = start(at(&proxy.url, "cron --stop-timeout 1s", &[file.to_str().unwrap()]));
    for name in names {
        cron.says(&format!("{name}: up"), 1).await;
    }
    proxy.hold_everything();
    cron.complains("a renewal received no reply").await;
    sleep(Duration::from_secs(3)).await;
    proxy.open();
    cron.complains("renewed again").await;
    let ended = cron.stopped().await;
    assert_eq!(ended.err.matches("a renewal received no reply").count(), 1, "{ended:?}");
    assert!(!ended.err.contains("lost"), "{ended:?}");
}

async fn a_cron_that_waits_for_its_database_may_be_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (scheme, rest) = db.url.split_once("://").unwrap();
    let away = format!("{scheme}://127.0.0.1:1/{}", rest.split_once('/').unwrap().1);
    let mut cron = cron_at(&stage, &away);
    cron.complains("at 127.0.0.1:1, database ").await;
    cron.stopped().await;
    // What is wrong with the file does not wait for the database.
    std::fs::write(stage.file("jobs.toml"), "[k]\n").unwrap();
    let wrong = start(at(&away, "cron", &[stage.file("jobs.toml").to_str().unwrap()])).ended().await.with(2);
    assert!(wrong.err.contains("jobs.toml, line 1"), "{wrong:?}");
}
