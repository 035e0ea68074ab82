//! The jobs of a file: what their commands find, and what follows their ends.

use std::{path::PathBuf, time::Duration};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::{Pid, Signal, getuid, kill_process};
use tokio::time::sleep;

use crate::{
    program::{Program as _, STAYS, Stage, at, read, rowlock, start},
    program_cron::{cron, ended_as, job, runs},
    program_runs::ran,
    program_terminal::signal,
};

harness::tests!(
    everywhere(
        what_follows_the_end_of_a_tick_is_run_once,
        nothing_follows_a_run_whose_end_is_not_recorded,
        what_follows_a_run_ends_with_the_drain_or_with_a_second_signal
    ),
    sqlite(
        a_command_finds_what_its_job_says,
        a_stop_timeout_may_be_longer_than_a_month,
        a_command_runs_as_its_user,
        a_command_of_another_user_dies_with_the_process_above_it,
        a_command_that_is_missing_costs_its_job_alone,
        a_crontab_becomes_a_file_whose_jobs_run,
        the_file_says_how_many_commands_run,
        a_process_above_a_command_that_is_stopped_stops_nothing,
        a_command_that_cannot_begin_is_a_failure,
        fewer_commands_run_once_others_have_ended
    ),
    everywhere.long(old_runs_are_forgotten_by_the_job_of_the_guide),
    sqlite.long(a_command_that_appears_is_found, an_end_that_is_being_recorded_at_the_stop_is_not_called_lost),
    postgres(a_password_is_masked)
);

/// Writes a file with the text of jobs, whose commands are scripts in the stage's folder.
pub fn file(stage: &Stage, text: &str) -> PathBuf {
    let file = stage.file("jobs.toml");
    std::fs::write(&file, text.replace("$STAGE", stage.path())).unwrap();
    file
}

/// A command that appends a line of shell words to the file `said`.
fn says(words: &str) -> String {
    format!("[\"sh\", \"-c\", '''echo {words} >> \"$0/said\"''', \"$STAGE\"]")
}

async fn said(stage: &Stage, lines: usize) -> String {
    let said = stage.file("said");
    eventually("it says so", async || std::fs::read_to_string(&said).is_ok_and(|said| said.lines().count() >= lines))
        .await;
    read(&said)
}

async fn a_command_finds_what_its_job_says<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    std::fs::create_dir(stage.file("folder")).unwrap();
    let words = "$LANG $TARGET $PATH $(pwd) $(umask) ${DATABASE_URL-none}";
    let text = format!(
        "[defaults]\npath = \"/usr/bin:/bin\"\nenv = {{ LANG = \"C\", TARGET = \"tape\" }}\numask = \"027\"\n\
         [one]\nafter = \"1h\"\ncwd = \"$STAGE/folder\"\nenv = {{ TARGET = \"disk\" }}\ncommand = {}\n",
        says(words)
    );
    let running = cron(&db, "", &file(&stage, &text));
    assert_eq!(said(&stage, 1).await, format!("C disk /usr/bin:/bin {}/folder 0027 none", stage.path()));
    running.stopped().await;
    let asks = "[defaults]\non_failure = [\"/no/such/hook\"]\n[two]\nafter = \"1h\"\ndatabase_url = true\ncommand = "
        .to_owned()
        + &says("$DATABASE_URL");
    let running = cron(&db, "", &file(&stage, &asks));
    assert!(said(&stage, 2).await.ends_with(&format!("\n{}", db.url)));
    let ended = running.stopped().await;
    assert!(ended.err.contains("two: on_failure: command: /no/such/hook: command not found"), "{ended:?}");
    // The URL may stand in a file, which a command does not see.
    std::fs::write(stage.file("url"), &db.url).unwrap();
    let words = "${DATABASE_URL-none} ${DATABASE_URL_FILE-none} ${PGPASSWORD-none}";
    let text = |name: &str, more: &str| format!("[{name}]\nafter = \"1h\"\n{more}command = {}\n", says(words));
    let path = file(&stage, &[text("three", ""), text("four", "database_url = true\n")].concat());
    let mut command = rowlock("cron", &[path.to_str().unwrap()]);
    command.env("DATABASE_URL_FILE", stage.file("url")).env("PGPASSWORD", "a word");
    let running = start(command);
    let lines = said(&stage, 4).await;
    assert!(lines.contains("none none none") && lines.contains(&format!("{} none none", db.url)), "{lines}");
    // The program reads it for itself, and not for each command.
    std::fs::remove_file(stage.file("url")).unwrap();
    db.rowlock("trigger four", &[]).await.with(0);
    assert!(said(&stage, 5).await.ends_with(&format!("\n{} none none", db.url)));
    running.stopped().await;
}

