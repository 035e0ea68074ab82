//! Renewals, releases, abandonments and confirmations: changes of claims that stand.

use std::{iter, sync::LazyLock};

use chrono::{DateTime, Utc};
use sqlx::{
    AssertSqlSafe, MySql, MySqlConnection, Row as _,
    mysql::{MySqlQueryResult, MySqlRow},
};

use crate::store::mysql::row::{
    IN_TIME, JOINED, NOW, NOWAIT, Query, bind_claim, execute_nowait_first, is_mariadb, marks, micros, padded, read,
    read_statement,
};
use crate::{
    key::{Claim, Key},
    store::{
        Change, Confirmed, Form, HeldStore, Outcome, Reply, RowSnapshot,
        fault::{Fault, fault},
        hex, is_undone, limit_micros,
        stored_row::{by_key, snapshot},
        unanswered, unconfirmed, unmatched,
    },
};

/// The lock waits for a transaction whose COMMIT was not answered. The statement is an update
/// rather than a read: a cluster node that is behind would return the row as it was before that
/// COMMIT, but rejects every update of such a row.
const CONFIRMS: &str = "
UPDATE t_resource_lock SET confirms = LAST_INSERT_ID(confirms + 1) - 1, expires_at = expires_at + INTERVAL 1 MICROSECOND
WHERE key_resource = ? AND holder = ? AND token = ? AND lock_flag = 1 AND claimed_at = begin_time AND end_time IS NULL";

/// Builds the condition that the row is of one of these claims, and that the claim stands.
fn ours(named: &[&Claim], row: &str) -> String {
    let (keys, claims) = (marks("?", named.len()), marks("(?, ?)", named.len()));
    format!(
        "{row}.key_resource IN ({keys}) AND ({row}.holder, {row}.token) IN ({claims})
    AND {row}.lock_flag = 1 AND {row}.claimed_at = {row}.begin_time AND {row}.end_time IS NULL"
    )
}

/// Builds the query that locks the rows of the claims that stand, and returns further columns, if
/// any.
fn locked(named: &[&Claim], more: &str) -> String {
    let ours = ours(named, "c");
    format!(
        "
    SELECT c.key_resource, c.token{more} FROM t_resource_lock c FORCE INDEX (PRIMARY)
    WHERE {ours} LIMIT 1000000 FOR UPDATE SKIP LOCKED"
    )
}

/// Builds the update of those of the claims that stand.
fn change_statement(named: &[&Claim], set: &str) -> String {
    let locked = locked(named, "");
    format!("UPDATE ({locked}) j {JOINED} SET {set}")
}

/// Builds the same update for MariaDB. It changes nothing if one of the rows is locked, or one that
/// a trigger uses.
fn change_nowait_statement(named: &[&Claim], set: &str) -> String {
    let ours = ours(named, "t");
    format!("{NOWAIT} UPDATE t_resource_lock t FORCE INDEX (PRIMARY) SET {set} WHERE {ours}")
}

/// Builds the update of all of the claims. It changes nothing if one of them does not stand.
fn change_all_statement(named: &[&Claim], set: &str) -> String {
    let locked = locked(named, ", COUNT(*) OVER () AS standing");
    format!("UPDATE ({locked}) j {JOINED} SET {set} WHERE j.standing = ?")
}

fn keys_of(claims: &[Claim]) -> impl Iterator<Item = &Key> {
    claims.iter().map(|claim| &claim.key)
}

fn bind_claims<'q>(query: Query<'q>, named: &[&Claim]) -> Query<'q> {
    let query = named.iter().fold(query, |query, claim| query.bind(claim.key.as_str().to_owned()));
    named.iter().fold(query, |query, claim| query.bind(*claim.holder.as_uuid()).bind(claim.token.get()))
}

/// Extends the claims, or ends a single one. The reply has only the number of rows. If it does not
/// show that all were changed, a later read tells what became of each. If some were extended, the
/// read cannot tell which: the others are not reported as too late.
async fn change_in_one(
    conn: &mut MySqlConnection,
    claims: &[Claim],
    change: Change,
    not_after: Option<DateTime<Utc>>,
    nowait: bool,
) -> Reply<Vec<Outcome>> {
    let (named, set) = (padded(claims), set_of(change));
    let nowait = nowait.then(|| {
        let query = sqlx::query(AssertSqlSafe(change_nowait_statement(&named, set)));
        bind_claims(bind_change(query, change, not_after), &named)
    });
    let for_both = || {
        let query = sqlx::query(AssertSqlSafe(change_statement(&named, set)));
        bind_change(bind_claims(query, &named), change, not_after)
    };
    let reply = execute_nowait_first(conn, nowait, for_both).await?;
    if is_all(&reply, claims) {
        return Ok(vec![Outcome::Done; claims.len()]);
    }
    let not_after = not_after.filter(|_| reply.rows_affected() == 0);
    outcomes(change, claims, &read(conn, keys_of(claims), "").await?, not_after)
}

