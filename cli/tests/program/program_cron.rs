//! `rowlock cron`: the jobs of a file, on one or more instances.

use std::{
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use serde_json::Value;
use tokio::time::sleep;

use crate::{
    program::{PROGRAM, Program as _, STAYS, Stage, Started, start},
    program_terminal::state,
};

harness::tests!(
    everywhere(
        a_command_sees_its_tick_and_its_output_has_its_name,
        a_signal_lets_runs_end,
        what_does_not_end_within_the_stop_timeout_is_stopped_and_run_elsewhere,
        a_run_that_is_lost_is_stopped,
        a_run_that_takes_too_long_is_stopped_and_fails,
        a_failure_is_recorded_with_the_last_line_of_stderr,
        a_tick_is_finished_elsewhere_after_a_kill,
        a_tick_is_finished_elsewhere_while_its_instance_is_paused,
        a_job_that_is_exclusive_waits_for_its_key,
        a_job_whose_key_is_lost_keeps_its_tick_until_its_command_has_ended,
        a_job_whose_tick_is_lost_keeps_its_key_until_its_command_has_ended,
        the_files_of_the_guide_survive_a_kill,
        the_file_is_read_anew,
        a_file_that_was_read_applies_when_the_database_is_back,
        a_wrong_file_is_refused_with_its_line,
        jobs_that_cannot_all_start_claim_no_tick,
        an_error_that_does_not_pass_ends_the_program
    ),
    postgres(a_file_that_the_database_refuses_is_read_again),
    sqlite(
        a_name_is_no_option,
        a_file_that_cannot_be_read_stops_nothing,
        output_that_cannot_be_written_stops_no_run,
        a_command_that_has_ended_is_recorded_though_its_leftovers_are_stopped
    ),
    everywhere.alone(each_tick_is_run_once_beside_kills)
);

/// A command that runs until it is asked to stop.
const OBEYS: &str = r#"trap 'echo bye; exit 7' TERM; touch "$0/up"; while :; do sleep 0.05; done"#;

/// Writes a file with one job.
pub fn job(stage: &Stage, name: &str, terms: &str, script: &str) -> PathBuf {
    jobs(stage, &[(name, terms, script)])
}

pub fn jobs(stage: &Stage, jobs: &[(&str, &str, &str)]) -> PathBuf {
    let section = |(name, terms, script): &(&str, &str, &str)| {
        format!("[\"{name}\"]\n{terms}\ncommand = [\"sh\", \"-c\", '''{script}''', '{}']\n", stage.path())
    };
    let file = stage.file("jobs.toml");
    std::fs::write(&file, jobs.iter().map(section).collect::<String>()).unwrap();
    file
}

pub fn cron<DB: TestDatabase>(db: &TestDb<DB>, words: &str, file: &Path) -> Started {
    let words = format!("cron {words}");
    db.start(&words, &[file.to_str().unwrap()])
}

pub async fn runs<DB: TestDatabase>(db: &TestDb<DB>, name: &str) -> Vec<Value> {
    let runs = db.rowlock("runs --json --limit 1000", &[name]).await.with(0).json();
    runs.as_array().unwrap().clone()
}

async fn schedules<DB: TestDatabase>(db: &TestDb<DB>) -> Vec<Value> {
    db.rowlock("schedules --json", &[]).await.with(0).json().as_array().unwrap().clone()
}

/// Waits until the last run has this status, and returns it.
pub async fn ended_as<DB: TestDatabase>(db: &TestDb<DB>, name: &str, status: &str) -> Value {
    let is_listed = async || {
        let listed = db.rowlock("runs --json --limit 1000", &[name]).await;
        // Until it is declared, no schedule has this name.
        listed.code == 0 && listed.json().as_array().unwrap().iter().any(|run| run["status"] == status)
    };
    eventually(status, is_listed).await;
    runs(db, name).await.into_iter().find(|run| run["status"] == status).unwrap()
}

/// A fixed delay has its first tick at once.
async fn a_command_sees_its_tick_and_its_output_has_its_name<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = r#"echo "$ROWLOCK_JOB/$ROWLOCK_ATTEMPT/$ROWLOCK_MISSED/$ROWLOCK_SLOT/$ROWLOCK_TOKEN"
        echo oh >&2; printf end; exit 3"#;
    let file = job(&stage, "nightly report", "after = \"1h\"", script);
    let mut cron = cron(&db, "--label node-1", &file);
    cron.complains("WARN rowlock::cron: failed job=\"nightly report\"").await;
    let ended = cron.stopped().await;
    let run = ended_as(&db, "nightly report", "failed").await;
    assert_eq!((&run["error"], &run["by"]), (&"exit code 3: oh".into(), &"node-1".into()));
    let (slot, token) = (run["slot"].as_str().unwrap(), &run["token"]);
    let line = format!("nightly report: nightly report/1/0/{slot}/{token}\nnightly report: end\n");
    assert_eq!(ended.out, line);
    assert!(ended.err.contains("\nnightly report: oh\n"), "{ended:?}");
}

