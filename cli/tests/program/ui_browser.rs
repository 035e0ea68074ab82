//! `rowlock ui` in a real browser: Chromium, which chromedriver drives. `CHROMEDRIVER` names its
//! program; `scripts/test` provides it.
//!
//! What the browser shows is kept as pictures in `target/ui-screenshots`.

use std::{path::PathBuf, process::Stdio, time::Duration};

use fantoccini::{
    Client, ClientBuilder, Locator,
    actions::{InputSource as _, KeyAction, KeyActions},
    key::Key,
};
use harness::{Need, TestDatabase, TestDb, acquired, eventually};
use hyper_util::client::legacy::connect::HttpConnector;
use rowlock::Status;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::{
    program::{Program as _, Stage, Started, start},
    program_cron::{cron, ended_as, job, runs},
    ui::{SCRIPT, Ui, open, open_at},
};

pub const BROWSER: Need = Need { what: "CHROMEDRIVER", is_met: |_| driver().is_some() };

// The page is the same on every database.
harness::tests!(
    sqlite[BROWSER].last(each_page_is_shown_in_a_browser),
    everywhere[BROWSER].last(
        a_key_is_released_in_a_browser,
        a_page_is_used_with_the_keyboard,
        a_browser_tells_of_a_lost_server
    ),
    servers[BROWSER].alone(a_browser_tells_of_a_lost_database),
);

fn driver() -> Option<String> {
    std::env::var("CHROMEDRIVER").ok().filter(|path| !path.is_empty())
}

/// A browser with a profile of its own. It ends with this value, and so does what drives it.
pub struct Browser {
    pub client: Client,
    _driver: Driver,
}

struct Driver {
    program: Started,
    profile: Stage,
}

impl Driver {
    /// Returns the processes of the browser, which have its profile among their arguments.
    fn browser(&self) -> Vec<Pid> {
        let processes =
            std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_ours = |pid: &String| {
            let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&arguments).contains(self.profile.path())
        };
        processes.filter(is_ours).filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
    }
}

impl Drop for Driver {
    /// A driver that is killed leaves its browser behind.
    fn drop(&mut self) {
        for process in self.browser() {
            let _ = kill_process(process, Signal::KILL);
        }
    }
}

/// The width and height of a screen, and whether it is dark.
pub type Screen = (u32, u32, bool);
pub const DESK: Screen = (1280, 860, false);
pub const PHONE: Screen = (390, 844, true);

