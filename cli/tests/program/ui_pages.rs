//! `rowlock ui`: what the pages show, and that they show it as text.

use std::time::Duration;

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use rustix::process::Signal;

use crate::{
    program::{Program as _, Stage},
    program_cron::{cron, ended_as, job, jobs},
    program_schedules::due,
    ui::{ESCAPED, SCRIPT, open, open_at},
};

harness::tests!(
    everywhere(
        keys_are_searched_sorted_and_paged,
        jobs_and_their_runs_are_shown,
        jobs_that_need_attention_come_first,
        an_open_page_follows_the_database,
        the_numbers_are_those_of_the_database,
        ticks_that_were_missed_are_counted_once,
        counts_and_bars_are_links,
        a_table_that_is_missing_is_told,
        schedules_that_cannot_be_read_leave_the_locks,
        locks_that_cannot_be_read_leave_the_schedules,
        what_cannot_be_served_is_refused
    ),
    everywhere.each(keys_are_shown_as_text),
    servers.long(jobs_that_are_removed_or_have_no_instance_are_shown),
    servers.each(a_database_that_is_lost_and_comes_back_is_reported),
    postgres(a_time_that_is_none_stops_nothing),
    sqlite.long(jobs_that_are_removed_or_have_no_instance_are_shown)
);

/// Keys that are claimed within a tick of SQLite's clock may have equal tokens.
const CLOCK_TICK: Duration = Duration::from_millis(1);
/// The addresses of all pages.
const PAGES: [&str; 9] = [
    "/",
    "/jobs",
    "/runs",
    "/instances",
    "/changes",
    "/key?key=k",
    "/job?name=k",
    "/release?key=k",
    "/output?name=k&slot=2026-10-25T00:00:00Z&attempt=1",
];

async fn keys_are_shown_as_text<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("<b>me</b>\u{202e}").build().unwrap();
    let _held = acquired(lock.try_acquire(SCRIPT).await);
    let ui = open(&db, "--allow-changes").await;
    let query = "key=%3Cscript%3Edocument.title%3D'owned'%3C/script%3E";
    for path in ["/", "/?q=%3Cscript%3E", &format!("/key?{query}"), &format!("/release?{query}")] {
        let page = ui.get(path).await.with(200);
        assert!(page.body.contains(ESCAPED) && page.body.contains("&lt;b&gt;me&lt;/b&gt;?"), "{path}: {}", page.body);
        assert!(!page.body.contains("<script>") && !page.body.contains("<b>"), "{path}: {}", page.body);
        assert!(!page.body.contains('\u{202e}'), "{path}: a mark that reverses what follows");
    }
    let missing = ui.get("/key?key=%3Cscript%3E").await.with(200);
    assert!(missing.body.contains("This key has no row") && !missing.body.contains("<script>"), "{missing:?}");
    for path in PAGES {
        let page = ui.get(path).await;
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(
            (page.header("x-content-type-options"), page.header("cache-control")),
            (Some("nosniff"), Some("no-store"))
        );
        let body = page.body.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        assert!(!body.contains("http"), "{path}: nothing comes from elsewhere");
        assert!(!page.body.contains(" style=") && !page.body.contains(" onclick"), "{path}");
    }
}

async fn keys_are_searched_sorted_and_paged<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.builder().label("ann").build().unwrap();
    let names: Vec<String> = (0..120).map(|number| format!("k/{number:03}")).collect();
    for name in &names {
        let lease = acquired(lock.acquire(name, PATIENCE).await);
        lease.release().await.unwrap();
        if name >= &names[118] {
            tokio::time::sleep(2 * CLOCK_TICK).await;
        }
    }
    let _held = acquired(lock.acquire("K/007", PATIENCE).await);
    let ui = open(&db, "").await;
    let keys = async |query: &str| -> Vec<String> {
        let page = ui.get(&format!("/?{query}")).await.with(200).body;
        page.split("<th scope=\"row\">").skip(1).map(|row| row.split(['>', '<']).nth(2).unwrap().to_owned()).collect()
    };
    assert_eq!(keys("page=3").await.len(), 21, "121 keys on pages of 50");
    assert_eq!(keys("page=99").await.len(), 21, "the last page");
    assert_eq!(keys("desc=true").await[..2], ["k/119", "k/118"]);
    assert_eq!(keys("q=k/007").await, ["K/007", "k/007"], "in the order of their bytes, whatever the case");
    assert_eq!(keys("state=held").await, ["K/007"]);
    assert_eq!(keys("sort=state").await[..2], ["K/007", "k/000"]);
    assert_eq!(keys("sort=token&desc=true").await[..2], ["K/007", "k/119"], "the newest token first");
    assert_eq!(keys("q=ANN&page=1").await.len(), 50, "by holder");
    ui.get("/?sort=nonsense").await.with(400);
}