async fn a_signal_lets_runs_end<DB: TestDatabase>(db: TestDb<DB>) {
    for (signal, name, words) in
        [(Signal::TERM, "SIGTERM", "--stop-timeout 1h"), (Signal::INT, "SIGINT", "--drain 1h --stop-timeout 100ms")]
    {
        let stage = Stage::new();
        let job_name = format!("job-{}", signal.as_raw());
        let mut cron = cron(&db, words, &job(&stage, &job_name, "after = \"1h\"", STAYS));
        stage.up().await;
        cron.signal(signal);
        cron.complains(&format!("stopping ({name}): 1 run may continue for 1h")).await;
        sleep(Duration::from_millis(500)).await;
        assert!(!cron.is_over());
        stage.go();
        cron.ended().await.with(0);
        assert_eq!(runs(&db, &job_name).await[0]["status"], "succeeded");
    }
}

/// The lease is so long that only a run that was handed back is taken over.
async fn what_does_not_end_within_the_stop_timeout_is_stopped_and_run_elsewhere<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let terms = "after = \"1h\"\nlease = \"1h\"";
    let first = cron(&db, "--stop-timeout 300ms", &job(&stage, "k", terms, OBEYS));
    stage.up().await;
    assert_eq!(first.stopped().await.out, "k: bye\n");
    let second = cron(&db, "", &job(&stage, "k", terms, "true"));
    let run = ended_as(&db, "k", "succeeded").await;
    assert_eq!(run["attempt"], 2);
    second.stopped().await;
}

async fn a_run_that_is_lost_is_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut cron = cron(&db, "--stop-timeout 5s", &job(&stage, "k", "after = \"1h\"\nlease = \"2s\"", OBEYS));
    stage.up().await;
    db.execute("UPDATE t_resource_schedule SET token = token + 1, paused = TRUE").await;
    cron.complains("k: lost; stopping the command").await;
    cron.says("k: bye", 1).await;
    cron.stopped().await;
}

/// The command has started a process in a session of its own, which ignores SIGTERM.
async fn a_run_that_takes_too_long_is_stopped_and_fails<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = r#"setsid sh -c 'trap "" TERM; echo $$ > "$0/new"; mv "$0/new" "$0/up"; while :; do sleep 0.05; done' "$0" &
        trap 'echo bye; exit 7' TERM; while :; do sleep 0.05; done"#;
    let mut cron = cron(&db, "--stop-timeout 500ms", &job(&stage, "k", "after = \"1h\"\ntimeout = \"2s\"", script));
    let left = stage.up().await;
    assert!(state(&left).is_some());
    cron.says("k: bye", 1).await;
    let run = ended_as(&db, "k", "failed").await;
    assert_eq!(run["error"], "stopped after its timeout of 2s");
    assert_eq!(state(&left), None, "it lives on");
    let ended = cron.stopped().await;
    assert!(ended.err.contains("k: rowlock: not ended within 500ms: killed\n"), "the name comes once: {ended:?}");
}

