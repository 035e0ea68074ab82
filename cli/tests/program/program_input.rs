//! What the program reports about invalid arguments and unusable databases.

use std::{
    os::unix::fs::PermissionsExt as _,
    time::{Duration, Instant},
};

use harness::{DIRECT, TestDatabase, TestDb, each};
use proptest::prelude::{Just, prop_oneof};
use tokio::{net::TcpListener, process::Command};

use crate::program::{Ended, Program as _, Stage, at, ended, rowlock};

harness::tests!(
    everywhere(
        a_table_that_is_missing_says_what_to_run,
        a_command_that_cannot_be_run_takes_no_key,
        bad_arguments_are_refused_and_say_why
    ),
    sqlite(
        a_file_that_is_missing_is_not_made,
        a_look_leaves_the_file_as_it_is,
        a_preview_leaves_the_own_file_as_it_is,
        no_database_names_all_three_ways,
        a_time_to_connect_may_be_long,
        each_commands_help_has_an_example,
        completions_and_man_pages_are_written,
        any_url_is_read_or_refused
    ),
    servers(a_server_out_of_reach_is_no_refusal),
    servers[DIRECT](a_password_is_not_repeated, an_error_of_the_database_names_it)
);

/// The site's URL with another user, password and address.
fn url<DB: TestDatabase>(db: &TestDb<DB>, authority: &str) -> String {
    let (scheme, rest) = db.url.split_once("://").unwrap();
    format!("{scheme}://{authority}/{}", rest.split_once('/').unwrap().1)
}

fn address<DB: TestDatabase>(db: &TestDb<DB>) -> String {
    let rest = db.url.split_once("://").unwrap().1;
    let authority = rest.split_once('/').unwrap().0;
    authority.rsplit_once('@').map_or(authority, |(_, address)| address).to_owned()
}

async fn list(url: &str) -> Ended {
    let ended = ended(at(url, "list --connect-timeout 500ms", &[])).await;
    assert!(ended.out.is_empty() && ended.err.lines().count() == 1, "{ended:?}");
    ended
}

async fn a_table_that_is_missing_says_what_to_run<DB: TestDatabase>(db: TestDb<DB>) {
    db.execute("DROP TABLE t_resource_lock").await;
    for words in [
        "run k -- true",
        "acquire k",
        "list",
        "show k",
        "forget --older-than 1h",
        "watch",
        "acquire k --wait 1s",
        "list --json",
        "renew k --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11",
        "release k --force",
    ] {
        let missing = db.rowlock(words, &[]).await.with(78);
        assert!(missing.err.lines().count() == 1 && missing.err.contains("run `rowlock migrate`"), "{missing:?}");
    }
    for _ in 0..2 {
        db.rowlock("migrate", &[]).await.with(0);
    }
    db.rowlock("run k -- true", &[]).await.with(0);
}

async fn a_server_out_of_reach_is_no_refusal<DB: TestDatabase>(db: TestDb<DB>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let started = Instant::now();
    let place = format!("at {address}, database {}", db.url.rsplit_once('/').unwrap().1.split('?').next().unwrap());
    let url = url(&db, &format!("operator:hunter2@{address}"));
    let url = format!("{url}{}application_name=hunter2", if url.contains('?') { '&' } else { '?' });
    let silent = list(&url).await.with(69);
    assert!(silent.err.contains("no reply within 500ms") && started.elapsed() < Duration::from_secs(5), "{silent:?}");
    drop(listener);
    let closed = list(&url).await.with(69);
    assert!(closed.err.contains("refused") && closed.err.contains("no connection to"), "{closed:?}");
    for ended in [silent, closed] {
        assert!(!ended.err.contains("hunter2") && !ended.err.contains("operator"), "{ended:?}");
        assert!(ended.err.contains(&place) && ended.err.contains("check that the server runs"), "{ended:?}");
    }
    let scheme = db.url.split_once("://").unwrap().0;
    let without_path = list(&format!("{scheme}://operator:hunter2@{address}")).await.with(69);
    assert!(without_path.err.contains(&format!("at {address}: ")), "{without_path:?}");
    assert!(!without_path.err.contains("hunter2") && !without_path.err.contains("operator"), "{without_path:?}");
}

