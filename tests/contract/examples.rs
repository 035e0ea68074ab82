//! Runs the examples as a user does. The examples check themselves, and the tests check their
//! output.

use std::{
    fs,
    io::Result,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use harness::{Need, TestDatabase, TestDb, acquired, eventually};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::timeout,
};

/// The built examples.
pub const EXAMPLES: Need = Need { what: "cargo build --examples", is_met: |_| are_built(&NAMES) };

harness::tests!(
    everywhere[EXAMPLES](
        deduct_shows_exact_balances_each_way,
        deduct_tells_a_wrong_balance,
        deduct_leaves_no_table_behind_when_its_output_is_closed,
        scheduled_job_hands_over_and_runs_each_tick_once
    ),
    sqlite[EXAMPLES](
        deduct_refuses_what_it_does_not_know,
        scheduled_job_that_is_killed_leaves_no_instance_behind,
        fencing_refuses_the_late_write_that_nothing_else_stops,
        exactly_once_survives_kills_as_the_guide_shows_it
    )
);

const NAMES: [&str; 6] = ["cron", "deduct", "exactly_once", "fencing", "graceful_shutdown", "scheduled_job"];
/// The time limit of an example, long enough for a slow machine.
const STORY: Duration = Duration::from_secs(300);

/// Returns whether these examples are built next to this program and are newer than their sources.
/// `cargo test --workspace` ensures this, `cargo test -p rowlock-contract` does not.
pub fn are_built(names: &[&str]) -> bool {
    names.iter().all(|name| is_fresh(&program(name)).unwrap_or(false))
}

/// The sources are those in cargo's own dependency file.
fn is_fresh(program: &Path) -> Result<bool> {
    let built = fs::metadata(program)?.modified()?;
    let list = fs::read_to_string(program.with_extension("d"))?.replace("\\ ", "\0");
    for source in list.split_whitespace().skip(1) {
        if fs::metadata(source.replace('\0', " "))?.modified()? > built {
            return Ok(false);
        }
    }
    Ok(true)
}

fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().and_then(Path::parent).unwrap().join("examples").join(name)
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the text of a function of an example, which a page shows.
pub fn recipe(source: &str, begin: &str) -> String {
    let source = fs::read_to_string(repository().join(source)).unwrap();
    let length = |begin: usize| source[begin..].find("\n}\n").map(|end| end + 3);
    let begin = source.find(begin).unwrap();
    source[begin..begin + length(begin).unwrap()].to_owned()
}

pub fn example(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program(name));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn ended(mut example: Command) -> (Option<i32>, String) {
    output(example.spawn().unwrap()).await
}

async fn output(example: Child) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = timeout(STORY, example.wait_with_output()).await.expect("it ends").unwrap();
    (status.code(), String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap())
}

/// Its instances have copies of its stderr.
async fn scheduled_job_that_is_killed_leaves_no_instance_behind<DB: TestDatabase>(_: TestDb<DB>) {
    let mut parent = example("scheduled_job", &[]).spawn().unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let has_instances = async {
        while !lines.next_line().await.unwrap().unwrap().starts_with("A schedule") {}
        while !lines.next_line().await.unwrap().unwrap().contains("runs") {}
    };
    timeout(STORY, has_instances).await.unwrap();
    parent.kill().await.unwrap();
    let (_, said) = output(parent).await;
    assert!(!said.contains("panicked"), "{said}");
}

async fn deduct_shows_exact_balances_each_way<DB: TestDatabase>(db: TestDb<DB>) {
    let mut arguments = vec!["--accounts", "1", "--deductions", "5"];
    // On SQLite, the example needs no URL.
    if db.server.name != "sqlite" {
        arguments.extend(["--database-url", &db.url]);
    }
    let (status, said) = ended(example("deduct", &arguments)).await;
    assert_eq!(status, Some(0), "{said}");
    for way in ["lease", "version", "VersionedTable::deduct"] {
        let line = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let line = line.filter(|fields| fields.len() == 7).find(|fields| fields[0] == way).expect(&said);
        let number = |field: usize| line[field].parse::<u32>().expect(&said);
        let (committed, ran, in_vain) = (number(1), number(2), number(3));
        assert_eq!((committed, in_vain, line[6]), (32 * 5, ran - committed, "exact"), "{said}");
        assert!(way != "version" || in_vain > 0, "32 workers on one account get in each other's way: {said}");
    }
    assert!(DB::execute(&db.pool, "SELECT 1 FROM rowlock_example").await.is_err(), "its table is gone");
}

/// The test changes a balance while the only worker waits for the key.
async fn deduct_tells_a_wrong_balance<DB: TestDatabase>(db: TestDb<DB>) {
    let lease = acquired(db.lock().try_acquire("example-account-0").await);
    let few = ["--workers", "1", "--accounts", "1", "--deductions", "1"];
    let deducting = example("deduct", &[&few, ["--strategy", "lease", "--database-url", &db.url].as_slice()].concat());
    let deducting = harness::spawn(ended(deducting));
    let change = "UPDATE rowlock_example SET balance = balance + 7";
    eventually("there is an account", async || DB::execute(&db.pool, change).await.is_ok_and(|rows| rows == 1)).await;
    lease.release().await.unwrap();
    let (status, said) = deducting.await.unwrap();
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("WRONG") && said.contains("a balance is wrong"), "{said}");
    assert!(DB::execute(&db.pool, change).await.is_err(), "its table is gone");
}

