//! A day in the life: a crontab becomes jobs on three machines, which are deployed, rolled back,
//! cut off from their database and killed, while an operator asks and Prometheus watches.

use std::{collections::BTreeMap, sync::Mutex};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;

use crate::{
    program::{Program as _, Stage, Started, at, ended, rowlock, start},
    program_cron::ended_as,
    ui::{Ui, open_at},
    ui_operating::{PROMTOOL, checked, file},
};

harness::tests!(postgres[PROMTOOL].long(a_day_in_the_life));

const PASSWORD: &str = "hunter2-of-the-day";

/// The crontab of a service: 25 lines, with all that crontabs have. A line before it names the
/// commands' home.
const CRONTAB: &str = r#"# the night of a shop
SHELL=/bin/sh
PATH=/usr/local/bin:/usr/bin:/bin
MAILTO=ops@example.org
CRON_TZ=Europe/Berlin

@reboot /opt/shop/warm-up
@daily echo purge
@hourly echo rotate
*/5 * * * * echo heartbeat
0 1 * * * echo backup
30 2 * * * echo report
15 3 1 * * echo invoices
0 4 * * mon-fri echo export
5 4 * * sun echo archive
10 5 * * * echo "100\% done"
20 5 * * * cat%one line%of input
0 6 * * 1-5 echo stock
*/10 8-18 * * * echo prices
0 7,19 * * * echo mails
45 23 * * * echo "$(date +\%F)" > /dev/null
0 0 1 1 * echo year
0 9 * * * env | grep -c DATABASE_URL || true
0 12 * * * test ! -e "$HOME/stuck" || exec sleep 1000
0 13 * * * test ! -e "$HOME/broken" || { echo disk full >&2; exit 3; }
"#;

/// The machines, and the files that they share.
struct Site<'a, DB: TestDatabase> {
    db: &'a TestDb<DB>,
    stage: Stage,
    url: String,
    machines: BTreeMap<&'static str, Started>,
}

impl<DB: TestDatabase> Site<'_, DB> {
    /// Starts a machine with this release, or replaces it.
    async fn deploy(&mut self, label: &'static str, release: &str) {
        if let Some(old) = self.machines.remove(label) {
            old.signal(Signal::TERM);
            assert_clean(&old.ended().await.with(0).err);
        }
        let file = self.stage.file(release);
        let words = format!("cron --label {label} --build {release} --drain 30s");
        self.machines.insert(label, start(at(&self.url, &words, &[file.to_str().unwrap()])));
        eventually("it is alive", async || {
            let found = self.instances().await;
            found.iter().any(|(name, build)| name == label && build == release)
        })
        .await;
    }

    async fn instances(&self) -> Vec<(String, String)> {
        let found = self.db.rowlock("instances --json", &[]).await.with(0).json();
        let alive = found.as_array().unwrap().iter().filter(|one| one["alive"] == true);
        let text = |one: &serde_json::Value, field: &str| one[field].as_str().unwrap().to_owned();
        alive.map(|one| (text(one, "label"), text(one, "build"))).collect()
    }

    /// What an operator asks, with one command.
    async fn ask(&self, words: &str) -> String {
        let mut command = at(&self.url, words, &[]);
        command.env_remove("SUDO_USER").env("USER", "ann");
        let said = ended(command).await.with(0);
        assert_clean(&said.err);
        assert_clean(&said.out);
        said.out
    }
}

#[track_caller]
fn assert_clean(text: &str) {
    assert!(!text.contains(PASSWORD), "{text}");
}