/// The process above the command is told the stop timeout, too.
async fn a_stop_timeout_may_be_longer_than_a_month<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let running = cron(&db, "--stop-timeout 31d", &job(&stage, "k", "after = \"1h\"", "true"));
    ended_as(&db, "k", "succeeded").await;
    running.stopped().await;
}

/// Only root can run commands as another user.
async fn a_command_runs_as_its_user<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let own = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).unwrap().unwrap();
    let (user, other) = if getuid().is_root() { ("nobody", None) } else { (own.name.as_str(), Some("root")) };
    let script = "echo \"$(id -un) $(id -Gn) $USER $LOGNAME $HOME\"; ";
    let text =
        format!("[one]\nafter = \"1h\"\nuser = \"{user}\"\ncwd = \"/\"\ncommand = [\"sh\", \"-c\", '''{script}''']\n");
    let mut running = cron(&db, "", &file(&stage, &text));
    let record = nix::unistd::User::from_name(user).unwrap().unwrap();
    let groups = std::process::Command::new("id").args(["-Gn", user]).output().unwrap().stdout;
    let groups = String::from_utf8(groups).unwrap();
    let line = format!("one: {user} {} {user} {user} {}\n", groups.trim(), record.dir.display());
    running.says(&line, 1).await;
    // The process above the command is not that user's, and stops it all the same.
    ended_as(&db, "one", "succeeded").await;
    running.stopped().await;
    if let Some(other) = other {
        let text = text.replace(user, other);
        let checked = db.rowlock("cron --check", &[file(&stage, &text).to_str().unwrap()]).await.with(2);
        assert!(checked.err.contains("only root can run commands as root"), "{checked:?}");
    }
    // Of the program's variables it has the path alone, and its output has a name for it too.
    let script = "env | grep -v \"^ROWLOCK_\\|^PWD=\\|^_=\\|^SHLVL=\\|^OLDPWD=\" | cut -d= -f1 | sort | tr \"\\n\" \" \"; echo and so on > /dev/stderr";
    let text = format!("[env]\nafter = \"1h\"\nuser = \"{user}\"\ncommand = [\"sh\", \"-c\", '''{script}''']\n");
    let mut running = cron(&db, "", &file(&stage, &text));
    running.says("env: HOME LOGNAME PATH USER \n", 1).await;
    running.complains("env: and so on\n").await;
    running.stopped().await;
    let text =
        format!("[two]\nafter = \"1h\"\nuser = \"{user}\"\ntimeout = \"500ms\"\ncommand = [\"sleep\", \"1000\"]\n");
    let running = cron(&db, "", &file(&stage, &text));
    assert_eq!(ended_as(&db, "two", "failed").await["error"], "stopped after its timeout of 500ms");
    running.stopped().await;
}

/// Neither the program nor the process above the command is there to stop it.
async fn a_command_of_another_user_dies_with_the_process_above_it<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let user = if getuid().is_root() { "user = \"nobody\"\n" } else { "" };
    let text = format!("[k]\nafter = \"1h\"\n{user}command = [\"sh\", \"-c\", '''echo $PPID $$; exec sleep 1000''']\n");
    let mut running = cron(&db, "", &file(&stage, &text));
    running.says("\n", 1).await;
    let pids: Vec<String> = running.said().trim().split(' ').skip(1).map(str::to_owned).collect();
    let [above, command] = pids.as_slice() else { panic!("{pids:?}") };
    let command = PathBuf::from(format!("/proc/{command}/cmdline"));
    let lives = || std::fs::read(&command).is_ok_and(|words| words.starts_with(b"sleep"));
    eventually("it sleeps", async || lives()).await;
    signal(above, Signal::STOP);
    running.signal(Signal::KILL);
    sleep(Duration::from_millis(500)).await;
    signal(above, Signal::KILL);
    eventually("it dies", async || !lives()).await;
}

const MISSING: &str = "[fine]\nevery = \"1s\"\ncommand = [\"true\"]\n\
                       [missing]\nafter = \"1h\"\ncommand = [\"$STAGE/program\"]\n";

/// Makes the command of [`MISSING`].
fn make_it(stage: &Stage) {
    std::os::unix::fs::symlink("/bin/true", stage.file("program")).unwrap();
}