impl Browser {
    pub async fn open(screen: Screen) -> Self {
        let mut command = Command::new(driver().unwrap());
        command.arg("--port=0").env("TZ", "Australia/Adelaide").stdin(Stdio::null());
        let mut driver = Driver { program: start(command), profile: Stage::new() };
        driver.program.says("started successfully on port ", 1).await;
        let port = driver.program.said().split("started successfully on port ").nth(1).unwrap();
        let port = port.split('.').next().unwrap().to_owned();
        let (width, height, dark) = screen;
        let arguments = json!([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            format!("--user-data-dir={}", driver.profile.path()),
            format!("--window-size={width},{height}"),
            format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)),
        ]);
        let options = json!({
            "args": arguments,
            "mobileEmulation": { "deviceMetrics": { "width": width, "height": height, "pixelRatio": 1.0, "mobile": false } },
        });
        let wanted: Value = json!({ "goog:chromeOptions": options, "goog:loggingPrefs": { "browser": "ALL" } });
        let mut builder = ClientBuilder::new(HttpConnector::new());
        let builder = builder.capabilities(wanted.as_object().unwrap().clone());
        let client = builder.connect(&format!("http://127.0.0.1:{port}")).await.expect("a browser");
        Self { client, _driver: driver }
    }

    pub async fn goto(&self, ui: &Ui, path: &str) {
        self.client.goto(&format!("http://{}{path}", ui.address)).await.unwrap();
    }

    async fn text(&self) -> String {
        self.run("return document.body.innerText").await.as_str().unwrap_or_default().to_owned()
    }

    pub async fn run(&self, script: &str) -> Value {
        self.client.execute(script, Vec::new()).await.unwrap_or_else(|error| panic!("{script}: {error}"))
    }

    /// Waits until the page has this text.
    pub async fn shows(&self, text: &str) {
        let mut last = String::new();
        for _ in 0..600 {
            last = self.text().await;
            if last.contains(text) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("no {text:?}: {last}");
    }

    pub async fn sees_an_event(&self) {
        self.run("window.seen = document.querySelector('.asof').textContent").await;
        eventually("an event has come", async || {
            self.run("return document.querySelector('.asof').textContent !== window.seen").await == true
        })
        .await;
    }

    async fn click(&self, css: &str) {
        // An event may replace what was found.
        eventually(css, async || match self.client.find(Locator::Css(css)).await {
            Ok(found) => found.click().await.is_ok(),
            Err(_) => false,
        })
        .await;
    }

    pub async fn press(&self, key: Key) {
        let value = char::from(key);
        let keys = KeyActions::new("keys".into()).then(KeyAction::Down { value }).then(KeyAction::Up { value });
        self.client.perform_actions(keys).await.unwrap();
    }

    /// Keeps a picture of the page, and checks that it fits the screen's width.
    async fn picture(&self, name: &str) {
        let wide = self.run("return document.documentElement.scrollWidth > window.innerWidth").await;
        assert_eq!(wide, false, "{name} is wider than the screen");
        let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/ui-screenshots"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(format!("{name}.png")), self.client.screenshot().await.unwrap()).unwrap();
    }

    pub async fn close(self) {
        self.client.clone().close().await.unwrap();
    }
}

/// Makes the tables show something of everything.
pub async fn filled<DB: TestDatabase>(db: &TestDb<DB>, stage: &Stage) -> (Vec<rowlock::Lease<DB>>, Started) {
    let lock = db.builder().label("batch-2/9120").build().unwrap();
    let mut held = Vec::new();
    for key in [SCRIPT, "nightly-report", "exports#1", "exports#2", "cache#r1", "deploy"] {
        held.push(acquired(lock.try_acquire(key).await));
    }
    acquired(lock.try_acquire("import/2026-11-22").await).fail().await.unwrap();
    acquired(lock.try_acquire("import/2026-11-21").await).release().await.unwrap();
    // One line, as long as an output may be.
    let file = job(stage, "sync-crm", "every = \"1s\"", "printf %065536d 0; exit 3");
    let running = cron(db, "", &file);
    ended_as(db, "sync-crm", "failed").await;
    (held, running)
}

/// Returns the page of the output of a run of [`filled`].
pub async fn output<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let run = runs(db, "sync-crm").await[0].clone();
    format!("/output?name=sync-crm&slot={}&attempt={}", run["slot"].as_str().unwrap(), run["attempt"])
}

async fn each_page_is_shown_in_a_browser<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (_held, _running) = filled(&db, &stage).await;
    let (ui, output) = (open(&db, "--allow-changes").await, output(&db).await);
    db.lock().force_release("deploy", Status::Failed).await.unwrap();
    let pages = [
        ("locks", "/", "nightly-report"),
        ("jobs", "/jobs", "sync-crm"),
        ("runs", "/runs?window=6h", "Times are those of Australia/Adelaide."),
        ("key", "/key?key=nightly-report", "batch-2/9120"),
        ("job", "/job?name=sync-crm", "every 1s"),
        ("release", "/release?key=nightly-report", "Release nightly-report by force?"),
        ("changes", "/changes", "released"),
        ("output", &output, "0000000000"),
        ("script", "/key?key=%3Cscript%3Edocument.title%3D%27owned%27%3C%2Fscript%3E", SCRIPT),
    ];
    for (screen, name) in [(DESK, "desk"), (PHONE, "phone")] {
        let browser = Browser::open(screen).await;
        let dark = browser.run("return matchMedia('(prefers-color-scheme: dark)').matches").await;
        assert_eq!(dark, screen.2, "{name}");
        for (page, path, shows) in pages {
            browser.goto(&ui, path).await;
            browser.shows(shows).await;
            browser.picture(&format!("{}-{page}-{name}", db.server.name)).await;
            let title = browser.client.title().await.unwrap();
            assert!(title.ends_with(" · rowlock") && title != "owned", "{title}");
            assert_eq!(browser.run("return document.querySelectorAll('script:not([src])').length").await, 0);
        }
        browser.goto(&ui, "/jobs").await;
        browser.shows("sync-crm").await;
        let heights =
            "return Math.max(...Array.from(document.querySelectorAll('tbody tr'), (row) => row.offsetHeight))";
        let height = browser.run(heights).await.as_f64().unwrap();
        assert!(height <= 75.0, "{name}: a job takes {height} pixels");
        // What events bring is text too.
        browser.goto(&ui, "/").await;
        browser.sees_an_event().await;
        assert!(browser.text().await.contains(SCRIPT));
        assert_eq!(browser.client.title().await.unwrap(), "Locks · rowlock");
        browser.close().await;
    }
}

