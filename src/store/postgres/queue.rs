//! Tickets of waiters, and notifications of releases.

use std::sync::LazyLock;

use chrono::{DateTime, Utc};
use sqlx::{
    PgConnection, Pool, Postgres, Row as _,
    pool::PoolOptions,
    postgres::{PgListener, PgRow},
};

use crate::store::queue::{ALIVE_SECONDS, FRONT, Notification, QueueEntry, QueueStore, operations};
use crate::{
    key::Key,
    store::{
        Reply, Store as _, TooLate,
        postgres::{
            OWN_SESSION,
            row::{in_time, names},
        },
    },
};

/// The channel that releases notify. The payload is the key.
const CHANNEL: &str = "rowlock";

/// The mark is a hint that may be lost, so it is committed asynchronously, and the row is locked
/// only briefly.
const MARK: &str = "
WITH quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)
), locked AS MATERIALIZED (
    SELECT t.key_resource, t.lock_flag, t.awaited FROM quick, t_resource_lock t WHERE t.key_resource = ANY ($1::text[]) FOR UPDATE OF t SKIP LOCKED
), marked AS (
    UPDATE t_resource_lock t SET awaited = true FROM locked l WHERE t.key_resource = l.key_resource AND NOT l.awaited
)
SELECT coalesce(bool_or(lock_flag <> 1), false) FROM locked";

/// The first row draws the number, which the other rows share. This requires no right on the
/// sequence. $2 is the limit.
static JOIN: LazyLock<String> = LazyLock::new(|| {
    const IN_TIME: &str = in_time!("$2");
    format!(
        "
WITH first AS (
    INSERT INTO t_resource_lock_queue (key_resource, alive_until)
    SELECT ($1::text[])[1], clock_timestamp() + interval '{ALIVE_SECONDS} s' WHERE {IN_TIME} RETURNING ticket, alive_until
), others AS (
    INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until)
    SELECT key, first.ticket, first.alive_until FROM first, unnest(($1::text[])[2:]) AS key
)
SELECT (SELECT ticket FROM first) AS ticket, clock_timestamp() AS now"
    )
});

static FRONT_OF_QUEUE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
SELECT f.* FROM unnest($1::text[]) AS key CROSS JOIN LATERAL (
    SELECT q.key_resource::text, q.ticket, (extract(epoch FROM q.alive_until - clock_timestamp()) * 1000000)::bigint AS left_micros
    FROM t_resource_lock_queue q WHERE q.key_resource = key AND q.ticket <= $2 ORDER BY q.ticket LIMIT {FRONT}) f
ORDER BY f.key_resource COLLATE \"C\", f.ticket"
    )
});

static STAY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "
UPDATE t_resource_lock_queue SET alive_until = clock_timestamp() + interval '{ALIVE_SECONDS} s'
WHERE ticket = ANY ($1::bigint[])"
    )
});

const LEAVE: &str = "DELETE FROM t_resource_lock_queue WHERE ticket = ANY ($1::bigint[])";

const CLEAR: &str =
    "DELETE FROM t_resource_lock_queue WHERE ticket = ANY ($1::bigint[]) AND alive_until <= clock_timestamp()";
const LENGTHS: &str = "
SELECT key_resource::text, count(*) FROM t_resource_lock_queue WHERE alive_until > clock_timestamp() GROUP BY key_resource";
const SWEEP: &str = "DELETE FROM t_resource_lock_queue WHERE alive_until < clock_timestamp() - interval '1 hour'";

impl QueueStore for Postgres {
    const NOTIFIES: bool = true;
    const NOTIFIES_IF_MARKED: bool = true;
    type Notifications = (PgListener, Pool<Postgres>);

    operations!(PgConnection);

    /// Opens a pool of its own for one connection, because the application's pool may have none to
    /// spare.
    async fn listen(pool: &Pool<Self>) -> Reply<Option<Self::Notifications>> {
        let options = PoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
        let server = Self::own_session((*pool.connect_options()).clone());
        let own = options.test_before_acquire(false).connect_lazy_with(server);
        let mut listener = match PgListener::connect_with(&own).await {
            Err(error) if Self::refuses_own_session(&error) => return Ok(None),
            opened => opened?,
        };
        listener.eager_reconnect(false);
        let seen: Option<String> =
            sqlx::query_scalar("SELECT current_setting($1, true)").bind(OWN_SESSION.0).fetch_one(&mut listener).await?;
        if seen.as_deref() != Some(OWN_SESSION.1) {
            Self::stop_listening((listener, own)).await;
            return Ok(None);
        }
        listener.listen(CHANNEL).await?;
        Ok(Some((listener, own)))
    }

    async fn next_notification((listener, _): &mut Self::Notifications) -> Reply<Option<Notification>> {
        let notified = listener.try_recv().await?;
        Ok(notified.map(|notified| Notification::Released(notified.payload().to_owned())))
    }

    async fn check_listening((listener, _): &mut Self::Notifications) -> Reply<()> {
        sqlx::query("SELECT 1").execute(listener).await.map(drop)
    }

    async fn stop_listening((listener, own): Self::Notifications) {
        drop(listener);
        own.close().await;
    }

    async fn request_notification(conn: &mut PgConnection, keys: &[Key]) -> Reply<bool> {
        sqlx::query_scalar(MARK).bind(names(keys)).fetch_one(conn).await
    }

    async fn join(
        conn: &mut PgConnection,
        keys: &[Key],
        not_after: Option<DateTime<Utc>>,
    ) -> Reply<Result<i64, TooLate>> {
        let row = sqlx::query(JOIN.as_str()).bind(names(keys)).bind(not_after).fetch_one(conn).await?;
        let (ticket, now): (Option<i64>, _) = (row.try_get("ticket")?, row.try_get("now")?);
        Ok(ticket.ok_or(TooLate { now }))
    }

    async fn front(conn: &mut PgConnection, keys: &[Key], number: i64) -> Reply<Vec<QueueEntry>> {
        let rows = sqlx::query(FRONT_OF_QUEUE.as_str()).bind(names(keys)).bind(number).fetch_all(conn).await?;
        let entry = |row: &PgRow| -> Reply<QueueEntry> {
            Ok(QueueEntry { key: row.try_get(0)?, number: row.try_get(1)?, left_micros: row.try_get(2)? })
        };
        rows.iter().map(entry).collect()
    }

    async fn heartbeat(conn: &mut PgConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(STAY.as_str()).bind(numbers).execute(conn).await.map(drop)
    }

    async fn leave(conn: &mut PgConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(LEAVE).bind(numbers).execute(conn).await.map(drop)
    }

    async fn clear(conn: &mut PgConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(CLEAR).bind(numbers).execute(conn).await.map(drop)
    }
}
