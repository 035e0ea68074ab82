//! Renewals, releases, abandonments and confirmations: changes of claims that stand.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use sqlx::{Row as _, Sqlite, SqliteConnection};

use crate::{
    key::Claim,
    store::{
        Change, Confirmed, Form, HeldStore, Outcome, Reply, RowSnapshot, hex, limit_micros,
        sqlite::row::{as_micros, bind_claim, is_listed, json, kept, listed, micros, read_from, sql},
        stored_row::snapshot,
        unanswered, unconfirmed, unmatched,
    },
};

/// The claims of the list ?1 that stand. Each item is a holder, of 32 digits, a token, of 20, and
/// its key in hex. The planner would read the table first if the list had no part in a condition.
macro_rules! standing {
    () => {
        sql!({is_listed!("substr(j.value, 53)")} " AND t.holder = unhex(substr(j.value, 1, 32))
              AND t.token = CAST(substr(j.value, 33, 20) AS INTEGER)
              AND (t.lock_flag = 1 AND t.claimed_at = t.begin_time AND t.end_time IS NULL) = (j.value NOTNULL)")
    };
}

macro_rules! change {
    ($set:expr) => {
        change!($set, "")
    };
    ($set:expr, $limit:expr) => {
        sql!(
            {listed!()} "UPDATE t_resource_lock AS t SET " {$set} " FROM j WHERE " {standing!()} {$limit}
            " RETURNING key_resource, token"
        )
    };
}

/// `$end` is the time of the release in the form of the column.
macro_rules! release {
    ($end:expr) => {
        sql!(
            "lock_flag = 0, status = ?2, end_time = " {$end}
            ", holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL"
        )
    };
}

/// ?3 is the limit.
const RENEW: &str = change!(sql!("expires_at = max(ifnull(expires_at, 0), " now " + ?2)"), sql!(" AND " now " <= ?3"));
const RELEASE: &str = change!(release!(kept!("end_time", sql!(now " + ?3"))));
/// The same for a table that keeps times as integers.
const RELEASE_MICROS: &str = change!(release!(sql!(now " + ?3")));
/// Releases all of ?4 claims or none, so that a count says which were released. The driver sends
/// each row of a reply through a channel, which takes longer than this count.
const RELEASE_ALL: &str = sql!(
    {listed!()} "UPDATE t_resource_lock AS t SET " {release!(sql!(now " + ?3"))} " FROM j WHERE " {standing!()}
    " AND (SELECT count(*) FROM json_each(?1) AS j CROSS JOIN t_resource_lock AS t ON " {standing!()} ") = ?4"
);
const ABANDON: &str = change!(sql!("expires_at = min(expires_at, " now " + ?2)"));

const PUT_BACK: &str = change!(sql!(
    "status = prior_status, begin_time = prior_begin_time, end_time = prior_end_time, client_ip = prior_client_ip,
    lock_flag = prior_token NOTNULL, prior_client_ip = NULL, holder = iif(prior_token NOTNULL, zeroblob(16), NULL),
    expires_at = iif(prior_token NOTNULL, " now ", NULL), claimed_at = iif(prior_token NOTNULL, prior_begin_time, NULL)"
));

/// The statements of many claims.
#[cfg(test)]
pub(super) const TEXTS: [&str; 6] = [RENEW, RELEASE, RELEASE_MICROS, RELEASE_ALL, ABANDON, PUT_BACK];

/// `$set` decides whether the statement counts a confirmation, or only waits until no other
/// transaction writes.
macro_rules! confirms {
    ($set:literal) => {
        sql!(
            "UPDATE t_resource_lock SET confirms = " $set " WHERE key_resource = ?1 AND holder = ?2 AND token = ?3
                AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL RETURNING confirms"
        )
    };
}

async fn still_confirms(conn: &mut SqliteConnection, sql: &'static str, claim: &Claim) -> Reply<Option<i64>> {
    bind_claim(sql, claim).fetch_optional(conn).await?.map(|row| row.try_get(0)).transpose()
}

async fn read_snapshot(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<RowSnapshot>> {
    let query = sqlx::query(read_from!("t_resource_lock WHERE key_resource = ?1")).bind(claim.key.as_str());
    query.fetch_optional(conn).await?.as_ref().map(snapshot).transpose()
}

impl HeldStore for Sqlite {
    async fn confirm(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Confirmed> {
        Ok(match still_confirms(conn, confirms!("confirms + 1"), claim).await? {
            Some(count) => Confirmed::Done(count),
            None => unconfirmed(claim, read_snapshot(conn, claim).await?),
        })
    }

    async fn confirms(conn: &mut SqliteConnection, claim: &Claim) -> Reply<Option<i64>> {
        still_confirms(conn, confirms!("confirms"), claim).await
    }

    /// `in_micros`: the table keeps times as integers.
    async fn change(
        conn: &mut SqliteConnection,
        claims: &[Claim],
        change: Change,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> Reply<Vec<Outcome>> {
        let in_micros = form == Form::IntegerTimes;
        let named = json(claims.iter().map(|Claim { key, holder, token }| {
            format!("\"{}{:020}{}\"", holder.as_uuid().simple(), token.get(), hex(key.as_str()))
        }));
        if in_micros
            && claims.len() > 1
            && let Change::Release { status, offset, .. } = change
        {
            let query = sqlx::query(RELEASE_ALL).bind(&named).bind(status.letter()).bind(micros(offset));
            let count = claims.len() as u64;
            match query.bind(count.cast_signed()).execute(&mut *conn).await?.rows_affected() {
                done if done == count => return Ok(vec![Outcome::Done; claims.len()]),
                0 => {}
                // A trigger left some out.
                done => {
                    return Err(unanswered(sqlx::Error::Protocol(format!("{done} of {count} claims were released"))));
                }
            }
        }
        let query = match change {
            Change::Renew(lease) => sqlx::query(RENEW).bind(named).bind(micros(lease)).bind(limit_micros(not_after)),
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
                let seen = if done.is_empty() { seen? } else { seen.map_err(unanswered)? };
                unmatched(change, claim, seen, not_after)
            });
        }
        Ok(outcomes)
    }
}
