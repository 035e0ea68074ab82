//! The table: created, completed, and checked before it is used.

use std::time::Duration;

use sqlx::Pool;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    error::{Action, Certainty, Error},
    key::Key,
    store::{
        Database, KeyLimit, Schema,
        borrowed::{Borrowed, Failure},
    },
};

/// How long creating the table may take, a wait behind other transactions included.
const LIMIT: Duration = Duration::from_secs(60);

/// Creates the table `t_resource_lock` if it is not there, and adds the columns that it lacks.
///
/// A complete table is only looked at: no lock, no right to change the schema is needed. It may be called at every start,
/// by any number of instances at once, and beside `sqlx migrate run`. Nothing is recorded in `_sqlx_migrations` or anywhere.
///
/// # Errors
/// [`Error::Database`] if the database refuses; [`Error::TimedOut`] after a minute.
///
/// # Cancel safety
/// Dropped, it leaves the table as it was, or complete, or (MySQL, MariaDB) created but not complete; call it again.
pub async fn migrate<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    let limit = Instant::now() + LIMIT;
    let mut tries = 0;
    loop {
        let missing = schema(pool, limit).await?.missing();
        if missing.is_empty() {
            return Ok(());
        }
        if tries == 10 {
            return Err(Error::ColumnMissing { columns: missing.join(", ") });
        }
        let mut conn = Borrowed::checkout(pool, limit).await.map_err(|failure| failed(failure, LIMIT))?;
        let reply = timeout_at(limit, DB::install(conn.get())).await;
        tries += 1;
        match conn.settle(reply) {
            // Instances that start together run into each other (a type exists already, a column, a busy file):
            // whoever fails looks again, and gives up only on an error that stays.
            Err(failure) if tries == 10 => return Err(failed(failure, LIMIT)),
            Err(_) => sleep(Duration::from_millis(fastrand::u64(5..50) * tries)).await,
            Ok(()) => {}
        }
    }
}

async fn schema<DB: Database>(pool: &Pool<DB>, limit: Instant) -> Result<Schema, Error> {
    let limited = limit.saturating_duration_since(Instant::now());
    let mut conn = Borrowed::checkout(pool, limit).await.map_err(|failure| failed(failure, limited))?;
    let reply = timeout_at(limit, DB::schema(conn.get())).await;
    conn.settle(reply).map_err(|failure| failed(failure, limited))
}

fn failed(failure: Failure, limit: Duration) -> Error {
    failure.into_error(Action::Migrate, "t_resource_lock".into(), limit, Certainty::NothingChanged)
}

/// What a lock has to know of the table before it sends a claim.
#[derive(Debug)]
pub(crate) struct Table {
    key_type: String,
    key_limit: KeyLimit,
}

impl Table {
    /// Reads the table's shape, and refuses one that a lock cannot stand on.
    pub async fn read<DB: Database>(pool: &Pool<DB>, limit: Instant) -> Result<Self, Error> {
        let schema = schema(pool, limit).await?;
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
        Ok(Self { key_type: schema.key_type, key_limit: schema.key_limit })
    }

    pub fn admits(&self, key: &Key) -> Result<(), Error> {
        if self.key_limit.holds(key) {
            return Ok(());
        }
        Err(Error::KeyTooLong { key: key.clone(), column: self.key_type.clone() })
    }
}
