//! A row of the lock's table as MySQL and MariaDB return it, and the values that statements take.

use chrono::{DateTime, NaiveDateTime, Utc};
use sqlx::{
    AssertSqlSafe, MySql, MySqlConnection, Row as _,
    mysql::{MySqlArguments, MySqlQueryResult, MySqlRow},
};

pub(super) use crate::store::micros;
use crate::{
    key::{Claim, Key},
    store::{
        Form, Reply,
        fault::{Fault, fault},
        stored_row::{StoredRow, plain_columns},
    },
};

/// The clock for tokens. SYSDATE is read when the row is locked (UTC_TIMESTAMP is the statement's
/// start), and is converted from the session's time zone to UTC.
macro_rules! clock_micros {
    () => {
        "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', SYSDATE(6)) + TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6))"
    };
}

/// A statement that databases share: texts, `now` for the database's clock, the numbers of
/// parameters in brackets, each of which comes once and in its order, columns with what their types
/// are in the table, and other parts in braces.
macro_rules! sql {
    (@ now) => { "UTC_TIMESTAMP(6)" };
    (@ earliest) => { "TIMESTAMP '0001-01-01 00:00:00'" };
    (@ [$number:literal]) => { "?" };
    (@ (ago [$number:literal])) => { "UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND" };
    (@ (text $column:literal)) => { concat!("CONVERT(", $column, " USING utf8mb4)") };
    (@ (time $column:literal)) => { $column };
    (@ (flag $column:literal)) => { concat!("CAST(", $column, " AS SIGNED)") };
    (@ { $($part:tt)+ }) => { $($part)+ };
    (@ $text:literal) => { $text };
    ($($part:tt)+) => { concat!($($crate::store::mysql::row::sql!(@ $part)),+) };
}

pub(super) use sql;

pub(super) const MICROS: &str = clock_micros!();

/// The condition that a statement has not passed its limit, which is in microseconds as well. The
/// clock is read for each row, after it was locked.
pub(super) const IN_TIME: &str = concat!(clock_micros!(), " <= ?");

/// The UTC time at which a row is changed. A statement may have waited since its start, behind a
/// metadata lock, and be carried out after one that was sent later: what it extends must not end
/// sooner than the later statement has set.
pub(super) const NOW: &str = "SYSDATE(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), UTC_TIMESTAMP(6)) MICROSECOND";

/// On MariaDB, makes an UPDATE fail at a locked row (error 1205) instead of waiting for it, or for
/// a row that a trigger of the application uses. A statement that fails is sent again in the form
/// for both servers, where a derived table skips locked rows.
pub(super) const NOWAIT: &str = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR";

pub(super) fn is_mariadb(form: Form) -> bool {
    matches!(form, Form::MariaDb | Form::Galera)
}

/// Joins the rows that a derived table `j` has locked with the table that is changed. Without the
/// index, a server reads the whole of a small table, and waits for the rows that others have
/// locked.
pub(super) const JOINED: &str =
    "STRAIGHT_JOIN t_resource_lock t FORCE INDEX (PRIMARY) ON t.key_resource = j.key_resource";

/// A row with its key, in the form of `rules::Row`, the claim that was taken over, and the time.
/// Zero dates, which the driver cannot read, become NULL.
pub(super) const ROW: &str = "
CONVERT(key_resource USING utf8mb4) AS key_resource, CAST(COALESCE(lock_flag = 1, 0) AS SIGNED) AS locked, CONVERT(status USING utf8mb4) AS status, CAST(time AS SIGNED) AS minutes,
IF(begin_time >= '1000-01-01', begin_time, NULL) AS begin_time, IF(end_time >= '1000-01-01', end_time, NULL) AS end_time,
CONVERT(client_ip USING utf8mb4) AS client_ip, holder, token, expires_at, claimed_at, end_time IS NOT NULL AS ended, CAST(0 AS SIGNED) AS awaited,
prior_token, CONVERT(prior_client_ip USING utf8mb4) AS prior_client_ip, UTC_TIMESTAMP(6) AS now";

pub(super) type Query<'q> = sqlx::query::Query<'q, MySql, MySqlArguments>;

pub(super) fn bind_claim<'q>(query: Query<'q>, claim: &'q Claim) -> Query<'q> {
    query.bind(claim.key.as_str()).bind(*claim.holder.as_uuid()).bind(claim.token.get())
}

/// Pads the items of a statement to a power of two with the last one, so that few statements are
/// ever prepared.
pub(super) fn padded<T>(named: &[T]) -> Vec<&T> {
    let padding = named.len().next_power_of_two() - named.len();
    named.iter().chain(std::iter::repeat_n(named.last(), padding).flatten()).collect()
}

pub(super) fn marks(mark: &str, count: usize) -> String {
    vec![mark; count].join(", ")
}

/// Builds the read of the rows of so many keys, with a lock if one is named.
pub(super) fn read_statement(keys: usize, lock: &str) -> String {
    format!("SELECT {ROW} FROM t_resource_lock WHERE key_resource IN ({}) {lock}", marks("?", keys))
}

/// Reads the rows of these keys, with a lock if one is named.
pub(super) async fn read(
    conn: &mut MySqlConnection,
    keys: impl Iterator<Item = &Key>,
    lock: &str,
) -> Reply<Vec<MySqlRow>> {
    let keys: Vec<&Key> = keys.collect();
    let named = padded(&keys);
    let query = sqlx::query(AssertSqlSafe(read_statement(named.len(), lock)));
    named.iter().fold(query, |query, key| query.bind(key.as_str())).fetch_all(conn).await
}

/// Executes the statement with [`NOWAIT`], if there is one. If there is none, or it met a locked
/// row and changed nothing, executes the one for both servers.
pub(super) async fn execute_nowait_first<'q>(
    conn: &mut MySqlConnection,
    nowait: Option<Query<'q>>,
    for_both: impl FnOnce() -> Query<'q>,
) -> Reply<MySqlQueryResult> {
    if let Some(query) = nowait {
        match query.execute(&mut *conn).await {
            Err(error) if fault(&error) == Fault::Contention => {}
            reply => return reply,
        }
    }
    for_both().execute(conn).await
}

impl StoredRow for MySqlRow {
    plain_columns!();

    fn is(&self, column: &str) -> Reply<bool> {
        self.try_get::<Option<i64>, _>(column).map(|flag| flag == Some(1))
    }

    fn time_or_null(&self, column: &str) -> Reply<Option<DateTime<Utc>>> {
        Ok(self.try_get::<Option<NaiveDateTime>, _>(column)?.map(|time| time.and_utc()))
    }
}

/// Converts a time for the tables.
pub(super) fn stored(time: DateTime<Utc>) -> NaiveDateTime {
    time.naive_utc()
}
