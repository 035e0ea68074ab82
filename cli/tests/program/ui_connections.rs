//! `rowlock ui` and clients that take their time.

use std::{process::Stdio, time::Duration};

use harness::{PATIENCE, TestDatabase, TestDb, acquired, eventually};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    process::Command,
    time::timeout,
};

use crate::{
    program::{PROGRAM, Program as _, Stage},
    program_cron::job,
    program_schedules::due,
    ui::{Ui, open, open_by},
};

harness::tests!(
    sqlite(
        half_requests_keep_nothing_from_the_page,
        requests_without_their_body_and_open_pages_keep_nothing_from_others,
        a_form_that_is_not_sent_is_given_up,
        a_head_has_an_end,
        clients_of_a_cron_leave_files_to_its_commands
    ),
    sqlite.long(a_client_that_does_not_read_loses_its_place)
);

/// Prometheus waits for ten seconds.
const SCRAPE: Duration = Duration::from_secs(10);

/// Opens the page with room for few connections.
async fn with_few_files<DB: TestDatabase>(db: &TestDb<DB>) -> Ui {
    let mut command = Command::new("setsid");
    let script = r#"ulimit -n 60; exec "$0" ui --listen 127.0.0.1:0"#;
    command.args(["sh", "-c", script, PROGRAM]).env("DATABASE_URL", &db.url).stdin(Stdio::null());
    open_by(command).await
}

async fn sent(ui: &Ui, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(&ui.address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

/// Waits until the server has closed the connection, and returns what it has sent.
async fn closed(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    // A connection that is closed before everything was read is reset.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut text)).await.expect("the connection is closed");
    String::from_utf8(text).unwrap()
}

async fn half_requests_keep_nothing_from_the_page<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = with_few_files(&db).await;
    let mut events = ui.events("/events/").await;
    events.until("nothing was taken", |page| page.contains("No key was ever taken")).await;
    let mut halves = Vec::new();
    for _ in 0..80 {
        halves.push(sent(&ui, "GET / HTTP/1.1\r\nHost:").await);
    }
    for path in ["/metrics", "/", "/jobs"] {
        timeout(SCRAPE, ui.get(path)).await.expect("an answer").with(200);
    }
    let _held = acquired(db.lock().try_acquire("k").await);
    events.until("k is held", |page| page.contains("badge held")).await;
    for half in halves {
        let text = closed(half).await;
        assert!(text.is_empty() || text.starts_with("HTTP/1.1 408 "), "{text:?}");
    }
}

async fn requests_without_their_body_and_open_pages_keep_nothing_from_others<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = with_few_files(&db).await;
    let bodiless = format!("GET / HTTP/1.1\r\nHost: {}\r\nContent-Length: 5\r\n\r\n", ui.address);
    let events = format!("GET /events/ HTTP/1.1\r\nHost: {}\r\n\r\n", ui.address);
    let mut clients = Vec::new();
    for text in [bodiless, events] {
        for _ in 0..40 {
            clients.push(sent(&ui, &text).await);
        }
        timeout(SCRAPE, ui.get("/metrics")).await.expect("an answer").with(200);
    }
}

async fn a_form_that_is_not_sent_is_given_up<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = open(&db, "--allow-changes").await;
    let head = format!("POST /pause HTTP/1.1\r\nHost: {0}\r\nOrigin: http://{0}\r\n", ui.address);
    let form = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\nname=";
    let text = closed(sent(&ui, &format!("{head}{form}")).await).await;
    assert!(text.starts_with("HTTP/1.1 408 "), "{text:?}");
    eventually("the page is there", async || ui.get("/").await.status == 200).await;
}

async fn a_head_has_an_end<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = open(&db, "").await;
    let head = format!("GET / HTTP/1.1\r\nHost: {}\r\nX: {}", ui.address, "x".repeat(20_000));
    let text = closed(sent(&ui, &head).await).await;
    assert!(text.starts_with("HTTP/1.1 431 "), "{text:?}");
}

/// Returns how many sockets the program has open. Some of them are not of clients.
fn sockets(ui: &Ui) -> usize {
    let files = std::fs::read_dir(format!("/proc/{}/fd", ui.program.id())).unwrap().flatten();
    let targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

async fn clients_of_a_cron_leave_files_to_its_commands<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let path = job(&stage, "k", "after = \"1h\"", "true");
    let mut program = db.start("cron --listen 127.0.0.1:0", &[path.to_str().unwrap()]);
    program.complains("/metrics and /healthz").await;
    let address = program.complained().split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let ui = Ui { program, address };
    let mut halves = Vec::new();
    for _ in 0..80 {
        halves.push(sent(&ui, "GET /metrics HTTP/1.1\r\nHost:").await);
    }
    // It comes after them.
    ui.get("/healthz").await.with(200);
    let open = sockets(&ui);
    assert!(open < 40, "{open} sockets");
    ui.program.stopped().await;
}

/// The answer is larger than what the system keeps of it for a client with a small window.
async fn a_client_that_does_not_read_loses_its_place<DB: TestDatabase>(db: TestDb<DB>) {
    due(&db).await;
    db.execute(
        "INSERT INTO t_resource_schedule (name, spec, zone, slot, due_at)
         WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 8000)
         SELECT printf('%0200d', n), spec, zone, slot, due_at FROM n CROSS JOIN t_resource_schedule",
    )
    .await;
    let ui = open(&db, "").await;
    // A page waits for the first look, however long that takes.
    ui.get("/").await.with(200);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut client = socket.connect(ui.address.parse().unwrap()).await.unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", ui.address);
    client.write_all(request.as_bytes()).await.unwrap();
    eventually("the answer has begun", async || client.peek(&mut [0]).await.unwrap() > 0).await;
    // A connection whose answer was sent as a whole is closed, and the number does not fall.
    let before = sockets(&ui);
    let ended = timeout(4 * PATIENCE, async {
        while sockets(&ui) >= before {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    assert!(ended.await.is_ok(), "the connection is kept");
}