async fn a_failure_is_recorded_with_the_last_line_of_stderr<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, once) = (Stage::new(), "after = \"1h\"");
    let long = "ä".repeat(300);
    let says = |text: &str| format!("echo first >&2; printf '{text}' >&2; exit 3");
    let file = jobs(
        &stage,
        &[
            ("short", once, &says("disk \\033full\\n\\n")),
            ("long", once, &says(&long)),
            ("silent", once, "exit 3"),
            ("left", once, "sleep 1000 & printf 'disk full' >&2; exit 3"),
            ("killed", once, "echo dying >&2; kill -KILL $$"),
        ],
    );
    let mut running = cron(&db, "--stop-timeout 300ms", &file);
    for (name, error) in [
        ("short", "exit code 3: disk ?full".to_owned()),
        ("long", format!("exit code 3: {}", "ä".repeat(100))),
        ("silent", "exit code 3".to_owned()),
        ("left", "exit code 3: disk full".to_owned()),
        ("killed", "exit code 137 (SIGKILL): dying".to_owned()),
    ] {
        assert_eq!(ended_as(&db, name, "failed").await["error"], error.as_str());
    }
    running.complains("left: rowlock: stopped what the command had left running\n").await;
    running.stopped().await;
}

async fn a_tick_is_finished_elsewhere_after_a_kill<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = r#"echo "attempt $ROWLOCK_ATTEMPT of $ROWLOCK_SLOT"
        if [ $ROWLOCK_ATTEMPT = 1 ]; then setsid sh -c 'echo $$ > "$0/new"; mv "$0/new" "$0/up"; exec sleep 1000' "$0" & fi
        while [ $ROWLOCK_ATTEMPT = 1 ]; do sleep 0.05; done"#;
    let file = job(&stage, "k", "after = \"1h\"\nlease = \"2s\"", script);
    let mut first = cron(&db, "--label first", &file);
    first.says("k: attempt 1", 1).await;
    let mut second = cron(&db, "--label second", &file);
    second.complains("1 job").await;
    let left = stage.up().await;
    first.signal(Signal::KILL);
    let first = first.ended().await.with(-9);
    eventually("what the command started is killed too", async || state(&left).is_none()).await;
    second.says("k: attempt 2", 1).await;
    second.complains("attempt=2 taken_over_from=\"first\"\n").await;
    let run = ended_as(&db, "k", "succeeded").await;
    let second = second.stopped().await;
    assert_eq!(first.out.replace("attempt 1", "attempt 2"), second.out, "the same tick");
    let lost = &runs(&db, "k").await[1];
    assert_eq!((&run["attempt"], &run["by"]), (&2.into(), &"second".into()));
    assert_eq!((&lost["status"], &lost["by"], &lost["slot"]), (&"lost".into(), &"first".into(), &run["slot"]));
}

/// Once the instance goes on, it stops its command, and changes nothing of what the other recorded.
async fn a_tick_is_finished_elsewhere_while_its_instance_is_paused<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let terms = "after = \"1h\"\nlease = \"5s\"";
    let mut first = cron(&db, "--stop-timeout 1h --label first", &job(&stage, "k", terms, OBEYS));
    stage.up().await;
    let due = async || db.cell("due_at", "t_resource_schedule").await;
    let claimed = due().await;
    eventually("it is renewed", async || due().await != claimed).await;
    first.signal(Signal::STOP);
    let second = cron(&db, "--label second", &job(&stage, "k", terms, "true"));
    ended_as(&db, "k", "succeeded").await;
    let ends = runs(&db, "k").await;
    first.signal(Signal::CONT);
    first.complains("k: lost; stopping the command").await;
    first.says("k: bye", 1).await;
    for cron in [first, second] {
        cron.stopped().await;
    }
    assert_eq!(runs(&db, "k").await, ends);
    // On a busy machine an instance may lose a lease without being paused.
    let (last, before) = ends.split_first().unwrap();
    assert_eq!((&last["status"], &last["by"]), (&"succeeded".into(), &"second".into()));
    assert!(
        before.iter().all(|run| run["status"] == "lost") && before.iter().any(|run| run["by"] == "first"),
        "{ends:?}"
    );
}

