//! The claim of what is due: a read, and a compare-and-set of the whole of what was seen.

use chrono::TimeDelta;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection};
use uuid::Uuid;

use crate::store::{
    Reply, changed, limit_micros,
    mysql::{
        row::{Query, marks, micros, padded, stored},
        schedule_sql::{COLUMNS, LOOK, RECORD_LOST, claim_statement},
    },
    schedule::{DueRequest, Known, LOST, to_stored_count},
    schedule_seen::{SEEN, Seen, SeenStore},
    unanswered,
};

impl SeenStore for MySql {
    async fn look_for_due(conn: &mut MySqlConnection, ask: &DueRequest<'_>) -> Reply<Vec<Seen>> {
        if ask.known.is_empty() {
            return Ok(Vec::new());
        }
        let known = marks("(?, ?, ?)", ask.known.len());
        let query = sqlx::query(AssertSqlSafe(format!("SELECT {COLUMNS} {LOOK} ({known}) ORDER BY due_at LIMIT ?")));
        let bind = |query: Query<'static>, Known { times, .. }: &Known| {
            query.bind(times.name.as_str().to_owned()).bind(times.spec.clone()).bind(times.zone.clone())
        };
        let rows = ask.known.iter().fold(query, bind).bind(SEEN).fetch_all(conn).await?;
        rows.iter().map(Seen::read).collect()
    }

    async fn take_free(
        conn: &mut MySqlConnection,
        ask: &DueRequest<'_>,
        rows: &[&Seen],
        lease: TimeDelta,
    ) -> Reply<Vec<bool>> {
        // The runs begin at the time by which they were decided.
        let Some(now) = rows.first().map(|seen| seen.now) else { return Ok(Vec::new()) };
        let named = padded(rows);
        let mut query = sqlx::query(AssertSqlSafe(claim_statement(named.len())));
        for seen in named {
            query = query.bind(seen.times.name.as_str()).bind(&seen.times.spec).bind(&seen.times.zone);
            query = query.bind(seen.token).bind(stored(seen.slot)).bind(to_stored_count(seen.attempt));
            query = query.bind(stored(seen.due_at)).bind(seen.triggered_at.map(stored));
        }
        let holder: Uuid = *ask.holder.as_uuid();
        let query = query.bind(holder).bind(ask.label).bind(stored(now)).bind(now.timestamp_micros());
        let query = query.bind(micros(lease)).bind(limit_micros(ask.not_after));
        let taken = query.execute(&mut *conn).await?.rows_affected();
        if taken == 0 || taken == rows.len() as u64 {
            return Ok(vec![taken > 0; rows.len()]);
        }
        let names = marks("?", rows.len());
        let sql = format!("SELECT name, token FROM t_resource_schedule WHERE holder = ? AND name IN ({names})");
        let query = sqlx::query_as(AssertSqlSafe(sql)).bind(holder);
        let query = rows.iter().fold(query, |query, seen| query.bind(seen.times.name.as_str()));
        // Without the names, nothing is known of what was claimed.
        let held: Vec<(Vec<u8>, i64)> = query.fetch_all(conn).await.map_err(unanswered)?;
        let is_held = |seen: &&Seen| held.contains(&(seen.times.name.as_str().into(), seen.next_token()));
        Ok(rows.iter().map(is_held).collect())
    }

    async fn take_over(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<bool> {
        changed::<Self>(conn, async |conn| take_lost(conn, ask, seen).await).await
    }
}

async fn take_lost(conn: &mut MySqlConnection, ask: &DueRequest<'_>, seen: &Seen) -> Reply<bool> {
    if MySql::take_free(conn, ask, &[seen], ask.lease_of(&seen.times.name)).await? != [true] {
        return Ok(false);
    }
    let query = sqlx::query(RECORD_LOST).bind(seen.times.name.as_str()).bind(stored(seen.to_run()));
    let query = query.bind(to_stored_count(seen.attempt)).bind(seen.token).bind(&seen.label);
    let query = query.bind(stored(seen.began())).bind(to_stored_count(seen.missed)).bind(LOST);
    query.execute(conn).await.map(|_| true)
}