async fn jobs_and_their_runs_are_shown<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "every = \"1s\"", "exit 3");
    let running = cron(&db, "--label <i>me</i>", &file);
    ended_as(&db, "k", "failed").await;
    let ui = open(&db, "").await;
    let jobs = ui.get("/jobs").await.with(200).body;
    assert!(jobs.contains("/job?name=k") && jobs.contains("every 1s") && jobs.contains("badge failed"), "{jobs}");
    assert!(jobs.contains("<a href=\"/jobs?sign=failing\">1 failing</a>"), "{jobs}");
    assert!(ui.get("/jobs?sign=failing").await.with(200).body.contains("/job?name=k"));
    for none in ["late", "no_instance", "paused", "lost"] {
        let page = ui.get(&format!("/jobs?sign={none}")).await.with(200).body;
        assert!(page.contains("No job matches") && page.contains("0 jobs shown"), "{none}: {page}");
    }
    let job = ui.get("/job?name=k").await.with(200).body;
    assert!(job.contains("exit") && job.contains("&lt;i&gt;me&lt;/i&gt;") && !job.contains("<i>"), "{job}");
    assert!(job.contains("none known"), "no success so far: {job}");
    assert!(job.contains("data-label=\"Start\"><time") && job.contains("<svg class=\"scale\""), "{job}");
    let ticks = job.split("Next ticks").nth(1).unwrap().split("</ul>").next().unwrap();
    assert_eq!(ticks.matches("<li>").count(), 5, "{ticks}");
    for window in ["6h", "24h", "7d"] {
        let runs = ui.get(&format!("/runs?window={window}")).await.with(200).body;
        assert!(runs.contains("<rect class=\"failed\""), "{runs}");
    }
    let metrics = ui.get("/metrics").await.with(200).body;
    assert!(metrics.contains("rowlock_job_failed{job=\"k\"} 1"), "{metrics}");
    drop(running);
}

/// The slots of both jobs are in the past, as if nothing had run them.
async fn jobs_that_are_removed_or_have_no_instance_are_shown<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, yearly) = (Stage::new(), "cron = \"0 0 1 1 *\"");
    let cron =
        cron(&db, "--label <i>me</i> --build 1.4", &jobs(&stage, &[("gone", yearly, ""), ("stays", yearly, "")]));
    let ui = open(&db, "").await;
    let shows = async |path: &str, texts: &[&str]| {
        let what = format!("{path}: {texts:?}");
        eventually(&what, async || {
            let body = ui.get(path).await.with(200).body;
            texts.iter().all(|text| body.contains(text))
        })
        .await;
    };
    shows("/instances", &["&lt;i&gt;me&lt;/i&gt;", "1.4", "badge alive", "2 schedules (", "stays: cron 0 0 1 1 * UTC"])
        .await;
    shows(
        "/metrics",
        &[
            "rowlock_instances{build=\"1.4\"} 1\n",
            "rowlock_job_removed{job=\"gone\"} 0\n",
            "rowlock_job_instances{job=\"gone\",times=\"effective\"} 1\n",
        ],
    )
    .await;
    jobs(&stage, &[("stays", yearly, "")]);
    cron.signal(Signal::HUP);
    shows("/jobs", &["badge removed", "1 removed"]).await;
    shows("/job?name=gone", &["badge removed", "Gone"]).await;
    cron.stopped().await;
    let ago = DB::ago(600_000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ago}, due_at = {ago}")).await;
    shows("/jobs", &["badge no_instance", "1 without an instance", "1 removed"]).await;
    shows("/instances", &["No instance runs jobs"]).await;
    let numbers = [
        "rowlock_job_removed{job=\"gone\"} 1\n",
        "rowlock_job_removed{job=\"stays\"} 0\n",
        "rowlock_job_instances{job=\"stays\",times=\"effective\"} 0\n",
        "rowlock_job_instances{job=\"stays\",times=\"other\"} 0\n",
        "rowlock_job_late_seconds{job=\"gone\"} 0.0\n",
        "rowlock_job_late_seconds{job=\"stays\"} 6",
    ];
    shows("/metrics", &numbers).await;
    let ahead = DB::ago(-3 * 366 * 24 * 3_600_000);
    db.execute(&format!("UPDATE t_resource_schedule SET slot = {ahead}, due_at = {ahead}")).await;
    shows("/jobs", &["badge clock_was_ahead"]).await;
    shows("/metrics", &["rowlock_job_clock_ahead{job=\"stays\"} 1\n"]).await;
}