/// `rowlock run` takes the key of the lock table by hand.
async fn a_job_that_is_exclusive_waits_for_its_key<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let held = db.start("run billing", &["--", "sh", "-c", STAYS, stage.path()]);
    stage.up().await;
    let terms = "after = \"1h\"\nexclusive_with = \"billing\"";
    let mut cron =
        cron(&db, "", &job(&stage, "k", terms, "echo begins; while [ ! -e \"$0/end\" ]; do sleep 0.05; done"));
    cron.complains("1 job").await;
    eventually("the tick is claimed", async || schedules(&db).await[0]["state"] == "running").await;
    stage.go();
    let held = held.ended().await.with(0);
    assert_eq!(held.out, "");
    cron.says("k: begins", 1).await;
    assert_eq!(db.show("billing").await["state"], "held");
    db.rowlock("run billing -- true", &[]).await.with(75);
    std::fs::write(stage.file("end"), "").unwrap();
    ended_as(&db, "k", "succeeded").await;
    cron.stopped().await;
    db.rowlock("run billing -- true", &[]).await.with(0);
}

/// The first attempt takes its time to stop.
const LINGERS: &str = r#"trap 'echo stopping; while [ ! -e "$0/end" ]; do sleep 0.05; done; echo bye; exit 7' TERM
    if [ $ROWLOCK_ATTEMPT = 2 ]; then echo again; exit; fi
    touch "$0/up"; while :; do sleep 0.05; done"#;

async fn lingers<DB: TestDatabase>(db: &TestDb<DB>, stage: &Stage) -> Started {
    let terms = "after = \"1h\"\nlease = \"2s\"\nexclusive_with = \"billing\"";
    let cron = cron(db, "--stop-timeout 5min", &job(stage, "k", terms, LINGERS));
    stage.up().await;
    cron
}

async fn a_job_whose_key_is_lost_keeps_its_tick_until_its_command_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut cron = lingers(&db, &stage).await;
    db.execute("UPDATE t_resource_lock SET token = token + 1").await;
    cron.says("k: stopping", 1).await;
    sleep(Duration::from_secs(3)).await;
    let row = &schedules(&db).await[0];
    assert_eq!((&row["state"], &row["attempt"]), (&"running".into(), &1.into()), "{row}");
    std::fs::write(stage.file("end"), "").unwrap();
    ended_as(&db, "k", "succeeded").await;
    let ended = cron.stopped().await;
    assert!(ended.out.ends_with("k: stopping\nk: bye\nk: again\n"), "{ended:?}");
}

async fn a_job_whose_tick_is_lost_keeps_its_key_until_its_command_has_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut cron = lingers(&db, &stage).await;
    db.execute("UPDATE t_resource_schedule SET token = token + 1, paused = TRUE").await;
    cron.says("k: stopping", 1).await;
    sleep(Duration::from_secs(3)).await;
    db.rowlock("run billing -- true", &[]).await.with(75);
    std::fs::write(stage.file("end"), "").unwrap();
    cron.says("k: bye", 1).await;
    eventually("the key is free", async || db.rowlock("run billing -- true", &[]).await.code == 0).await;
    cron.stopped().await;
}

