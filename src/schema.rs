//! The table: created, completed, and validated before it is used.

use std::time::Duration;

use sqlx::Pool;

#[cfg(feature = "schedule")]
use crate::store::schedule::Found;
use crate::{
    action::{Action, Certainty},
    error::Error,
    key::Key,
    session::{
        sessions::{Purpose, Sessions},
        time::Instant,
        timers::sleep,
    },
    store::{
        Database, Form,
        failure::Failure,
        fault::Fault,
        schema::{Freshness, KeyLimit, Schema},
    },
};

const NO_FUNCTIONS: &str =
    "SQLite has no stored functions: use the crate, the program `rowlock` or the Python client there";

/// How long creating the table may take, including a wait for other transactions.
const LIMIT: Duration = Duration::from_secs(60);
/// The pauses between attempts that waited for a lock: as long as they waited, up to twice that.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
const MOST_PAUSE: Duration = Duration::from_secs(2);
/// How long an attempt may take that waits for a lock for a second, and the look for what is in its
/// way.
const ATTEMPT: Duration = Duration::from_secs(4);
const LOOK: Duration = Duration::from_secs(2);

/// Creates the tables `t_resource_lock` and `t_resource_lock_queue` if they do not exist, and adds
/// the columns that the first lacks. With the feature `schedule`, it also creates the tables
/// `t_resource_schedule` and `t_resource_schedule_run` beside them.
///
/// On PostgreSQL, a table that the connection's `search_path` leads to is completed in its own
/// schema, and the queue is created beside it. If there is none, both are created in the first
/// schema of the path. On MySQL and MariaDB, the tables are in the connection's database; on
/// SQLite, in its main file.
///
/// The existing columns and rows of a table that other programs use are not changed.
///
/// A table in use is completed between the transactions of other clients. The statement waits for
/// them for a second at most, because clients that come later wait behind it; then it lets these
/// through, for at least as long, and tries again. The limit is the server's, so nothing is left
/// behind if the process dies.
///
/// A complete table is only read: the call then takes no lock and needs no right to change the
/// schema. It may be called at every start, beside `sqlx migrate run`, and by any number of
/// instances at once. Nothing is recorded in `_sqlx_migrations` or elsewhere. Locks do not need the
/// tables of schedules: where only these are missing and the user may not create tables, the call
/// logs a warning and succeeds.
///
/// # Errors
/// [`Error::TableUnfit`] if the table is not usable, also with the missing columns, and
/// [`Error::Unsupported`] if the server or the file cannot be used; nothing is changed.
/// [`Error::InUse`] if transactions kept the table from being completed for a minute, which says
/// whose; [`Error::Database`] if the database refuses; [`Error::TimedOut`] after a minute.
///
/// # Cancel safety
/// If the future is dropped, the table is unchanged, or complete, or (MySQL, MariaDB, SQLite)
/// created but not complete. The call can be repeated.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// rowlock::migrate(&pool).await?; // at every start, before the lock is used
/// let lock = rowlock::LeaseLock::new(pool);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
pub async fn migrate<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    let connections = Sessions::new(pool.clone(), Purpose::Requests);
    let migrated = install(&connections, &mut Attempts::new()).await;
    connections.close_idle();
    migrated
}

async fn install<DB: Database>(connections: &Sessions<DB>, attempts: &mut Attempts) -> Result<(), Error> {
    complete(connections, attempts).await?;
    #[cfg(feature = "schedule")]
    complete_schedules(connections, attempts).await?;
    Ok(())
}

/// Creates the tables of schedules if they do not exist.
#[cfg(feature = "schedule")]
async fn complete_schedules<DB: Database>(connections: &Sessions<DB>, attempts: &mut Attempts) -> Result<(), Error> {
    loop {
        let found = schedule_tables(connections, attempts.limit, LIMIT).await;
        if found.map_err(|error| attempts.error(error))?.tables {
            return Ok(());
        }
        match connections.send(attempts.limit, async |conn| DB::install_schedules(conn).await).await {
            Err(failure) if matches!(failure.fault(), Fault::Denied | Fault::ReadOnly) => {
                tracing::warn!(%failure, "the tables of schedules do not exist, and could not be created");
                return Ok(());
            }
            Err(failure) => attempts.again::<DB>(failure, "the tables of schedules").await?,
            Ok(()) => attempts.changed(),
        }
    }
}

