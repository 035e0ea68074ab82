//! `rowlock run`: which runs start, which are refused, and what the row contains afterwards.

use std::{
    fs::File,
    path::Path,
    time::{Duration, Instant},
};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use tokio::time::sleep;

use crate::{
    program::{PROGRAM, Program as _, STAYS, Stage, ended, read, rowlock, start, within},
    program_cron::job,
};

harness::tests!(
    everywhere(
        the_exit_code_is_the_commands_and_the_row_tells_how_it_ended,
        the_command_sees_its_claim_and_what_comes_in,
        one_of_many_runs_within_a_min_interval,
        article_rules_wait_for_an_operator,
        a_failed_run_is_repeated_within_its_min_interval_on_request,
        a_command_may_outlast_its_lease,
        a_killed_holder_is_replaced_within_its_lease_and_its_command_dies
    ),
    everywhere.alone(waiting_ends_with_the_key_or_with_the_time),
    sqlite(
        the_command_begins_with_the_signals_of_a_fresh_process,
        a_local_lock_needs_nothing,
        a_local_cron_is_stopped_while_it_waits_for_its_file,
        a_program_that_is_replaced_while_it_waits_runs_its_command
    ),
    sqlite.alone(a_command_that_does_not_start_leaves_the_key_free),
    mysql_and_mariadb.alone(it_takes_leave_of_the_server)
);

async fn the_exit_code_is_the_commands_and_the_row_tells_how_it_ended<DB: TestDatabase>(db: TestDb<DB>) {
    for (script, code, status) in
        [("true", 0, "S"), ("exit 3", 3, "F"), ("exit 255", 255, "F"), ("kill -9 $$", 137, "F"), ("kill $$", 143, "F")]
    {
        let ended = db.rowlock("run k -- sh -c", &[script]).await.with(code);
        assert_eq!((ended.out.as_str(), ended.err.as_str()), ("", ""), "{script}");
        let row = db.show("k").await;
        assert_eq!((&row["status"], &row["holder"]), (&status.into(), &serde_json::Value::Null), "{script}");
        assert!(row["state"] == if status == "S" { "free" } else { "failed" } && row["ended"].is_string(), "{row}");
    }
}

async fn the_command_sees_its_claim_and_what_comes_in<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    std::fs::write(stage.file("in"), "from outside").unwrap();
    let script =
        r#"printf '%s\n' "$ROWLOCK_KEY" "$ROWLOCK_TOKEN" "$ROWLOCK_HOLDER" "$0" "$1" > "$2/claim"; cat; echo oh >&2"#;
    let key = "nightly report, Zürich";
    let words = [key, "--label", "who", "--", "sh", "-c", script, "a  b", "--held", stage.path()];
    let mut command = db.command("run", &words);
    command.stdin(File::open(stage.file("in")).unwrap());
    let ended = ended(command).await.with(0);
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("from outside", "oh\n"));
    let claim = read(&stage.file("claim"));
    let [seen_key, token, holder, rest @ ..] = &claim.lines().collect::<Vec<_>>()[..] else { panic!("{claim}") };
    assert_eq!((*seen_key, rest), (key, &["a  b", "--held"][..]));
    assert!(uuid::Uuid::parse_str(holder).is_ok(), "{holder}");
    let row = db.show(key).await;
    assert_eq!((row["token"].to_string().as_str(), row["by"].as_str()), (*token, Some("who")));
}

/// A program in a pipe may rely on SIGPIPE to end it. Rust programs ignore SIGPIPE, so the command
/// must start with the default.
async fn the_command_begins_with_the_signals_of_a_fresh_process<DB: TestDatabase>(db: TestDb<DB>) {
    let script = "(yes; echo $? >&2) | head -n 1";
    let ended = db.rowlock("run k -- sh -c", &[script]).await.with(0);
    assert_eq!((ended.out.as_str(), ended.err.as_str()), ("y\n", "141\n"));
}