/// The files that the pages show, with a short lease and with a command of the test. Each job is
/// triggered, its machine is killed in the middle of the runs, and another one finishes them.
async fn the_files_of_the_guide_survive_a_kill<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    for program in ["report", "refresh"] {
        let script = "#!/bin/sh\necho begins\nwhile [ -n \"$STAYS\" ]; do sleep 0.05; done\n";
        std::fs::write(stage.file(program), script).unwrap();
        std::fs::set_permissions(stage.file(program), std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for page in ["README.md", "docs/jobs.md", "docs/cron.md"] {
        let text = std::fs::read_to_string(repository.join(page)).unwrap();
        let mut blocks = text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
        let shown = blocks.find(|block| block.contains("command = ")).unwrap_or_else(|| panic!("no file in {page}"));
        let lease =
            |line: &str| if line.starts_with('[') { format!("{line}\nlease = \"2s\"\n") } else { format!("{line}\n") };
        let ours: String = shown.lines().map(lease).collect();
        let file = stage.file("jobs.toml");
        std::fs::write(&file, ours.replace("/opt/app/", &format!("{}/", stage.path()))).unwrap();
        survives_a_kill(&db, &file, page, shown.lines().filter_map(|line| line.strip_prefix('[')?.strip_suffix(']')))
            .await;
        db.execute("DELETE FROM t_resource_schedule_run").await;
    }
}

async fn survives_a_kill<DB: TestDatabase>(
    db: &TestDb<DB>,
    file: &Path,
    page: &str,
    names: impl Iterator<Item = &str> + Clone,
) {
    let mut command = db.command("cron", &[file.to_str().unwrap()]);
    command.env("STAYS", "yes");
    let mut first = start(command);
    first.complains("jobs.toml: ").await;
    for name in names.clone() {
        db.rowlock("trigger", &[name]).await.with(0);
        first.says(&format!("{name}: begins"), 1).await;
    }
    let second = cron(db, "", file);
    first.signal(Signal::KILL);
    first.ended().await.with(-9);
    for name in names {
        let finished = async || {
            let runs = runs(db, name).await;
            let has = |status: &str, first: bool| {
                runs.iter().any(|run| run["status"] == status && (run["attempt"] == 1) == first)
            };
            has("lost", true) && has("succeeded", false)
        };
        eventually(&format!("{page}: {name} is finished"), finished).await;
    }
    second.stopped().await;
}

/// A job is removed while it runs, one is changed, and one is added.
async fn the_file_is_read_anew<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (stays, often) = (("removed", "after = \"1h\"", STAYS), "after = \"200ms\"");
    let file = jobs(&stage, &[stays, ("changed", often, "echo one")]);
    let mut cron = cron(&db, "", &file);
    cron.says("changed: one", 1).await;
    stage.up().await;
    std::fs::write(&file, "[added]\nevery = \"1s\"\n").unwrap();
    cron.signal(Signal::HUP);
    cron.complains("jobs.toml, line 1: added: it has no command").await;
    cron.complains("the jobs stay as they were").await;
    cron.says("changed: one", 3).await;
    jobs(&stage, &[("changed", "after = \"300ms\"", "echo two"), ("added", often, "echo three")]);
    cron.signal(Signal::HUP);
    cron.complains("jobs.toml: 2 jobs; added: added; changed: changed; gone: removed\n").await;
    cron.says("changed: two", 2).await;
    cron.says("added: three", 2).await;
    assert!(runs(&db, "removed").await.is_empty(), "its run goes on");
    stage.go();
    ended_as(&db, "removed", "succeeded").await;
    let ended = cron.stopped().await;
    let last = ended.out.rsplit("changed: two").next().unwrap();
    assert!(!last.contains("one") && runs(&db, "removed").await.len() == 1, "{ended:?}");
    let times: Vec<Value> = schedules(&db).await.iter().map(|row| row["times"].clone()).collect();
    assert_eq!(times, ["after 200ms", "after 300ms", "after 3600s"]);
}

async fn a_file_that_was_read_applies_when_the_database_is_back<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"0 0 1 1 *\"", "echo one");
    let mut cron = cron(&db, "", &file);
    cron.complains("1 job").await;
    db.execute("ALTER TABLE t_resource_schedule RENAME TO hidden").await;
    job(&stage, "k", "after = \"1h\"", "echo two");
    cron.signal(Signal::HUP);
    cron.complains("trying again every 5s").await;
    job(&stage, "k", "after = \"1h\"", "echo three"); // no signal tells of this
    db.execute("ALTER TABLE hidden RENAME TO t_resource_schedule").await;
    cron.says("k: two", 1).await;
    cron.stopped().await;
}

