//! The options of `rowlock run` that concern several keys, time, refusals and shells.

use std::time::{Duration, Instant};

use harness::{TestDatabase, TestDb, eventually};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    program::{PROGRAM, Program as _, STAYS, Stage},
    program_cron::{ended_as, job},
};

harness::tests!(
    everywhere(
        several_keys_are_taken_together_or_not_at_all,
        a_tick_that_takes_too_long_is_stopped_and_has_failed,
        a_refusal_has_the_exit_code_that_was_asked_for,
        fair_waiters_are_served_in_order
    ),
    everywhere.each(a_command_that_takes_too_long_is_stopped_and_has_failed),
    sqlite(
        a_text_is_run_by_a_shell,
        a_run_within_another_one_has_variables_of_its_own,
        jobs_within_a_run_have_no_variables_of_it
    )
);

async fn several_keys_are_taken_together_or_not_at_all<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let script = format!(r#"echo "$ROWLOCK_KEY $ROWLOCK_TOKEN $ROWLOCK_TOKENS" > "$0/tokens"; {STAYS}"#);
    let job = db.start("run b --also c --also a --also b -- sh -c", &[&script, stage.path()]);
    let holder = stage.up().await;
    let seen = std::fs::read_to_string(stage.file("tokens")).unwrap();
    let [key, token, tokens] = seen.trim_end().splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("{seen}") };
    let tokens: Value = serde_json::from_str(tokens).unwrap();
    for key in ["a", "b", "c"] {
        let row = db.show(key).await;
        assert_eq!((&row["holder"], &row["token"]), (&holder.as_str().into(), &tokens[key]));
    }
    assert_eq!((key, token.to_owned(), tokens.as_object().unwrap().len()), ("b", tokens["b"].to_string(), 3));
    let refused = db.rowlock("run free --also c -- true", &[]).await.with(75);
    assert!(refused.err.contains("refused: c: held"), "{refused:?}");
    let held = db.rowlock("list --claimed --json", &[]).await.with(0).json();
    assert!(held.as_array().unwrap().iter().all(|row| row["key"] != "free"), "all or none: {held}");
    stage.go();
    job.ended().await.with(0);
    for key in ["a", "b", "c"] {
        let row = db.show(key).await;
        assert_eq!((&row["status"], &row["holder"]), (&"S".into(), &Value::Null), "{row}");
    }
    db.rowlock("run a --also b -- false", &[]).await.with(1);
    assert_eq!(db.show("b").await["status"], "F");
}

/// Ignores SIGTERM, so that the stop timeout passes too.
async fn a_command_that_takes_too_long_is_stopped_and_has_failed<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, began) = (Stage::new(), Instant::now());
    let ignores = r#"trap 'touch "$0/asked"' TERM; while :; do sleep 0.05; done"#;
    let job = db.start("run k --lease 1h --timeout 700ms --stop-timeout 500ms -- sh -c", &[ignores, stage.path()]);
    let ended = job.ended().await.with(124);
    assert!(began.elapsed() >= Duration::from_millis(1200), "{:?}", began.elapsed());
    assert!(
        stage.file("asked").exists() && ended.err.contains("k: not ended within 700ms, its --timeout"),
        "{ended:?}"
    );
    let row = db.show("k").await;
    assert_eq!((&row["status"], &row["holder"]), (&"F".into(), &Value::Null));
    db.rowlock("run k --timeout 1h -- true", &[]).await.with(0);
    let refused = db.rowlock("run k --timeout 0s -- true", &[]).await.with(2);
    assert!(refused.err.contains("--timeout") && refused.err.contains("from 1ms to 366days"), "{refused:?}");
    assert_eq!(db.show("k").await["status"], "S");
}

async fn a_tick_that_takes_too_long_is_stopped_and_has_failed<DB: TestDatabase>(db: TestDb<DB>) {
    let runs = async || db.rowlock("runs k --json", &[]).await.json();
    let started = db.start("run k --timeout 300ms --cron", &["* * * * * *", "--", "sleep", "1000"]);
    started.ended().await.with(124);
    let run = &runs().await[0];
    assert_eq!((&run["status"], &run["error"]), (&"failed".into(), &"stopped after its timeout of 300ms".into()));
}