/// Looks whether the tables of schedules exist, and whether the server can be used.
#[cfg(feature = "schedule")]
pub(crate) async fn schedule_tables<DB: Database>(
    connections: &Sessions<DB>,
    limit: Instant,
    time_limit: Duration,
) -> Result<Found, Error> {
    let found = connections.send_repeatedly(limit, async |conn| DB::schedule_tables(conn).await).await;
    found.map_err(|failure| {
        failure.into_error(Action::Inspect, "the tables of schedules".into(), time_limit, Certainty::NothingChanged)
    })
}

/// Creates the lock's functions, or replaces those of another version, for programs that are not in
/// Rust: `rowlock_try_acquire` and others. On MySQL and MariaDB they are stored procedures. Creates
/// or completes the tables first, as [`migrate`] does.
///
/// On PostgreSQL, the functions are in the schema of the table, and keep that schema as their
/// `search_path`. They run with the rights of their caller. The guide describes them in
/// `docs/languages.md`.
///
/// It may be called at every start, by any number of instances at once. On MySQL and MariaDB, a
/// procedure does not exist for a moment while it is replaced.
///
/// # Errors
/// Those of [`migrate`]. On SQLite [`Error::Unsupported`], since SQLite has no stored functions.
///
/// # Cancel safety
/// If the future is dropped, the functions are unchanged or replaced; on MySQL and MariaDB, some of
/// them may be missing. The call can be repeated.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "postgres")]
/// # async fn example(pool: sqlx::PgPool) -> Result<(), rowlock::Error> {
/// rowlock::migrate_functions(&pool).await?;
/// // From now on, in any language: SELECT * FROM rowlock_try_acquire('report', lease => '1 minute')
/// # Ok(())
/// # }
/// ```
pub async fn migrate_functions<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    let connections = Sessions::new(pool.clone(), Purpose::Requests);
    let mut attempts = Attempts::new();
    let migrated = match install(&connections, &mut attempts).await {
        Ok(()) => create_functions(&connections, &mut attempts).await,
        failed => failed,
    };
    connections.close_idle();
    migrated
}

async fn create_functions<DB: Database>(connections: &Sessions<DB>, attempts: &mut Attempts) -> Result<(), Error> {
    loop {
        match connections.send(attempts.limit, async |conn| DB::install_functions(conn).await).await {
            Ok(true) => return Ok(()),
            Ok(false) => return Err(Error::Unsupported { wrong: NO_FUNCTIONS.into() }),
            Err(failure) => attempts.again::<DB>(failure, "the lock's functions").await?,
        }
    }
}

async fn complete<DB: Database>(connections: &Sessions<DB>, attempts: &mut Attempts) -> Result<(), Error> {
    let mut installed = false;
    loop {
        let schema = schema(connections, attempts.limit, LIMIT).await.map_err(|error| attempts.error(error))?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsupported { wrong });
        }
        let missing = schema.missing();
        if let Some(wrong) = schema.wrong {
            return Err(unfit(wrong));
        }
        if missing.is_empty() {
            return Ok(());
        }
        if installed {
            let wrong =
                format!("it lacks {}, which rowlock does not add to a table of another program", missing.join(", "));
            return Err(unfit(wrong));
        }
        match connections.send(attempts.limit, async |conn| DB::install(conn).await).await {
            Ok(()) => {
                installed = true;
                attempts.changed();
            }
            Err(failure) if failure.fault() == Fault::Contention => attempts.blocked(connections).await?,
            Err(failure) => attempts.again::<DB>(failure, "the table t_resource_lock").await?,
        }
    }
}