/// Each hour has a job that needs attention for another reason, or none.
async fn jobs_that_need_attention_come_first<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let terms = "cron = \"0 0 1 1 *\"\nzone = \"Europe/Berlin\"";
    let all = [("a", terms, ""), ("b", terms, "exit 3"), ("c", terms, ""), ("d", "after = \"1h\"", "")];
    let _running = cron(&db, "", &jobs(&stage, &all));
    ended_as(&db, "d", "succeeded").await;
    db.rowlock("trigger b", &[]).await.with(0);
    ended_as(&db, "b", "failed").await;
    db.rowlock("pause c", &[]).await.with(0);
    let ui = open(&db, "").await;
    let order = async |path: &str| -> String {
        let page = ui.get(path).await.with(200).body;
        page.split("href=\"/job?name=").skip(1).filter_map(|rest| rest.chars().next()).collect()
    };
    assert_eq!(order("/jobs").await, "bacd");
    assert_eq!(order("/jobs?sort=name").await, "abcd");
    assert_eq!(order("/jobs?sort=next").await, "dabc", "c is paused");
    assert_eq!(order("/jobs?sign=paused").await, "c");
    assert_eq!(order("/jobs?q=A").await, "a");
    let page = ui.get("/jobs").await.with(200).body;
    assert!(page.contains("00:00 there, ") && page.contains("Europe/Berlin"), "{page}");
    let ticks = async |name: &str| {
        let page = ui.get(&format!("/job?name={name}")).await.with(200).body;
        page.split("Next ticks").nth(1).map_or(0, |rest| rest.split("</ul>").next().unwrap().matches("<li>").count())
    };
    assert_eq!((ticks("a").await, ticks("c").await, ticks("d").await), (5, 0, 0), "c is paused, d has a fixed delay");
}

async fn an_open_page_follows_the_database<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = open(&db, "").await;
    let mut events = ui.events("/events/?state=held").await;
    events.until("nothing is held", |page| page.contains("No key was ever taken")).await;
    let held = acquired(db.lock().try_acquire("k").await);
    events.until("k is held", |page| page.contains("/key?key=k") && page.contains("badge held")).await;
    let mut of_key = ui.events("/events/key?key=k").await;
    of_key.until("k is held", |page| page.contains("badge held")).await;
    held.fail().await.unwrap();
    events.until("nothing is held", |page| page.contains("No key matches")).await;
    of_key.until("k has failed", |page| page.contains("badge failed")).await;
}

async fn the_numbers_are_those_of_the_database<DB: TestDatabase>(db: TestDb<DB>) {
    let (lock, ui) = (db.lock(), open(&db, "").await);
    let _keys = [acquired(lock.try_acquire("a\"\\\nb").await), acquired(lock.try_acquire("b").await)];
    let _permits = [acquired(lock.try_acquire("s#1").await), acquired(lock.try_acquire("s#2").await)];
    let _reader = acquired(lock.try_acquire("r#r1").await);
    acquired(lock.try_acquire("f").await).fail().await.unwrap();
    let waiting = db.start("run b --fair --wait 10m -- true", &[]);
    eventually("the numbers are right", async || {
        let text = ui.get("/metrics").await.with(200).body;
        let lines = [
            "rowlock_up 1",
            "rowlock_keys{state=\"held\"} 5",
            "rowlock_keys{state=\"failed\"} 1",
            "rowlock_queued 1",
            "rowlock_longest_queue 1",
            "rowlock_permits_in_use{name=\"s\"} 2",
            "rowlock_readers 1",
        ];
        lines.iter().all(|line| text.lines().any(|one| one == *line))
    })
    .await;
    drop(waiting);
}