async fn deduct_leaves_no_table_behind_when_its_output_is_closed<DB: TestDatabase>(db: TestDb<DB>) {
    let mut deducting = example("deduct", &["--database-url", &db.url]).spawn().unwrap();
    drop(deducting.stdout.take());
    let (status, said) = output(deducting).await;
    assert_eq!(status, Some(1), "{said}");
    assert!(DB::execute(&db.pool, "SELECT 1 FROM rowlock_example").await.is_err(), "its table is gone");
}

async fn deduct_refuses_what_it_does_not_know<DB: TestDatabase>(_: TestDb<DB>) {
    for wrong in [&["--account", "1"] as &[_], &["--strategy", "hope"], &["--workers"], &["--workers", "many"], &["1"]]
    {
        let (status, said) = ended(example("deduct", wrong)).await;
        assert_eq!(status, Some(2), "{wrong:?}: {said}");
        assert!(said.contains("Usage: deduct"), "{wrong:?}: {said}");
    }
    let (status, said) = ended(example("deduct", &["--help"])).await;
    assert!(status == Some(0) && said.starts_with("Usage: deduct"), "{said}");
}

async fn fencing_refuses_the_late_write_that_nothing_else_stops<DB: TestDatabase>(_: TestDb<DB>) {
    let (status, said) = ended(example("fencing", &[])).await;
    assert_eq!(status, Some(0), "{said}");
    let (checked, unchecked) = said.split_once("does not look at tokens").expect(&said);
    for (story, answer, left) in [(checked, "refused", "second"), (unchecked, "stored", "first")] {
        let late =
            ["-- first is woken up --", "first", "wrote:", answer, "looked again: held = false", "could not release"];
        let mut rest = story;
        for part in late.into_iter().chain(["storage", &format!("written by {left}")]) {
            rest = rest.split_once(part).unwrap_or_else(|| panic!("no {part:?} in time: {said}")).1;
        }
    }
}

/// The table of the history is counted here, too.
async fn scheduled_job_hands_over_and_runs_each_tick_once<DB: TestDatabase>(db: TestDb<DB>) {
    // On SQLite, the example needs no URL.
    let url = ["--database-url", db.url.as_str()];
    let arguments = if db.server.name == "sqlite" { &[] } else { url.as_slice() };
    let (status, said) = ended(example("scheduled_job", arguments)).await;
    assert_eq!(status, Some(0), "{said}");
    let (lock, rest) = said.split_once("A schedule.").expect(&said);
    assert!(lock.contains("refused") && lock.contains("taken over from node-1"), "{said}");
    let (ticks, history) = rest.split_once("The history:").expect(&said);
    for (what, times) in [("taken over from", 3), ("  killed  ", 5), ("  paused  ", 1), ("  goes on ", 1)] {
        assert!(ticks.matches(what).count() >= times, "{times} times {what:?}: {said}");
    }
    let rows = history.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let rows: Vec<_> = rows.filter(|row| row.get(4) == Some(&"ms")).collect();
    let succeeded: Vec<_> = rows.iter().filter(|row| row[2] == "succeeded").map(|row| seconds(row[0])).collect();
    let lost = rows.iter().filter(|row| row[2] == "lost").count();
    assert!(succeeded.windows(2).all(|two| two[1] == (two[0] + 1) % DAY), "each tick once: {said}");
    assert!(succeeded.len() >= 12 && lost >= 3 && rows.len() == succeeded.len() + lost, "{said}");
    let count = format!("{} ticks, each of them succeeded once; {lost} runs were lost", succeeded.len());
    assert!(history.contains(&count), "{said}");
}

async fn exactly_once_survives_kills_as_the_guide_shows_it<DB: TestDatabase>(_: TestDb<DB>) {
    let guide = fs::read_to_string(repository().join("docs/jobs.md")).unwrap();
    let recipe = recipe("examples/exactly_once.rs", "async fn pay_interest");
    assert!(guide.contains(&recipe), "docs/jobs.md shows another pay_interest than the example runs");
    let (status, said) = ended(example("exactly_once", &[])).await;
    assert_eq!(status, Some(0), "{said}");
    // One tick: lost, then paid under a kill. The next tick: paid.
    assert!(said.contains("\n3 runs, 2 ticks that succeeded, a balance of 2\n"), "{said}");
    assert!(said.contains("node-1  killed  before") && said.contains("node-2  killed  after"), "{said}");
}

const DAY: u32 = 24 * 60 * 60;

fn seconds(clock: &str) -> u32 {
    clock.split(':').fold(0, |seconds, part| seconds * 60 + part.parse::<u32>().unwrap())
}
