//! The plans of statements over many keys, in tables that were analyzed while they were small.

use sqlx::{AssertSqlSafe, Row as _, SqliteConnection};

use crate::store::sqlite::{
    change,
    for_tests::{execute, tables},
    free, judged,
};

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
        for texts in [&change::TEXTS[..], &judged::TEXTS, &[free::CLAIM]] {
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