async fn a_command_that_is_missing_costs_its_job_alone<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = file(&stage, MISSING);
    let check = db.rowlock("cron --check", &[file.to_str().unwrap()]).await.with(2);
    let wrong = format!("line 6: missing: command: {}/program: command not found", stage.path());
    assert!(check.err.contains(&wrong), "{check:?}");
    let mut running = cron(&db, "", &file);
    running.complains(&wrong).await;
    ended_as(&db, "fine", "succeeded").await;
    assert!(db.rowlock("runs --json", &["missing"]).await.with(75).err.contains("there is no schedule"));
    make_it(&stage);
    running.signal(Signal::HUP);
    ended_as(&db, "missing", "succeeded").await;
    running.stopped().await;
}

async fn a_command_that_appears_is_found<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let mut running = cron(&db, "", &file(&stage, MISSING));
    running.complains("this machine checks again every 60s").await;
    make_it(&stage);
    sleep(Duration::from_secs(61)).await;
    ended_as(&db, "missing", "succeeded").await;
    running.stopped().await;
}

async fn a_crontab_becomes_a_file_whose_jobs_run<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let crontab = stage.file("crontab");
    let text =
        "WORDS=as it is\n0 0 1 1 *  cat - said.txt%Happy\\%%new year\n0 0 1 1 * echo \"$WORDS: $(pwd)\" >&2; exit 3\n";
    std::fs::write(&crontab, format!("HOME={}\n{text}", stage.path())).unwrap();
    std::fs::write(stage.file("said.txt"), "and so on\n").unwrap();
    let converted = start(rowlock("cron --from-crontab user", &[crontab.to_str().unwrap()])).ended().await.with(0);
    // The user who wrote the file may not be the one whose crontab it is.
    assert!(!converted.out.contains("\nuser = ") && converted.out.contains("set user = "), "{}", converted.out);
    let file = file(&stage, &converted.out);
    db.rowlock("cron --check", &[file.to_str().unwrap()]).await.with(0);
    let mut running = cron(&db, "", &file);
    running.complains("2 jobs").await;
    for name in ["cat", "echo"] {
        db.rowlock("trigger", &[name]).await.with(0);
    }
    running.says("cat: Happy%\ncat: new year\ncat: and so on\n", 1).await;
    ended_as(&db, "cat", "succeeded").await;
    let failed = ended_as(&db, "echo", "failed").await;
    assert_eq!(failed["error"], format!("exit code 3: as it is: {}", stage.path()));
    running.stopped().await;
}

async fn old_runs_are_forgotten_by_the_job_of_the_guide<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let guide = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operators.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let shown = guide.split("```toml\n").find(|block| block.contains("[forget-runs]")).unwrap();
    let shown = shown.split("```").next().unwrap();
    let ours = shown.replace("command = [\"rowlock\"", &format!("command = [\"{}\"", crate::program::PROGRAM));
    assert_ne!(ours, shown);
    for days in [100, 80] {
        let ago = days * 86_400_000;
        ran(&db, "other", ago, ago, "F").await;
    }
    let mut running = cron(&db, "", &file(&stage, &ours));
    running.complains("1 job").await;
    db.rowlock("trigger forget-runs", &[]).await.with(0);
    running.says("forget-runs: 1 deleted\n", 1).await;
    ended_as(&db, "forget-runs", "succeeded").await;
    assert_eq!(runs(&db, "other").await.len(), 1);
    running.stopped().await;
}

async fn the_file_says_how_many_commands_run<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = |name: &str| {
        let script = r#"echo "$ROWLOCK_JOB" >> "$0/said"; while [ ! -e "$0/go" ]; do sleep 0.05; done"#;
        format!("[{name}]\nafter = \"1h\"\ncommand = [\"sh\", \"-c\", '''{script}''', \"$STAGE\"]\n")
    };
    let text = |most: u32| format!("max_concurrent_runs = {most}\n{}{}{}", job("a"), job("b"), job("c"));
    let running = cron(&db, "", &file(&stage, &text(1)));
    said(&stage, 1).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(said(&stage, 1).await.lines().count(), 1);
    file(&stage, &text(2));
    running.signal(Signal::HUP);
    said(&stage, 2).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(said(&stage, 2).await.lines().count(), 2);
    stage.go();
    said(&stage, 3).await;
    for name in ["a", "b", "c"] {
        ended_as(&db, name, "succeeded").await;
    }
    running.stopped().await;
}