/// A PostgreSQL server with `trust` authentication still refuses an unknown user.
async fn a_password_is_not_repeated<DB: TestDatabase>(db: TestDb<DB>) {
    let address = address(&db);
    let wrong = list(&url(&db, &format!("stranger:hunter2@{address}"))).await.with(69);
    assert!(wrong.err.contains("stranger") && !wrong.err.contains("hunter2"), "{wrong:?}");
    let scheme = db.url.split_once("://").unwrap().0;
    for unreadable in [
        format!("{scheme}://me:hunter2/@{address}/x"),
        format!("{scheme}://me:hunter2@{address}:port/x"),
        format!("{scheme}://me:hunter2@[/x"),
        format!("{scheme}:hunter2"),
        "hunter2".to_owned(),
        "hunter2://me:secret@host/x".to_owned(),
    ] {
        let ended = list(&unreadable).await;
        assert!([2, 69].contains(&ended.code) && !ended.err.contains("hunter2"), "{unreadable}: {ended:?}");
    }
    // The value of a misspelt parameter may still be a secret.
    let more = format!("{}{}pasword=hunter2&colour=hunter2", db.url, if db.url.contains('?') { '&' } else { '?' });
    let ended = ended(at(&more, "list", &[])).await;
    assert!(!ended.err.contains("hunter2"), "{ended:?}");
}

/// A password is in the URL, which the server accepts or does not ask for.
async fn an_error_of_the_database_names_it<DB: TestDatabase>(db: TestDb<DB>) {
    let address = address(&db);
    let database = db.url.rsplit_once('/').unwrap().1.split('?').next().unwrap();
    let place = format!("at {address}, database {database}");
    let user = db.url.split_once("://").unwrap().1.split(['@', ':']).next().unwrap();
    // A server that asks for a password is given its own.
    let asks = db.url.split_once("://").unwrap().1.split('@').next().unwrap().contains(':');
    let with_password = match asks || db.server.name != "postgres" {
        true => db.url.clone(),
        false => url(&db, &format!("{user}:hunter2@{address}")),
    };
    for (statement, words, code) in [
        ("ALTER TABLE t_resource_schedule RENAME TO hidden", "schedules", 78),
        ("ALTER TABLE t_resource_lock DROP COLUMN confirms", "acquire k", 78),
        ("DROP TABLE t_resource_lock", "run k -- true", 78),
    ] {
        db.execute(statement).await;
        let ended = ended(at(&with_password, words, &[])).await.with(code);
        assert!(ended.err.contains(&place) && ended.err.contains("run `rowlock migrate`"), "{ended:?}");
        assert!(!ended.err.contains("hunter2") && ended.err.lines().count() == 1, "{ended:?}");
    }
}

async fn a_file_that_is_missing_is_not_made<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let missing = format!("sqlite:{}", stage.file("locks.db").display());
    let ended = list(&missing).await.with(69);
    assert!(ended.err.contains("unable to open") && ended.err.contains(stage.path()), "{ended:?}");
    assert!(ended.err.contains("`rowlock migrate` creates it"), "{ended:?}");
    assert!(!stage.file("locks.db").exists());
    let nowhere = format!("sqlite:{}/none/locks.db", stage.path());
    let ended = self::ended(rowlock("--database-url", &[&nowhere, "migrate"])).await.with(69);
    assert!(ended.err.contains(&format!("there is no folder {}/none", stage.path())), "{ended:?}");
}

async fn a_look_leaves_the_file_as_it_is<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let url = format!("sqlite:{}", stage.file("app.db").display());
    let pool = harness::pool::<sqlx::Sqlite>(&format!("{url}?mode=rwc"), 1).await;
    sqlx::Sqlite::execute(&pool, "CREATE TABLE app (id int)").await.unwrap();
    pool.close().await;
    list(&url).await.with(78);
    // A connection that was open before would not show the change.
    let pool = harness::pool::<sqlx::Sqlite>(&url, 1).await;
    assert_eq!(sqlx::Sqlite::text(&pool, "PRAGMA journal_mode").await.as_deref(), Some("delete"));
}

