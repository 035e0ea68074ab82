//! Claims: the granting half of the rules (`rules.rs`), as one statement.

use std::{collections::HashMap, sync::LazyLock};

use chrono::DateTime;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _, mysql::MySqlRow};
use uuid::Uuid;

use super::{MICROS, Query, ROW, commit, marks, micros, padded, read};
use crate::{
    key::{Prior, Token},
    rules::{Rules, Terms, Verdict, judge},
    store::{Answer, Ask, Reply, is_refused, put_back, unanswered},
};

/// The derived table locks and judges, the update takes. Without LIMIT, MySQL would merge the two, lock first and wait.
/// Distances are never added to the row's times, which may be any: an overflow would be an error here.
fn claim_statement(named: &str, asker: &str, rows: &str, holder: &str, token: &str) -> String {
    format!(
        "
UPDATE (
    SELECT c.key_resource, c.token, c.client_ip, c.prior_token, c.prior_client_ip, UTC_TIMESTAMP(6) AS now, {MICROS} AS micros,{named}
        CASE WHEN c.lock_flag = 1 AND c.holder = {asker} AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN 'same'
             WHEN NOT ? AND UTC_TIMESTAMP(6) < c.queued_until THEN NULL
             WHEN c.lock_flag = 1 AND c.holder IS NOT NULL AND c.claimed_at = c.begin_time AND c.end_time IS NULL THEN
                 CASE WHEN ? AND UTC_TIMESTAMP(6) >= c.expires_at THEN 'taken over' END
             WHEN c.lock_flag = 1 THEN
                 CASE WHEN ? AND TIMESTAMPDIFF(MICROSECOND, c.begin_time, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND) >= LEAST(c.time, 2147483647) * 60000000 THEN 'taken over' END
             WHEN (? OR CAST(c.status AS BINARY) = 'S') AND (c.begin_time IS NULL OR ? OR (CAST(c.status AS BINARY) = 'F' AND ?)
                 OR UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND - INTERVAL ? MICROSECOND >= c.begin_time) THEN 'acquired'
        END AS verdict
    FROM t_resource_lock c {rows} FOR UPDATE SKIP LOCKED
) j STRAIGHT_JOIN t_resource_lock t ON t.key_resource = j.key_resource
SET t.lock_flag = 1, t.status = 'P', t.client_ip = ?, t.holder = {holder}, t.end_time = NULL,
    t.begin_time = IF(j.verdict = 'same', t.begin_time, j.now + INTERVAL ? MICROSECOND),
    t.claimed_at = IF(j.verdict = 'same', t.claimed_at, j.now + INTERVAL ? MICROSECOND),
    t.prior_token = CASE j.verdict WHEN 'same' THEN j.prior_token WHEN 'taken over' THEN j.token END,
    t.prior_client_ip = CASE j.verdict WHEN 'same' THEN j.prior_client_ip WHEN 'taken over' THEN LEFT(j.client_ip, 45) END,
    t.expires_at = j.now + INTERVAL ? MICROSECOND,
    t.token = {token}
WHERE j.verdict IS NOT NULL"
    )
}

const TOKEN: &str = "IF(j.verdict = 'same', j.token, GREATEST(j.token + 1, j.micros))";

/// Set in the last insert id of a claim that took over: a look at the row then tells from whom.
const TOOK_OVER: u64 = 1 << 63;

/// One claim: its token travels in the reply, as the last insert id.
static CLAIM: LazyLock<String> = LazyLock::new(|| {
    let took_over = "j.verdict = 'taken over' OR (j.verdict = 'same' AND j.prior_token IS NOT NULL)";
    let token = format!("LAST_INSERT_ID({TOKEN} | IF({took_over}, {TOOK_OVER}, 0)) & {}", !TOOK_OVER);
    claim_statement("", "?", "WHERE c.key_resource = ? LIMIT 1", "?", &token)
});

/// Several, for different keys: what travels is the statement's time, by which a look knows its grants.
fn claim_several_statement(count: usize) -> String {
    let keys = marks("?", count);
    let asker = format!("UNHEX(ELT(FIELD(c.key_resource, {keys}), {keys}))");
    let rows = format!("FORCE INDEX (PRIMARY) WHERE c.key_resource IN ({keys}) LIMIT 1000000");
    let token = format!("IF(LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', j.now)), {TOKEN}, 0)");
    claim_statement(&format!(" {asker} AS asker,"), &asker, &rows, "j.asker", &token)
}

