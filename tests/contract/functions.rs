//! The functions in SQL: every cell of the rules table, and what the lock promises.

use std::time::Duration;

use chrono::{DateTime, NaiveDateTime, TimeDelta, Utc};
use harness::{Table, TestDatabase, TestDb};
use rowlock::leases::Holder;
use sqlx::{MySqlConnection, PgConnection, Row as _, mysql::MySqlRow, postgres::PgRow};
use uuid::Uuid;

use crate::{
    article,
    batched::{names, numbered},
    rules::{self, Terms, Verdict, judge},
    rules_table::{HOUR, cells, row_of, write},
};

harness::tests!(servers(every_cell_of_the_rules_table, every_cell_on_the_articles_own_table));

/// The reply of `rowlock_try_acquire`.
#[derive(Clone, Debug)]
pub struct Answer {
    pub granted: bool,
    pub token: Option<i64>,
    pub holder: Option<Holder>,
    pub expires_at: Option<DateTime<Utc>>,
    pub previous: Option<(i64, String)>,
    pub reason: Option<String>,
    pub by: Option<String>,
    pub until: Option<DateTime<Utc>>,
    pub retry_after: Option<Duration>,
}

/// What a caller asks `rowlock_try_acquire` for.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    pub key: &'a str,
    pub lease: Duration,
    pub label: Option<&'a str>,
    pub min_interval: Duration,
    pub rules: &'a str,
    pub holder: Option<Holder>,
}

impl<'a> Ask<'a> {
    pub fn of(key: &'a str) -> Self {
        let (lease, min_interval) = (Duration::from_secs(30), Duration::ZERO);
        Self { key, lease, label: None, min_interval, rules: "recover", holder: None }
    }
}

/// The functions of a database, called as its drivers call them.
pub trait Functions: TestDatabase {
    fn call_try_acquire(
        conn: &mut Self::Connection,
        ask: &Ask<'_>,
    ) -> impl Future<Output = Result<Answer, sqlx::Error>> + Send;
    /// Calls `rowlock_renew`, `rowlock_release`, `rowlock_abandon` or `rowlock_confirm` by its last
    /// word, with a last argument where it has one. Returns the outcome.
    fn call_change(
        conn: &mut Self::Connection,
        change: &str,
        key: &str,
        holder: Holder,
        token: i64,
        last: Option<&str>,
    ) -> impl Future<Output = Result<Option<String>, sqlx::Error>> + Send;
    /// Calls `rowlock_list`. Returns key, state and token of each row.
    fn call_list(
        conn: &mut Self::Connection,
    ) -> impl Future<Output = Result<Vec<(String, String, i64)>, sqlx::Error>> + Send;
}

fn uuid(holder: Option<Holder>) -> Option<Uuid> {
    holder.map(|holder| Uuid::parse_str(&holder.to_string()).unwrap())
}

impl Functions for sqlx::Postgres {
    async fn call_try_acquire(conn: &mut PgConnection, ask: &Ask<'_>) -> Result<Answer, sqlx::Error> {
        let query = sqlx::query(
            "SELECT *, extract(epoch FROM retry_after)::float8 AS seconds FROM rowlock_try_acquire($1, $2, $3, $4, $5, $6)",
        );
        let query = query.bind(ask.key).bind(TimeDelta::from_std(ask.lease).unwrap()).bind(ask.label);
        let query = query.bind(TimeDelta::from_std(ask.min_interval).unwrap()).bind(ask.rules).bind(uuid(ask.holder));
        let row: PgRow = query.fetch_one(conn).await?;
        let token: Option<i64> = row.try_get("previous_token")?;
        let label: Option<String> = row.try_get("previous_label")?;
        let holder: Option<Uuid> = row.try_get("holder")?;
        Ok(Answer {
            granted: row.try_get("granted")?,
            token: row.try_get("token")?,
            holder: holder.map(|holder| Holder::parse(&holder.to_string()).unwrap()),
            expires_at: row.try_get("expires_at")?,
            previous: token.zip(label),
            reason: row.try_get("reason")?,
            by: row.try_get("by")?,
            until: row.try_get("until")?,
            retry_after: row.try_get::<Option<f64>, _>("seconds")?.map(Duration::from_secs_f64),
        })
    }

    async fn call_change(
        conn: &mut PgConnection,
        change: &str,
        key: &str,
        holder: Holder,
        token: i64,
        last: Option<&str>,
    ) -> Result<Option<String>, sqlx::Error> {
        let last = last.map(|last| format!(", '{last}'")).unwrap_or_default();
        let sql = format!("SELECT rowlock_{change}($1, $2, $3{last})::text");
        let query = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(key);
        query.bind(uuid(Some(holder))).bind(token).fetch_one(conn).await
    }

    async fn call_list(conn: &mut PgConnection) -> Result<Vec<(String, String, i64)>, sqlx::Error> {
        sqlx::query_as("SELECT key, state, token FROM rowlock_list()").fetch_all(conn).await
    }
}