/// One run stands for five ticks that were missed, and each of its attempts has a row that says so.
async fn ticks_that_were_missed_are_counted_once<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let add = async |slot: &str, attempts: &str, missed: u32| {
        db.execute(&format!(
            "INSERT INTO t_resource_schedule_run
                 (name, slot, attempt, token, client_ip, begin_time, end_time, status, missed)
             SELECT name, {slot}, number, 1, 'me', {0}, {0}, 'F', {missed}
             FROM t_resource_schedule CROSS JOIN ({attempts}) AS attempts",
            DB::ago(1000)
        ))
        .await;
    };
    let one = "SELECT 1 AS number";
    add("slot", &format!("{one} UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4"), 5).await;
    add(&DB::ago(60_000), one, 2).await;
    let ui = open(&db, "").await;
    let numbers = ui.get("/metrics").await.with(200).body;
    assert!(numbers.contains("rowlock_job_missed{job=\"k\"} 7\n"), "{numbers}");
    let jobs = ui.get("/jobs").await.with(200).body;
    assert!(jobs.contains("data-label=\"Missed in a week\">7<"), "{jobs}");
}

async fn a_table_that_is_missing_is_told<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = open(&db, "").await;
    db.execute("DROP TABLE t_resource_schedule_run").await;
    db.execute("DROP TABLE t_resource_schedule").await;
    ui.get("/jobs").await.with(200);
    eventually("no job is shown", async || ui.get("/jobs").await.with(200).body.contains("No job is registered")).await;
    db.execute("DROP TABLE t_resource_lock").await;
    eventually("the page says so", async || {
        let page = ui.get("/").await.with(200).body;
        page.contains("The database does not answer") && page.contains("t_resource_lock")
    })
    .await;
    let numbers = ui.get("/metrics").await.with(200).body;
    assert!(numbers.contains("rowlock_up 0") && !numbers.contains("rowlock_keys"), "{numbers}");
    db.rowlock("migrate", &[]).await.with(0);
    eventually("it is back", async || !ui.get("/").await.with(200).body.contains("does not answer")).await;
}

async fn counts_and_bars_are_links<DB: TestDatabase>(db: TestDb<DB>) {
    let lock = db.lock();
    let _held = [acquired(lock.try_acquire("k").await), acquired(lock.try_acquire("l").await)];
    acquired(lock.try_acquire("f").await).fail().await.unwrap();
    let waiting = db.start("run k --fair --wait 10m -- true", &[]);
    due(&db).await;
    db.rowlock("run k --cron", &["0 0 1 1 *", "--", "sh", "-c", "exit 3"]).await.with(3);
    let ui = open(&db, "").await;
    for (state, count, keys) in
        [("held", "2 held", ["k", "l"].as_slice()), ("failed", "1 failed", &["f"]), ("waiting", "1 waiting", &["k"])]
    {
        let link = format!("<a href=\"/?state={state}\">{count}</a>");
        eventually("the count is a link", async || ui.get("/").await.with(200).body.contains(&link)).await;
        let page = ui.get(&format!("/?state={state}")).await.with(200).body;
        for key in ["f", "k", "l"] {
            assert_eq!(page.contains(&format!("/key?key={key}\"")), keys.contains(&key), "{state}: {page}");
        }
    }
    let runs = ui.get("/runs?window=6h").await.with(200).body;
    assert!(
        runs.contains("<a href=\"/job?name=k\"><span title=\"k\">") && runs.contains("<rect class=\"failed\""),
        "{runs}"
    );
    drop(waiting);
}

