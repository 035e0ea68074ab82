//! Batches in which some rows are free and others are not, and the plans of statements over many
//! keys.

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, Row as _, Sqlite, SqliteConnection};

use crate::{
    key::Holder,
    rules::Terms,
    store::{
        Change, ClaimReply, ClaimStore as _, Form, HeldStore as _, Outcome, Reply,
        sqlite::{
            change, claim,
            for_tests::{claimed, execute, free, request, tables},
            free,
        },
    },
};

/// Creates rows of other holders.
async fn held(conn: &mut SqliteConnection, keys: &[&str]) {
    free(conn, keys).await;
    let replies = claims(conn, keys).await.unwrap();
    assert!(replies.iter().all(is_granted), "{replies:?}");
}

/// Sends requests of one holder each.
async fn claims(conn: &mut SqliteConnection, keys: &[&str]) -> Reply<Vec<ClaimReply>> {
    let requests: Vec<_> = keys.iter().map(|key| request(key, Holder::unique())).collect();
    Sqlite::claim(conn, &requests, &Terms::default(), None, Form::IntegerTimes).await
}

fn is_granted(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::Granted { .. })
}

fn is_locked(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::Seen { row: Some(row), .. } if row.locked)
}

fn is_missing(reply: &ClaimReply) -> bool {
    matches!(reply, ClaimReply::Seen { row: None, .. })
}

#[tokio::test]
async fn more_rows_are_locked_than_are_returned() {
    let conn = &mut tables().await;
    let keys: Vec<String> = (0..60).map(|number| format!("held {number}")).collect();
    let mut keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    held(conn, &keys).await;
    free(conn, &["free"]).await;
    keys.extend(["free", "missing"]);
    let replies = claims(conn, &keys).await.unwrap();
    assert!(replies[..60].iter().all(is_locked), "{replies:?}");
    assert!(replies[60..].iter().all(is_granted), "{replies:?}");
}

/// Triggers of the application see an insert only for a row that was missing.
#[tokio::test]
async fn only_missing_rows_are_created() {
    let conn = &mut tables().await;
    free(conn, &["free"]).await;
    held(conn, &["held"]).await;
    let trigger = "CREATE TABLE created (key TEXT);
        CREATE TRIGGER noted BEFORE INSERT ON t_resource_lock BEGIN INSERT INTO created VALUES (new.key_resource); END";
    execute(conn, trigger).await;
    let replies = claims(conn, &["free", "held", "missing"]).await.unwrap();
    assert!(is_granted(&replies[0]) && is_locked(&replies[1]) && is_granted(&replies[2]), "{replies:?}");
    let created: Vec<String> = sqlx::query_scalar("SELECT key FROM created").fetch_all(conn).await.unwrap();
    assert_eq!(created, ["missing"]);
}

/// The claim then creates the row by the statement for it, which names the key in its error.
#[tokio::test]
async fn a_row_whose_creation_a_trigger_skips_is_missing() {
    let conn = &mut tables().await;
    free(conn, &["free"]).await;
    let trigger = "CREATE TRIGGER refused BEFORE INSERT ON t_resource_lock BEGIN SELECT RAISE(IGNORE); END";
    execute(conn, trigger).await;
    let replies = claims(conn, &["missing", "free"]).await.unwrap();
    assert!(is_missing(&replies[0]) && is_granted(&replies[1]), "{replies:?}");
}

/// A claim that is taken over beside others could fail after those are committed.
#[tokio::test]
async fn a_row_whose_lease_has_ended_is_left_to_a_statement_of_its_own() {
    let conn = &mut tables().await;
    held(conn, &["ended"]).await;
    execute(conn, "UPDATE t_resource_lock SET expires_at = begin_time").await;
    free(conn, &["free"]).await;
    let replies = claims(conn, &["ended", "free"]).await.unwrap();
    assert!(is_locked(&replies[0]) && is_granted(&replies[1]), "{replies:?}");
    let replies = claims(conn, &["ended"]).await.unwrap();
    assert!(matches!(replies[0], ClaimReply::Granted { prior: Some(_), .. }), "{replies:?}");
}