/// The attempts of one call to create or complete tables or functions.
///
/// Instances that start together conflict with each other (a type or column that already exists, a
/// busy file). An instance that fails looks again, and returns the error only if it persists.
struct Attempts {
    limit: Instant,
    failed: u32,
    /// What is known of the outcome of the attempts so far.
    outcome: Certainty,
    /// When the present attempt was begun.
    begun: Instant,
    /// What kept an attempt from changing the table.
    blocker: Option<String>,
}

impl Attempts {
    fn new() -> Self {
        let begun = Instant::now();
        Self { limit: begun + LIMIT, failed: 0, outcome: Certainty::NothingChanged, begun, blocker: None }
    }

    /// Records that something was changed.
    fn changed(&mut self) {
        self.outcome = Certainty::Unknown;
    }

    /// Returns the error of a look at the tables, which is that of the call.
    fn error(&self, mut error: Error) -> Error {
        if let Some((action, outcome)) = error.outcome_mut().filter(|_| self.outcome == Certainty::Unknown) {
            (*action, *outcome) = (Action::Migrate, Certainty::Unknown);
        }
        error
    }

    /// Pauses before the next attempt.
    ///
    /// # Errors
    /// The error of the failure, if it was the tenth, or no connection was available.
    async fn again<DB: Database>(&mut self, failure: Failure, subject: &str) -> Result<(), Error> {
        let was_sent = !matches!(failure, Failure::NoThreads(_) | Failure::NoConnection(_));
        if failure.is_unanswered() || (was_sent && !DB::INSTALLS_ATOMICALLY) {
            self.changed();
        }
        self.failed += 1;
        if self.failed == 10 || !was_sent {
            return Err(failure.into_error(Action::Migrate, subject.to_owned(), LIMIT, self.outcome));
        }
        sleep(Duration::from_millis(fastrand::u64(5..50)) * self.failed).await;
        self.begun = Instant::now();
        Ok(())
    }

    /// Pauses after an attempt that waited in vain for a lock on the table, so that the clients
    /// behind it go on.
    ///
    /// # Errors
    /// [`Error::InUse`], if the time is over.
    async fn blocked<DB: Database>(&mut self, connections: &Sessions<DB>) -> Result<(), Error> {
        if !DB::INSTALLS_ATOMICALLY {
            self.changed(); // a part may be there
        }
        let limit = (Instant::now() + LOOK).min(self.limit);
        if let Ok(Some(by)) = connections.send(limit, async |conn| DB::blocker(conn).await).await {
            if self.blocker.is_none() {
                tracing::warn!(by, "the table t_resource_lock is in use: waiting to complete it");
            }
            self.blocker = Some(by);
        }
        let pause = (Instant::now() - self.begun).clamp(LEAST_PAUSE, MOST_PAUSE);
        let pause = pause.mul_f64(1.0 + fastrand::f64());
        if Instant::now() + pause + ATTEMPT >= self.limit {
            let by = self.blocker.take().unwrap_or_else(|| "a transaction that is not known".to_owned());
            return Err(Error::InUse { limit: LIMIT, by });
        }
        sleep(pause).await;
        self.begun = Instant::now();
        Ok(())
    }
}

async fn schema<DB: Database>(
    connections: &Sessions<DB>,
    limit: Instant,
    time_limit: Duration,
) -> Result<Schema, Error> {
    let schema = connections.send_repeatedly(limit, async |conn| DB::schema(conn).await).await;
    schema.map_err(|failure| {
        failure.into_error(Action::Inspect, "the table t_resource_lock".into(), time_limit, Certainty::NothingChanged)
    })
}

fn unfit(wrong: String) -> Error {
    Error::TableUnfit { table: "t_resource_lock".to_owned(), wrong }
}

/// What a lock has to know of the table before it sends a claim.
#[derive(Debug)]
pub(crate) struct Table {
    key_type: String,
    key_limit: KeyLimit,
    label_chars: usize,
    /// The statements that the server and the table allow.
    pub form: Form,
    /// What a read needs to show all that was committed before it.
    pub freshness: Freshness,
}

