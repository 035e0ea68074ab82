//! `acquire`, `renew`, `release`, and the commands that show the table.

use chrono::{DateTime, TimeDelta, Utc};
use harness::{TestDatabase, TestDb};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::program::{Program as _, Stage, start};

harness::tests!(
    everywhere(
        a_claim_is_taken_renewed_and_released,
        a_key_is_shown_with_its_end_and_duration,
        a_key_is_shown_though_its_changes_cannot_be_read,
        list_and_show_tell_every_field,
        forget_deletes_old_rows,
        watch_prints_the_list_until_it_is_interrupted,
        what_others_wrote_moves_no_cursor
    ),
    everywhere.each(a_renewal_never_shortens),
    sqlite(a_reader_that_has_enough_is_no_failure, a_log_that_cannot_be_written_stops_nothing),
    everywhere(a_claim_that_cannot_be_printed_is_put_back)
);

fn time(value: &Value) -> DateTime<Utc> {
    DateTime::parse_from_rfc3339(value.as_str().unwrap()).unwrap().to_utc()
}

fn fields(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

async fn a_claim_is_taken_renewed_and_released<DB: TestDatabase>(db: TestDb<DB>) {
    let acquired = db.rowlock("acquire deploy --lease 10s --label me", &[]).await.with(0);
    assert_eq!((acquired.out.lines().count(), acquired.err.as_str()), (1, ""));
    let claim = acquired.json();
    assert_eq!(fields(&claim), ["expires_at", "holder", "key", "taken_over_from", "token"]);
    assert_eq!((&claim["key"], &claim["taken_over_from"]), (&"deploy".into(), &Value::Null));
    let row = db.show("deploy").await;
    assert_eq!(
        (&row["token"], &row["holder"], &row["until"]),
        (&claim["token"], &claim["holder"], &claim["expires_at"])
    );
    // On MySQL, `since` is the time of the statement, and `until` is a lease after the row was
    // changed.
    let lease = time(&row["until"]) - time(&row["since"]);
    assert!(lease >= TimeDelta::seconds(10) && lease < TimeDelta::seconds(20), "{lease}");
    let holder = claim["holder"].as_str().unwrap();

    let refused = db.rowlock("acquire deploy --label you", &[]).await.with(75);
    assert!(refused.out.is_empty() && refused.err.starts_with("rowlock: refused: deploy: held, by me"), "{refused:?}");
    let renewed = db.rowlock("renew deploy --lease 1h --holder", &[holder]).await.with(0).json();
    assert_eq!(
        (&renewed["holder"], &renewed["token"], &renewed["key"]),
        (&claim["holder"], &claim["token"], &claim["key"])
    );
    assert!(time(&renewed["expires_at"]) - time(&claim["expires_at"]) > TimeDelta::minutes(50), "{renewed}");
    assert_eq!(fields(&renewed), fields(&claim));

    let released = db.rowlock("release deploy --status F --holder", &[holder]).await.with(0);
    assert_eq!((released.out.as_str(), released.err.as_str()), ("", ""));
    let row = db.show("deploy").await;
    assert_eq!((&row["status"], &row["holder"]), (&"F".into(), &Value::Null));
    for words in ["renew deploy --holder", "release deploy --holder"] {
        let late = db.rowlock(words, &[holder]).await.with(74);
        assert!(late.out.is_empty() && late.err.contains("\"deploy\" is not held by"), "{late:?}");
    }
    assert_eq!(db.show("deploy").await, row);
    db.rowlock("release absent --force", &[]).await.with(75);
    db.rowlock("show absent", &[]).await.with(75);
}

async fn list_and_show_tell_every_field<DB: TestDatabase>(db: TestDb<DB>) {
    let held = db.rowlock("acquire a --lease 1h --label me", &[]).await.with(0).json();
    db.rowlock("run b --label me -- false", &[]).await.with(1);
    db.rowlock("run c --label me -- true", &[]).await.with(0);
    let list = db.rowlock("list --json", &[]).await.with(0).json();
    let seen: Vec<_> = list.as_array().unwrap().iter().map(|row| (row["key"].clone(), row["state"].clone())).collect();
    assert_eq!(json!(seen), json!([["a", "held"], ["b", "failed"], ["c", "free"]]));
    for row in list.as_array().unwrap() {
        let listed =
            ["by", "duration", "ended", "holder", "key", "since", "state", "status", "token", "until", "waiting"];
        assert_eq!(fields(row), listed);
        let mut shown = db.show(row["key"].as_str().unwrap()).await;
        let more = ["schedule", "changes", "runs", "permits", "readers"]
            .map(|field| shown.as_object_mut().unwrap().remove(field));
        assert_eq!((&shown, more), (row, [json!(null), json!([]), json!([]), json!([]), json!([])].map(Some)));
        assert!(row["by"] == "me" && row["token"].as_i64() > Some(0), "{row}");
        assert!((Utc::now() - time(&row["since"])).abs() < TimeDelta::minutes(10), "{row}");
    }
    assert_eq!(
        (&list[0]["holder"], &list[0]["ended"], &list[0]["status"]),
        (&held["holder"], &Value::Null, &"P".into())
    );
    assert!(
        list[2]["status"] == "S" && list[2]["until"].is_null() && time(&list[2]["ended"]) >= time(&list[2]["since"])
    );
    let within = db.rowlock("list --json --min-interval 1h", &[]).await.with(0).json();
    assert_eq!(within[2]["state"], "within_min_interval");
    assert_eq!(time(&within[2]["until"]) - time(&within[2]["since"]), TimeDelta::hours(1));
    assert_eq!(db.rowlock("list --json --claimed", &[]).await.with(0).json(), json!([list[0]]));

    let table = db.rowlock("list", &[]).await.with(0).out;
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
    let texts = |line: usize| lines[line].iter().filter(|text| !text.is_empty()).copied().collect::<Vec<_>>();
    assert_eq!(texts(0), ["KEY", "STATE", "SINCE", "UNTIL", "BY", "WAITING", "TOKEN"]);
    let clock = |value: &Value| time(value).format("%Y-%m-%d %H:%M:%SZ").to_string();
    let row = [clock(&list[0]["since"]), clock(&list[0]["until"]), list[0]["token"].to_string()];
    assert_eq!(texts(1), ["a", "held", &row[0], &row[1], "me", "-", &row[2]]);
    assert_eq!((texts(2)[1], texts(2)[3], texts(3)[1], lines.len()), ("failed", "-", "free", 4));
}

async fn a_renewal_never_shortens<DB: TestDatabase>(db: TestDb<DB>) {
    let claim = db.rowlock("acquire k --lease 1h", &[]).await.with(0).json();
    let holder = claim["holder"].as_str().unwrap();
    for renewal in ["renew k --holder", "renew k --lease 1s --holder"] {
        let renewed = db.rowlock(renewal, &[holder]).await.with(0).json();
        assert!(time(&renewed["expires_at"]) >= time(&claim["expires_at"]), "{claim} {renewed}");
    }
    // An expired claim stands until another one takes over.
    db.set("k", &format!("expires_at = {}", DB::ago(1000))).await;
    let expired = db.show("k").await;
    let longer = db.rowlock("renew k --holder", &[holder]).await.with(0).json();
    assert!(time(&longer["expires_at"]) - time(&expired["until"]) > TimeDelta::seconds(20), "{longer}");
    let late = db.rowlock("renew absent --holder", &[holder]).await.with(74);
    assert!(late.err.contains("is not held by"), "{late:?}");
}

async fn a_key_is_shown_with_its_end_and_duration<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("run k --label me -- sleep 1.1", &[]).await.with(0);
    let row = db.show("k").await;
    let apart = (time(&row["ended"]) - time(&row["since"])).as_seconds_f64();
    let duration = row["duration"].as_f64().unwrap();
    assert!(duration >= 1.1 && (duration - apart).abs() < 0.001, "{row}");
    let facts = async |status: &str| {
        let text = db.rowlock("show k", &[]).await.with(0).out;
        let fact = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            line[name.len()..].trim().to_owned()
        };
        assert_eq!((fact("KEY"), fact("STATUS")), ("k".to_owned(), status.to_owned()));
        (fact("STATE"), fact("ENDED"), fact("DURATION"))
    };
    let (state, ended, took) = facts("succeeded").await;
    assert_eq!((state.as_str(), ended), ("free", time(&row["ended"]).format("%Y-%m-%d %H:%M:%SZ").to_string()));
    assert!(took.starts_with("1s ") && took.ends_with("ms"), "{took}");
    db.rowlock("run k -- false", &[]).await.with(1);
    facts("failed").await;
    db.rowlock("acquire k --lease 1h", &[]).await.with(0);
    let (state, ended, took) = facts("in progress").await;
    assert_eq!((state.as_str(), ended.as_str()), ("held", "-"));
    assert!(took.ends_with(" so far"), "{took}");
    assert_eq!(db.show("k").await["duration"], Value::Null, "it has not ended");
}