async fn one_of_many_runs_within_a_min_interval<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = || db.start("run k --min-interval 1h -- sh -c", &[r#"echo ran >> "$0/log""#, stage.path()]);
    let [a, b, c] = [job(), job(), job()];
    let (a, b, c) = tokio::join!(a.ended(), b.ended(), c.ended());
    let late = job().ended().await;
    let mut codes = [a.code, b.code, c.code, late.code];
    assert!(late.err.contains("within its min interval"), "{late:?}");
    codes.sort();
    assert_eq!((codes, read(&stage.file("log")).as_str()), ([0, 75, 75, 75], "ran"));
    // Once the beginning is longer ago than the interval, the next run is granted.
    db.set("k", &format!("begin_time = {}", DB::ago(3_700_000))).await;
    job().ended().await.with(0);
}

async fn article_rules_wait_for_an_operator<DB: TestDatabase>(db: TestDb<DB>) {
    let run = async |script| db.rowlock("run k --rules article -- sh -c", &[script]).await;
    run("exit 3").await.with(3);
    let refused = run("true").await.with(75);
    assert!(refused.err.contains("k: the last run failed"), "{refused:?}");
    let freed = db.rowlock("release k --force --status S", &[]).await.with(0);
    assert!(freed.out.starts_with(&format!("k is free; its token is {}; ", db.show("k").await["token"])), "{freed:?}");
    run("true").await.with(0);
    // The default rules would not have refused this run.
    run("exit 3").await.with(3);
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_failed_run_is_repeated_within_its_min_interval_on_request<DB: TestDatabase>(db: TestDb<DB>) {
    let run = async |words, code| db.rowlock(words, &["--min-interval", "1h", "--", "sh", "-c", code]).await.code;
    assert_eq!(run("run k", "exit 3").await, 3);
    assert_eq!(run("run k", "true").await, 75);
    assert_eq!(run("run k --retry-failed", "true").await, 0);
    assert_eq!(run("run k --retry-failed", "true").await, 75, "it succeeded");
}

async fn waiting_ends_with_the_key_or_with_the_time<DB: TestDatabase>(db: TestDb<DB>) {
    let holder = db.rowlock("acquire k --lease 1h", &[]).await.with(0).json();
    let asked = Instant::now();
    let refused = db.rowlock("run k --wait 300ms -- echo", &["it runs"]).await.with(75);
    assert!(asked.elapsed() >= Duration::from_millis(300) && refused.out.is_empty(), "{refused:?}");
    let mut waiting = db.start("run k --wait 1h -vv -- echo", &["it runs"]);
    waiting.complains("refused").await;
    db.rowlock("release k --holder", &[holder["holder"].as_str().unwrap()]).await.with(0);
    assert_eq!(waiting.ended().await.with(0).out, "it runs\n");
}

async fn a_command_may_outlast_its_lease<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = db.start("run k --lease 3s -- sh -c", &[STAYS, stage.path()]);
    let holder = stage.up().await;
    let first = db.show("k").await;
    let begun = Instant::now();
    eventually("it is renewed", async || {
        begun.elapsed() > Duration::from_millis(3500) && db.show("k").await["until"] != first["until"]
    })
    .await;
    let refused = db.rowlock("run k -- true", &[]).await.with(75);
    assert!(refused.err.contains("held"), "{refused:?}");
    assert_eq!(db.show("k").await["holder"], holder);
    stage.go();
    job.ended().await.with(0);
    assert_eq!(db.show("k").await["status"], "S");
}

async fn a_killed_holder_is_replaced_within_its_lease_and_its_command_dies<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let words = ["sh", "-c", STAYS, stage.path()];
    let holder = db.start("run k --lease 3s --label victim --min-interval 1h --", &words);
    stage.up().await;
    let mut next = db.start("acquire k --wait 1h --min-interval 1h --label heir -vv", &[]);
    next.complains("refused").await;
    holder.signal(Signal::KILL);
    let killed = Instant::now();
    let claim = next.ended().await.with(0).json();
    within(killed.elapsed(), Duration::from_secs(3));
    // The program's output ends only with its command, which the test never lets end.
    assert_eq!(holder.ended().await.code, -9);
    let row = db.show("k").await;
    assert_eq!((&row["by"], &row["token"]), (&"heir".into(), &claim["token"]));
    let prior = &claim["taken_over_from"];
    assert!(prior["by"] == "victim" && prior["token"].as_i64() < claim["token"].as_i64(), "{claim}");
}

