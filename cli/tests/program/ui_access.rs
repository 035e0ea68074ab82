//! `rowlock ui` for people who see little or use no mouse. `AXE` names the script of axe-core,
//! which finds barriers; `scripts/test` provides it.

use fantoccini::key::Key;
use harness::{Need, TestDatabase, TestDb, acquired, eventually};
use rowlock::Status;
use serde_json::json;

use crate::{
    program::{Program as _, Stage},
    ui::{SCRIPT, open},
    ui_browser::{BROWSER, Browser, DESK, PHONE, filled, output},
};

const AXE: Need = Need { what: "CHROMEDRIVER and AXE", is_met: |server| (BROWSER.is_met)(server) && axe().is_some() };

// The page is the same on every database.
harness::tests!(everywhere[AXE].last(no_page_has_a_barrier), everywhere[BROWSER].last(all_is_reached_by_the_keyboard));

fn axe() -> Option<String> {
    std::env::var("AXE").ok().filter(|path| !path.is_empty())
}

/// Names the serious barriers of the page that is shown, and the elements that have them.
const BARRIERS: &str = "const done = arguments[0];
    axe.run().then((found) => done(found.violations
        .filter((one) => ['serious', 'critical'].includes(one.impact))
        .map((one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html).join(' ')}`)));";

impl Browser {
    async fn barriers(&self) -> Vec<String> {
        let found = self.client.execute_async(BARRIERS, Vec::new()).await.unwrap();
        found.as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect()
    }
}

async fn no_page_has_a_barrier<DB: TestDatabase>(db: TestDb<DB>) {
    let axe = std::fs::read_to_string(axe().unwrap()).unwrap();
    let stage = Stage::new();
    let (_held, _running) = filled(&db, &stage).await;
    for number in 0..60 {
        acquired(db.lock().try_acquire(&format!("k/{number}")).await).release().await.unwrap();
    }
    db.lock().force_release("deploy", Status::Failed).await.unwrap();
    let (ui, output) = (open(&db, "--allow-changes").await, output(&db).await);
    let pages = [
        ("/", SCRIPT),
        ("/jobs", "sync-crm"),
        ("/runs?window=6h", "sync-crm"),
        ("/instances", "alive"),
        ("/jobs?q=nothing", "No job matches."),
        ("/key?key=exports%231&done=release", "exports#2"),
        ("/job?name=sync-crm", "exit"),
        ("/release?key=nightly-report", "by force?"),
        ("/trigger?name=sync-crm", "now?"),
        ("/skip?name=sync-crm", "Skip the next tick of"),
        ("/stop?name=sync-crm", "not tried again"),
        ("/changes", "released"),
        (&output, "0000000000"),
        ("/nothing", "no such page"),
    ];
    let mut barriers: Vec<String> = Vec::new();
    let mut screens = vec![DESK, PHONE];
    if harness::all() {
        screens.extend([DESK, PHONE].map(|(width, height, dark)| (width, height, !dark)));
    }
    for screen in screens {
        let browser = Browser::open(screen).await;
        for (path, shows) in pages {
            browser.goto(&ui, path).await;
            browser.shows(shows).await;
            browser.run(&axe).await;
            let found = browser.barriers().await;
            barriers.extend(found.iter().map(|one| format!("{screen:?} {path}: {one}")));
        }
        browser.run("document.body.append(document.createElement('button'))").await;
        let found = browser.barriers().await;
        assert!(found.len() == 1 && found[0].starts_with("button-name: "), "a button without a name: {found:?}");
        browser.close().await;
    }
    assert!(barriers.is_empty(), "{}", barriers.join("\n"));
}

/// Names what a visitor may use, and of that, what has the focus.
const CONTROLS: &str = "const name = (one) => `${one.tagName} ${one.getAttribute('href') ?? one.name ?? ''} ${one.id}`;
    const all = Array.from(document.querySelectorAll('a[href], button, input, select, summary'));
    return all.filter((one) => one.checkVisibility() && one.tabIndex >= 0).map(name);";
/// Names what has the focus, if that is seen.
const FOCUSED: &str = "const one = document.activeElement;
    const [box, style] = [one.getBoundingClientRect(), getComputedStyle(one)];
    const isSeen = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2
        && box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
    return isSeen ? `${one.tagName} ${one.getAttribute('href') ?? one.name ?? ''} ${one.id}` : `${one.outerHTML} is not seen`;";

async fn all_is_reached_by_the_keyboard<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (_held, _running) = filled(&db, &stage).await;
    let ui = open(&db, "--allow-changes").await;
    let browser = Browser::open(DESK).await;
    // No run is added to the page of the job while it is read.
    db.rowlock("pause sync-crm", &[]).await.with(0);
    eventually("no run is under way", async || db.rowlock("runs --running --json", &[]).await.json() == json!([]))
        .await;
    let pages = [
        ("/jobs", "every 1s"),
        ("/job?name=sync-crm", "Resume…"),
        ("/runs", "sync-crm"),
        ("/changes", "paused"),
        ("/instances", "alive"),
    ];
    for (path, shows) in pages {
        browser.goto(&ui, path).await;
        browser.shows(shows).await;
        let controls = browser.run(CONTROLS).await;
        for control in controls.as_array().unwrap() {
            browser.press(Key::Tab).await;
            assert_eq!(&browser.run(FOCUSED).await, control, "{path}: {controls}");
        }
    }
    // The last one is the list of an instance, which stays unfolded while events come.
    browser.press(Key::Enter).await;
    browser.shows("sync-crm: every 1s").await;
    browser.sees_an_event().await;
    browser.shows("sync-crm: every 1s").await;
    browser.goto(&ui, "/jobs").await;
    browser.press(Key::Tab).await;
    browser.press(Key::Enter).await;
    assert_eq!(browser.run("return document.activeElement.id").await, "main");
    // The next link is one of the content.
    browser.press(Key::Tab).await;
    assert_eq!(browser.run("return document.activeElement.closest('main') !== null").await, true);
    browser.close().await;
}
