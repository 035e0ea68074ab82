//! Claims of rows that are free or missing, which is what most claims find: one text, and so one
//! hand-over to the connection's thread.
//!
//! The text is a transaction that reads before it writes. When another connection writes, SQLite
//! lets such a transaction fail at once, where a statement by itself would wait for the busy
//! timeout. It is then undone, and the rows are judged before anything is written.

use std::collections::HashMap;

use chrono::DateTime;
use sqlx::{Row as _, Sqlite, SqliteConnection, sqlite::SqliteRow};

use crate::{
    key::Token,
    rules::{Rules, Terms},
    store::{
        ClaimReply, ClaimRequest, ClaimStore as _, Reply, Store as _, hex, is_apart,
        sqlite::row::{as_micros, is_listed, json, listed, micros, read_from, sql},
        stored_row::seen,
        unanswered,
    },
};

/// Joins the list ?1 with the table. Each item is a holder, of 32 digits, and its key in hex.
macro_rules! wanted {
    ($condition:literal) => {
        sql!(
            "json_each(?1) AS j CROSS JOIN t_resource_lock ON " {is_listed!("substr(j.value, 33)")} " WHERE " $condition
        )
    };
}

/// Creates the rows that are missing, and claims those that are free. Returns rows that are locked,
/// and then one with the places in the list and the tokens of the claims, and the number of rows
/// that exist. A row for each claim would cost more than the claim:
/// the driver sends each row through a channel.
///
/// That channel has room for 50 rows. If more were sent, the transaction would stay open until the
/// client reads them. The rows of the requests' own holders come first, so that none of them is
/// taken for a new claim.
pub(super) const CLAIM: &str = sql!(
    "BEGIN;" {read_from!(wanted!("lock_flag = 1 ORDER BY holder = unhex(substr(j.value, 1, 32)) DESC LIMIT 40;"))} "
INSERT INTO t_resource_lock (key_resource, status, lock_flag, begin_time, client_ip, time, token, confirms)
SELECT CAST(unhex(substr(j.value, 33)) AS TEXT), 'S', 0, 0, '', ?5, 0, 0 FROM json_each(?1) AS j
WHERE NOT EXISTS (SELECT 1 FROM t_resource_lock WHERE key_resource = CAST(unhex(substr(j.value, 33)) AS TEXT))
ON CONFLICT (key_resource) DO NOTHING;" {listed!()} "
UPDATE t_resource_lock
SET lock_flag = 1, status = 'P', client_ip = ?2, holder = unhex(substr(j.value, 1, 32)), end_time = NULL,
    begin_time = " now " + ?4, claimed_at = " now " + ?4, token = max(token + 1, " now "), expires_at = " now " + ?3,
    prior_token = NULL, prior_client_ip = client_ip, prior_status = status,
    prior_begin_time = begin_time, prior_end_time = end_time
FROM j WHERE " {is_listed!("substr(j.value, 33)")} " AND lock_flag IS NOT 1 AND " now " <= ?6;
SELECT group_concat(CASE WHEN lock_flag = 1 AND holder = unhex(substr(j.value, 1, 32)) THEN j.key || ' ' || token END),
    count(*) FROM " {wanted!("TRUE;")} "COMMIT"
);

/// Returns whether to expect that the rows are free, and no rule asks for more. A request that has
/// waited reads first: the key may still be held, and a read takes no lock.
pub(super) fn is_likely(requests: &[ClaimRequest], terms: &Terms) -> bool {
    let of_sets = requests.len() > 1 && !is_apart(requests);
    terms.rules == Rules::Recover && terms.min_interval.is_zero() && !of_sets && !requests.iter().all(|one| one.waited)
}

/// Claims the rows that nothing has locked, and returns the others as they were seen. Returns
/// `None` if nothing was done, because another connection writes or the statement failed.
pub(super) async fn claim(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
    limit: i64,
) -> Reply<Option<Vec<ClaimReply>>> {
    let item = |one: &ClaimRequest| format!("\"{}{}\"", one.holder.as_uuid().simple(), hex(one.key.as_str()));
    let query = sqlx::query(CLAIM).bind(json(requests.iter().map(item))).bind(&terms.label);
    let query = query.bind(micros(terms.lease)).bind(micros(terms.offset()));
    let rows = match query.bind(terms.minutes()).bind(limit).fetch_all(&mut *conn).await {
        Ok(rows) => rows,
        Err(error) => {
            tracing::debug!(%error, "the rows are read first");
            Sqlite::undo(conn).await?;
            return Ok(None);
        }
    };
    let Some((last, seen)) = rows.split_last() else { return Ok(None) };
    let tokens = tokens(last, requests.len()).map_err(unanswered)?;
    // What was granted is committed, and an error would tell its holders that nothing was changed.
    let is_any_granted = tokens.iter().any(Option::is_some);
    let failed = |error| if is_any_granted { unanswered(error) } else { error };
    let mut locked = locked(seen, terms).map_err(failed)?;
    let reply = |(request, token): (&ClaimRequest, Option<Token>)| match (locked.remove(request.key.as_str()), token) {
        // A row that was locked before may be this holder's own, from an earlier request.
        (Some(seen), _) => Some(seen),
        (None, token) => token.map(|token| ClaimReply::Granted { token, prior: None }),
    };
    let replies: Vec<Option<ClaimReply>> = requests.iter().zip(tokens).map(reply).collect();
    let existing: i64 = last.try_get(1).map_err(failed)?;
    let others = if (replies.iter().flatten().count() as i64) < existing {
        // More rows are locked than were returned, a trigger has skipped a row, or it was too late.
        Sqlite::look(conn, requests, terms).await.map_err(failed)?
    } else {
        vec![ClaimReply::Seen { row: None, now: DateTime::UNIX_EPOCH }; requests.len()]
    };
    Ok(Some(replies.into_iter().zip(others).map(|(reply, other)| reply.unwrap_or(other)).collect()))
}

/// Reads the rows that were locked, by key.
fn locked<'a>(rows: &'a [SqliteRow], terms: &Terms) -> Reply<HashMap<&'a str, ClaimReply>> {
    rows.iter().map(|row| Ok((row.try_get("key_resource")?, seen(Some(row), terms)?))).collect()
}

/// Reads the places and tokens of the claims that were granted, out of `count`.
fn tokens(row: &SqliteRow, count: usize) -> Reply<Vec<Option<Token>>> {
    let mut tokens = vec![None; count];
    for claim in row.try_get::<Option<&str>, _>(0)?.unwrap_or_default().split_terminator(',') {
        let (place, token) = claim.split_once(' ').unwrap_or_default();
        let place: usize = place.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        let token = token.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        if let Some(granted) = tokens.get_mut(place) {
            *granted = Some(Token::new(token));
        }
    }
    Ok(tokens)
}
