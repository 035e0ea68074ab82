//! The tables and the functions: created, completed, previewed, and dropped again.
//!
//! `work.rs` looks at a database and changes it, and `attempts.rs` decides what follows from a
//! failure.

mod attempts;
mod work;

use chrono::FixedOffset;
use sqlx::Pool;

use crate::{
    error::Error,
    store::{Database, migration::Part},
};

pub use crate::store::{migration::Step, schema::Functions};
pub use work::Plan;
use work::Work;

const UNCHECKED: &str = "these statements do not look for claims and for instances that are alive, as \
                         `rowlock migrate --undo --yes` does";

/// Creates the tables `t_resource_lock`, `t_resource_lock_queue` and `t_resource_change` if they do
/// not exist, and adds the columns that the first lacks. With the feature `schedule`, it also
/// creates the tables of schedules and of orders for them.
///
/// On PostgreSQL, a table that the connection's `search_path` leads to is completed in its own
/// schema, and the queue is created beside it. If there is none, both are created in the first
/// schema of the path. On MySQL and MariaDB, the tables are in the connection's database; on
/// SQLite, in its main file.
///
/// The existing columns and rows of a table that other programs use are not changed. On MySQL and
/// MariaDB the columns that are added are `INVISIBLE`: statements of other programs that have no
/// list of columns do not see them. A warning says where the database has no such columns.
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
/// [`Migration`] prints the statements that the call would send, and can undo them.
///
/// # Errors
/// [`Error::Setup`] if the table is not usable, also with the missing columns, or the server or the
/// file cannot be used. [`Error::Database`] if transactions kept the table from being completed for
/// a minute, which says whose, if the database refuses, and if there is no reply within a minute.
///
/// # Cancel safety
/// If the future is dropped, the table is unchanged, or complete, or (MySQL, MariaDB, SQLite)
/// created but not complete. The call can be repeated.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// rowlock::migrate(&pool).await?; // at every start, before the lock is used
/// let lock = rowlock::LeaseLock::new(pool);
/// # Ok(())
/// # }
/// ```
pub async fn migrate<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    Migration::new(pool.clone()).run().await.map(drop)
}

/// Creates the lock's functions, or replaces those of an older version, for programs that are not
/// in Rust: `rowlock_try_acquire` and others. On MySQL and MariaDB they are stored procedures.
/// Creates or completes the tables first, as [`migrate`] does.
///
/// On PostgreSQL, the functions are in the schema of the table, and keep that schema as their
/// `search_path`. They run with the rights of their caller. The guide describes them in
/// `docs/functions.md`.
///
/// It may be called at every start, by any number of instances at once. Functions of this version
/// or of a newer one are left alone. On MySQL, a procedure does not exist for a moment while it is
/// replaced.
///
/// # Errors
/// Those of [`migrate`]. On SQLite [`Error::Setup`], since SQLite has no stored functions.
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
/// rowlock::migration::migrate_functions(&pool).await?;
/// // From now on, in any language: SELECT * FROM rowlock_try_acquire('report', lease => '1 minute')
/// # Ok(())
/// # }
/// ```
pub async fn migrate_functions<DB: Database>(pool: &Pool<DB>) -> Result<(), Error> {
    Migration::new(pool.clone()).functions(true).run().await.map(drop)
}

/// A migration, as [`migrate`] runs it. Its statements can be printed before they run, and undone.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// let migration = rowlock::migration::Migration::new(pool);
/// println!("{}", migration.plan().await?); // a script for this server and its table
/// let done = migration.run().await?;
/// assert!(done.steps().any(|step| step.sql.contains("t_resource_lock_queue")));
/// assert!(migration.plan().await?.is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Migration<DB: Database> {
    pool: Pool<DB>,
    functions: bool,
    /// In seconds.
    offset: i64,
}

impl<DB: Database> Migration<DB> {
    /// Describes the migration of the database to which the pool connects.
    pub fn new(pool: Pool<DB>) -> Self {
        Self { pool, functions: false, offset: 0 }
    }

    /// Sets whether the lock's functions are concerned too, as by [`migrate_functions`]. Off by
    /// default.
    #[must_use]
    pub fn functions(mut self, functions: bool) -> Self {
        self.functions = functions;
        self
    }

    /// Declares that other programs on the table write local time at this offset, as
    /// [`LeaseLockBuilder::article_clients`](crate::leases::LeaseLockBuilder::article_clients)
    /// does: their times are no reason for a note.
    #[must_use]
    pub fn article_clients(mut self, utc_offset: FixedOffset) -> Self {
        self.offset = utc_offset.local_minus_utc().into();
        self
    }

    /// Returns the statements that [`run`](Self::run) would send now. Changes and locks nothing.
    ///
    /// # Errors
    /// Those of [`migrate`]. It waits for no transaction.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn plan(&self) -> Result<Plan, Error> {
        let work = Work::new(&self.pool);
        let mut plan = Plan::default();
        for part in self.parts() {
            let Plan { parts, notes } = work.look(part).await?;
            plan.parts.extend(parts);
            plan.notes.extend(notes);
        }
        plan.notes.extend(work.look_for_local_time(self.offset).await);
        Ok(plan)
    }

    /// Creates what is missing, as [`migrate`] does, and returns the plan that was carried out.
    ///
    /// # Errors
    /// Those of [`migrate`].
    ///
    /// # Cancel safety
    /// That of [`migrate`].
    pub async fn run(&self) -> Result<Plan, Error> {
        let mut work = Work::new(&self.pool);
        let mut done = Plan::default();
        for part in self.parts() {
            work.complete(part, &mut done).await?;
        }
        Ok(done)
    }

    /// Returns which of the lock's functions exist.
    ///
    /// # Errors
    /// On SQLite [`Error::Setup`], since SQLite has no stored functions. Otherwise those of
    /// [`plan`](Self::plan).
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn installed_functions(&self) -> Result<Functions, Error> {
        Work::new(&self.pool).installed().await.map(|found| found.judge())
    }

    /// Returns the statements that [`undo`](Self::undo) would send now. Changes and locks nothing.
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan).
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn plan_undo(&self) -> Result<Plan, Error> {
        let (_, mut plan) = Work::new(&self.pool).look_back().await?;
        if !plan.is_empty() {
            plan.notes.push(UNCHECKED.to_owned());
        }
        Ok(plan)
    }

    /// Takes the columns, the tables and the functions of rowlock away, and returns the plan that
    /// was carried out.
    /// The seven columns of `t_resource_lock` stay, with all rows.
    ///
    /// Locks and schedules of programs that run on fail from then on.
    ///
    /// # Errors
    /// [`Error::Setup`] if a claim has not been released, or an instance of schedules is alive;
    /// nothing is changed. Otherwise those of [`migrate`].
    ///
    /// # Cancel safety
    /// If the future is dropped, everything is there, or gone, or (MySQL, MariaDB) gone in part.
    /// The call can be repeated.
    pub async fn undo(&self) -> Result<Plan, Error> {
        Work::new(&self.pool).remove().await
    }

    fn parts(&self) -> impl Iterator<Item = Part> + use<DB> {
        let schedules = [
            #[cfg(feature = "schedule")]
            Part::Schedules,
        ];
        [Part::Locks].into_iter().chain(schedules).chain(self.functions.then_some(Part::Functions))
    }
}