/// The article's table has room for shorter keys.
async fn a_file_that_the_database_refuses_is_read_again<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "cron = \"0 0 1 1 *\"", "echo one");
    db.execute("DROP TABLE t_resource_lock").await;
    db.execute(
        "CREATE TABLE t_resource_lock (key_resource varchar(45) PRIMARY KEY, status char(1), lock_flag int,
         begin_time timestamp, end_time timestamp, client_ip varchar(45), time int)",
    )
    .await;
    db.rowlock("migrate", &[]).await.with(0);
    let mut cron = cron(&db, "", &file);
    cron.complains("1 job").await;
    job(&stage, "k", &format!("after = \"1h\"\nexclusive_with = \"{}\"", "x".repeat(50)), "echo two");
    cron.signal(Signal::HUP);
    cron.complains("the jobs stay as they were").await;
    job(&stage, "k", "after = \"1h\"", "echo three");
    cron.signal(Signal::HUP);
    cron.says("k: three", 1).await;
    assert!(!cron.stopped().await.err.contains("trying again"));
}

async fn a_wrong_file_is_refused_with_its_line<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "every = \"1s\"\nevrey = 1", "true");
    let ended = cron(&db, "", &file).ended().await.with(2);
    let says = format!("rowlock: {}, line 3: k: \"evrey\" is no key of a job", file.display());
    assert!(ended.err.starts_with(&says) && ended.err.lines().count() == 1, "{ended:?}");
    assert_eq!(db.rowlock("schedules --json", &[]).await.with(0).out, "[]\n");
    let missing = cron(&db, "", &stage.file("none.toml")).ended().await.with(2);
    assert!(missing.err.contains("none.toml"), "{missing:?}");
}

/// Each value of the lease is an instance of the library. The second one cannot start.
async fn jobs_that_cannot_all_start_claim_no_tick<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let second = "after = \"1h\"\nlease = \"2h\"\nexclusive_with = \"billing\"";
    let file = jobs(&stage, &[("first", "after = \"1h\"\nlease = \"1h\"", "true"), ("second", second, "true")]);
    db.execute("DROP TABLE t_resource_lock").await;
    for _ in 0..3 {
        cron(&db, "", &file).ended().await.with(78);
        assert!(schedules(&db).await.is_empty(), "none is registered");
        assert_eq!(db.rowlock("instances --json", &[]).await.with(0).out, "[]\n", "no instance is left");
    }
}

async fn an_error_that_does_not_pass_ends_the_program<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "every = \"1s\"", "true");
    let mut command = db.command("cron", &[file.to_str().unwrap()]);
    // There is no such database, or no such file.
    let (before, _) = db.url.split_once('?').unwrap_or((&db.url, ""));
    command.env("DATABASE_URL", format!("{before}_none"));
    let none = start(command).ended().await.with(69);
    assert!(none.err.contains("no connection to") && none.err.lines().count() == 1, "{none:?}");
    assert!(!none.err.contains("trying again"), "{none:?}");
    db.execute("DROP TABLE t_resource_schedule").await;
    let missing = cron(&db, "", &file).ended().await.with(78);
    assert!(missing.err.contains("run `rowlock migrate` once") && !missing.err.contains("again"), "{missing:?}");
}

