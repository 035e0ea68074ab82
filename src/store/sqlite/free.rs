//! Claims of rows that are free, which is what most claims find: one text, and so one hand-over to
//! the connection's thread.
//!
//! The text is a transaction that reads before it writes. When another connection writes, SQLite
//! lets such a transaction fail at once, where a statement by itself would wait for the busy
//! timeout. It is then undone, and the rows are judged before anything is written.

use std::collections::HashMap;

use chrono::DateTime;
use sqlx::{Row as _, SqliteConnection};

use crate::{
    key::Token,
    rules::{Rules, Terms},
    store::{
        ClaimReply, ClaimRequest, Reply, is_apart,
        sqlite::{
            in_memory::end_transactions,
            row::{self, as_micros, hex, json, listed, micros, now, read_from, time},
        },
        unanswered,
    },
};

/// Joins the list ?1 with the table. Each item is a holder, of 32 digits, and its key in hex.
macro_rules! wanted {
    ($condition:literal) => {
        concat!(
            "json_each(?1) AS j CROSS JOIN t_resource_lock ON key_resource = CAST(unhex(substr(j.value, 33)) AS TEXT) WHERE ",
            $condition
        )
    };
}

/// Returns the rows that are locked, and then one text with the place in the list and the token of
/// each claim. A row for each claim would cost more than the claim: the driver sends each row
/// through a channel.
pub(super) const CLAIM: &str = concat!(
    "BEGIN;",
    read_from!(wanted!("lock_flag = 1;")),
    listed!(),
    "
UPDATE t_resource_lock
SET lock_flag = 1, status = 'P', client_ip = ?2, holder = unhex(substr(j.value, 1, 32)), end_time = NULL,
    begin_time = ",
    now!(),
    " + ?4, claimed_at = ",
    now!(),
    " + ?4, token = max(token + 1, ",
    now!(),
    "), expires_at = ",
    now!(),
    " + ?3, prior_token = NULL, prior_client_ip = client_ip, prior_status = status,
    prior_begin_time = begin_time, prior_end_time = end_time
FROM j WHERE key_resource = CAST(unhex(substr(j.value, 33)) AS TEXT) AND lock_flag IS NOT 1;
SELECT group_concat(j.key || ' ' || token) FROM ",
    wanted!("lock_flag = 1 AND holder = unhex(substr(j.value, 1, 32));"),
    "COMMIT"
);

/// Returns whether to expect that the rows are free, and no rule asks for more. A request that has
/// waited reads first: the key may still be held, and a read takes no lock.
pub(super) fn is_likely(requests: &[ClaimRequest], terms: &Terms) -> bool {
    let of_sets = requests.len() > 1 && !is_apart(requests);
    terms.rules == Rules::Recover && terms.min_interval.is_zero() && !of_sets && !requests.iter().all(|one| one.waited)
}

/// Claims the rows that nothing has locked, and returns the others as they were seen. Returns `None`
/// if nothing was done, because another connection writes or the statement failed.
pub(super) async fn claim(
    conn: &mut SqliteConnection,
    requests: &[ClaimRequest],
    terms: &Terms,
) -> Reply<Option<Vec<ClaimReply>>> {
    let item = |one: &ClaimRequest| format!("\"{}{}\"", one.holder.as_uuid().simple(), hex(one.key.as_str()));
    let query = sqlx::query(CLAIM).bind(json(requests.iter().map(item))).bind(&terms.label);
    let query = query.bind(micros(terms.lease)).bind(micros(terms.offset()));
    let rows = match query.fetch_all(&mut *conn).await {
        Ok(rows) => rows,
        Err(error) => {
            tracing::debug!(%error, "the rows are read first");
            end_transactions(conn).await.map_err(unanswered)?;
            return Ok(None);
        }
    };
    let Some((granted, seen)) = rows.split_last() else { return Ok(None) };
    let mut locked = HashMap::with_capacity(seen.len());
    for row in seen {
        let reply = ClaimReply::Seen { row: Some(row::read(row, terms)?), now: time(row, "now")?.unwrap_or_default() };
        locked.insert(row.try_get::<&str, _>(0)?, reply);
    }
    let mut tokens = tokens(granted.try_get::<Option<&str>, _>(0)?.unwrap_or_default(), requests.len())?;
    let reply = |(request, token): (&ClaimRequest, Option<Token>)| match (locked.remove(request.key.as_str()), token) {
        // A row that was locked before may be this holder's own, from an earlier request.
        (Some(seen), _) => seen,
        (None, Some(token)) => ClaimReply::Granted { token, prior: None },
        (None, None) => ClaimReply::Seen { row: None, now: DateTime::UNIX_EPOCH },
    };
    Ok(Some(requests.iter().zip(tokens.drain(..)).map(reply).collect()))
}

/// Reads the places and tokens of the claims that were granted, out of `count`.
fn tokens(granted: &str, count: usize) -> Reply<Vec<Option<Token>>> {
    let mut tokens = vec![None; count];
    for claim in granted.split_terminator(',') {
        let (place, token) = claim.split_once(' ').unwrap_or_default();
        let place: usize = place.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        let token = token.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        if let Some(granted) = tokens.get_mut(place) {
            *granted = Some(Token::new(token));
        }
    }
    Ok(tokens)
}