async fn a_process_above_a_command_that_is_stopped_stops_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let text = |name: &str, terms: &str| {
        let script = r#"echo $PPID > "$0/new"; mv "$0/new" "$0/up"; exec sleep 1000"#;
        format!("[{name}]\nafter = \"1h\"\n{terms}\ncommand = [\"sh\", \"-c\", '''{script}''', \"$STAGE\"]\n")
    };
    let running = cron(&db, "--stop-timeout 300ms", &file(&stage, &text("late", "timeout = \"1s\"")));
    signal(&stage.up().await, Signal::STOP);
    assert_eq!(ended_as(&db, "late", "failed").await["error"], "stopped after its timeout of 1s");
    running.stopped().await;
    std::fs::remove_file(stage.file("up")).unwrap();
    let running = cron(&db, "--stop-timeout 300ms", &file(&stage, &text("ends", "")));
    let above = stage.up().await;
    let stops = async {
        // However often it is stopped.
        loop {
            let _ = kill_process(Pid::from_raw(above.trim().parse().unwrap()).unwrap(), Signal::STOP);
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        _ = running.stopped() => {}
        () = stops => {}
    }
    assert_eq!(runs(&db, "ends").await[0]["error"], "handed back: its work was stopped");
}

async fn what_follows_the_end_of_a_tick_is_run_once<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let hook = says("$ROWLOCK_OUTCOME $ROWLOCK_JOB $ROWLOCK_ATTEMPT $ROWLOCK_ERROR $TARGET");
    let text = format!(
        "[defaults]\nenv = {{ TARGET = \"tape\" }}\non_failure = {hook}\non_success = {hook}\nretry = 2\n\
         [fails]\nafter = \"1h\"\ncommand = [\"sh\", \"-c\", \"echo no >&2; exit 3\"]\n"
    );
    let running = cron(&db, "", &file(&stage, &text));
    assert_eq!(said(&stage, 1).await, "failed fails 3 exit code 3: no tape");
    running.stopped().await;
    assert_eq!(runs(&db, "fails").await.len(), 3);
    let text = format!("[fine]\nafter = \"1h\"\ncommand = [\"true\"]\non_failure = {hook}\non_success = {hook}\n");
    let running = cron(&db, "", &file(&stage, &text));
    assert_eq!(said(&stage, 2).await.lines().nth(1), Some("succeeded fine 1"));
    running.stopped().await;
    // What the hook does changes nothing.
    let text = "[odd]\nafter = \"1h\"\ncommand = [\"true\"]\non_success = [\"sh\", \"-c\", \"exit 9\"]\n";
    let mut running = cron(&db, "", &file(&stage, text));
    running.complains("odd: on_success: exit code 9").await;
    assert_eq!(ended_as(&db, "odd", "succeeded").await["error"], serde_json::Value::Null);
    running.stopped().await;
}

/// The next renewal comes after the end of the command.
async fn nothing_follows_a_run_whose_end_is_not_recorded<DB: TestDatabase>(db: TestDb<DB>) {
    for (name, end) in [("good", "exit 0"), ("bad", "exit 3")] {
        let stage = Stage::new();
        let hook = says("$ROWLOCK_OUTCOME").replace("$STAGE", stage.path());
        let hooks = format!("after = \"1h\"\non_failure = {hook}\non_success = {hook}");
        let mut running = cron(&db, "", &job(&stage, name, &hooks, &format!("{STAYS}; {end}")));
        stage.up().await;
        db.execute("UPDATE t_resource_schedule SET token = token + 1, paused = TRUE").await;
        stage.go();
        running.complains(&format!("WARN rowlock::cron: lost: its end is not recorded job=\"{name}\"")).await;
        let ended = running.stopped().await;
        assert!(!ended.err.contains("succeeded") && !ended.err.contains("cron: failed"), "{ended:?}");
        assert!(!stage.file("said").exists(), "{ended:?}");
    }
}

/// By itself, the program would wait for it for a minute: longer than the test waits.
async fn what_follows_a_run_ends_with_the_drain_or_with_a_second_signal<DB: TestDatabase>(db: TestDb<DB>) {
    let hook = r#"echo > "$0/up"; while [ ! -e "$0/go" ]; do echo on >> "$0/said"; sleep 0.05; done; touch "$0/done""#;
    for (name, drain) in [("ends", "1h"), ("again", "1h"), ("short", "500ms")] {
        let stage = Stage::new();
        let text = format!(
            "[{name}]\nafter = \"1h\"\ncommand = [\"true\"]\n\
             on_success = [\"sh\", \"-c\", '''{hook}''', \"$STAGE\"]\n"
        );
        let mut running = cron(&db, &format!("--stop-timeout 300ms --drain {drain}"), &file(&stage, &text));
        stage.up().await;
        running.signal(Signal::TERM);
        running.complains(&format!("stopping (SIGTERM): 1 run may continue for {drain}")).await;
        if drain == "1h" {
            // Longer than its stop timeout.
            let before = said(&stage, 1).await.lines().count();
            said(&stage, before + 20).await;
        }
        match name {
            "ends" => stage.go(),
            "again" => running.signal(Signal::TERM),
            _ => {}
        }
        let ended = running.ended().await.with(0);
        assert_eq!(stage.file("done").exists(), name == "ends", "{ended:?}");
        let is_stopped = ended.err.contains(&format!("{name}: on_success: stopped: "));
        assert_eq!(is_stopped, name != "ends", "{ended:?}");
    }
}

