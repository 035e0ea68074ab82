//! Tickets of waiters, and notifications of releases.

use chrono::{DateTime, Utc};
use sqlx::{Pool, Row as _, Sqlite, SqliteConnection};

use crate::store::queue::{ALIVE_SECONDS, FRONT, Notification, QueueEntry, QueueStore, operations};
use crate::{
    key::Key,
    store::{
        Reply, Store as _, TooLate, limit_micros,
        sqlite::{
            row::{self, json, sql, written},
            watch::FileWatch,
        },
    },
};

/// The number is a time as well, so that one that was given up is not issued again after its
/// millisecond. A waiter that gets it before stands where the other one stood, at the end. If the
/// other one is given up once more, because the reply was lost, the waiter draws another number. ?3
/// is the limit.
const JOIN: &str = sql!("
INSERT INTO t_resource_lock_queue (key_resource, ticket, alive_until)
SELECT CAST(unhex(j.value) AS TEXT), n.ticket, " now " + ?2 * 1000000
FROM json_each(?1) AS j, (
    SELECT max(COALESCE((SELECT max(ticket) + 1 FROM t_resource_lock_queue), 0), " now ") AS ticket) AS n
WHERE " now " <= ?3 RETURNING ticket");

const FRONT_OF_QUEUE: &str = sql!("
SELECT key_resource, ticket, alive_until - " now " FROM t_resource_lock_queue
WHERE key_resource = ?1 AND ticket <= ?2 ORDER BY ticket LIMIT ?3");

const STAY: &str = sql!("
UPDATE t_resource_lock_queue SET alive_until = " now " + ?2 * 1000000
WHERE ticket IN (SELECT value FROM json_each(?1))");
const LEAVE: &str = "DELETE FROM t_resource_lock_queue WHERE ticket IN (SELECT value FROM json_each(?1))";
const CLEAR: &str = sql!("
DELETE FROM t_resource_lock_queue WHERE ticket IN (SELECT value FROM json_each(?1)) AND alive_until <= " now);
const LENGTHS: &str =
    sql!("SELECT key_resource, count(*) FROM t_resource_lock_queue WHERE alive_until > " now " GROUP BY key_resource");
const SWEEP: &str = sql!("DELETE FROM t_resource_lock_queue WHERE alive_until < " now " - 3600 * 1000000");

impl QueueStore for Sqlite {
    const NOTIFIES: bool = true;
    type Notifications = FileWatch;

    operations!(SqliteConnection);

    async fn listen(pool: &Pool<Self>) -> Reply<Option<FileWatch>> {
        Ok(FileWatch::new(pool.connect_options().get_filename()))
    }

    async fn next_notification(watch: &mut FileWatch) -> Reply<Option<Notification>> {
        Ok(watch.changed().await.then_some(Notification::Changed))
    }

    async fn join(
        conn: &mut SqliteConnection,
        keys: &[Key],
        not_after: Option<DateTime<Utc>>,
    ) -> Reply<Result<i64, TooLate>> {
        let query =
            sqlx::query(JOIN).bind(row::keys(keys)).bind(ALIVE_SECONDS.cast_signed()).bind(limit_micros(not_after));
        match written(query, conn).await? {
            Some(row) => Ok(Ok(row.try_get(0)?)),
            None => Ok(Err(TooLate { now: Self::now(conn).await? })),
        }
    }

    async fn front(conn: &mut SqliteConnection, keys: &[Key], number: i64) -> Reply<Vec<QueueEntry>> {
        let mut front = Vec::new();
        for key in keys {
            let query = sqlx::query(FRONT_OF_QUEUE).bind(key.as_str()).bind(number).bind(FRONT.cast_signed());
            for row in query.fetch_all(&mut *conn).await? {
                front.push(QueueEntry { key: row.try_get(0)?, number: row.try_get(1)?, left_micros: row.try_get(2)? });
            }
        }
        Ok(front)
    }

    async fn heartbeat(conn: &mut SqliteConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(STAY).bind(array(numbers)).bind(ALIVE_SECONDS.cast_signed()).execute(conn).await.map(drop)
    }

    async fn leave(conn: &mut SqliteConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(LEAVE).bind(array(numbers)).execute(conn).await.map(drop)
    }

    async fn clear(conn: &mut SqliteConnection, numbers: &[i64]) -> Reply<()> {
        sqlx::query(CLEAR).bind(array(numbers)).execute(conn).await.map(drop)
    }
}

fn array(numbers: &[i64]) -> String {
    json(numbers.iter().map(i64::to_string))
}