/// Derives the outcomes of a change that did not match all rows.
fn outcomes(
    change: Change,
    claims: &[Claim],
    rows: &[MySqlRow],
    not_after: Option<DateTime<Utc>>,
) -> Reply<Vec<Outcome>> {
    let by_key = by_key(rows)?;
    let outcome = |claim: &Claim| {
        let seen = by_key.get(claim.key.as_str()).map(|row| snapshot(*row)).transpose()?;
        Ok(unmatched(change, claim, seen, not_after))
    };
    claims.iter().map(outcome).collect()
}

/// Ends all claims in one statement, if all of them stand. A row that it frees could be claimed by
/// another holder before a read shows which were freed. It therefore frees nothing if one of the
/// claims does not stand, or its row is locked; a second statement then ends those that stand.
async fn end_several(conn: &mut MySqlConnection, claims: &[Claim], change: Change) -> Reply<Vec<Outcome>> {
    let named = padded(claims);
    let query = bind_claims(sqlx::query(AssertSqlSafe(change_all_statement(&named, set_of(change)))), &named);
    let query = bind_change(query, change, None).bind(i64::try_from(claims.len()).unwrap_or(i64::MAX));
    let reply = query.execute(&mut *conn).await?;
    if is_all(&reply, claims) {
        return Ok(vec![Outcome::Done; claims.len()]);
    }
    end_those_that_stand(conn, claims, change).await
}

/// Changes and reads the rows in one transaction, sent at once, as text, so that a client that
/// stops sending does not leave it open. After an error it is unknown whether the transaction was
/// committed, unless all claims still stand.
async fn end_those_that_stand(conn: &mut MySqlConnection, claims: &[Claim], change: Change) -> Reply<Vec<Outcome>> {
    let named: Vec<&Claim> = claims.iter().collect();
    let keys = || claims.iter().map(|claim| text(claim.key.as_str()));
    let holders =
        claims.iter().flat_map(|claim| [format!("x'{}'", claim.holder.as_uuid().simple()), claim.token.to_string()]);
    let set = match change {
        Change::Release { status, offset, .. } => vec![text(status.letter()), micros(offset).to_string()],
        Change::Abandon(delay) => vec![micros(delay).to_string()],
        Change::Renew(_) | Change::PutBack => Vec::new(),
    };
    let sql = format!(
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; START TRANSACTION; {}; {}; {}",
        change_statement(&named, set_of(change)),
        read_statement(named.len(), ""),
        commit!()
    );
    let sql = fill(&sql, keys().chain(holders).chain(set).chain(keys()));
    let rows = match sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *conn).await {
        Ok(rows) => rows,
        Err(error) => return Err(undone(conn, claims, change, error).await),
    };
    outcomes(change, claims, &rows, None).map_err(unanswered)
}

/// Returns the statement's own error if nothing was committed, which is certain where all claims
/// still stand.
async fn undone(conn: &mut MySqlConnection, claims: &[Claim], change: Change, error: sqlx::Error) -> sqlx::Error {
    if !is_undone(&error) {
        return unanswered(error);
    }
    if let Err(error) = sqlx::raw_sql(rollback!()).execute(&mut *conn).await {
        return unanswered(error);
    }
    if matches!(fault(&error), Fault::Contention | Fault::MissingTable) {
        return error;
    }
    let Ok(rows) = read(conn, keys_of(claims), "").await else { return unanswered(error) };
    let Ok(outcomes) = outcomes(change, claims, &rows, None) else { return unanswered(error) };
    let stand = outcomes.iter().all(|outcome| matches!(outcome, Outcome::Skipped { .. }));
    if stand { error } else { unanswered(error) }
}

/// Writes a text as an expression, in which nothing needs escaping.
fn text(value: &str) -> String {
    format!("_utf8mb4 x'{}'", hex(value))
}

/// Replaces a statement's marks with values.
fn fill(sql: &str, mut values: impl Iterator<Item = String>) -> String {
    sql.split('?').fold(String::with_capacity(2 * sql.len()), |mut filled, part| {
        if !filled.is_empty() {
            filled.extend(values.next());
        }
        filled.push_str(part);
        filled
    })
}

static RENEW: LazyLock<String> = LazyLock::new(|| {
    format!(
        "t.expires_at = GREATEST(IFNULL(t.expires_at, t.claimed_at), {NOW} + INTERVAL ? MICROSECOND) WHERE {IN_TIME}"
    )
});