/// A table that is absent is that of an older database, in which nothing was kept.
async fn a_key_is_shown_though_its_changes_cannot_be_read<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("run k -- true", &[]).await.with(0);
    db.execute("ALTER TABLE t_resource_change RENAME COLUMN detail TO other").await;
    let shown = db.rowlock("show k", &[]).await.with(0);
    assert!(shown.err.contains("k: what operators changed is not known"), "{}", shown.err);
    db.execute("DROP TABLE t_resource_change").await;
    let shown = db.rowlock("show k", &[]).await.with(0);
    assert_eq!(shown.err, "");
}

async fn forget_deletes_old_rows<DB: TestDatabase>(db: TestDb<DB>) {
    for key in ["old", "young"] {
        db.rowlock("run", &[key, "--", "true"]).await.with(0);
    }
    db.set("old", &format!("begin_time = {0}, end_time = {0}", DB::ago(9 * 3_600_000))).await;
    assert_eq!(db.rowlock("forget --older-than 2h", &[]).await.with(0).out, "1 deleted\n");
    assert_eq!(db.rowlock("list --json", &[]).await.with(0).json()[0]["key"], "young");
}

async fn watch_prints_the_list_until_it_is_interrupted<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("acquire k --lease 1h", &[]).await.with(0);
    let mut watch = db.start("watch --every 100ms", &[]);
    watch.says("1 keys\nKEY", 2).await;
    db.rowlock("release k --force --status S", &[]).await.with(0);
    watch.says("k    free", 1).await;
    watch.signal(Signal::INT);
    let ended = watch.ended().await.with(-2);
    assert!(ended.err.is_empty() && !ended.out.contains('\x1b'), "{ended:?}");
}