const TAKEN_OVER: &str = "prior_token, CONVERT(prior_client_ip USING utf8mb4) AS prior_client_ip";

static LOOK: LazyLock<String> =
    LazyLock::new(|| format!("SELECT {ROW}, {TAKEN_OVER} FROM t_resource_lock WHERE key_resource = ?"));

fn look_at_several_statement(count: usize) -> String {
    let keys = marks("?", count);
    format!(
        "SELECT CONVERT(key_resource USING utf8mb4) AS name, {ROW}, {TAKEN_OVER} FROM t_resource_lock WHERE key_resource IN ({keys})"
    )
}

fn bind_rules<'q>(query: Query<'q>, ask: &Ask, terms: &Terms) -> Query<'q> {
    let (recover, offset) = (terms.rules == Rules::Recover, micros(terms.offset()));
    query
        .bind(ask.in_turn)
        .bind(recover)
        .bind(recover && terms.article_clients.is_some())
        .bind(offset)
        .bind(recover)
        .bind(terms.once_per.is_zero())
        .bind(terms.retry_failed)
        .bind(offset)
        .bind(micros(terms.once_per))
}

fn bind_times<'q>(query: Query<'q>, terms: &Terms) -> Query<'q> {
    let offset = micros(terms.offset());
    query.bind(offset).bind(offset).bind(micros(terms.lease))
}

/// Whoever waits is refused most of the time, and a look alone tells why.
pub(super) async fn look_and_claim(conn: &mut MySqlConnection, ask: &Ask, terms: &Terms) -> Reply<Answer> {
    if let Some(row) = sqlx::query(LOOK.as_str()).bind(ask.key.as_str()).fetch_optional(&mut *conn).await? {
        let (row, now) = read(&row, terms)?;
        if let Verdict::Refuse(..) | Verdict::Queue = judge(Some(&row), now, ask.holder, ask.in_turn, terms) {
            return Ok(Answer::Seen { row: Some(row), now });
        }
    }
    claim_one(conn, ask, terms).await
}

pub(super) async fn claim_one(conn: &mut MySqlConnection, ask: &Ask, terms: &Terms) -> Reply<Answer> {
    let (key, holder) = (ask.key.as_str(), *ask.holder.as_uuid());
    let query = bind_rules(sqlx::query(CLAIM.as_str()).bind(holder), ask, terms).bind(key);
    let query = bind_times(query.bind(&terms.label).bind(holder), terms);
    let reply = query.execute(&mut *conn).await?;
    let receipt = reply.last_insert_id();
    let granted = reply.rows_affected() > 0;
    // A trigger of the application's that writes hides the receipt: the row tells the token, too.
    let token = (receipt != 0).then(|| Token::new(i64::try_from(receipt & !TOOK_OVER).unwrap_or_default()));
    if let (true, Some(token)) = (granted && receipt & TOOK_OVER == 0, token) {
        return Ok(Answer::Granted { token, prior: None });
    }
    let row = sqlx::query(LOOK.as_str()).bind(key).fetch_optional(conn).await;
    // Granted, and the look failed: reported as a lost reply, so that the same holder asks again.
    let row = if granted { row.map_err(unanswered)? } else { row? };
    if granted {
        let seen = row.as_ref().map(|row| seen(row, holder)).transpose()?.flatten();
        let token = token.or(seen.as_ref().map(|seen| seen.0));
        // Lost again by now, and it cannot be told what.
        let token = token.ok_or_else(|| unanswered(sqlx::Error::RowNotFound))?;
        return Ok(Answer::Granted { token, prior: seen.and_then(|seen| seen.1) });
    }
    let Some(row) = row else { return Ok(Answer::Seen { row: None, now: DateTime::UNIX_EPOCH }) };
    let (row, now) = read(&row, terms)?;
    Ok(Answer::Seen { row: Some(row), now })
}