/// Another transaction has locked the row.
async fn an_end_that_is_being_recorded_at_the_stop_is_not_called_lost<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let hooks = format!("after = \"1h\"\non_success = {}", says("$ROWLOCK_OUTCOME").replace("$STAGE", stage.path()));
    let mut running = cron(&db, "--drain 100ms", &job(&stage, "k", &hooks, STAYS));
    stage.up().await;
    let mut tx = db.pool.begin().await.unwrap();
    DB::execute_on(&mut tx, "UPDATE t_resource_schedule SET missed = missed").await.unwrap();
    stage.go();
    running.complains("the end of a run is not recorded yet").await;
    running.signal(Signal::TERM);
    running.complains("WARN rowlock::cron: its end may not be recorded job=\"k\"").await;
    let ended = running.ended().await.with(0);
    assert!(!ended.err.contains("succeeded") && !ended.err.contains("lost"), "{ended:?}");
    assert!(!stage.file("said").exists(), "{ended:?}");
}

/// More words than the system passes to a program.
async fn a_command_that_cannot_begin_is_a_failure<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let words = format!("\"{}\", ", "x".repeat(100_000)).repeat(40);
    let hook = says("$ROWLOCK_OUTCOME $ROWLOCK_ATTEMPT");
    let text = format!("[k]\nafter = \"1h\"\nretry = 1\ncommand = [\"true\", {words}]\non_failure = {hook}\n");
    let mut running = cron(&db, "", &file(&stage, &text));
    assert_eq!(said(&stage, 1).await, "failed 2");
    running.complains("cron: failed job=\"k\"").await;
    let error = ended_as(&db, "k", "failed").await["error"].clone();
    assert!(error.as_str().unwrap().starts_with("the command cannot be started: "), "{error}");
    running.stopped().await;
}

/// Those that run when the file is read anew are not stopped.
async fn fewer_commands_run_once_others_have_ended<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let job = |name: &str| {
        let script = r#"echo "$ROWLOCK_JOB" >> "$0/said"; while [ ! -e "$0/$ROWLOCK_JOB" ]; do sleep 0.05; done"#;
        format!("[{name}]\nafter = \"1h\"\ncommand = [\"sh\", \"-c\", '''{script}''', \"$STAGE\"]\n")
    };
    let mut running = cron(&db, "", &file(&stage, &format!("max_concurrent_runs = 2\n{}{}", job("a"), job("b"))));
    said(&stage, 2).await;
    file(&stage, &format!("max_concurrent_runs = 1\n{}{}{}", job("a"), job("b"), job("c")));
    running.signal(Signal::HUP);
    running.complains("3 jobs").await;
    std::fs::write(stage.file("a"), "").unwrap();
    ended_as(&db, "a", "succeeded").await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(said(&stage, 2).await.lines().count(), 2, "b still runs");
    assert_eq!(
        db.number("SELECT COUNT(*) FROM t_resource_schedule WHERE holder IS NOT NULL").await,
        Some(1),
        "c waits"
    );
    std::fs::write(stage.file("b"), "").unwrap();
    assert!(said(&stage, 3).await.ends_with("\nc"));
    std::fs::write(stage.file("c"), "").unwrap();
    ended_as(&db, "c", "succeeded").await;
    running.stopped().await;
}

async fn a_password_is_masked<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let (scheme, rest) = db.url.split_once("://").unwrap();
    let (user, rest) = rest.split_once('@').unwrap();
    let user = user.split(':').next().unwrap();
    // The server of the tests asks for none.
    let url = format!("{scheme}://{user}:secret%2Dword@{rest}");
    let script = "echo $DATABASE_URL; echo of secret-word >&2; exit 3";
    let path = file(
        &stage,
        &format!("[k]\nafter = \"1h\"\ndatabase_url = true\ncommand = [\"sh\", \"-c\", '''{script}''']\n"),
    );
    let running = start(at(&url, "cron", &[path.to_str().unwrap()]));
    assert_eq!(ended_as(&db, "k", "failed").await["error"], "exit code 3: of ***");
    let ended = running.stopped().await;
    assert_eq!(ended.out, format!("k: {}\n", url.replace("secret%2Dword", "***")));
    assert!(!(ended.out + &ended.err).contains("secret"), "it is shown");
}
