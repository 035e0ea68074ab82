//! A row of the lock's table as PostgreSQL returns it, and what the statements share.

use chrono::{DateTime, Utc};
use sqlx::{
    Connection as _, PgConnection, Postgres, Row as _,
    postgres::{PgArguments, PgRow},
};

use crate::{
    key::{Claim, Key},
    store::{
        Reply, RowSnapshot,
        stored_row::{StoredRow, plain_columns, snapshot},
    },
};

/// Converts an infinite time, which another program may write, to a far one. (`least` alone would
/// make a time of NULL.)
macro_rules! finite {
    ($column:literal) => {
        concat!(
            "CASE WHEN ",
            $column,
            " IS NOT NULL THEN greatest(least(",
            $column,
            "::timestamptz, '9999-12-31Z'), '0001-01-01Z') END"
        )
    };
}

/// The condition that a statement has not passed its limit. PostgreSQL evaluates it where it
/// stands, since the clock is volatile: beside rows that a subquery has locked, it is read after
/// the lock.
macro_rules! in_time {
    ($limit:literal) => {
        concat!("clock_timestamp() <= coalesce(", $limit, "::timestamptz, 'infinity')")
    };
}

/// A statement that databases share: texts, `now` for the database's clock, the numbers of
/// parameters in brackets, columns with what their types are in the table, and other parts in
/// braces. A time so many microseconds ago is by the clock of the transaction: a volatile function
/// is no condition of an index.
macro_rules! sql {
    (@ now) => { "clock_timestamp()" };
    (@ earliest) => { "'-infinity'" };
    (@ [$number:literal]) => { concat!("$", $number) };
    (@ (ago [$number:literal])) => { concat!("now() - $", $number, "::bigint * interval '1 microsecond'") };
    (@ (text $column:literal)) => { concat!($column, "::text") };
    (@ (time $column:literal)) => { $crate::store::postgres::row::finite!($column) };
    (@ (flag $column:literal)) => { $column };
    (@ { $($part:tt)+ }) => { $($part)+ };
    (@ $text:literal) => { $text };
    ($($part:tt)+) => { concat!($($crate::store::postgres::row::sql!(@ $part)),+) };
}

pub(super) use {finite, in_time, sql};

/// A row in the form of `rules::Row`, in types that do not depend on the table's.
pub(super) const ROW: &str = concat!(
    "key_resource::text COLLATE \"C\" AS key_resource, lock_flag = 1 AS locked, status::text, time::bigint AS minutes,
    client_ip::text, holder, token, end_time IS NOT NULL AS ended, awaited, ",
    finite!("begin_time"),
    " AS begin_time, ",
    finite!("claimed_at"),
    " AS claimed_at, ",
    finite!("expires_at"),
    " AS expires_at, ",
    finite!("end_time"),
    " AS end_time"
);

/// The requests `asked`, of which the planner here expects one. It expects a hundred of any list,
/// for which it would read all of a table that has few rows when the statement is planned. The plan
/// is kept while the table grows.
pub(super) const FEW: &str = "(SELECT * FROM asked WHERE place = abs(place))";

pub(super) fn names(keys: &[Key]) -> Vec<&str> {
    keys.iter().map(Key::as_str).collect()
}

/// Converts a time for the tables.
#[cfg(feature = "schedule")]
pub(super) fn stored(time: DateTime<Utc>) -> DateTime<Utc> {
    time
}

pub(super) type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

pub(super) fn bind_claim<'q>(sql: &'static str, claim: &'q Claim) -> Query<'q> {
    sqlx::query(sql).bind(claim.key.as_str()).bind(claim.holder.as_uuid()).bind(claim.token.get())
}

/// Waits for the end of the transaction of a statement that failed. The server reports an error
/// before it releases the locks, and the next statement would skip the rows that are still locked.
pub(super) async fn once_ended<T>(conn: &mut PgConnection, reply: Reply<T>) -> Reply<T> {
    if matches!(reply, Err(sqlx::Error::Database(_))) {
        drop(conn.ping().await);
    }
    reply
}

impl StoredRow for PgRow {
    plain_columns!();

    fn is(&self, column: &str) -> Reply<bool> {
        self.try_get::<Option<bool>, _>(column).map(Option::unwrap_or_default)
    }

    fn time_or_null(&self, column: &str) -> Reply<Option<DateTime<Utc>>> {
        self.try_get(column)
    }
}

pub(super) fn snapshot_of(row: &PgRow) -> Reply<Option<RowSnapshot>> {
    row.is("seen")?.then(|| snapshot(row)).transpose()
}
