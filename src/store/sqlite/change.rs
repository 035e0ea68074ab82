//! Renewals, releases, abandonments and confirmations: changes of claims that stand.

use std::collections::HashSet;

use chrono::TimeDelta;
use sqlx::{Row as _, SqliteConnection};
use uuid::Uuid;

use crate::{
    key::Claim,
    store::{
        Change, Confirmed, Outcome, Reply, RowSnapshot,
        sqlite::row::{hex, json, kept, micros, now, read_row},
        unanswered, unconfirmed, unmatched,
    },
};

/// ?1 is [[key in hex, holder in hex, token], ...].
macro_rules! change {
    ($set:expr) => {
        concat!(
            "UPDATE t_resource_lock AS t SET ",
            $set,
            " FROM json_each(?1) AS j
            WHERE t.key_resource = CAST(unhex(j.value ->> 0) AS TEXT) AND t.holder = unhex(j.value ->> 1) AND t.token = j.value ->> 2
              AND t.lock_flag = 1 AND t.claimed_at = t.begin_time AND t.end_time IS NULL
            RETURNING key_resource, token"
        )
    };
}

/// `$end` is the time of the release in the form of the column.
macro_rules! release {
    ($($end:expr),+) => {
        change!(concat!(
            "lock_flag = 0, status = ?2, end_time = ",
            $($end,)+
            ", holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL"
        ))
    };
}

const RENEW: &str = change!(concat!("expires_at = max(ifnull(expires_at, 0), ", now!(), " + ?2)"));
const RESUME: &str = change!(concat!("expires_at = ", now!(), " + ?2"));
const RELEASE: &str = release!(kept!("end_time", now!(), " + ?3"));
/// The same for a table that keeps times as integers.
const RELEASE_MICROS: &str = release!(now!(), " + ?3");
const ABANDON: &str = change!(concat!("expires_at = min(expires_at, ", now!(), " + ?2)"));

const PUT_BACK: &str = change!(
    "lock_flag = 0, status = prior_status, begin_time = prior_begin_time, end_time = prior_end_time,
    client_ip = prior_client_ip, holder = NULL, expires_at = NULL, claimed_at = NULL, prior_client_ip = NULL"
);

/// `$set` decides whether the statement counts a confirmation, or only waits until no other
/// transaction writes.
macro_rules! confirms {
    ($set:literal) => {
        concat!(
            "UPDATE t_resource_lock SET confirms = ",
            $set,
            " WHERE key_resource = ?1 AND holder = ?2 AND token = ?3 AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL
            RETURNING confirms"
        )
    };
}

async fn still_confirms(conn: &mut SqliteConnection, sql: &'static str, claim: &Claim) -> Reply<Option<i64>> {
    let query = sqlx::query_scalar(sql).bind(claim.key.as_str());
    query.bind(*claim.holder.as_uuid()).bind(claim.token.get()).fetch_optional(conn).await
}

async fn read_snapshot(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<RowSnapshot>> {
    let Some(row) = read_row(conn, &claim.key).await? else { return Ok(None) };
    Ok(Some(RowSnapshot {
        holder: row.try_get::<Option<Uuid>, _>("holder")?,
        token: row.try_get("token")?,
        locked: row.try_get("locked")?,
        stands: row.try_get("stands")?,
        left: TimeDelta::microseconds(row.try_get("left_micros")?),
    }))
}

pub(super) async fn confirm(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Confirmed> {
    Ok(match still_confirms(conn, confirms!("confirms + 1"), claim).await? {
        Some(count) => Confirmed::Done(count),
        None => unconfirmed(claim, read_snapshot(conn, claim).await?),
    })
}

pub(super) async fn confirms(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<i64>> {
    still_confirms(conn, confirms!("confirms"), claim).await
}

/// `in_micros`: the table keeps times as integers.
pub(super) async fn change(
    conn: &mut SqliteConnection,
    claims: &[Claim],
    change: Change,
    in_micros: bool,
) -> Reply<Vec<Outcome>> {
    let named = json(claims.iter().map(|claim| {
        format!("[\"{}\",\"{}\",{}]", hex(claim.key.as_str()), claim.holder.as_uuid().simple(), claim.token)
    }));
    let query = match change {
        Change::Renew(lease) => sqlx::query(RENEW).bind(named).bind(micros(lease)),
        Change::Resume(lease) => sqlx::query(RESUME).bind(named).bind(micros(lease)),
        Change::Release { status, offset, .. } => {
            let release = if in_micros { RELEASE_MICROS } else { RELEASE };
            sqlx::query(release).bind(named).bind(status.letter()).bind(micros(offset))
        }
        Change::Abandon(delay) => sqlx::query(ABANDON).bind(named).bind(micros(delay)),
        Change::PutBack => sqlx::query(PUT_BACK).bind(named),
    };
    let done = query.fetch_all(&mut *conn).await?;
    let done = done.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    let done = done.collect::<Reply<HashSet<(String, i64)>>>()?;
    let mut outcomes = Vec::with_capacity(claims.len());
    for claim in claims {
        outcomes.push(if done.contains(&(claim.key.as_str().to_owned(), claim.token.get())) {
            Outcome::Done
        } else {
            // The changes are committed: an error must not be read as if they had been undone.
            let seen = read_snapshot(conn, claim).await;
            unmatched(change, claim, if done.is_empty() { seen? } else { seen.map_err(unanswered)? })
        });
    }
    Ok(outcomes)
}
