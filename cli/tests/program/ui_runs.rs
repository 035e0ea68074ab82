//! `rowlock ui`: the timeline of runs.

use harness::{TestDatabase, TestDb, eventually};

use crate::{
    program::{Program as _, Stage},
    program_cron::{cron, jobs},
    program_runs::ran,
    program_schedules::due,
    ui::open,
};

harness::tests!(
    sqlite(
        the_timeline_is_filtered,
        ticks_to_come_are_drawn,
        runs_after_a_quiet_time_are_not_missed,
        runs_after_a_clock_that_was_ahead_are_not_missed,
        a_success_of_a_clock_that_was_ahead_hides_no_failure
    ),
    everywhere(runs_that_are_close_become_one_bar)
);

async fn the_timeline_is_filtered<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, often) = (Stage::new(), "every = \"1s\"");
    let _running = cron(&db, "", &jobs(&stage, &[("works", often, ""), ("breaks", often, "exit 3")]));
    let ui = open(&db, "").await;
    let page = async |query: &str| ui.get(&format!("/runs?{query}")).await.with(200).body;
    let shown = async |query: &str| {
        let page = page(query).await;
        ["works", "breaks"].map(|name| page.contains(&format!("<a href=\"/job?name={name}\"")))
    };
    eventually("both are shown", async || shown("").await == [true, true]).await;
    eventually("one has failed", async || shown("failing=true").await == [false, true]).await;
    assert_eq!(shown("q=WORK&window=6h").await, [true, false]);
    assert_eq!(shown("failing=true&window=7d").await, [false, true]);
    assert_eq!(shown("q=work&failing=true").await, [false, false]);
    assert!(page("q=work&failing=true").await.contains("No job matches."));
    for (query, zone) in [("", "UTC"), ("zone=Asia/Tokyo", "Asia/Tokyo"), ("zone=%3Cb%3E", "UTC")] {
        assert!(page(query).await.contains(&format!("Times are those of {zone}.")), "{query}");
    }
    ui.get("/runs?window=nonsense").await.with(400);
}

async fn ticks_to_come_are_drawn<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let _running = cron(&db, "", &jobs(&stage, &[("k", "every = \"30m\"", ""), ("often", "every = \"1s\"", "")]));
    let ui = open(&db, "").await;
    eventually("both are shown", async || ui.get("/runs").await.body.contains("2 jobs")).await;
    let ticks = async |window: &str, name: &str| {
        let page = ui.get(&format!("/runs?window={window}&q={name}")).await.with(200).body;
        let (_, row) = page.split_once("<ul><li>").unwrap();
        row.split("</ul>").next().unwrap().matches("rect class=\"tick\"").count()
    };
    assert!((7..=8).contains(&ticks("24h", "k").await), "those of four hours");
    assert!((1..=2).contains(&ticks("6h", "k").await), "those of one hour");
    assert!((8..=10).contains(&ticks("24h", "often").await), "as many as can be told apart");
    db.rowlock("pause k", &[]).await.with(0);
    eventually("a paused job has none", async || ticks("24h", "k").await == 0).await;
}

async fn runs_that_are_close_become_one_bar<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    for (ago, status) in [(7_200, "S"), (3_600, "S"), (3_590, "F"), (3_580, "L")] {
        ran(&db, "k", 1000 * ago, 1000 * ago, status).await;
    }
    let ui = open(&db, "").await;
    for window in ["6h", "24h", "7d"] {
        let page = ui.get(&format!("/runs?window={window}")).await.with(200).body;
        let (_, row) =
            page.split_once("aria-label=\"4 runs, 1 failed\">").unwrap_or_else(|| panic!("{window}: {page}"));
        let bars: Vec<&str> = row.split("<rect class=\"").skip(1).filter(|bar| !bar.starts_with("tick")).collect();
        match window {
            "7d" => assert!(bars.len() <= 2, "{bars:?}"),
            _ => {
                assert_eq!(bars.len(), 2, "{bars:?}");
                assert!(bars[0].starts_with("succeeded\"") && bars[1].starts_with("failed\""), "{bars:?}");
                assert!(bars[1].contains(": 3 runs, 1 failed, 1 lost</title>"), "{bars:?}");
            }
        }
    }
}

/// While no page was open, more runs have ended than one statement reads.
async fn runs_after_a_quiet_time_are_not_missed<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let ui = open(&db, "").await;
    assert!(ui.get("/job?name=k").await.with(200).body.contains("It has not run so far."));
    for (name, ago, number) in [("k", 90_000, 1), ("other", 1_000, 20_000)] {
        let at = DB::ago(ago);
        db.execute(&format!(
            "INSERT INTO t_resource_schedule_run (name, slot, attempt, token, client_ip, begin_time, end_time, status)
             WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {number})
             SELECT '{name}', {at} - n, 1, 1, 'me', {at}, {at}, 'S' FROM n"
        ))
        .await;
    }
    eventually("its run is shown", async || {
        !ui.get("/job?name=k").await.with(200).body.contains("It has not run so far.")
    })
    .await;
}

/// The clock of the database was an hour ahead, and has been corrected.
async fn runs_after_a_clock_that_was_ahead_are_not_missed<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    ran(&db, "other", -3_600_000, -3_600_000, "S").await;
    let ui = open(&db, "").await;
    let has_run = async || !ui.get("/job?name=k").await.with(200).body.contains("It has not run so far.");
    assert!(!has_run().await);
    ran(&db, "k", 0, 0, "S").await;
    eventually("its run is shown", has_run).await;
}

/// The runs that are ahead are deleted when the clock is put right.
async fn a_success_of_a_clock_that_was_ahead_hides_no_failure<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    ran(&db, "k", -3_600_000, -3_600_000, "S").await;
    let ui = open(&db, "").await;
    let failed = async |number| {
        ui.get("/metrics").await.with(200).body.contains(&format!("rowlock_job_failed{{job=\"k\"}} {number}\n"))
    };
    assert!(failed(0).await);
    db.execute("DELETE FROM t_resource_schedule_run").await;
    ran(&db, "k", 0, 0, "F").await;
    eventually("its failure is counted", async || failed(1).await).await;
}