impl Functions for sqlx::MySql {
    async fn call_try_acquire(conn: &mut MySqlConnection, ask: &Ask<'_>) -> Result<Answer, sqlx::Error> {
        let query = sqlx::query("CALL rowlock_try_acquire(?, ?, ?, ?, ?, ?)").bind(ask.key);
        let query = query.bind(ask.lease.as_secs_f64()).bind(ask.label).bind(ask.min_interval.as_secs_f64());
        let holder = ask.holder.map(|holder| holder.to_string());
        let row: MySqlRow = query.bind(ask.rules).bind(holder).fetch_one(conn).await?;
        let time = |name: &str| -> Result<Option<DateTime<Utc>>, sqlx::Error> {
            Ok(row.try_get::<Option<NaiveDateTime>, _>(name)?.map(|time| time.and_utc()))
        };
        let token: Option<i64> = row.try_get("previous_token")?;
        let label: Option<String> = row.try_get("previous_label")?;
        let holder: Option<String> = row.try_get("holder")?;
        Ok(Answer {
            granted: row.try_get::<i64, _>("granted")? == 1,
            token: row.try_get("token")?,
            holder: holder.map(|holder| Holder::parse(&holder).unwrap()),
            expires_at: time("expires_at")?,
            previous: token.zip(label),
            reason: row.try_get("reason")?,
            by: row.try_get("by")?,
            until: time("until")?,
            retry_after: row.try_get::<Option<f64>, _>("retry_after")?.map(Duration::from_secs_f64),
        })
    }

    async fn call_change(
        conn: &mut MySqlConnection,
        change: &str,
        key: &str,
        holder: Holder,
        token: i64,
        last: Option<&str>,
    ) -> Result<Option<String>, sqlx::Error> {
        let last = match (change, last) {
            ("renew" | "release", None) => ", NULL".to_owned(),
            (_, last) => last.map(|last| format!(", '{last}'")).unwrap_or_default(),
        };
        let sql = format!("CALL rowlock_{change}(?, ?, ?{last})");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(key).bind(holder.to_string()).bind(token);
        // `rowlock_confirm` has no rows.
        let rows = query.fetch_all(conn).await?;
        rows.first().map(|row| row.try_get(0)).transpose()
    }

    async fn call_list(conn: &mut MySqlConnection) -> Result<Vec<(String, String, i64)>, sqlx::Error> {
        let rows = sqlx::query("CALL rowlock_list()").fetch_all(conn).await?;
        rows.iter().map(|row| Ok((row.try_get("key")?, row.try_get("state")?, row.try_get("token")?))).collect()
    }
}

async fn every_cell_of_the_rules_table<DB: Functions>(db: TestDb<DB>) {
    every_cell(db, Table::Ours).await;
}

async fn every_cell_on_the_articles_own_table<DB: Functions>(db: TestDb<DB>) {
    article::put(&db, Table::Articles).await;
    every_cell(db, Table::Articles).await;
}

/// The functions have no settings for other programs on the table, and none to repeat failed runs.
pub fn settings() -> Vec<Terms> {
    let mut all = Vec::new();
    for rules in [rules::Rules::Article, rules::Rules::Recover] {
        for min_interval in [0, HOUR / 2] {
            let min_interval = TimeDelta::milliseconds(min_interval);
            all.push(Terms { rules, min_interval, ..Terms::default() });
        }
    }
    all
}

async fn every_cell<DB: Functions>(db: TestDb<DB>, table: Table) {
    rowlock::migration::migrate_functions(&db.pool).await.unwrap();
    let (settings, holder) = (settings(), Holder::unique());
    let keys = numbered(settings.len());
    let mut seen = std::collections::BTreeSet::new();
    let mut conn = db.pool.acquire().await.unwrap();
    for cell in cells() {
        db.execute("DELETE FROM t_resource_lock").await;
        if let Some(cell) = &cell {
            write(&db, &names(&keys).collect::<Vec<_>>(), cell, TimeDelta::zero(), table).await;
        }
        for (terms, key) in settings.iter().zip(&keys) {
            let now = Utc::now();
            let row = cell.as_ref().map(|cell| row_of(cell, now));
            let verdict = judge(row.as_ref(), now, holder, terms);
            let rules = if terms.rules == rules::Rules::Article { "article" } else { "recover" };
            let min_interval = terms.min_interval.to_std().unwrap();
            let ask = Ask { min_interval, rules, holder: Some(holder), ..Ask::of(key) };
            let answer = DB::call_try_acquire(&mut conn, &ask).await.unwrap();
            let context = format!("{cell:?} under {terms:?}: rules.rs says {verdict:?}, the function {answer:?}");
            match &verdict {
                Verdict::Create | Verdict::Acquire => {
                    assert!(answer.granted && answer.previous.is_none(), "{context}");
                }
                Verdict::TakeOver => {
                    assert!(answer.granted && answer.previous == Some((7, "other".into())), "{context}");
                }
                Verdict::Refuse(reason, until) => {
                    assert!(!answer.granted && answer.token.is_none(), "{context}");
                    assert_eq!(answer.reason.as_deref(), Some(reason.name()), "{context}");
                    assert_eq!(answer.by.as_deref(), Some("other"), "{context}");
                    assert_eq!(until.is_some(), answer.until.is_some(), "{context}");
                    assert_eq!(until.is_some(), answer.retry_after.is_some(), "{context}");
                    if let (Some(expected), Some(got)) = (until, answer.until) {
                        assert!((*expected - got).num_seconds().abs() < 120, "{context}");
                    }
                }
                Verdict::Same => panic!("{context}"),
            }
            seen.insert(format!("{verdict:?}").split(['(', ',']).take(2).collect::<Vec<_>>().join(" "));
        }
    }
    assert_eq!(seen.len(), 9, "every verdict and every reason that a row can give came up: {seen:?}");
}