/// Returns the assignments of a change, and the condition of one that has a limit.
fn set_of(change: Change) -> &'static str {
    match change {
        Change::Renew(_) => &RENEW,
        Change::Release { .. } => {
            "t.lock_flag = 0, t.status = ?, t.end_time = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, t.holder = NULL,
             t.expires_at = NULL, t.claimed_at = NULL, t.prior_token = NULL, t.prior_client_ip = NULL"
        }
        Change::Abandon(_) => "t.expires_at = LEAST(t.expires_at, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND)",
        Change::PutBack => {
            "t.status = t.prior_status, t.begin_time = t.prior_begin_time, t.end_time = t.prior_end_time,
             t.client_ip = t.prior_client_ip, t.lock_flag = t.prior_token IS NOT NULL,
             t.holder = IF(t.prior_token IS NULL, NULL, REPEAT(x'00', 16)),
             t.expires_at = IF(t.prior_token IS NULL, NULL, UTC_TIMESTAMP(6)),
             t.claimed_at = IF(t.prior_token IS NULL, NULL, t.prior_begin_time)"
        }
    }
}

fn is_all(reply: &MySqlQueryResult, claims: &[Claim]) -> bool {
    usize::try_from(reply.rows_affected()).is_ok_and(|rows| rows == claims.len())
}

fn bind_change(query: Query<'_>, change: Change, not_after: Option<DateTime<Utc>>) -> Query<'_> {
    match change {
        Change::Renew(lease) => query.bind(micros(lease)).bind(limit_micros(not_after)),
        Change::Abandon(delay) => query.bind(micros(delay)),
        Change::Release { status, offset, .. } => query.bind(status.letter()).bind(micros(offset)),
        Change::PutBack => query,
    }
}

async fn snapshot_of(conn: &mut MySqlConnection, claim: &Claim, lock: &str) -> Reply<Option<RowSnapshot>> {
    read(conn, iter::once(&claim.key), lock).await?.first().map(snapshot).transpose()
}

/// Reads the count of a claim's confirmations, while the claim stands. The read locks the row, so
/// that no proxy sends it to a replica.
async fn read_confirms(conn: &mut MySqlConnection, claim: &Claim) -> Reply<Option<i64>> {
    let sql = "SELECT confirms FROM t_resource_lock WHERE key_resource = ? AND holder = ? AND token = ? FOR UPDATE";
    bind_claim(sqlx::query(sql), claim).fetch_optional(conn).await?.map(|row| row.try_get(0)).transpose()
}

impl HeldStore for MySql {
    async fn confirm(conn: &mut MySqlConnection, claim: &Claim) -> Reply<Confirmed> {
        let named = padded(std::slice::from_ref(claim));
        // The reply carries the count, as the last insert id.
        let sql = change_statement(&named, "t.confirms = LAST_INSERT_ID(t.confirms + 1)");
        let query = bind_claims(sqlx::query(AssertSqlSafe(sql)), &named);
        let reply = query.execute(&mut *conn).await?;
        if reply.rows_affected() > 0 {
            let count = match reply.last_insert_id() {
                // A trigger of the application that writes hides the id.
                0 => read_confirms(conn, claim).await?.ok_or(sqlx::Error::RowNotFound)?,
                count => i64::try_from(count).unwrap_or_default(),
            };
            return Ok(Confirmed::Done(count));
        }
        // A locking read returns the row as it is now, and no row that another transaction has
        // locked. A plain read returns the row as of the transaction's snapshot, which it takes if
        // there is none yet: later reads would not see what the other transaction commits.
        let now = snapshot_of(conn, claim, "FOR UPDATE SKIP LOCKED").await?;
        Ok(if now.is_none() { Confirmed::Skipped } else { unconfirmed(claim, now) })
    }

    async fn confirms(conn: &mut MySqlConnection, claim: &Claim) -> Reply<Option<i64>> {
        let reply = bind_claim(sqlx::query(CONFIRMS), claim).execute(&mut *conn).await?;
        match (reply.rows_affected(), reply.last_insert_id()) {
            (0, _) => Ok(None),
            // A trigger hides the id. The update succeeded, so this node has the current row.
            (_, 0) => read_confirms(conn, claim).await,
            (_, next) => Ok(i64::try_from(next - 1).ok()),
        }
    }

    async fn change(
        conn: &mut MySqlConnection,
        claims: &[Claim],
        change: Change,
        not_after: Option<DateTime<Utc>>,
        form: Form,
    ) -> Reply<Vec<Outcome>> {
        match change {
            Change::Renew(_) => change_in_one(conn, claims, change, not_after, false).await,
            _ if claims.len() == 1 => change_in_one(conn, claims, change, None, is_mariadb(form)).await,
            Change::Release { .. } | Change::Abandon(_) | Change::PutBack => end_several(conn, claims, change).await,
        }
    }
}