#[tokio::test]
async fn a_row_that_a_trigger_skips_is_there() {
    let conn = &mut tables().await;
    free(conn, &["frozen", "free"]).await;
    let trigger = "CREATE TRIGGER frozen BEFORE UPDATE ON t_resource_lock WHEN old.key_resource = 'frozen'
        BEGIN SELECT RAISE(IGNORE); END";
    execute(conn, trigger).await;
    for keys in [&["frozen"][..], &["frozen", "free"]] {
        let replies = claims(conn, keys).await.unwrap();
        assert!(!is_granted(&replies[0]) && !is_missing(&replies[0]), "{replies:?}");
        assert!(replies[1..].iter().all(is_granted), "{replies:?}");
    }
}

/// What was granted is committed, so the error must not say that nothing was changed.
#[tokio::test]
async fn a_row_that_cannot_be_read_beside_one_that_was_granted_is_a_lost_reply() {
    let conn = &mut tables().await;
    free(conn, &["unreadable", "free"]).await;
    execute(conn, "UPDATE t_resource_lock SET lock_flag = 1, holder = x'00' WHERE key_resource = 'unreadable'").await;
    let error = claims(conn, &["unreadable", "free"]).await.unwrap_err();
    assert!(matches!(error, sqlx::Error::Io(_)), "{error:?}");
    assert!(is_locked(&claims(conn, &["free"]).await.unwrap()[0]));
    let error = claims(conn, &["unreadable"]).await.unwrap_err();
    assert!(matches!(error, sqlx::Error::ColumnDecode { .. }), "{error:?}");
}

/// Another program has written a time that no version reads. The leases beside it are renewed.
#[tokio::test]
async fn a_row_that_was_overwritten_takes_no_other_renewal_with_it() {
    let conn = &mut tables().await;
    let claims = [claimed(conn, "theirs", Form::IntegerTimes).await, claimed(conn, "ours", Form::IntegerTimes).await];
    // The application's own table, without STRICT.
    execute(conn, "CREATE TABLE theirs AS SELECT * FROM t_resource_lock").await;
    execute(conn, "DROP TABLE t_resource_lock").await;
    execute(conn, "ALTER TABLE theirs RENAME TO t_resource_lock").await;
    execute(conn, "UPDATE t_resource_lock SET begin_time = '10:00 JST' WHERE key_resource = 'theirs'").await;
    let change = Change::Renew(TimeDelta::seconds(60));
    let outcomes = Sqlite::change(conn, &claims, change, None, Form::IntegerTimes).await.unwrap();
    assert_eq!(outcomes, [Outcome::Lost, Outcome::Done]);
}

/// Returns what the plan of a statement does, a line for each step.
async fn plan(conn: &mut SqliteConnection, sql: &str) -> Vec<String> {
    let rows = sqlx::raw_sql(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"))).fetch_all(conn).await.unwrap();
    rows.iter().map(|row| row.get("detail")).collect()
}

#[tokio::test]
async fn no_statement_scans_the_table_whatever_was_analyzed() {
    for rows in (0..20).chain([64, 1000, 100_000]) {
        let mut conn = tables().await;
        if rows > 0 {
            let analyzed = format!(
                "ANALYZE; DELETE FROM sqlite_stat1;
                INSERT INTO sqlite_stat1 VALUES ('t_resource_lock', 'sqlite_autoindex_t_resource_lock_1', '{rows} 1');
                ANALYZE sqlite_schema"
            );
            execute(&mut conn, &analyzed).await;
        }
        for texts in [&change::TEXTS[..], &claim::TEXTS, &[free::CLAIM]] {
            for sql in texts.iter().flat_map(|text| text.split(';')).filter(|sql| sql.contains("json_each")) {
                let plan = plan(&mut conn, sql).await;
                // A filter is made of all rows.
                let scans = |step: &String| {
                    step == "SCAN t"
                        || step.starts_with("SCAN t ")
                        || step.starts_with("SCAN t_resource_lock")
                        || step.starts_with("BLOOM FILTER")
                };
                assert!(!plan.iter().any(scans), "{rows}: {plan:?}: {sql}");
                assert!(plan.iter().any(|step| step.contains("(key_resource=?)")), "{rows}: {plan:?}: {sql}");
            }
        }
    }
}

/// A look for the runs of the last minute reads these, and not the whole history.
#[cfg(feature = "schedule")]
#[tokio::test]
async fn runs_are_selected_by_the_index_on_their_ends() {
    let plan = plan(&mut tables().await, crate::store::sqlite::schedule_sql::SELECTED).await;
    assert!(plan.iter().any(|step| step.contains("t_resource_schedule_run_end (end_time>?)")), "{plan:?}");
}
