//! `rowlock ui --allow-changes`: which requests change something, and which never do.

use std::time::Duration;

use harness::{TestDatabase, TestDb, acquired, eventually};
use rustix::process::Signal;
use serde_json::Value;
use tokio::{io::AsyncReadExt as _, net::TcpStream, time::sleep};

use crate::{
    program::{Program as _, Stage},
    program_cron::{cron, job},
    program_schedules::{due, schedule},
    ui::{Answer, Ui, open},
    ui_guard::secret,
};

harness::tests!(
    everywhere(
        a_page_only_shows_unless_changes_are_allowed,
        other_sites_are_refused,
        a_key_is_released_by_force_and_that_is_logged,
        a_key_that_has_changed_hands_is_not_released,
        a_job_that_has_gone_on_to_another_tick_is_left_alone,
        jobs_are_paused_resumed_and_triggered,
        a_job_without_an_instance_is_triggered_on_request_only,
        a_password_is_asked_for_and_names_the_operator
    ),
    postgres(a_change_is_logged_though_the_browser_goes_away, a_change_is_logged_before_the_program_ends)
);

/// The addresses of all changes.
const CHANGES: [&str; 6] = ["/release", "/pause", "/resume", "/trigger", "/skip", "/stop"];

async fn is_held<DB: TestDatabase>(db: &TestDb<DB>) -> bool {
    db.show("k").await["state"] == "held"
}

async fn a_page_only_shows_unless_changes_are_allowed<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let ui = open(&db, "").await;
    assert!(!ui.get("/key?key=k").await.with(200).body.contains("/release"));
    for path in CHANGES {
        let page = ui.get(&format!("{path}?name=k")).await.with(403);
        assert!(page.body.contains("--allow-changes"), "{page:?}");
        ui.post(path, &[], "name=k").await.with(403);
    }
    assert!(is_held(&db).await);
}

async fn other_sites_are_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let ui = open(&db, "--allow-changes --host locks.example.com").await;
    let port = ui.address.split(':').nth(1).unwrap();
    for ours in ["localhost", "127.0.0.1", "LOCKS.example.com"] {
        ui.send("GET", "/", &[("Host", &format!("{ours}:{port}"))], "").await.with(200);
    }
    let evil = format!("evil.example:{port}");
    for headers in [vec![("Host", evil.as_str())], vec![], vec![("Host", "localhost"), ("Host", "evil.example")]] {
        let refused = ui.send("GET", "/", &headers, "").await;
        assert!([400, 421].contains(&refused.status) && !refused.body.contains("/key"), "{headers:?}: {refused:?}");
    }
    due(&db).await;
    eventually("the job is seen", async || ui.get("/job?name=k").await.body.contains("/trigger?name=k")).await;
    let orders = async || {
        let row = schedule(&db).await;
        ["paused", "triggered", "skipped_until", "stopping"].map(|field| row[field].clone())
    };
    let before = orders().await;
    let body = format!("name=k&seen={}&status=S", ui.get("/release?key=k").await.with(200).field("seen"));
    let other_port = format!("http://127.0.0.1:{}", port.parse::<u16>().unwrap() ^ 1);
    for origin in ["", "null", "http://evil.example", "http://127.0.0.1", &other_port] {
        let mut headers = vec![("Host", ui.address.as_str())];
        if !origin.is_empty() {
            headers.push(("Origin", origin));
        }
        for path in CHANGES {
            ui.send("POST", path, &headers, &body).await.with(403);
        }
    }
    let read = [("Host", ui.address.as_str()), ("Origin", "http://evil.example")];
    ui.send("GET", "/", &read, "").await.with(403);
    for path in CHANGES {
        ui.get(&format!("{path}?{body}")).await.with(200);
    }
    assert!(is_held(&db).await);
    assert_eq!(orders().await, before);
    ui.post("/release", &[], &body).await.with(303);
    assert!(!is_held(&db).await, "the same request from a page of this server");
}

async fn released<DB: TestDatabase>(db: &TestDb<DB>, ui: &Ui, headers: &[(&str, &str)]) -> Answer {
    let page = ui.send("GET", "/release?key=k", &[headers, &[("Host", &ui.address)]].concat(), "").await.with(200);
    assert!(page.body.contains("Release k by force?") && page.body.contains("its work may go on"), "{page:?}");
    assert!(page.body.contains("value=\"F\" checked"), "{page:?}");
    assert!(is_held(db).await, "a look at the form changes nothing");
    ui.post("/release", headers, &format!("name=k&seen={}&status=F", page.field("seen"))).await
}