impl Table {
    /// Reads the shape of the table, and refuses a table that a lock cannot use.
    pub async fn read<DB: Database>(
        connections: &Sessions<DB>,
        limit: Instant,
        time_limit: Duration,
    ) -> Result<Self, Error> {
        let schema = schema(connections, limit, time_limit).await?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsupported { wrong });
        }
        if schema.columns.is_empty() {
            return Err(Error::TableMissing);
        }
        let missing = schema.missing();
        if !missing.is_empty() {
            return Err(Error::ColumnMissing { table: "t_resource_lock", columns: missing.join(", ") });
        }
        if let Some(wrong) = schema.wrong {
            return Err(unfit(wrong));
        }
        if let Some((server, version)) = schema.untried {
            if schema.accepted {
                tracing::warn!(server, version, "this server keeps no row locks: two holders can hold one key");
            } else {
                tracing::warn!(server, version, "this server is not tested with rowlock");
            }
        }
        let Schema { key_type, key_limit, label_chars, form, freshness, .. } = schema;
        Ok(Self { key_type, key_limit, label_chars, form, freshness })
    }

    pub fn admits(&self, key: &Key, label: &str) -> Result<(), Error> {
        if !self.key_limit.holds(key) {
            let column = "t_resource_lock.key_resource".to_owned();
            return Err(Error::KeyUnfit { key: key.clone(), column, holds: self.key_type.clone() });
        }
        if label.chars().count() > self.label_chars {
            return Err(Error::LabelTooLong { label: label.to_owned(), chars: self.label_chars });
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    async fn outcome_after<DB: Database>(failures: impl IntoIterator<Item = Failure>) -> Certainty {
        let mut attempts = Attempts::new();
        for failure in failures {
            match attempts.again::<DB>(failure, "a table").await {
                Ok(()) => {}
                Err(Error::NoConnection { action: Action::Migrate, outcome, .. }) => return outcome,
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no attempt was the last");
    }

    /// The look that follows an attempt may be what fails.
    #[tokio::test]
    async fn a_look_after_an_attempt_tells_of_the_attempt() {
        let looked = || Error::TimedOut {
            action: Action::Inspect,
            subject: "a table".into(),
            limit: LIMIT,
            outcome: Certainty::NothingChanged,
        };
        let mut attempts = Attempts::new();
        let nothing = attempts.error(looked());
        assert!(matches!(nothing, Error::TimedOut { action: Action::Inspect, outcome: Certainty::NothingChanged, .. }));
        attempts.again::<sqlx::Sqlite>(Failure::NoReply, "a table").await.unwrap();
        let unknown = attempts.error(looked());
        assert!(matches!(unknown, Error::TimedOut { action: Action::Migrate, outcome: Certainty::Unknown, .. }));
    }

    /// SQLite creates one table after another.
    #[tokio::test]
    async fn an_attempt_that_may_have_done_a_part_is_not_forgotten() {
        let no_connection = || Failure::NoConnection(sqlx::Error::PoolTimedOut);
        assert_eq!(outcome_after::<sqlx::Sqlite>([no_connection()]).await, Certainty::NothingChanged);
        for sent in [Failure::NoReply, Failure::Undone] {
            assert_eq!(outcome_after::<sqlx::Sqlite>([sent, no_connection()]).await, Certainty::Unknown);
        }
    }

    #[cfg(feature = "postgres")]
    #[tokio::test]
    async fn an_attempt_that_was_undone_has_changed_nothing() {
        let no_connection = || Failure::NoConnection(sqlx::Error::PoolTimedOut);
        assert_eq!(
            outcome_after::<sqlx::Postgres>([Failure::Undone, no_connection()]).await,
            Certainty::NothingChanged
        );
        assert_eq!(outcome_after::<sqlx::Postgres>([Failure::NoReply, no_connection()]).await, Certainty::Unknown);
    }
}