/// MySQL and MariaDB count and log connections that end without a disconnect message. The counter
/// is server-wide, and other tests abort connections at the same time: one run without an increase
/// is proof, and an increase proves nothing.
async fn it_takes_leave_of_the_server<DB: TestDatabase>(db: TestDb<DB>) {
    let aborted = "SELECT CAST(variable_value AS SIGNED) FROM TABLE_OF_STATUS WHERE variable_name = 'Aborted_clients'";
    let schema = if db.server.name == "mariadb" { "information_schema" } else { "performance_schema" };
    let aborted = aborted.replace("TABLE_OF_STATUS", &format!("{schema}.global_status"));
    eventually("a run that aborts nothing", async || {
        let before = db.number(&aborted).await;
        db.rowlock("run k -- true", &[]).await.with(0);
        db.number(&aborted).await == before
    })
    .await;
}

/// This happens when the program is upgraded while it waits.
async fn a_program_that_is_replaced_while_it_waits_runs_its_command<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let copy = stage.file("rowlock");
    std::fs::copy(PROGRAM, &copy).unwrap();
    let holder = db.rowlock("acquire k --lease 1h", &[]).await.with(0).json();
    let mut command = tokio::process::Command::new(&copy);
    command.args(["run", "k", "--wait", "1h", "-vv", "--", "echo", "it runs"]).env("DATABASE_URL", &db.url);
    let mut waiting = start(command);
    waiting.complains("refused").await;
    std::fs::remove_file(&copy).unwrap();
    db.rowlock("release k --holder", &[holder["holder"].as_str().unwrap()]).await.with(0);
    assert_eq!(waiting.ended().await.with(0).out, "it runs\n");
}

/// The longest argument list that the system accepts. With the arguments that the program adds to
/// start the command, the list is too long.
async fn a_command_that_does_not_start_leaves_the_key_free<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let deep = stage.file(&vec!["d".repeat(250); 12].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    std::os::unix::fs::symlink("/bin/true", deep.join("tool")).unwrap();
    let script = r#"
        shopt -s execfail; ulimit -s 8192; cd "$1"; word=$(printf %0999d 0); words=()
        for ((n = 0; n < 2100; n++)); do words+=("$word"); done
        while unset "words[-1]"; do exec "$0" run k --min-interval 1h --lease 1h -- ./tool "${words[@]}"; done 2> /dev/null"#;
    let mut shell = tokio::process::Command::new("bash");
    shell.args(["-c", script, PROGRAM, deep.to_str().unwrap()]).env("DATABASE_URL", &db.url);
    start(shell).ended().await.with(126);
    assert_eq!(db.show("k").await["state"], "expired", "it was taken");
    db.rowlock("run k --min-interval 1h -- true", &[]).await.with(0);
}

/// The program creates and migrates its own file when it needs it.
async fn a_local_lock_needs_nothing<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    for (variable, file) in [("XDG_STATE_HOME", "rowlock/locks.db"), ("HOME", ".local/state/rowlock/locks.db")] {
        let run = async |words: &str| {
            let mut command = rowlock(words, &[]);
            command.env("HOME", "/nowhere").env(variable, stage.path());
            ended(command).await
        };
        run("run k --local --min-interval 1h -- true").await.with(0);
        assert!(stage.file(file).exists(), "{file}");
        run("run k --local --min-interval 1h -- true").await.with(75);
        assert_eq!(run("list --local --json").await.with(0).json()[0]["key"], "k");
    }
}

/// Another process writes to the file, which has no tables yet.
async fn a_local_cron_is_stopped_while_it_waits_for_its_file<DB: TestDatabase>(_: TestDb<DB>) {
    let (stage, second) = (Stage::new(), Duration::from_secs(1));
    let (file, folder) = (job(&stage, "k", "after = \"1h\"", "true"), stage.file("rowlock"));
    std::fs::create_dir(&folder).unwrap();
    let pool = harness::pool::<DB>(&format!("sqlite:{}/locks.db?mode=rwc", folder.display()), 1).await;
    DB::execute(&pool, "PRAGMA journal_mode = WAL").await.unwrap();
    let writer = pool.begin_with(DB::BEGIN).await.unwrap();
    let mut command = rowlock("cron --local", &[file.to_str().unwrap()]);
    command.env("XDG_STATE_HOME", stage.path());
    let cron = start(command);
    let handled = || {
        let status = read(Path::new(&format!("/proc/{}/status", cron.id())));
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&mask, 16).unwrap() >> (Signal::TERM.as_raw() - 1) & 1 == 1
    };
    eventually("it handles signals", async || handled()).await;
    sleep(second).await;
    cron.signal(Signal::TERM);
    sleep(second).await;
    writer.rollback().await.unwrap();
    cron.ended().await.with(0);
}