async fn a_key_is_released_by_force_and_that_is_logged<DB: TestDatabase>(db: TestDb<DB>) {
    let held = acquired(db.lock().try_acquire("k").await);
    let mut ui = open(&db, "--allow-changes").await;
    assert!(ui.get("/key?key=k").await.with(200).body.contains("/release?key=k"));
    let done = released(&db, &ui, &[]).await.with(303);
    assert_eq!(done.header("location"), Some("/key?key=k&done=release"));
    let page = ui.get("/key?key=k&done=release").await.with(200).body;
    assert!(page.contains("badge failed") && page.contains("released by force"), "{page}");
    let row = db.show("k").await;
    assert_eq!((&row["status"], &row["holder"]), (&"F".into(), &Value::Null));
    assert!(row["token"].as_i64() > Some(held.token().get()));
    ui.program.complains("changed on the web page change=\"release\" of=\"k\" by=\"-\" from=127.0.0.1").await;
}

async fn a_key_that_has_changed_hands_is_not_released<DB: TestDatabase>(db: TestDb<DB>) {
    let first = acquired(db.lock().try_acquire("k").await);
    let ui = open(&db, "--allow-changes").await;
    let shown = async || format!("name=k&seen={}&status=F", ui.get("/release?key=k").await.with(200).field("seen"));
    let body = shown().await;
    first.release().await.unwrap();
    let free = ui.post("/release", &[], &body).await.with(404);
    assert!(free.body.contains("left alone: it is now free, last taken"), "{free:?}");
    assert_eq!(db.show("k").await["status"], "S", "a success is not overwritten");
    open(&db, "--allow-changes").await.get("/release?key=k").await.with(404);
    let next = db.builder().label("<b>next</b>").build().unwrap();
    let _second = acquired(next.try_acquire("k").await);
    let held = ui.post("/release", &[], &body).await.with(404);
    assert!(held.body.contains("left alone: it is now held by &lt;b&gt;next&lt;/b&gt; since"), "{held:?}");
    // A program that knows no tokens leaves that of the claim before.
    let body = shown().await;
    db.set("k", &format!("begin_time = {}, client_ip = 'other'", DB::ago(0))).await;
    let locked = ui.post("/release", &[], &body).await.with(404);
    assert!(locked.body.contains("it is now held by another program by other since"), "{locked:?}");
    assert_eq!(db.show("k").await["state"], "held_by_another_program");
}

/// The form was shown while another attempt ran.
async fn a_job_that_has_gone_on_to_another_tick_is_left_alone<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    let later = format!("slot = {}, attempt = 1", DB::ago(-3_600_000));
    for (verb, goes_on) in [("stop", "attempt = 1, run_slot = slot"), ("skip", "attempt = 0"), ("skip", &later)] {
        let ui = open(&db, "--allow-changes").await;
        let form = ui.get(&format!("/{verb}?name=k")).await.with(200);
        let body = format!("name=k&seen={}", form.field("seen"));
        db.execute(&format!("UPDATE t_resource_schedule SET {goes_on}")).await;
        let refused = ui.post(&format!("/{verb}"), &[], &body).await.with(404);
        assert!(refused.body.contains("has gone on to another tick since the page was shown"), "{refused:?}");
        let row = schedule(&db).await;
        assert_eq!((&row["stopping"], &row["skipped_until"]), (&false.into(), &Value::Null), "{row}");
    }
    let page = changed(&open(&db, "--allow-changes").await, "stop").await;
    assert!(page.contains("The tick is stopped"), "{page}");
}

/// Asks for a change of the job `k` by the form.
pub async fn asked(ui: &Ui, verb: &str) -> Answer {
    let form = ui.get(&format!("/{verb}?name=k")).await.with(200);
    let seen = if form.body.contains("name=\"seen\"") { form.field("seen") } else { String::new() };
    ui.post(&format!("/{verb}"), &[], &format!("name=k&seen={seen}")).await
}

/// Changes the job `k`, and returns the page that follows.
pub async fn changed(ui: &Ui, verb: &str) -> String {
    let done = asked(ui, verb).await.with(303);
    ui.get(done.header("location").unwrap()).await.with(200).body
}

async fn jobs_are_paused_resumed_and_triggered<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "after = \"1h\"", "echo it runs");
    let mut running = cron(&db, "", &file);
    running.complains("1 job").await;
    let mut ui = open(&db, "--allow-changes").await;
    let mut change = async |verb: &str, shows: &str| {
        let page = changed(&ui, verb).await;
        assert!(page.contains(shows), "{verb}: {page}");
        ui.program.complains(&format!("change=\"{verb}\" of=\"k\"")).await;
    };
    change("pause", "badge paused").await;
    change("resume", "The job is resumed").await;
    change("trigger", "A run was asked for").await;
    running.says("k: it runs", 1).await;
    ui.get("/pause?name=nothing").await.with(200);
    let none = ui.post("/pause", &[], "name=nothing").await.with(404);
    assert!(none.body.contains("there is no schedule"), "{none:?}");
}