async fn schedules_that_cannot_be_read_leave_the_locks<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    due(&db).await;
    let ui = open(&db, "").await;
    db.execute("ALTER TABLE t_resource_schedule RENAME COLUMN zone TO zonk").await;
    eventually("it is told", async || ui.get("/").await.with(200).body.contains("Schedules could not be read.")).await;
    let locks = ui.get("/").await.with(200).body;
    assert!(locks.contains("/key?key=k\"") && !locks.contains("does not answer"), "{locks}");
    let jobs = ui.get("/jobs").await.with(200).body;
    assert!(jobs.contains("Schedules could not be read.") && !jobs.contains("No job"), "{jobs}");
    let numbers = ui.get("/metrics").await.with(200).body;
    assert!(numbers.contains("rowlock_up 0") && numbers.contains("rowlock_keys{state=\"held\"} 1"), "{numbers}");
    assert!(!numbers.contains("rowlock_job_"), "{numbers}");
}

async fn locks_that_cannot_be_read_leave_the_schedules<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    due(&db).await;
    let ui = open(&db, "").await;
    assert!(ui.get("/metrics").await.with(200).body.contains("rowlock_up 1"));
    db.execute("ALTER TABLE t_resource_lock RENAME COLUMN client_ip TO client").await;
    eventually("it is told", async || ui.get("/").await.with(200).body.contains("Locks could not be read.")).await;
    assert!(!ui.get("/").await.with(200).body.contains("No key"), "nothing is known of keys");
    assert!(ui.get("/jobs").await.with(200).body.contains("/job?name=k\""));
    let numbers = ui.get("/metrics").await.with(200).body;
    assert!(numbers.contains("rowlock_job_running{job=\"k\"} 0") && !numbers.contains("rowlock_keys"), "{numbers}");
}

async fn what_cannot_be_served_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let open_to_all = db.rowlock("ui --listen 0.0.0.0:0", &[]).await.with(2);
    assert!(open_to_all.err.contains("give --password-file"), "{open_to_all:?}");
    let stage = Stage::new();
    crate::ui_guard::secret(&stage, "passwords", "hunter2\n");
    let words = format!("ui --listen 127.0.0.1:0 --password-file {}", stage.file("passwords").display());
    let wrong = db.rowlock(&words, &[]).await.with(2);
    assert!(wrong.err.contains("has to be NAME:PASSWORD") && !wrong.err.contains("hunter2"), "{wrong:?}");
    let ui = open(&db, "").await;
    let taken = db.rowlock(&format!("ui --listen {}", ui.address), &[]).await.with(73);
    assert!(taken.err.contains(&ui.address), "{taken:?}");
    ui.get("/nothing").await.with(404);
    ui.program.signal(rustix::process::Signal::TERM);
    ui.program.ended().await.with(0);
}

async fn a_database_that_is_lost_and_comes_back_is_reported<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let proxy = db.proxy().await;
    let ui = open_at(&proxy.url, "").await;
    let mut events = ui.events("/events/?").await;
    events.until("k is shown", |page| page.contains("/key?key=k") && !page.contains("does not answer")).await;
    proxy.hold_everything();
    let lost = |page: &str| page.contains("The database does not answer") && page.contains("What follows is from");
    events.until("the loss is told, beside what was seen", |page| lost(page) && page.contains("/key?key=k")).await;
    let page = ui.get("/").await.with(200).body;
    assert!(lost(&page), "{page}");
    assert!(ui.get("/metrics").await.body.contains("rowlock_up 0"));
    proxy.open();
    events.until("it is back", |page| page.contains("/key?key=k") && !page.contains("does not answer")).await;
}

/// PostgreSQL has a time that no program can show.
async fn a_time_that_is_none_stops_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let ui = open(&db, "").await;
    let mut events = ui.events("/events/").await;
    events.until("nothing is held", |page| page.contains("No key was ever taken")).await;
    db.execute("UPDATE t_resource_schedule SET slot = 'infinity'").await;
    // At least one look is made in that time. An open page is sent no more than the looks.
    assert!(events.drain(Duration::from_secs(5)).await < 10, "it is flooded");
    ui.get("/metrics").await.with(200);
    db.execute("UPDATE t_resource_schedule SET slot = due_at").await;
    let _held = acquired(db.lock().try_acquire("k").await);
    events.until("k is held", |page| page.contains("badge held")).await;
    let numbers = async || ui.get("/metrics").await.with(200).body;
    eventually("the numbers are right", async || numbers().await.contains("rowlock_keys{state=\"held\"} 1")).await;
}
