//! `rowlock ui`: what operators have changed, how they stop and skip runs, and what runs print.

use harness::{TestDatabase, TestDb, acquired, eventually};
use rowlock::Status;

use crate::{
    program::{Program as _, Stage},
    program_cron::{cron, ended_as, job},
    ui::{ESCAPED, SCRIPT, Ui, open},
    ui_changes::{asked, changed},
};

harness::tests!(everywhere(
    changes_are_shown_as_text,
    changes_that_cannot_be_read_stop_nothing,
    what_a_run_has_printed_is_shown_as_text,
    a_run_is_stopped,
    a_tick_is_skipped_and_resumed
));

async fn changes_are_shown_as_text<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("<b>me</b>").build().unwrap();
    let _held = acquired(lock.try_acquire(SCRIPT).await);
    let _ = lock.force_release(SCRIPT, Status::Failed).await.unwrap();
    let ui = open(&db, "").await;
    for path in ["/changes", "/changes?q=%3CSCRIPT%3E", "/key?key=%3Cscript%3Edocument.title%3D'owned'%3C/script%3E"] {
        let page = ui.get(path).await.with(200).body;
        assert!(page.contains("Who\">&lt;b&gt;me&lt;/b&gt;<") && page.contains(ESCAPED), "{path}: {page}");
        assert!(!page.contains("<script>") && !page.contains("<b>"), "{path}: {page}");
    }
}

async fn changes_that_cannot_be_read_stop_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    db.execute("DROP TABLE t_resource_change").await;
    let ui = open(&db, "").await;
    for path in ["/", "/jobs", "/changes", "/key?key=k"] {
        let page = ui.get(path).await.with(200).body;
        let says = "<strong>Changes could not be read.</strong> the table t_resource_change does not exist here";
        assert!(page.contains(says), "{path}: {page}");
        assert_eq!(page.contains("badge held"), path == "/" || path == "/key?key=k", "{path}: {page}");
        assert!(!page.contains("No operator"), "{path}: {page}");
    }
    let metrics = ui.get("/metrics").await.with(200).body;
    assert!(metrics.contains("rowlock_up 1\n"), "{metrics}");
}

async fn what_a_run_has_printed_is_shown_as_text<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!(r#"echo "{SCRIPT}"; printf '\033[31mred\n'; exit 3"#);
    let _running = cron(&db, "", &job(&stage, "k", "after = \"1h\"", &script));
    ended_as(&db, "k", "failed").await;
    let ui = open(&db, "").await;
    let page = ui.get("/job?name=k").await.with(200).body;
    let link = page.split('"').find(|text| text.starts_with("/output?")).unwrap().replace("&amp;", "&");
    let page = ui.get(&link).await.with(200).body;
    assert!(page.contains(&format!("<pre>{ESCAPED}\n?[31mred</pre>")), "{page}");
    assert!(!page.contains("<script>") && page.contains("Attempt 1 at the tick of 2"), "{page}");
    let other = ui.get(&link.replace("attempt=1", "attempt=2")).await.with(200).body;
    assert!(other.contains("Nothing is kept") && !other.contains("<pre>"), "{other}");
    ui.get("/output?name=k&slot=now&attempt=1").await.with(400);
}

async fn shows(ui: &Ui, texts: &[&str]) {
    eventually(&format!("{texts:?}"), async || {
        let page = ui.get("/job?name=k").await.with(200).body;
        texts.iter().all(|text| page.contains(text))
    })
    .await;
}

async fn a_run_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let terms = "after = \"1h\"\nlease = \"3s\"\ndescription = \"\"\"<i>One\ntwo\"\"\"";
    let mut running = cron(&db, "", &job(&stage, "k", terms, "sleep 600"));
    let ui = open(&db, "--allow-changes").await;
    shows(&ui, &["Note of the run</dt><dd>pid ", "/stop?name=k", "<p class=\"about\">&lt;i&gt;One\ntwo\nruns: sh"])
        .await;
    let page = changed(&ui, "stop").await;
    assert!(page.contains("The tick is stopped.") && page.contains("Who\">-@127.0.0.1<"), "{page}");
    running.complains("k: stopped by an operator").await;
    ended_as(&db, "k", "failed").await;
    shows(&ui, &["stopped by -@127.0.0.1", "/skip?name=k"]).await;
    assert!(!ui.get("/job?name=k").await.body.contains("/stop?name=k"));
}

async fn a_tick_is_skipped_and_resumed<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut running = cron(&db, "", &job(&stage, "k", "cron = \"0 0 1 1 *\"", "true"));
    running.complains("1 job").await;
    let ui = open(&db, "--allow-changes").await;
    let ticks = async || {
        let page = ui.get("/job?name=k").await.with(200).body;
        let ticks = page.split("Next ticks").nth(1).unwrap().split("</ul>").next().unwrap();
        ticks.split("datetime=\"").skip(1).step_by(2).map(|tick| tick[..4].parse().unwrap()).collect::<Vec<i32>>()
    };
    let before = ticks().await;
    let form = ui.get("/skip?name=k").await.with(200).body;
    assert!(form.contains(&format!("Tick</dt><dd>{}-01-01 00:00:00Z<", before[0])), "{form}");
    let page = changed(&ui, "skip").await;
    assert!(page.contains("The next tick is skipped.") && page.contains("Skipped until"), "{page}");
    assert!(!page.contains("/skip?name=k"), "the order would be replaced by itself");
    let form = ui.get("/skip?name=k").await.with(200).body;
    assert!(form.contains(": this one only, if you go on"), "{form}");
    ui.get("/skip?name=other").await.with(404);
    assert!(page.contains("What\">skipped<"), "{page}");
    assert_eq!(ticks().await[..4], before[1..]);
    let page = changed(&ui, "resume").await;
    assert!(!page.contains("Skipped until") && page.contains("What\">resumed<"), "{page}");
    assert_eq!(ticks().await, before);
    db.rowlock("pause k --until", &["2126-01-01T00:00:00Z"]).await.with(0);
    shows(&ui, &["Paused until</dt>", "2126-01-01 00:00:00Z"]).await;
    let refused = asked(&ui, "stop").await.with(404).body;
    assert!(refused.contains("k: no tick was begun"), "{refused}");
}