/// Each for itself, all in one statement, and a look. All of them are in turn, or none is.
pub(super) async fn claim_apart(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    let named = padded(asks);
    let keys = |query| named.iter().fold(query, |query: Query<'static>, ask| query.bind(ask.key.as_str().to_owned()));
    let askers = |query| {
        let holder = |ask: &&Ask| ask.holder.as_uuid().simple().to_string();
        named.iter().map(holder).fold(keys(query), |query, holder| query.bind(holder))
    };
    let query = askers(askers(sqlx::query(AssertSqlSafe(claim_several_statement(named.len())))));
    let query = keys(bind_rules(query, named[0], terms)).bind(terms.label.clone());
    let reply = bind_times(query, terms).execute(&mut *conn).await?;
    // What it granted lasts until then, to the microsecond.
    let sent = i64::try_from(reply.last_insert_id()).ok().and_then(DateTime::from_timestamp_micros);
    let until = sent.filter(|_| reply.rows_affected() > 0).map(|sent| sent + terms.lease);
    // Where a trigger hides that, it is known by its holder, who has asked for nothing before.
    let hidden = reply.rows_affected() > 0 && reply.last_insert_id() == 0;
    let look = sqlx::query(AssertSqlSafe(look_at_several_statement(named.len())));
    let rows = keys(look).fetch_all(conn).await.map_err(unanswered)?;
    let named = |row| Ok((MySqlRow::try_get::<String, _>(row, "name")?, row));
    let rows = rows.iter().map(named).collect::<Reply<HashMap<_, _>>>()?;
    let answer = |ask: &Ask| {
        let Some(found) = rows.get(ask.key.as_str()) else {
            return Ok(Answer::Seen { row: None, now: DateTime::UNIX_EPOCH });
        };
        let (row, now) = read(found, terms)?;
        let ours = judge(Some(&row), now, ask.holder, ask.in_turn, terms) == Verdict::Same;
        let granted = ours && (hidden || (row.expires_at.is_some() && row.expires_at == until));
        if let (true, Some((token, prior))) = (granted, seen(found, *ask.holder.as_uuid())?) {
            return Ok(Answer::Granted { token, prior });
        }
        Ok(Answer::Seen { row: Some(row), now })
    };
    let answers = asks.iter().map(answer).collect::<Reply<Vec<_>>>().map_err(unanswered)?;
    let granted = answers.iter().filter(|answer| matches!(answer, Answer::Granted { .. })).count();
    if u64::try_from(granted).ok() != Some(reply.rows_affected()) {
        // Lost again by now, or the look went to another server.
        return Err(unanswered(sqlx::Error::RowNotFound));
    }
    Ok(answers)
}

/// All in one transaction, which is rolled back at the first that cannot be had. No claim waits for a row, so none deadlocks.
pub(super) async fn claim_together(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    sqlx::raw_sql("START TRANSACTION").execute(&mut *conn).await?;
    let claimed = claim_each(conn, asks, terms).await;
    if claimed.as_ref().is_ok_and(|answers| !is_refused(answers)) {
        commit(conn).await?;
        return claimed;
    }
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map_err(unanswered)?;
    claimed.map(|answers| put_back(answers, asks.len()))
}

/// Up to the first that is refused.
async fn claim_each(conn: &mut MySqlConnection, asks: &[Ask], terms: &Terms) -> Reply<Vec<Answer>> {
    let mut answers = Vec::with_capacity(asks.len());
    for ask in asks {
        answers.push(claim_one(conn, ask, terms).await?);
        if is_refused(&answers) {
            break;
        }
    }
    Ok(answers)
}

/// The claim's token, and whom it took over from, unless it is lost by now.
fn seen(row: &MySqlRow, holder: Uuid) -> Reply<Option<(Token, Option<Prior>)>> {
    if row.try_get::<Option<Uuid>, _>("holder")? != Some(holder) {
        return Ok(None);
    }
    let token: Option<i64> = row.try_get("prior_token")?;
    let label: Option<String> = row.try_get("prior_client_ip")?;
    let prior = token.map(|token| Prior { token: Token::new(token), label: label.unwrap_or_default() });
    Ok(Some((Token::new(row.try_get("token")?), prior)))
}