async fn a_job_without_an_instance_is_triggered_on_request_only<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"0 0 1 1 *\"", "true");
    let mut running = cron(&db, "", &file);
    running.complains("1 job").await;
    running.stopped().await;
    let ui = open(&db, "--allow-changes").await;
    let page = ui.get("/trigger?name=k").await.with(200);
    let why = "no instance that declares it is alive; it was not run so far";
    assert!(page.body.contains(why) && page.body.contains("name=\"anyway\""), "{page:?}");
    let refused = ui.post("/trigger", &[], "name=k").await.with(404);
    assert!(refused.body.contains("k: not triggered") && refused.body.contains(why), "{refused:?}");
    assert_eq!(schedule(&db).await["triggered"], Value::Null);
    ui.post("/trigger", &[], "name=k&anyway=yes").await.with(303);
    assert!(schedule(&db).await["triggered"].is_string());
}

async fn a_password_is_asked_for_and_names_the_operator<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let stage = Stage::new();
    let file = secret(&stage, "passwords", "ann:open sesame\nbob:other\n");
    let mut ui = open(&db, &format!("--allow-changes --password-file {}", file.display())).await;
    for path in ["/", "/metrics", "/style.css", "/events/", "/release?key=k"] {
        let refused = ui.get(path).await.with(401);
        assert_eq!(refused.header("www-authenticate"), Some("Basic realm=\"rowlock\", charset=\"UTF-8\""));
        assert!(!refused.body.contains("badge"), "{refused:?}");
    }
    // bob with ann's password, and ann with her own.
    let [wrong, right] = ["Basic Ym9iOm9wZW4gc2VzYW1l", "Basic YW5uOm9wZW4gc2VzYW1l"];
    ui.send("GET", "/", &[("Host", &ui.address), ("Authorization", wrong)], "").await.with(401);
    released(&db, &ui, &[("Authorization", right)]).await.with(303);
    ui.program.complains("change=\"release\" of=\"k\" by=\"ann\"").await;
    let headers = [("Host", ui.address.as_str()), ("Authorization", right)];
    for path in ["/changes?q=K", "/key?key=k"] {
        let page = ui.send("GET", path, &headers, "").await.with(200).body;
        let row = page.split("<tr>").last().unwrap();
        for cell in ["What\">released<", "Name\"><a href=\"/key?key=k\">k<", "Who\">ann@127.0.0.1<"] {
            assert!(row.contains(cell), "{path}: {cell}: {page}");
        }
    }
    let none = ui.send("GET", "/changes?q=other", &headers, "").await.with(200).body;
    assert!(none.contains("No change matches."), "{none}");
}

/// A change of the schedule `k`, whose row is locked by another transaction.
struct Blocked<DB: TestDatabase> {
    ui: Ui,
    request: TcpStream,
    transaction: sqlx::pool::PoolConnection<DB>,
}

impl<DB: TestDatabase> Blocked<DB> {
    async fn begin(db: &TestDb<DB>) -> Self {
        due(db).await;
        let ui = open(db, "--allow-changes").await;
        let mut transaction = db.pool_of(1).await.acquire().await.unwrap();
        for statement in ["BEGIN", "SELECT 1 FROM t_resource_schedule FOR UPDATE"] {
            DB::execute_on(&mut transaction, statement).await.unwrap();
        }
        let origin = format!("http://{}", ui.address);
        let headers = [("Host", ui.address.as_str()), ("Origin", &origin)];
        let request = ui.begin("POST", "/pause", &headers, "name=k").await;
        let waiting = "SELECT COUNT(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the change waits", async || db.number(waiting).await == Some(1)).await;
        Self { ui, request, transaction }
    }
}

const PAUSED: &str = "changed on the web page change=\"pause\" of=\"k\"";

async fn a_change_is_logged_though_the_browser_goes_away<DB: TestDatabase>(db: TestDb<DB>) {
    let Blocked { mut ui, request, mut transaction } = Blocked::begin(&db).await;
    drop(request);
    // The server has seen the end of that connection before it answers this one.
    ui.get("/style.css").await.with(200);
    DB::execute_on(&mut transaction, "ROLLBACK").await.unwrap();
    ui.program.complains(PAUSED).await;
    assert_eq!(schedule(&db).await["paused"], true);
}

async fn a_change_is_logged_before_the_program_ends<DB: TestDatabase>(db: TestDb<DB>) {
    let Blocked { ui, mut request, mut transaction } = Blocked::begin(&db).await;
    ui.program.signal(Signal::TERM);
    eventually("no connection is accepted", async || TcpStream::connect(&ui.address).await.is_err()).await;
    // Longer than a program takes to end that waits for nothing.
    sleep(Duration::from_secs(3)).await;
    DB::execute_on(&mut transaction, "ROLLBACK").await.unwrap();
    let mut answer = String::new();
    request.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 303 "), "{answer:?}");
    let ended = ui.program.ended().await.with(0);
    assert!(ended.err.contains(PAUSED), "{ended:?}");
    assert_eq!(schedule(&db).await["paused"], true);
}