async fn a_refusal_has_the_exit_code_that_was_asked_for<DB: TestDatabase>(db: TestDb<DB>) {
    db.rowlock("acquire k --lease 1h --label node-7", &[]).await.with(0);
    for (words, code) in [
        ("run k -E 1 -- echo runs", 1),
        ("run k --refused-exit-code 0 -- echo runs", 0),
        ("run k --refused-ok -- echo runs", 0),
        ("acquire k -E 200", 200),
        ("run k -- echo runs", 75),
    ] {
        let refused = db.rowlock(words, &[]).await.with(code);
        // A refusal that counts as success is shown on a terminal only: cron mails each line.
        let says = refused.err.starts_with("rowlock: refused: k: held, by node-7, since 2");
        let expected = (code != 0, "", usize::from(code != 0));
        assert_eq!((says, refused.out.as_str(), refused.err.lines().count()), expected, "{words}: {refused:?}");
    }
    db.rowlock("run k -E 1 --refused-ok -- true", &[]).await.with(2);
    db.rowlock("run k -E 256 -- true", &[]).await.with(2);
    let yearly = ["0 0 1 1 *", "--", "true"];
    db.rowlock("run yearly -E 4 --cron", &yearly).await.with(4);
}

/// The second waits for longer, but began later.
async fn fair_waiters_are_served_in_order<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, order) = (Stage::new(), r#"echo "$1" >> "$0/order"; sleep 0.3"#);
    let holder = db.rowlock("acquire k --lease 1h", &[]).await.with(0).json();
    let mut waiters = Vec::new();
    for number in ["1", "2", "3", "4"] {
        waiters.push(db.start("run k --fair --wait forever -- sh -c", &[order, stage.path(), number]));
        let waiting = i64::try_from(waiters.len()).unwrap();
        eventually("it has a ticket", async || {
            db.number("SELECT COUNT(*) FROM t_resource_lock_queue").await == Some(waiting)
        })
        .await;
    }
    db.rowlock("release k --holder", &[holder["holder"].as_str().unwrap()]).await.with(0);
    for waiter in waiters {
        waiter.ended().await.with(0);
    }
    assert_eq!(std::fs::read_to_string(stage.file("order")).unwrap(), "1\n2\n3\n4\n");
}

async fn a_text_is_run_by_a_shell<DB: TestDatabase>(db: TestDb<DB>) {
    for words in ["run k -c", "run k --shell"] {
        let ended = db.rowlock(words, &["echo \"$ROWLOCK_KEY\" | tr a-z A-Z; exit 3"]).await.with(3);
        assert_eq!(ended.out, "K\n");
    }
    let both = db.rowlock("run k -c true -- true", &[]).await.with(2);
    assert!(both.err.contains("cannot be used with"), "{both:?}");
}

async fn a_run_within_another_one_has_variables_of_its_own<DB: TestDatabase>(db: TestDb<DB>) {
    let script = r#"echo "$ROWLOCK_KEY $ROWLOCK_TOKENS.""#;
    let words = ["--", PROGRAM, "run", "c", "--", "sh", "-c", script];
    let ended = db.rowlock("run a --also b", &words).await.with(0);
    assert_eq!(ended.out.trim_end(), "c .");
}

async fn jobs_within_a_run_have_no_variables_of_it<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = job(&stage, "k", "after = \"1h\"", r#"echo "[$ROWLOCK_KEY$ROWLOCK_HOLDER]""#);
    let cron = db.start("run a --", &[PROGRAM, "cron", file.to_str().unwrap()]);
    ended_as(&db, "k", "succeeded").await;
    cron.signal(Signal::TERM);
    let ended = cron.ended().await;
    assert!(ended.out.contains("k: []\n"), "{ended:?}");
}