async fn a_preview_leaves_the_own_file_as_it_is<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let local = async |words| {
        let mut command = rowlock("--local", &[]);
        command.args(str::split_whitespace(words)).env("XDG_STATE_HOME", stage.path());
        ended(command).await
    };
    let url = format!("sqlite:{}?mode=rwc", stage.file("rowlock/locks.db").display());
    std::fs::create_dir(stage.file("rowlock")).unwrap();
    let pool = harness::pool::<sqlx::Sqlite>(&url, 1).await;
    let tables = async || sqlx::Sqlite::number(&pool, "SELECT COUNT(*) FROM sqlite_master").await;
    let planned = local("migrate --dry-run").await.with(0);
    assert!(planned.out.contains("CREATE TABLE"), "{planned:?}");
    local("doctor").await.with(78);
    assert_eq!(tables().await, Some(0));
    local("list").await.with(0);
    assert!(tables().await > Some(0), "another command creates them");
}

async fn bad_arguments_are_refused_and_say_why<DB: TestDatabase>(db: TestDb<DB>) {
    for (words, more, says) in [
        ("run k --min-interval", &["soon", "--", "true"][..], "write it like 30s, 5m or 1h"),
        ("run k --lease 5 -- true", &[], "write it like 30s, 5m or 1h"),
        ("run k --lease 1ms -- true", &[], "lease"),
        ("run", &["", "--", "true"], "is empty"),
        ("run", &[" k", "--", "true"], "white space"),
        ("run k", &[], "<COMMAND>"),
        ("run k --", &[], "<COMMAND>"),
        ("run -- true", &[], "<KEY>"),
        ("run k true", &[], "unexpected argument 'true'"),
        ("run k --rules none -- true", &[], "recover, article"),
        ("run k --min-interval 1s --wait 10s -- true", &[], "shorter than the minimum interval"),
        ("run k --min-interval 1s --wait 1s -- true", &[], "shorter than the minimum interval"),
        ("run k --label", &["a\nb", "--", "true"], "label"),
        ("acquire", &[""], "is empty"),
        ("renew k", &[], "--holder"),
        ("renew k --holder me", &[], "is not the id of a holder"),
        ("release k", &[], "--holder <UUID>|--force"),
        ("release k --force --holder 0b9f6a52-3a4e-4c58-9d3c-2f1f6f0f7c11", &[], "cannot be used with"),
        ("release k --force --status X", &[], "[possible values: S, F]"),
        ("forget", &[], "--older-than"),
        ("forget --older-than 99y", &[], "at most ten years"),
        ("watch --every 0s", &[], "at least"),
        ("", &[], "Usage"),
        ("fly", &[], "unrecognized subcommand"),
    ] {
        let bad = db.rowlock(words, more).await;
        assert!(bad.code == 2 && bad.err.contains(says) && bad.out.is_empty(), "{words}: {bad:?}");
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
}

async fn no_database_names_all_three_ways<DB: TestDatabase>(_: TestDb<DB>) {
    for empty in [false, true] {
        let mut command: Command = rowlock("run k -- true", &[]);
        if empty {
            command.env("DATABASE_URL", "");
        }
        let none = ended(command).await.with(2);
        assert!(["--database-url", "DATABASE_URL", "--local"].iter().all(|way| none.err.contains(way)), "{none:?}");
    }
}

async fn a_command_that_cannot_be_run_takes_no_key<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = stage.file("script");
    std::fs::write(&file, "#!/bin/sh\n").unwrap();
    let there = file.to_str().unwrap();
    let script = stage.file("missing");
    std::fs::write(&script, "#! /no/such/interpreter -x\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let missing = script.to_str().unwrap();
    for (command, code, says) in [
        ("no-such-program", 127, "no-such-program: command not found"),
        ("/no/such/program", 127, "command not found"),
        ("", 127, "command not found"),
        (there, 126, "cannot be run"),
        (stage.path(), 126, "cannot be run"),
        (missing, 126, "its interpreter /no/such/interpreter cannot be run"),
    ] {
        let ended = db.rowlock("run k --min-interval 1h --", &[command]).await.with(code);
        assert!(ended.err.lines().count() == 1 && ended.err.contains(says), "{ended:?}");
    }
    assert_eq!(db.number("SELECT COUNT(*) FROM t_resource_lock").await, Some(0));
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    db.rowlock("run k --min-interval 1h --", &[there]).await.with(0);
}

async fn each_commands_help_has_an_example<DB: TestDatabase>(_: TestDb<DB>) {
    let help = ended(rowlock("--help", &[])).await.with(0).out;
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert_eq!(commands.len(), 32, "{commands:?}");
    let words: Vec<&str> = help.split_whitespace().collect();
    for code in ["0", "2", "69", "73", "74", "75", "78", "124", "126", "127"] {
        assert!(words.contains(&code), "{code}: {help}");
    }
    for command in commands {
        let help = ended(rowlock(command, &["--help"])).await.with(0).out;
        assert!(help.contains(&format!("rowlock {command}")) && help.contains("Example"), "{help}");
    }
}

async fn completions_and_man_pages_are_written<DB: TestDatabase>(_: TestDb<DB>) {
    let stage = Stage::new();
    let file = stage.file("rowlock.bash");
    let completions = ended(rowlock("completions bash", &[])).await.with(0).out;
    std::fs::write(&file, &completions).unwrap();
    assert!(Command::new("bash").arg("-n").arg(&file).status().await.unwrap().success());
    for shell in ["zsh", "fish"] {
        assert!(ended(rowlock("completions", &[shell])).await.with(0).out.contains("min-interval"), "{shell}");
    }
    // The folder does not exist, nor does the folder that it is in.
    let folder = stage.file("share/man1");
    ended(rowlock("man", &[folder.to_str().unwrap()])).await.with(0);
    let page = std::fs::read_to_string(folder.join("rowlock-run.1")).unwrap();
    assert!(page.contains(".TH rowlock-run 1") && page.contains("retry\\-failed"), "{page}");
    assert!(!folder.join("rowlock-exec.1").exists());
    // A file is in the place of the folder.
    ended(rowlock("man", &[file.to_str().unwrap()])).await.with(73);
}

/// The program ends with an exit code of its own and with one line, and does not print the
/// password.
async fn any_url_is_read_or_refused<DB: TestDatabase>(_: TestDb<DB>) {
    let scheme = prop_oneof!["postgres|postgresql|mysql|mariadb|sqlite|redis", "[a-z]{0,8}", ".{0,4}"];
    let rest = prop_oneof![
        "127\\.0\\.0\\.1:1/[a-z]{0,4}",
        "[\\[\\]:/?#@%&= .\\\\]{0,12}",
        "\\[::1\\]:1(/x)?(\\?[a-z=&-]{0,12})?"
    ];
    let before = prop_oneof![Just("://me:"), Just("://"), Just(":"), Just("://me:%")];
    each(60, (scheme, before, rest), |(scheme, before, rest)| async move {
        let url = format!("{scheme}{before}hunter2@{rest}");
        if url.contains('\0') || scheme == "sqlite" {
            return; // not valid in a variable; a file name
        }
        let ended = ended(at(&url, "list --connect-timeout 200ms", &[])).await;
        assert!([2, 69].contains(&ended.code) && ended.out.is_empty(), "{url:?}: {ended:?}");
        assert!(!ended.err.contains("hunter2") && !ended.err.contains("panicked"), "{url:?}: {ended:?}");
    });
}

async fn a_time_to_connect_may_be_long<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("list --connect-timeout 584542046090y", &[]).await.with(0);
}