/// Every 800 ms, one of three instances is killed and started again.
async fn each_tick_is_run_once_beside_kills<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let terms = "every = \"1s\"\ncatch_up = \"all\"\nmax = 1000\nlease = \"1s\"";
    let file = job(&stage, "k", terms, "sleep 0.2");
    let start = || cron(&db, "--stop-timeout 5s", &file);
    let mut instances = [start(), start(), start()];
    let begun = Instant::now();
    for round in 0.. {
        sleep(Duration::from_millis(800)).await;
        instances[round % 3].signal(Signal::KILL);
        let killed = std::mem::replace(&mut instances[round % 3], start());
        assert_eq!(killed.ended().await.code, -9);
        if begun.elapsed() > Duration::from_secs(8) {
            break;
        }
    }
    sleep(Duration::from_secs(3)).await;
    for instance in instances {
        instance.stopped().await;
    }
    let runs = runs(&db, "k").await;
    let succeeded = runs.iter().rev().filter(|run| run["status"] == "succeeded");
    let slots: Vec<chrono::DateTime<chrono::Utc>> =
        succeeded.map(|run| run["slot"].as_str().unwrap().parse().unwrap()).collect();
    let apart = slots.windows(2).all(|two| (two[1] - two[0]).num_milliseconds() == 1000);
    assert!(slots.len() >= 8 && apart, "{slots:?}");
    assert!(runs.iter().all(|run| run["status"] != "missed" && run["missed"] == 0), "{runs:?}");
}

async fn a_name_is_no_option<DB: TestDatabase>(db: TestDb<DB>) {
    let names = ["--help", "-h", "-v", "--", "--local", "--job=k"];
    let stage = Stage::new();
    let file = jobs(&stage, &names.map(|name| (name, "after = \"1h\"", r#"echo "runs $ROWLOCK_JOB""#)));
    let mut cron = cron(&db, "", &file);
    for name in names {
        cron.says(&format!("{name}: runs {name}\n"), 1).await;
    }
    cron.stopped().await;
}

/// The command leaves a process behind, which has the stop timeout. The signal and the timeout come
/// within it.
async fn a_command_that_has_ended_is_recorded_though_its_leftovers_are_stopped<DB: TestDatabase>(db: TestDb<DB>) {
    let leaves = r#"sleep 1000 & echo $$ > "$0/new"; mv "$0/new" "$0/up""#;
    for (name, terms, signal) in [("signal", "", Some(Signal::TERM)), ("time", "timeout = \"5s\"", None)] {
        let stage = Stage::new();
        let cron = cron(&db, "--stop-timeout 5s", &job(&stage, name, &format!("after = \"1h\"\n{terms}"), leaves));
        let command = stage.up().await;
        eventually("the command has ended", async || state(&command).is_none()).await;
        match signal {
            Some(signal) => {
                // The second signal ends the time that runs have to end.
                cron.signal(signal);
                sleep(Duration::from_millis(500)).await;
                cron.signal(signal);
            }
            None => {
                ended_as(&db, name, "succeeded").await;
                cron.signal(Signal::TERM);
            }
        }
        cron.ended().await.with(0);
        let runs = runs(&db, name).await;
        assert_eq!((runs.len(), &runs[0]["status"]), (1, &"succeeded".into()), "{runs:?}");
    }
}

/// Nothing writes to the FIFO, as a network file system that does not reply.
async fn a_file_that_cannot_be_read_stops_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "after = \"200ms\"", "echo runs");
    let mut cron = cron(&db, "", &file);
    cron.says("k: runs", 1).await;
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    cron.signal(Signal::HUP);
    let before = cron.said().matches("k: runs").count();
    cron.says("k: runs", before + 20).await;
    cron.stopped().await;
}

/// As on a full disk.
async fn output_that_cannot_be_written_stops_no_run<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "every = \"1s\"", "echo out; echo err >&2");
    let mut shell = tokio::process::Command::new("sh");
    shell.args(["-c", r#"exec "$0" cron "$1" > /dev/full 2> /dev/full"#, PROGRAM]).arg(&file);
    shell.env("DATABASE_URL", &db.url);
    let cron = start(shell);
    let succeeded = "SELECT COUNT(*) FROM t_resource_schedule_run WHERE status = 'S'";
    eventually("runs succeed", async || db.number(succeeded).await > Some(1)).await;
    cron.stopped().await;
    assert!(runs(&db, "k").await.iter().all(|run| run["status"] == "succeeded"));
}
