//! Renewals, releases, abandonments and confirmations: changes of claims that stand.

use std::collections::HashMap;

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::{Query, marks, micros, padded};
use crate::{
    key::Claim,
    rules::Terms,
    store::{Change, Outcome, Reply, Sighting, lost_among, skipped, unanswered, unmatched},
};

/// Claims a statement names, as (key, ...) and ((holder, token), ...).
pub(super) struct Named<'a>(Vec<&'a Claim>);

impl<'a> Named<'a> {
    pub fn new(claims: &'a [Claim]) -> Self {
        Self(padded(claims))
    }

    fn keys(&self) -> String {
        marks("?", self.0.len())
    }

    fn claims(&self) -> String {
        marks("(?, ?)", self.0.len())
    }
}

/// Locks the rows of these claims that stand.
fn ours(named: &Named<'_>) -> String {
    let (keys, claims) = (named.keys(), named.claims());
    format!(
        "
    SELECT c.key_resource, c.token FROM t_resource_lock c FORCE INDEX (PRIMARY)
    WHERE c.key_resource IN ({keys}) AND (c.holder, c.token) IN ({claims}) AND c.lock_flag = 1 AND c.claimed_at = c.begin_time AND c.end_time IS NULL
    LIMIT 1000000 FOR UPDATE SKIP LOCKED"
    )
}

pub(super) fn change_statement(named: &Named<'_>, set: &str) -> String {
    let ours = ours(named);
    format!("UPDATE ({ours}) j STRAIGHT_JOIN t_resource_lock t ON t.key_resource = j.key_resource SET {set}")
}

fn bind_keys<'q>(query: Query<'q>, named: &Named<'_>) -> Query<'q> {
    named.0.iter().fold(query, |query, claim| query.bind(claim.key.as_str().to_owned()))
}

pub(super) fn bind_claims<'q>(query: Query<'q>, named: &Named<'_>) -> Query<'q> {
    let query = bind_keys(query, named);
    named.0.iter().fold(query, |query, claim| query.bind(*claim.holder.as_uuid()).bind(claim.token.get()))
}

/// One statement. It reports only how many rows there were: where they stay claimed, or there was one, a look tells which.
pub(super) async fn change(
    conn: &mut MySqlConnection,
    claims: &[Claim],
    change: Change,
    terms: &Terms,
) -> Reply<Vec<Outcome>> {
    let named = Named::new(claims);
    let matched = send_change(conn, &named, change, terms).await?;
    if usize::try_from(matched).is_ok_and(|matched| matched == claims.len()) {
        return Ok(vec![Outcome::Done; claims.len()]);
    }
    let seen = sightings(conn, &named).await?;
    Ok(claims.iter().map(|claim| unmatched(change, claim, seen.get(claim.key.as_str()).copied())).collect())
}

/// What one statement frees somebody may take before a look at it: so a look comes first, and names those that stand. Should one of them
/// not be there any more and another's by then, nobody can tell whether it was freed.
pub(super) async fn end_several(
    conn: &mut MySqlConnection,
    claims: &[Claim],
    change: Change,
    terms: &Terms,
) -> Reply<Vec<Outcome>> {
    let outcomes = |seen: &HashMap<String, Sighting>, claims: &[Claim]| -> Vec<Outcome> {
        claims.iter().map(|claim| unmatched(change, claim, seen.get(claim.key.as_str()).copied())).collect()
    };
    let mut all = outcomes(&sightings(conn, &Named::new(claims)).await?, claims);
    let standing = skipped(claims.to_vec(), &all);
    if standing.is_empty() {
        return Ok(all);
    }
    let named = Named::new(&standing);
    let matched = send_change(conn, &named, change, terms).await?;
    let ended = if usize::try_from(matched).is_ok_and(|matched| matched == standing.len()) {
        vec![Outcome::Done; standing.len()]
    } else {
        outcomes(&sightings(conn, &named).await.map_err(unanswered)?, &standing)
    };
    if lost_among(&ended).is_some() {
        return Err(unanswered(sqlx::Error::RowNotFound));
    }
    let mut ended = ended.into_iter();
    for outcome in &mut all {
        if matches!(outcome, Outcome::Skipped { .. }) {
            *outcome = ended.next().unwrap_or(*outcome);
        }
    }
    Ok(all)
}

async fn send_change(conn: &mut MySqlConnection, named: &Named<'_>, change: Change, terms: &Terms) -> Reply<u64> {
    let sql = change_statement(
        named,
        match change {
            Change::Renew(_) => "t.expires_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND",
            Change::Release(_) => {
                "t.lock_flag = 0, t.status = ?, t.end_time = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, t.holder = NULL,
                     t.expires_at = NULL, t.claimed_at = NULL, t.prior_token = NULL, t.prior_client_ip = NULL"
            }
            Change::Abandon => "t.expires_at = LEAST(t.expires_at, UTC_TIMESTAMP(6))",
        },
    );
    let query = bind_claims(sqlx::query(AssertSqlSafe(sql)), named);
    let query = match change {
        Change::Renew(lease) => query.bind(micros(lease)),
        Change::Release(status) => query.bind(status.letter()).bind(micros(terms.offset())),
        Change::Abandon => query,
    };
    Ok(query.execute(conn).await?.rows_affected())
}

pub(super) async fn sightings(conn: &mut MySqlConnection, named: &Named<'_>) -> Reply<HashMap<String, Sighting>> {
    let sql = format!(
        "SELECT CONVERT(key_resource USING utf8mb4) AS name, holder, token, CAST(COALESCE(lock_flag = 1, 0) AS SIGNED) AS locked,
                CAST(COALESCE(lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL, 0) AS SIGNED) AS stands,
                COALESCE(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires_at), 0) AS left_micros
         FROM t_resource_lock WHERE key_resource IN ({})",
        named.keys()
    );
    let rows = bind_keys(sqlx::query(AssertSqlSafe(sql)), named).fetch_all(conn).await?;
    let mut sightings = HashMap::with_capacity(rows.len());
    for row in &rows {
        let sighting = Sighting {
            holder: row.try_get("holder")?,
            token: row.try_get("token")?,
            locked: row.try_get::<i64, _>("locked")? == 1,
            stands: row.try_get::<i64, _>("stands")? == 1,
            left: TimeDelta::microseconds(row.try_get("left_micros")?),
        };
        sightings.insert(row.try_get::<String, _>("name")?, sighting);
    }
    Ok(sightings)
}