/// Text that other programs wrote into the table: an escape sequence that clears the screen, a line
/// break, and bidirectional control characters.
async fn what_others_wrote_moves_no_cursor<DB: TestDatabase>(db: TestDb<DB>) {
    let key = "a\x1b[2J\x07\x7fb\u{9b}\u{202e}c";
    db.rowlock("acquire --lease 1h", &[key]).await.with(0);
    let label = "evil\x1b[2J\nrowlock: \u{7f}\u{9b}\u{2066}fine";
    db.execute(&format!("UPDATE t_resource_lock SET client_ip = '{label}'")).await;
    let said = [
        (db.rowlock("list", &[]).await.with(0).out, 2),
        (db.rowlock("show", &[key]).await.with(0).out, 10),
        (db.rowlock("run", &[key, "--", "true"]).await.with(75).err, 1),
        (db.rowlock("renew --holder 00000000-0000-0000-0000-000000000000", &[key]).await.with(74).err, 1),
        (db.rowlock("release --force", &[key]).await.with(0).out, 1),
    ];
    for (text, lines) in said {
        let moves = |c: &char| c.is_control() && *c != '\n' || ['\u{202e}', '\u{2066}'].contains(c);
        assert_eq!((text.chars().find(moves), text.lines().count()), (None, lines), "{text:?}");
    }
    // The JSON output contains the stored text unchanged.
    let shown = db.rowlock("show --json", &[key]).await.with(0);
    assert_eq!((shown.json()["key"].as_str(), shown.json()["by"].as_str()), (Some(key), Some(label)));
    assert_eq!(shown.out.chars().filter(|c| c.is_control()).count(), 1, "{shown:?}");
    let claim = db.rowlock("acquire", &[key]).await.with(0);
    assert_eq!(claim.json()["key"], key);
}

