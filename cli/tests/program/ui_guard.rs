//! `rowlock ui`: wrong passwords, tokens, and the files that have them.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    task::Poll,
    time::{Duration, Instant},
};

use harness::{TestDatabase, TestDb};

use crate::{
    program::{Program as _, Stage},
    program_cron::{ended_as, job},
    ui::{Ui, open},
};

harness::tests!(
    everywhere(programs_ask_without_a_password, a_cron_serves_numbers),
    sqlite(wrong_passwords_are_slow_and_logged, a_file_of_secrets_that_all_may_read_is_refused)
);

/// Writes a file that its owner alone may read.
pub fn secret(stage: &Stage, name: &str, text: &str) -> PathBuf {
    let file = stage.file(name);
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    file
}

/// As many as arrive at the same time, over connections of their own.
async fn wrong_passwords_are_slow_and_logged<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = secret(&stage, "passwords", "ann:open sesame\n");
    let mut ui = open(&db, &format!("--password-file {}", file.display())).await;
    let host = [("Host", ui.address.as_str())];
    let [wrong, right] = ["Basic Ym9iOm9wZW4gc2VzYW1l", "Basic YW5uOm9wZW4gc2VzYW1l"];
    let guess = async |sent| ui.send("GET", "/", &[&host[..], &[("Authorization", sent)]].concat(), "").await.status;
    let began = Instant::now();
    let answers = futures_of(10, || guess(wrong)).await;
    assert!(answers.iter().all(|status| *status == 401) && began.elapsed() >= Duration::from_secs(5), "{answers:?}");
    assert_eq!(guess(right).await, 200);
    assert_eq!(futures_of(10, || guess(right)).await, [200; 10]);
    let ended = {
        ui.program.complains("a wrong name or password").await;
        ui.program.stopped().await
    };
    assert_eq!(ended.err.matches("a wrong name or password").count(), 1, "{ended:?}");
    assert!(ended.err.contains("from=127.0.0.1:"), "{ended:?}");
}

async fn futures_of<F: Future<Output = u16>>(number: usize, make: impl Fn() -> F) -> Vec<u16> {
    let mut all: Vec<_> = (0..number).map(|_| Box::pin(make())).collect();
    let mut answers = Vec::new();
    std::future::poll_fn(|context| {
        all.retain_mut(|one| match one.as_mut().poll(context) {
            Poll::Ready(status) => {
                answers.push(status);
                false
            }
            Poll::Pending => true,
        });
        if all.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers
}

async fn programs_ask_without_a_password<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (file, token) = (secret(&stage, "passwords", "ann:open sesame\n"), secret(&stage, "token", "a-token\n"));
    let ui = open(&db, &format!("--password-file {} --metrics-token-file {}", file.display(), token.display())).await;
    let get = async |path: &str, sent: &str| {
        let headers = [("Host", ui.address.as_str()), ("Authorization", sent)];
        ui.send("GET", path, &headers, "").await
    };
    assert_eq!(ui.get("/healthz").await.with(200).body, "ok\n");
    ui.get("/metrics").await.with(401);
    assert!(get("/metrics", "Bearer a-token").await.with(200).body.contains("rowlock_up 1"));
    get("/metrics", "Basic YW5uOm9wZW4gc2VzYW1l").await.with(200);
    get("/metrics", "Bearer another").await.with(401);
    get("/", "Bearer a-token").await.with(401);
    let plain = open(&db, &format!("--metrics-token-file {}", token.display())).await;
    plain.get("/").await.with(200);
    plain.get("/metrics").await.with(401);
}

async fn a_file_of_secrets_that_all_may_read_is_refused<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    for (option, text) in [("--password-file", "ann:open sesame\n"), ("--metrics-token-file", "a-token\n")] {
        let file = secret(&stage, "file", text);
        let words = format!("ui --listen 127.0.0.1:0 {option} {}", file.display());
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o604)).unwrap();
        let refused = db.rowlock(&words, &[]).await.with(2);
        assert!(refused.err.contains("every user of this machine may read or write it"), "{refused:?}");
        assert!(!refused.err.contains("sesame") && !refused.err.contains("a-token"), "{refused:?}");
    }
}

async fn a_cron_serves_numbers<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (path, token) = (job(&stage, "k", "after = \"1h\"", "true"), secret(&stage, "token", "a-token\n"));
    let refused = db.rowlock("cron --listen 0.0.0.0:0", &[path.to_str().unwrap()]).await.with(2);
    assert!(refused.err.contains("give --metrics-token-file"), "{refused:?}");
    let words = ["--metrics-token-file", token.to_str().unwrap(), path.to_str().unwrap()];
    let mut running = db.start("cron --listen 127.0.0.1:0", &words);
    running.complains("/metrics and /healthz").await;
    let address = running.complained().split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    ended_as(&db, "k", "succeeded").await;
    let ui = Ui { program: running, address };
    assert_eq!(ui.get("/healthz").await.with(200).body, "ok\n");
    ui.get("/metrics").await.with(401);
    ui.get("/").await.with(404);
    // Prometheus asks by the name of its target.
    for host in [ui.address.as_str(), "app-1:9100"] {
        let get = async |path, sent: &[_]| ui.send("GET", path, &[&[("Host", host)], sent].concat(), "").await;
        let numbers = get("/metrics", &[("Authorization", "Bearer a-token")]).await.with(200).body;
        assert!(numbers.contains("rowlock_job_running{job=\"k\"} 0"), "{numbers}");
        get("/metrics", &[("Authorization", "Bearer another")]).await.with(401);
        get("/healthz", &[]).await.with(200);
    }
    let nameless = ui.send("GET", "/metrics", &[("Host", "app-1:9100")], "").await.with(421);
    assert!(nameless.body.contains("--metrics-token-file"), "{nameless:?}");
    ui.program.stopped().await;
}