/// What Prometheus has read, a value for each minute.
#[derive(Default)]
struct Samples {
    minutes: usize,
    series: BTreeMap<String, Vec<Option<String>>>,
    /// Until which minute, and which alerts fire then: the name, and its labels.
    expected: Vec<(usize, Vec<(&'static str, String)>)>,
}

impl Samples {
    /// Reads the numbers once they have these lines. They stay as they are for so many minutes, at
    /// the end of which these alerts fire.
    async fn take(&mut self, ui: &Ui, minutes: usize, needs: &[&str], alerts: &[(&'static str, &str)]) {
        let read = Mutex::new(String::new());
        eventually("the numbers are these", async || {
            let body = ui.get("/metrics").await.with(200).body;
            *read.lock().unwrap() = body.clone();
            needs.iter().all(|need| body.contains(need))
        })
        .await;
        let body = read.into_inner().unwrap();
        assert_clean(&body);
        for line in body.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let values = self.series.entry(series.to_owned()).or_default();
            values.resize(self.minutes, None);
            values.extend(vec![Some(value.to_owned()); minutes]);
        }
        self.minutes += minutes;
        let alerts = alerts.iter().map(|(name, job)| (*name, (*job).to_owned())).collect();
        self.expected.push((self.minutes - 1, alerts));
    }

    /// Runs the shipped rules over them.
    async fn judge(&self, stage: &Stage) {
        let rules = file("alerts.yml");
        let mut test =
            format!("rule_files: [{rules:?}]\nevaluation_interval: 1m\ntests:\n- interval: 1m\n  input_series:\n");
        for (series, values) in &self.series {
            let mut values: Vec<&str> = values.iter().map(|value| value.as_deref().unwrap_or("_")).collect();
            values.resize(self.minutes, "stale");
            test += &format!("  - series: {series:?}\n    values: {:?}\n", values.join(" "));
        }
        test += "  promql_expr_test:\n";
        for (minute, alerts) in &self.expected {
            test += &format!("  - expr: ALERTS{{alertstate=\"firing\"}}\n    eval_time: {minute}m\n    exp_samples:\n");
            for (name, labels) in alerts {
                let labels = format!("ALERTS{{alertname=\"{name}\", alertstate=\"firing\", {labels}}}");
                test += &format!("    - labels: {labels:?}\n      value: 1\n");
            }
        }
        let path = stage.file("day-test.yml");
        std::fs::write(&path, test).unwrap();
        checked(&["test", "rules", path.to_str().unwrap()], "").await;
    }
}

/// Writes the releases: the jobs of the crontab, each due every few seconds; and the same with
/// another name for one of them, and other times for another. Returns the number of jobs.
async fn releases(stage: &Stage) -> usize {
    let crontab = stage.file("crontab");
    std::fs::write(&crontab, format!("HOME={}\n{CRONTAB}", stage.path())).unwrap();
    let converted = ended(rowlock("cron --from-crontab user", &[crontab.to_str().unwrap()])).await.with(0).out;
    assert!(converted.contains("# @reboot") && converted.contains("# MAILTO="), "{converted}");
    let mut jobs = 0;
    let line = |line: &str| match line.starts_with("cron = ") {
        true => {
            jobs += 1;
            format!("cron = \"*/{} * * * * *\"\n", 5 + jobs % 3)
        }
        false => format!("{line}\n"),
    };
    let first = converted.lines().map(line).collect::<String>();
    let first = first.replacen("[defaults]\n", "[defaults]\njitter = \"3s\"\nlease = \"5s\"\n", 1);
    let first = first.replacen("[job]\n", "[stuck]\n", 1).replacen("[job-2]\n", "[broken]\n", 1);
    std::fs::write(stage.file("first"), &first).unwrap();
    let second = first.replacen("[echo-5]\n", "[report]\nrenamed_from = \"echo-5\"\n", 1);
    let second = second.replacen("\"*/5 * * * * *\"", "\"*/8 * * * * *\"", 1);
    std::fs::write(stage.file("second"), second).unwrap();
    for release in ["first", "second"] {
        ended(rowlock("cron --check", &[stage.file(release).to_str().unwrap()])).await.with(0);
    }
    jobs
}

/// The database is read, and all is well.
const UP: &[&str] = &["rowlock_up 1", "rowlock_job_failed{job=\"broken\"} 0"];

/// Waits until each of these jobs has succeeded since then, by the numbers of its runs.
async fn all_succeed_again<DB: TestDatabase>(site: &Site<'_, DB>, jobs: usize) {
    let successes = async || {
        let runs = site.db.rowlock("runs --limit 10000 --json", &[]).await.with(0).json();
        let mut of: BTreeMap<String, usize> = BTreeMap::new();
        for run in runs.as_array().unwrap().iter().filter(|run| run["status"] == "succeeded") {
            *of.entry(run["name"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        of
    };
    let before = successes().await;
    eventually("all have succeeded", async || {
        let now = successes().await;
        now.iter().filter(|(name, number)| **number > before.get(*name).copied().unwrap_or_default()).count() >= jobs
    })
    .await;
}

async fn a_day_in_the_life<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, proxy) = (Stage::new(), db.proxy().await);
    let jobs = releases(&stage).await;
    assert_eq!(jobs, 18);
    let url = proxy.url.replacen('@', &format!(":{PASSWORD}@"), 1);
    let ui = open_at(&url, "").await;
    let (mut samples, mut site) = (Samples::default(), Site { db: &db, stage, url, machines: BTreeMap::new() });
    for label in ["node-1", "node-2", "node-3"] {
        site.deploy(label, "first").await;
    }
    all_succeed_again(&site, jobs).await;
    samples.take(&ui, 30, UP, &[]).await;

    // A deploy, machine by machine, with a job that gets another name; and its rollback.
    for release in ["second", "first", "second"] {
        for label in ["node-1", "node-2", "node-3"] {
            site.deploy(label, release).await;
        }
        all_succeed_again(&site, jobs).await;
        samples.take(&ui, 30, UP, &[]).await;
    }
    assert!(site.ask("why report").await.contains("report: it succeeded last at 2"));
    assert!(site.ask("show echo-5").await.contains("its name is report"));

    // The database is away for five minutes of Prometheus.
    proxy.hold_everything();
    samples.take(&ui, 5, &["rowlock_up 0"], &[("RowlockDatabaseDown", "severity=\"critical\"")]).await;
    proxy.open();
    all_succeed_again(&site, jobs).await;
    samples.take(&ui, 10, UP, &[]).await;

    // A machine dies, and another one is drained.
    let killed = site.machines.remove("node-1").unwrap();
    killed.signal(Signal::KILL);
    killed.ended().await.with(-9);
    assert_eq!(
        site.ask("drain node-2").await,
        "node-2: 1 instance ends after its runs, for which it has its own --drain\n"
    );
    assert_clean(&site.machines.remove("node-2").unwrap().ended().await.with(0).err);
    eventually("one is alive", async || site.instances().await.len() == 1).await;
    all_succeed_again(&site, jobs).await;
    samples.take(&ui, 10, UP, &[]).await;
    assert!(site.ask("instances").await.contains("node-3"));

    // A job that is stuck is stopped, and one that fails says why.
    std::fs::write(site.stage.file("stuck"), "").unwrap();
    std::fs::write(site.stage.file("broken"), "").unwrap();
    eventually("it is stuck", async || site.ask("runs --running stuck").await.contains("pid ")).await;
    assert!(site.ask("why stuck").await.contains("it runs: attempt 1 on node-3 since 2"));
    std::fs::remove_file(site.stage.file("stuck")).unwrap();
    assert!(site.ask("stop stuck").await.contains("node-3 stops its command"));
    let stopped = ended_as(&db, "stuck", "failed").await;
    assert!(stopped["error"].as_str().unwrap().starts_with("stopped by ann@"), "{stopped}");
    assert!(site.ask("show stuck").await.contains("ann@"), "who has stopped it");
    let failed = ended_as(&db, "broken", "failed").await;
    assert_eq!(failed["error"], "exit code 3: disk full");
    assert_eq!(site.ask("output broken").await, "disk full\n");
    assert!(site.ask("why broken").await.contains("exit code 3: disk full"));
    assert!(site.ask("runs broken --stats").await.contains("SUCCEEDED"));
    ended_as(&db, "stuck", "succeeded").await;
    let needs = ["rowlock_job_failed{job=\"stuck\"} 0", "rowlock_job_failed{job=\"broken\"} 1"];
    samples.take(&ui, 20, &needs, &[("RowlockJobFailed", "severity=\"warning\", job=\"broken\"")]).await;

    // It is skipped until the morning, and mended.
    std::fs::remove_file(site.stage.file("broken")).unwrap();
    site.ask("skip broken --until 8h").await;
    assert!(site.ask("why broken").await.contains("an operator has its ticks skipped until 2"));
    site.ask("resume broken").await;
    all_succeed_again(&site, jobs).await;
    samples.take(&ui, 20, UP, &[]).await;

    let arguments = std::fs::read(format!("/proc/{}/cmdline", site.machines["node-3"].id())).unwrap();
    assert_clean(&String::from_utf8_lossy(&arguments));
    for page in ["/jobs", "/runs", "/instances", "/job?name=env"] {
        assert_clean(&ui.get(page).await.with(200).body);
    }
    assert_eq!(site.ask("output env").await, "0\n", "no command has the URL");
    let last = site.machines.remove("node-3").unwrap();
    last.signal(Signal::TERM);
    assert_clean(&last.ended().await.with(0).err);
    samples.judge(&site.stage).await;
}
