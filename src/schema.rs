//! The table: created, completed, and validated before it is used.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    error::{Action, Certainty, Error},
    key::Key,
    retry::outage_pause,
    store::{
        Database,
        connection::PooledConn,
        failure::Failure,
        pools::{Connections, Purpose},
        schema::{KeyLimit, Schema},
    },
};

/// How long creating the table may take, including a wait for other transactions.
const LIMIT: Duration = Duration::from_secs(60);

/// Creates the tables `t_resource_lock` and `t_resource_lock_queue` if they do not exist, and adds
/// the columns that the first lacks.
///
/// On PostgreSQL, a table that the connection's `search_path` leads to is completed in its own
/// schema, and the queue is created beside it. If there is none, both are created in the first
/// schema of the path. On MySQL and MariaDB, the tables are in the connection's database; on
/// SQLite, in its main file.
///
/// The existing columns and rows of a table that other programs use are not changed.
///
/// A complete table is only read: the call then takes no lock and needs no right to change the
/// schema. It may be called at every start, beside `sqlx migrate run`, and by any number of
/// instances at once. Nothing is recorded in `_sqlx_migrations` or elsewhere.
///
/// # Errors
/// [`Error::Unsuitable`] if the table would not be usable even with the missing columns, or if the
/// server or file cannot be used; nothing is changed. [`Error::Database`] if the database refuses;
/// [`Error::TimedOut`] after a minute.
///
/// # Cancel safety
/// If the future is dropped, the table is unchanged, or complete, or (MySQL, MariaDB) created but
/// not complete. The call can be repeated.
pub async fn migrate<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    let connections = Connections::new(pool.clone(), Purpose::Requests);
    let migrated = complete(&connections).await;
    connections.close_idle().await;
    migrated
}

async fn complete<DB: Database>(connections: &Connections<DB>) -> Result<(), Error> {
    let limit = Instant::now() + LIMIT;
    let (mut tries, mut installed) = (0, false);
    loop {
        let schema = schema(connections, limit, LIMIT).await?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsuitable { wrong });
        }
        let missing = schema.missing();
        if missing.is_empty() {
            return Ok(());
        }
        if let Some(wrong) = schema.wrong {
            return Err(Error::Unsuitable { wrong });
        }
        if installed {
            let wrong =
                format!("it lacks {}, which rowlock does not add to a table of another program", missing.join(", "));
            return Err(Error::Unsuitable { wrong });
        }
        let mut conn = PooledConn::checkout(connections, limit).await.map_err(|failure| failed(failure, LIMIT))?;
        let reply = timeout_at(limit, DB::install(conn.get())).await;
        tries += 1;
        match conn.settle(reply) {
            // Instances that start together conflict with each other (a type or column that already
            // exists, a busy file). An instance that fails inspects the table again, and returns
            // the error only if it persists.
            Err(failure) if tries == 10 => return Err(failed(failure, LIMIT)),
            Err(_) => sleep(Duration::from_millis(fastrand::u64(5..50) * tries)).await,
            Ok(()) => installed = true,
        }
    }
}

async fn schema<DB: Database>(
    connections: &Connections<DB>,
    limit: Instant,
    time_limit: Duration,
) -> Result<Schema, Error> {
    let failed = |failure: Failure| {
        failure.into_error(Action::Inspect, "the table t_resource_lock".into(), time_limit, Certainty::NothingChanged)
    };
    loop {
        let mut conn = PooledConn::checkout(connections, limit).await.map_err(failed)?;
        let reply = timeout_at(limit, DB::schema(conn.get())).await;
        match conn.settle(reply) {
            // The connection may have been closed while it was idle. The inspection may be
            // repeated.
            Err(failure) if failure.is_outage() && Instant::now() < limit => outage_pause().await,
            reply => return reply.map_err(failed),
        }
    }
}

fn failed(failure: Failure, limit: Duration) -> Error {
    failure.into_error(Action::Migrate, "the table t_resource_lock".into(), limit, Certainty::NothingChanged)
}

/// What a lock has to know of the table before it sends a claim.
#[derive(Debug)]
pub(crate) struct Table {
    key_type: String,
    key_limit: KeyLimit,
    label_chars: usize,
    /// Whether a statement can be instructed not to wait for a locked row.
    pub nowait: bool,
}

impl Table {
    /// Reads the shape of the table, and refuses a table that a lock cannot use.
    pub async fn read<DB: Database>(
        connections: &Connections<DB>,
        limit: Instant,
        time_limit: Duration,
    ) -> Result<Self, Error> {
        let schema = schema(connections, limit, time_limit).await?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsuitable { wrong });
        }
        if schema.columns.is_empty() {
            return Err(Error::TableMissing);
        }
        let missing = schema.missing();
        if !missing.is_empty() {
            return Err(Error::ColumnMissing { columns: missing.join(", ") });
        }
        if let Some(wrong) = schema.wrong {
            return Err(Error::Unsuitable { wrong });
        }
        if let Some((server, version)) = schema.untried {
            tracing::warn!(server, version, "nothing is promised on this server: rowlock has not been tried on it");
        }
        let Schema { key_type, key_limit, label_chars, nowait, .. } = schema;
        Ok(Self { key_type, key_limit, label_chars, nowait })
    }

    pub fn admits(&self, key: &Key, label: &str) -> Result<(), Error> {
        if !self.key_limit.holds(key) {
            return Err(Error::KeyTooLong { key: key.clone(), column: self.key_type.clone() });
        }
        if label.chars().count() > self.label_chars {
            return Err(Error::LabelTooLong { label: label.to_owned(), chars: self.label_chars });
        }
        Ok(())
    }
}