async fn a_key_is_released_in_a_browser<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let ui = open(&db, "--allow-changes").await;
    let browser = Browser::open(DESK).await;
    browser.goto(&ui, "/").await;
    browser.click("tbody a").await;
    browser.shows("in progress").await;
    browser.click("a.danger").await;
    browser.shows("Release k by force?").await;
    assert_eq!(db.show("k").await["state"], "held");
    browser.click("input[value=F]").await;
    browser.click("button.danger").await;
    browser.shows("The key was released by force").await;
    browser.shows("failed").await;
    let row = db.show("k").await;
    assert_eq!((&row["state"], &row["status"]), (&"failed".into(), &"F".into()));
    // The page follows without being loaded again.
    browser.run("window.same = true").await;
    let _again = acquired(db.lock().try_acquire("k").await);
    browser.shows("in progress").await;
    assert_eq!(browser.run("return window.same").await, true);
    browser.close().await;
}

/// A link keeps the focus when an event replaces it.
async fn a_page_is_used_with_the_keyboard<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock().try_acquire("k").await);
    let ui = open(&db, "").await;
    let browser = Browser::open(DESK).await;
    browser.goto(&ui, "/").await;
    browser.shows("k").await;
    browser.run("document.querySelector('tbody a').focus()").await;
    browser.sees_an_event().await;
    assert_eq!(browser.run("return document.activeElement.getAttribute('href')").await, "/key?key=k");
    browser.press(Key::Enter).await;
    browser.shows("in progress").await;
    browser.close().await;
}

async fn a_browser_tells_of_a_lost_database<DB: TestDatabase>(db: TestDb<DB>) {
    let _held = acquired(db.lock_for(Duration::from_secs(600)).try_acquire("k").await);
    let proxy = db.proxy().await;
    let ui = open_at(&proxy.url, "").await;
    let browser = Browser::open(DESK).await;
    browser.goto(&ui, "/").await;
    browser.shows("1 held").await;
    proxy.hold_everything();
    browser.shows("The database does not answer.").await;
    browser.picture(&format!("{}-lost-desk", db.server.name)).await;
    proxy.open();
    eventually("it is back", async || !browser.text().await.contains("does not answer")).await;
    browser.shows("1 held").await;
    browser.close().await;
}

/// The browser connects again by itself.
async fn a_browser_tells_of_a_lost_server<DB: TestDatabase>(db: TestDb<DB>) {
    let ui = open(&db, "").await;
    let browser = Browser::open(DESK).await;
    browser.goto(&ui, "/").await;
    browser.shows("No key was ever taken").await;
    let address = ui.address.clone();
    ui.program.stopped().await;
    browser.shows("The connection to rowlock ui is lost").await;
    let mut again = db.start(&format!("ui --listen {address}"), &[]);
    again.says("/\n", 1).await;
    eventually("it is back", async || !browser.text().await.contains("is lost")).await;
    browser.close().await;
}
