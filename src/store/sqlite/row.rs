//! A row of the lock's table as SQLite returns it, and the values that statements take.

use chrono::{DateTime, Utc};
use sqlx::{
    Row as _, Sqlite, SqliteConnection,
    sqlite::{SqliteArguments, SqliteRow},
};

pub(super) use crate::store::micros;
use crate::{
    key::{Claim, Key},
    store::{
        Reply, hex,
        stored_row::{StoredRow, plain_columns},
    },
};

/// A statement, or a part of one: texts, `now` for the database's clock, the numbers of parameters
/// in brackets, columns with what their types are in the table, and other parts in braces.
macro_rules! sql {
    (@ now) => { "CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000" };
    (@ earliest) => { "-9223372036854775808" };
    (@ [$number:literal]) => { concat!("?", $number) };
    (@ (ago [$number:literal])) => { $crate::store::sqlite::row::sql!(now " - ?" $number) };
    (@ (text $column:literal)) => { $column };
    (@ (time $column:literal)) => { $column };
    (@ (flag $column:literal)) => { $column };
    (@ { $($part:tt)+ }) => { $($part)+ };
    (@ $text:literal) => { $text };
    ($($part:tt)+) => { concat!($($crate::store::sqlite::row::sql!(@ $part)),+) };
}

/// Converts a time of the column to microseconds. A text that is not a time stays a text, and is an
/// error when decoded.
macro_rules! as_micros {
    ($column:literal) => {
        sql!(
            "COALESCE(CAST(round(unixepoch(CASE typeof(" $column ") WHEN 'text' THEN " $column
            " END, 'subsec') * 1000) AS INTEGER) * 1000, " $column ")"
        )
    };
}

/// Converts microseconds to the form in which the column keeps a time. A text keeps whole seconds,
/// rounded down, so that no time lies ahead.
macro_rules! kept {
    ($column:literal, $micros:expr) => {
        sql!(
            "(SELECT CASE WHEN type LIKE '%INT%' THEN " {$micros} " ELSE strftime('%Y-%m-%d %H:%M:%S', (" {$micros}
            ") / 1000000, 'unixepoch') END FROM pragma_table_info('t_resource_lock') WHERE name = '" $column
            "' COLLATE NOCASE)"
        )
    };
}

/// Reads rows; `$source` is what follows FROM.
macro_rules! read_from {
    ($source:expr) => {
        sql!("
SELECT key_resource, COALESCE(lock_flag = 1, 0) AS locked, status, time AS minutes, client_ip, holder, token, expires_at, prior_token, prior_client_ip,
       end_time IS NOT NULL AS ended, 0 AS awaited, " {as_micros!("begin_time")} " AS begin_time,
       " {as_micros!("claimed_at")} " AS claimed_at, " {as_micros!("end_time")} " AS end_time, " now " AS now
FROM " {$source})
    };
}

/// ?1 lists the keys, as [`keys`] writes them.
macro_rules! read_rows {
    () => {
        $crate::store::sqlite::row::read_from!(
            $crate::store::sqlite::row::sql!(
                "json_each(?1) AS j CROSS JOIN t_resource_lock ON " {$crate::store::sqlite::row::is_listed!("j.value")}
            )
        )
    };
}

/// The items of the list ?1, to be joined with the table in an UPDATE, which knows no CROSS JOIN.
macro_rules! listed {
    () => {
        "WITH j AS MATERIALIZED (SELECT value FROM json_each(?1)) "
    };
}

/// Whether the row has the key of the item `j`, which `$hex` is. Both parts are true of each item
/// that has a row.
///
/// In a table that was analyzed while it was small, the planner would read all rows for each item,
/// or the list for each row. If it expects that few items and few rows are the ones, it looks for
/// each item of a materialized list in the index.
macro_rules! is_listed {
    ($hex:literal) => {
        concat!("unlikely(j.value NOTNULL) AND unlikely(key_resource = CAST(unhex(", $hex, ") AS TEXT))")
    };
}

pub(super) use {as_micros, is_listed, kept, listed, read_from, read_rows, sql};

pub(super) type Query<'q> = sqlx::query::Query<'q, Sqlite, SqliteArguments>;

pub(super) fn bind_claim<'q>(sql: &'static str, claim: &'q Claim) -> Query<'q> {
    sqlx::query(sql).bind(claim.key.as_str()).bind(*claim.holder.as_uuid()).bind(claim.token.get())
}

impl StoredRow for SqliteRow {
    plain_columns!();

    fn is(&self, column: &str) -> Reply<bool> {
        self.try_get::<Option<bool>, _>(column).map(Option::unwrap_or_default)
    }

    fn time_or_null(&self, column: &str) -> Reply<Option<DateTime<Utc>>> {
        Ok(self.number_or_null(column)?.map(to_time))
    }
}

/// Converts microseconds since 1970. A time beyond the calendar's range is its first or last one.
fn to_time(micros: i64) -> DateTime<Utc> {
    let beyond = if micros > 0 { DateTime::<Utc>::MAX_UTC } else { DateTime::<Utc>::MIN_UTC };
    DateTime::from_timestamp_micros(micros).unwrap_or(beyond)
}

/// Converts a time for the tables.
pub(super) fn stored(time: DateTime<Utc>) -> i64 {
    time.timestamp_micros()
}

/// Builds a JSON array. Keys and ids are passed as hex, so that nothing in them needs escaping.
pub(super) fn json(items: impl Iterator<Item = String>) -> String {
    format!("[{}]", items.collect::<Vec<_>>().join(","))
}

pub(super) fn keys<'a>(keys: impl IntoIterator<Item = &'a Key>) -> String {
    json(keys.into_iter().map(|key| format!("\"{}\"", hex(key.as_str()))))
}

/// Returns the row of a statement that writes. The statement has to be run to its end: only there
/// does SQLite commit, which may fail.
///
/// The driver counts the numbers from ?1 on that a statement leaves out, over all statements of a
/// text. When they are more than the arguments, it binds no further ones.
pub(super) async fn written(query: Query<'_>, conn: &mut SqliteConnection) -> Reply<Option<SqliteRow>> {
    Ok(query.fetch_all(conn).await?.pop())
}
