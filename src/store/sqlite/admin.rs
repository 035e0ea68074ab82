//! Reads and changes of rows for operators, and what operators have changed.

use chrono::TimeDelta;
use sqlx::{Row as _, Sqlite, SqliteConnection};

use crate::{
    key::{Key, Token},
    rules::{Status, Terms},
    store::{
        Form, Reply,
        admin::{
            AdminStore, Change, ChangeInfo, Forced, Forgotten, KeyRange, Listed, Page, STEP, Seen, listed,
            listed_change, old_of, operations,
        },
        hex,
        sqlite::row::{as_micros, json, kept, micros, read_from, sql, stored, written},
    },
};

const LIST: &str = read_from!(
    "t_resource_lock WHERE key_resource > ?1 AND instr(key_resource, ?2) = 1 AND (lock_flag = 1 OR NOT ?3)
     ORDER BY key_resource LIMIT ?4"
);

const LOOK: &str = read_from!("t_resource_lock WHERE key_resource BETWEEN ?1 AND ?2 AND (lock_flag = 1 OR ?3)");

/// Whether a row is as expected: ?4 token, ?5 holder, ?6 begin_time, ?7 end_time.
macro_rules! as_expected {
    () => {
        sql!(
            "(?4 IS NULL OR (token = ?4 AND holder IS ?5 AND " {as_micros!("begin_time")} " IS ?6
                             AND " {as_micros!("end_time")} " IS ?7))"
        )
    };
}

const FORCE: &str = sql!("
UPDATE t_resource_lock
SET lock_flag = 0, status = ?2, end_time = " {kept!("end_time", sql!(now " + ?3"))} ", holder = NULL, expires_at = NULL,
    claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL, token = max(token + 1, " now ")
WHERE key_resource = ?1 AND " {as_expected!()} " RETURNING token");

const IS_AS_EXPECTED: &str = sql!("SELECT " {as_expected!()} " FROM t_resource_lock WHERE key_resource = ?1");

/// ?1 older_than, ?2 min_interval, ?3 the other programs' offset.
macro_rules! forgettable {
    () => {
        sql!(
            "ifnull(lock_flag, 0) = 0 AND status = 'S' AND token < " now "
             AND (begin_time IS NULL OR " {as_micros!("begin_time")} " - ?3 < " now " - max(?1, ?2, ifnull(time, 0) * 60000000))
             AND (end_time IS NULL OR " {as_micros!("end_time")} " - ?3 < " now " - ?1)"
        )
    };
}

const FIND: &str = sql!(
    "SELECT key_resource, COALESCE(" {forgettable!()} ", 0)
     FROM t_resource_lock WHERE key_resource > ?4 ORDER BY key_resource LIMIT ?5"
);

const FORGET: &str = sql!(
    "DELETE FROM t_resource_lock
     WHERE key_resource IN (SELECT CAST(unhex(value) AS TEXT) FROM json_each(?4)) AND " {forgettable!()}
);

const CHANGES: &str = "
SELECT at, who, what, name, detail FROM t_resource_change WHERE ?1 IS NULL OR name = ?2 ORDER BY id DESC LIMIT ?3";

const FORGET_CHANGES: &str = sql!(
    "DELETE FROM t_resource_change
     WHERE id IN (SELECT id FROM t_resource_change WHERE at < " now " - ?1 ORDER BY id LIMIT ?2)"
);

impl AdminStore for Sqlite {
    operations!(SqliteConnection);

    async fn read_range(conn: &mut SqliteConnection, keys: &KeyRange, terms: &Terms, _: Form) -> Reply<Vec<Listed>> {
        let query = sqlx::query(LOOK).bind(keys.first.as_str()).bind(keys.last.as_str());
        let rows = query.bind(keys.is_one()).fetch_all(conn).await?;
        rows.iter().map(|row| listed(row, terms)).collect()
    }

    async fn force(
        conn: &mut SqliteConnection,
        key: &Key,
        status: Status,
        expected: Option<&Seen>,
        terms: &Terms,
    ) -> Reply<Forced> {
        let bound = |sql: &'static str| {
            let query = sqlx::query(sql).bind(key.as_str()).bind(status.letter()).bind(micros(terms.offset()));
            let query = query.bind(expected.map(|seen| seen.token)).bind(expected.and_then(|seen| seen.holder));
            let query = query.bind(expected.and_then(|seen| seen.begin_time).map(stored));
            query.bind(expected.and_then(|seen| seen.end_time).map(stored))
        };
        if let Some(row) = written(bound(FORCE), conn).await? {
            return Ok(Forced::Freed(Token::new(row.try_get("token")?)));
        }
        let row = bound(IS_AS_EXPECTED).fetch_optional(conn).await?;
        Ok(Forced::not(row.map(|row| row.try_get(0)).transpose()?))
    }

    /// Reads the rows without the file's write lock, which is then held only while the old ones of
    /// one step are deleted.
    async fn forget(
        conn: &mut SqliteConnection,
        older_than: TimeDelta,
        after: &str,
        terms: &Terms,
    ) -> Reply<Forgotten> {
        let bind = |sql: &'static str| {
            sqlx::query(sql).bind(micros(older_than)).bind(micros(terms.min_interval)).bind(micros(terms.offset()))
        };
        let step = i64::try_from(STEP).unwrap_or(i64::MAX);
        let rows = bind(FIND).bind(after).bind(step).fetch_all(&mut *conn).await?;
        let (keys, after) = old_of(rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))))?;
        if keys.is_empty() {
            return Ok(Forgotten { rows: 0, after });
        }
        let named = json(keys.iter().map(|key| format!("\"{}\"", hex(key))));
        let reply = bind(FORGET).bind(named).execute(conn).await?;
        Ok(Forgotten { rows: reply.rows_affected(), after })
    }
}
