//! Rows as the databases return them. Each database keeps times and flags in types of its own. What
//! the columns of a row mean is said once.

use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::{
    key::{PreviousClaim, Token},
    rules::{Row, Terms},
    store::{ClaimReply, ClaimRequest, Reply, RowSnapshot, to_utc},
};

/// A row of a table of the library.
pub trait StoredRow {
    fn text_or_null(&self, column: &str) -> Reply<Option<String>>;
    fn number_or_null(&self, column: &str) -> Reply<Option<i64>>;
    fn uuid_or_null(&self, column: &str) -> Reply<Option<Uuid>>;
    fn time_or_null(&self, column: &str) -> Reply<Option<DateTime<Utc>>>;

    /// Reads a number of 32 bits. The tables have no negative ones.
    #[cfg(feature = "schedule")]
    fn count(&self, column: &str) -> Reply<u32>;

    /// Reads a flag. NULL is `false`.
    fn is(&self, column: &str) -> Reply<bool>;

    fn text(&self, column: &str) -> Reply<String> {
        present(column, self.text_or_null(column)?)
    }

    fn number(&self, column: &str) -> Reply<i64> {
        present(column, self.number_or_null(column)?)
    }

    #[cfg(feature = "schedule")]
    fn uuid(&self, column: &str) -> Reply<Uuid> {
        present(column, self.uuid_or_null(column)?)
    }

    fn time(&self, column: &str) -> Reply<DateTime<Utc>> {
        present(column, self.time_or_null(column)?)
    }
}

fn present<T>(column: &str, value: Option<T>) -> Reply<T> {
    let null =
        || sqlx::Error::ColumnDecode { index: column.to_owned(), source: sqlx::error::UnexpectedNullError.into() };
    value.ok_or_else(null)
}

/// Implements what the drivers do alike.
macro_rules! plain_columns {
    () => {
        fn text_or_null(&self, column: &str) -> Reply<Option<String>> {
            self.try_get(column)
        }

        fn number_or_null(&self, column: &str) -> Reply<Option<i64>> {
            self.try_get(column)
        }

        fn uuid_or_null(&self, column: &str) -> Reply<Option<uuid::Uuid>> {
            self.try_get(column)
        }

        #[cfg(feature = "schedule")]
        fn count(&self, column: &str) -> Reply<u32> {
            self.try_get::<i32, _>(column).map(|number| u32::try_from(number).unwrap_or_default())
        }
    };
}

pub(super) use plain_columns;

/// Reads a row of the lock's table, in the form in which the rules judge it. `ahead` is how far the
/// table's times are ahead of UTC.
pub fn read(row: &impl StoredRow, ahead: TimeDelta) -> Reply<Row> {
    let utc =
        |column| -> Reply<Option<DateTime<Utc>>> { Ok(row.time_or_null(column)?.map(|time| to_utc(time, ahead))) };
    Ok(Row {
        locked: row.is("locked")?,
        status: row.text_or_null("status")?.unwrap_or_default(),
        begin_time: utc("begin_time")?,
        minutes: row.number_or_null("minutes")?,
        client_ip: row.text_or_null("client_ip")?.unwrap_or_default(),
        holder: row.uuid_or_null("holder")?,
        token: row.number("token")?,
        expires_at: row.time_or_null("expires_at")?,
        claimed_at: utc("claimed_at")?,
        ended: row.is("ended")?,
        awaited: row.is("awaited")?,
    })
}

/// Returns the reply to a request that was not granted, whose key has this row.
pub fn seen(row: Option<&impl StoredRow>, terms: &Terms) -> Reply<ClaimReply> {
    let Some(row) = row else { return Ok(ClaimReply::Seen { row: None, now: DateTime::UNIX_EPOCH }) };
    Ok(ClaimReply::Seen { row: Some(read(row, terms.offset())?), now: row.time("now")? })
}

/// Returns rows of the lock's table by their keys.
pub fn by_key<R: StoredRow>(rows: &[R]) -> Reply<HashMap<String, &R>> {
    rows.iter().map(|row| Ok((row.text("key_resource")?, row))).collect()
}

/// Returns the replies to requests of which none was granted, whose keys have these rows.
pub fn seen_each(rows: &[impl StoredRow], requests: &[ClaimRequest], terms: &Terms) -> Reply<Vec<ClaimReply>> {
    let by_key = by_key(rows)?;
    requests.iter().map(|request| seen(by_key.get(request.key.as_str()).copied(), terms)).collect()
}

/// Reads the claim that a claim took over.
pub fn previous(row: &impl StoredRow) -> Reply<Option<PreviousClaim>> {
    let Some(token) = row.number_or_null("prior_token")? else { return Ok(None) };
    let label = row.text_or_null("prior_client_ip")?.unwrap_or_default();
    Ok(Some(PreviousClaim { token: Token::new(token), label }))
}

/// Reads a claim's row after a change did not match it. Other programs may have written what cannot
/// be read: their row is not the claim's, and takes no other row of a batch with it.
pub fn snapshot(row: &impl StoredRow) -> Reply<RowSnapshot> {
    let (locked, now) = (row.is("locked")?, row.time("now")?);
    let time = |column| row.time_or_null(column).ok().flatten();
    let is_begun = time("begin_time").is_some_and(|begun| time("claimed_at") == Some(begun));
    Ok(RowSnapshot {
        holder: row.uuid_or_null("holder")?,
        token: row.number("token")?,
        locked,
        stands: locked && is_begun && !row.is("ended")?,
        left: time("expires_at").map_or(TimeDelta::zero(), |end| end - now),
        now,
    })
}
