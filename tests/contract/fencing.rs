//! The statements of docs/fencing.md, taken from that page.

use harness::{PATIENCE, TestDatabase, TestDb, acquired};
use tokio::task::JoinSet;

harness::tests!(everywhere.each(the_statements_of_the_page_refuse_a_late_write, a_late_write_is_refused_at_any_moment));

/// Returns the statements of the page, without their comments: the one for a new row, that for a
/// row that is there, and that of step 4.
fn statements() -> [String; 3] {
    let page = include_str!("../../docs/fencing.md");
    let block = page.split_once("```sql\n").unwrap().1.split_once("```").unwrap().0;
    let lines: Vec<&str> = block.lines().filter(|line| !line.starts_with("--")).collect();
    let sql = lines.join("\n");
    let all: Vec<String> = sql.split(';').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect();
    all.try_into().unwrap()
}

/// Replaces the parameters by values, in their order.
fn with(sql: &str, values: &[&str]) -> String {
    let mut sql = sql.to_owned();
    for (number, value) in (1..).zip(values) {
        let numbered = format!("${number}");
        let place = if sql.contains(&numbered) { numbered.as_str() } else { "?" };
        sql = sql.replacen(place, value, 1);
    }
    sql
}

/// Writes under a token. Returns whether the write was accepted.
async fn write<DB: TestDatabase>(db: &TestDb<DB>, statements: &[String; 3], is_new: bool, token: i64) -> bool {
    let token = token.to_string();
    let body = format!("'by {token}'");
    let sql = match is_new && ["postgres", "sqlite"].contains(&db.server.name) {
        true => with(&statements[0], &["'r'", &body, &token]),
        false => with(&statements[1], &[&body, &token, "'r'", &token]),
    };
    db.execute(&sql).await == 1
}

async fn tables<DB: TestDatabase>(db: &TestDb<DB>) -> [String; 3] {
    db.execute("CREATE TABLE report (name varchar(40) PRIMARY KEY, body varchar(40), token bigint)").await;
    if !["postgres", "sqlite"].contains(&db.server.name) {
        db.execute("INSERT INTO report VALUES ('r', '', 0)").await;
    }
    statements()
}

async fn the_statements_of_the_page_refuse_a_late_write<DB: TestDatabase>(db: TestDb<DB>) {
    let statements = tables(&db).await;
    let body = async || db.text("SELECT body FROM report").await.unwrap();
    assert!(write(&db, &statements, true, 5).await, "the first one");
    for is_new in [true, false] {
        assert!(!write(&db, &statements, is_new, 4).await && body().await == "by 5", "a late one");
        assert!(write(&db, &statements, is_new, 5).await, "another one of the same holder, which changes nothing");
    }
    assert_eq!(db.execute(&with(&statements[2], &["7", "'r'", "7"])).await, 1, "step 4");
    assert!(!write(&db, &statements, true, 6).await && body().await == "by 5");
    assert_eq!(db.execute(&with(&statements[2], &["6", "'r'", "6"])).await, 0);
    assert!(write(&db, &statements, false, 7).await && body().await == "by 7");
}

/// Many holders write, each with the token of its claim, and each a second time after others.
async fn a_late_write_is_refused_at_any_moment<DB: TestDatabase>(db: TestDb<DB>) {
    let statements = tables(&db).await;
    let (lock, mut tokens) = (db.lock(), Vec::new());
    for _ in 0..20 {
        let lease = acquired(lock.acquire("r", PATIENCE).await);
        tokens.push(lease.token().get());
        lease.release().await.unwrap();
    }
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    let mut writes = JoinSet::new();
    for token in tokens.iter().rev().chain(&tokens).copied() {
        let (db, statements) = (db.over(db.pool.clone()), statements.clone());
        writes.spawn(harness::task(async move { write(&db, &statements, token % 2 == 0, token).await }));
    }
    let accepted = writes.join_all().await.into_iter().filter(|accepted| *accepted).count();
    let last = tokens.last().unwrap();
    assert!((2..=40).contains(&accepted), "{accepted}");
    assert_eq!(db.text("SELECT body FROM report").await, Some(format!("by {last}")));
}