/// `rowlock list | head -1`
async fn a_reader_that_has_enough_is_no_failure<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    for words in [
        "list",
        "list --json",
        "show k",
        "show k --json",
        "watch --every 10ms",
        "completions bash",
        "release k --force",
    ] {
        db.rowlock("run k -- true", &[]).await.with(0);
        let mut shell = tokio::process::Command::new("sh");
        // The reader exits before the program starts.
        let script = r#"{ while [ ! -e "$0/$1" ]; do sleep 0.01; done; shift; "$@"; echo $? >&2; } | (exec < /dev/null; touch "$0/$1")"#;
        let file = words.replace(' ', "_");
        let program = crate::program::PROGRAM;
        shell.args(["-c", script, stage.path(), &file, program]).args(words.split(' ')).env("DATABASE_URL", &db.url);
        let ended = start(shell).ended().await;
        // A forced release is logged in any case.
        let err: Vec<&str> = ended.err.lines().filter(|line| !line.contains("changed on the command line")).collect();
        assert_eq!((err, ended.out.as_str()), (vec!["141"], ""), "{words}");
    }
}

/// When stderr is a full disk, the command is still stopped and waited for, and the exit code stays
/// the same.
async fn a_log_that_cannot_be_written_stops_nothing<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("acquire k --lease 1h", &[]).await.with(0);
    let mut shell = tokio::process::Command::new("sh");
    shell.args(["-c", r#"exec "$0" run k -- true 2> /dev/full"#, crate::program::PROGRAM]);
    shell.env("DATABASE_URL", &db.url);
    start(shell).ended().await.with(75);
    db.rowlock("release k --force", &[]).await.with(0);

    let stage = Stage::new();
    let obeys = r#"trap 'echo bye; exit 7' TERM; touch "$0/up"; while :; do sleep 0.05; done"#;
    let mut shell = tokio::process::Command::new("sh");
    let script = r#"exec "$0" run k --lease 1s --stop-timeout 1h -vv -- sh -c "$1" "$2" 2> /dev/full"#;
    shell.args(["-c", script, crate::program::PROGRAM, obeys, stage.path()]).env("DATABASE_URL", &db.url);
    let job = start(shell);
    stage.up().await;
    db.rowlock("release k --force", &[]).await.with(0);
    assert_eq!(job.ended().await.with(74).out, "bye\n");
}

/// No work was begun. Under the article's rules, a claim that was abandoned would wait for an
/// operator.
async fn a_claim_that_cannot_be_printed_is_put_back<DB: TestDatabase>(db: TestDb<DB>) {
    for words in ["acquire k", "hold k"] {
        for rules in ["recover", "article"] {
            let mut shell = tokio::process::Command::new("sh");
            let script = format!("exec \"$0\" {words} --rules {rules} --lease 1h > /dev/full");
            shell.args(["-c", &script, crate::program::PROGRAM]).env("DATABASE_URL", &db.url);
            shell.stdin(std::process::Stdio::piped());
            start(shell).ended().await.with(73);
            db.rowlock(&format!("run k --rules {rules} -- true"), &[]).await.with(0);
        }
    }
}
