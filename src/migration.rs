//! The tables and the functions: created, completed, previewed, and taken away again.

use std::{fmt, time::Duration};

use sqlx::Pool;

use crate::{
    action::{Action, Certainty},
    error::Error,
    schema::{schema, unfit},
    session::{
        sessions::{Purpose, Sessions},
        time::Instant,
        timers::sleep,
    },
    store::{
        Database,
        failure::Failure,
        fault::Fault,
        schema::{OURS, Part, Schema, TABLES, THEIRS},
    },
};

pub use crate::store::schema::{Functions, Step};

const DROPPED: &str = "exclusive, on what is dropped";
const NO_FUNCTIONS: &str =
    "SQLite has no stored functions: use the crate, the program `rowlock` or the Python client there";
const NOT_HIDDEN: &str = "this database has no INVISIBLE columns: statements of other programs that INSERT into \
                          t_resource_lock without a list of columns fail from now on; give them one first";

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
/// [`Migration`] prints what the call would do, and takes it back.
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
    Migration::new(pool.clone()).run().await.map(drop)
}

/// Creates the lock's functions, or replaces those of an older version, for programs that are not
/// in Rust: `rowlock_try_acquire` and others. On MySQL and MariaDB they are stored procedures.
/// Creates or completes the tables first, as [`migrate`] does.
///
/// On PostgreSQL, the functions are in the schema of the table, and keep that schema as their
/// `search_path`. They run with the rights of their caller. The guide describes them in
/// `docs/languages.md`.
///
/// It may be called at every start, by any number of instances at once. Functions of this version
/// or of a newer one are left alone. On MySQL, a procedure does not exist for a moment while it is
/// replaced.
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
    Migration::new(pool.clone()).functions(true).run().await.map(drop)
}

/// What [`migrate`] does, to be looked at first, and to be taken back.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "sqlite")]
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
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct Migration<DB: Database> {
    pool: Pool<DB>,
    functions: bool,
}

impl<DB: Database> Migration<DB> {
    /// Describes the migration of the database to which the pool connects.
    pub fn new(pool: Pool<DB>) -> Self {
        Self { pool, functions: false }
    }

    /// Sets whether the lock's functions are concerned too, as by [`migrate_functions`]. Off by
    /// default.
    #[must_use]
    pub fn functions(mut self, functions: bool) -> Self {
        self.functions = functions;
        self
    }

    /// Returns the statements that [`run`](Self::run) would send now. Changes and locks nothing.
    ///
    /// # Errors
    /// Those of [`migrate`], but for `InUse`.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn plan(&self) -> Result<Plan, Error> {
        let work = Work::new(&self.pool);
        let mut plan = Plan::default();
        for part in self.parts() {
            plan.add(work.look(part).await?);
        }
        plan.notes.extend(work.look_for_local_time().await?);
        work.connections.close_idle();
        Ok(plan)
    }

    /// Creates what is missing, as [`migrate`] does, and returns what was sent.
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
        work.connections.close_idle();
        Ok(done)
    }

    /// Returns which of the lock's functions exist.
    ///
    /// # Errors
    /// On SQLite [`Error::Unsupported`], since SQLite has no stored functions. Otherwise those of
    /// [`plan`](Self::plan).
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn installed_functions(&self) -> Result<Functions, Error> {
        let work = Work::new(&self.pool);
        let installed = work.installed().await;
        work.connections.close_idle();
        installed
    }

    /// Returns the statements that [`undo`](Self::undo) would send now. Changes and locks nothing.
    ///
    /// # Errors
    /// Those of [`plan`](Self::plan).
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn plan_undo(&self) -> Result<Plan, Error> {
        let work = Work::new(&self.pool);
        let (_, plan) = work.look_back().await?;
        work.connections.close_idle();
        Ok(plan)
    }

    /// Takes the columns, the tables and the functions of rowlock away, and returns what was sent.
    /// The seven columns of `t_resource_lock` stay, with all rows.
    ///
    /// Locks and schedules of programs that run on fail from then on.
    ///
    /// # Errors
    /// [`Error::StillUsed`] if a claim has not been released, or an instance of schedules is alive;
    /// nothing is changed. Otherwise those of [`migrate`].
    ///
    /// # Cancel safety
    /// That of [`migrate`].
    pub async fn undo(&self) -> Result<Plan, Error> {
        let mut work = Work::new(&self.pool);
        #[cfg(feature = "schedule")]
        work.refuse_instances(&self.pool).await?;
        let done = work.remove().await?;
        work.connections.close_idle();
        Ok(done)
    }

    fn parts(&self) -> impl Iterator<Item = Part> + use<DB> {
        let schedules = [
            #[cfg(feature = "schedule")]
            Part::Schedules,
        ];
        [Part::Locks].into_iter().chain(schedules).chain(self.functions.then_some(Part::Functions))
    }
}

/// The statements of a migration. It is displayed as a script for the database's own client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    parts: Vec<PlannedPart>,
    notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct PlannedPart {
    around: (&'static str, &'static str),
    steps: Vec<Step>,
}

impl Plan {
    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the statements, in their order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.parts.iter().flat_map(|part| &part.steps)
    }

    /// Returns what should be known before it is carried out.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    fn add(&mut self, other: Self) {
        self.parts.extend(other.parts);
        self.notes.extend(other.notes);
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "-- NOTE: {note}")?;
        }
        for PlannedPart { around: (before, after), steps } in &self.parts {
            for line in Some(before).into_iter().filter(|line| !line.is_empty()) {
                writeln!(f, "{line}")?;
            }
            for Step { sql, locks } in steps {
                writeln!(f, "-- lock: {locks}\n{sql};")?;
            }
            for line in Some(after).into_iter().filter(|line| !line.is_empty()) {
                writeln!(f, "{line}")?;
            }
        }
        Ok(())
    }
}

/// One call: its sessions and its attempts.
struct Work<DB: Database> {
    connections: Sessions<DB>,
    attempts: Attempts,
}

impl<DB: Database> Work<DB> {
    fn new(pool: &Pool<DB>) -> Self {
        Self { connections: Sessions::new(pool.clone(), Purpose::Requests), attempts: Attempts::new() }
    }

    /// Returns what a part lacks.
    async fn look(&self, part: Part) -> Result<Plan, Error> {
        let schema = schema(&self.connections, self.attempts.limit, LIMIT, part).await;
        let schema = schema.map_err(|error| self.attempts.error(error))?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsupported { wrong });
        }
        let exists = !schema.columns.is_empty();
        let unknown = THEIRS.into_iter().filter(|column| exists && schema.column(column).is_none());
        let unknown = unknown.collect::<Vec<_>>().join(", ");
        if !unknown.is_empty() {
            return Err(unfit(format!("it lacks {unknown}, which rowlock does not add to a table of another program")));
        }
        if let Some(wrong) = schema.wrong {
            return Err(unfit(wrong));
        }
        if part == Part::Functions && self.installed().await? == Functions::Current {
            return Ok(Plan::default());
        }
        let steps = DB::steps(&schema, part);
        let is_seen = part == Part::Locks && exists && !schema.missing_columns().is_empty() && !schema.hides_columns;
        Ok(Plan {
            parts: if steps.is_empty() { Vec::new() } else { vec![PlannedPart { around: DB::around(part), steps }] },
            notes: is_seen.then(|| NOT_HIDDEN.to_owned()).into_iter().collect(),
        })
    }

    /// Returns a note if a row is of a time that has not come yet.
    async fn look_for_local_time(&self) -> Result<Option<String>, Error> {
        let schema = schema(&self.connections, self.attempts.limit, LIMIT, Part::Locks).await?;
        if schema.columns.is_empty() {
            return Ok(None);
        }
        let found = self.connections.send_repeatedly(self.attempts.limit, async |conn| DB::ahead(conn).await).await;
        let key = found.map_err(|failure| self.attempts.failed(failure, Part::Locks))?;
        Ok(key.map(|key| {
            format!(
                "the begin_time of key {key:?} is in the future: programs that write local time do that, and others \
                 then wait too long; declare them (`article_clients`, `--article-clients +08:00`)"
            )
        }))
    }

    /// Returns the statements that leave the article's table alone.
    async fn look_back(&self) -> Result<(Schema, Plan), Error> {
        let schema = schema(&self.connections, self.attempts.limit, LIMIT, Part::Locks).await?;
        if let Some(wrong) = schema.refused {
            return Err(Error::Unsupported { wrong });
        }
        let found = self.connections.send_repeatedly(self.attempts.limit, async |conn| DB::functions(conn).await).await;
        let found = found.map_err(|failure| self.attempts.failed(failure, Part::Functions))?.unwrap_or_default();
        let steps = removal::<DB>(&schema, &found.names);
        let parts = match steps.is_empty() {
            true => Vec::new(),
            false => vec![PlannedPart { around: DB::around(Part::Locks), steps }],
        };
        Ok((schema, Plan { parts, notes: Vec::new() }))
    }

    #[cfg(feature = "schedule")]
    async fn refuse_instances(&self, pool: &Pool<DB>) -> Result<(), Error> {
        let instances = match crate::Schedules::new(pool.clone()).instances().await {
            Err(Error::ScheduleTablesMissing) => return Ok(()),
            instances => instances?,
        };
        match instances.iter().find(|instance| instance.alive) {
            Some(instance) => {
                Err(Error::StillUsed { by: format!("instance {:?} runs schedules; stop it", instance.label) })
            }
            None => Ok(()),
        }
    }

    /// Removes what [`look_back`](Self::look_back) returns, unless a claim stands.
    async fn remove(&mut self) -> Result<Plan, Error> {
        loop {
            let (schema, plan) = self.look_back().await?;
            let Some(PlannedPart { steps, .. }) = plan.parts.first() else { return Ok(plan) };
            let exists = !schema.columns.is_empty();
            let removed = self.connections.send(self.attempts.limit, async |conn| match exists {
                true => DB::remove(conn, &schema, steps).await,
                false => DB::alter(conn, steps).await.map(|()| None),
            });
            match removed.await {
                Ok(None) => return Ok(plan),
                Ok(Some((key, label))) => {
                    let by = format!("key {key:?} is claimed by {label:?}; release it, by force if its holder is gone");
                    return Err(Error::StillUsed { by });
                }
                Err(failure) if failure.fault() == Fault::Contention => {
                    self.attempts.blocked(&self.connections).await?
                }
                Err(failure) => self.attempts.again::<DB>(failure, Part::Locks).await?,
            }
        }
    }

    async fn installed(&self) -> Result<Functions, Error> {
        let found = self.connections.send_repeatedly(self.attempts.limit, async |conn| DB::functions(conn).await).await;
        let found = found.map_err(|failure| self.attempts.failed(failure, Part::Functions))?;
        found.map(|found| found.judge()).ok_or_else(|| Error::Unsupported { wrong: NO_FUNCTIONS.into() })
    }

    /// Creates what a part lacks, until nothing is missing.
    async fn complete(&mut self, part: Part, done: &mut Plan) -> Result<(), Error> {
        let mut is_first = true;
        loop {
            let plan = self.look(part).await?;
            let Some(planned) = plan.parts.first() else { return Ok(()) };
            // Another instance may be replacing what was created; otherwise it is somewhere else.
            if done.parts.contains(planned) && !self.attempts.looks_again().await {
                return Err(unfit("what was created is not found in it: check the search_path".to_owned()));
            }
            let steps = &planned.steps;
            for note in plan.notes.iter().filter(|_| is_first) {
                tracing::warn!("{note}");
            }
            is_first = false;
            let limit = self.attempts.limit;
            let denied = |failure: &Failure| match failure.fault() {
                Fault::Denied => true,
                Fault::ReadOnly => part != Part::Locks,
                _ => false,
            };
            match self.connections.send(limit, async |conn| DB::check_rights(conn, steps).await).await {
                Err(failure) if denied(&failure) => return self.denied(failure, part),
                Err(failure) => {
                    self.attempts.again::<DB>(failure, part).await?;
                    continue;
                }
                Ok(()) => {}
            }
            match self.connections.send(limit, async |conn| DB::alter(conn, steps).await).await {
                Ok(()) => {
                    self.attempts.changed();
                    done.parts.extend(plan.parts);
                }
                Err(failure) if denied(&failure) => return self.denied(failure, part),
                Err(failure) if failure.fault() == Fault::Contention => {
                    self.attempts.blocked(&self.connections).await?
                }
                Err(failure) => self.attempts.again::<DB>(failure, part).await?,
            }
        }
    }

    /// Locks do without the tables of schedules.
    fn denied(&self, failure: Failure, part: Part) -> Result<(), Error> {
        #[cfg(feature = "schedule")]
        if part == Part::Schedules {
            tracing::warn!(%failure, "the tables of schedules do not exist, and could not be created");
            return Ok(());
        }
        Err(self.attempts.failed(failure, part))
    }
}

/// Returns the statements that leave the article's table alone. Functions come first: they need the
/// columns.
fn removal<DB: Database>(schema: &Schema, functions: &[String]) -> Vec<Step> {
    let dropped = |sql: String| Step { sql, locks: DROPPED };
    let functions = functions.iter().map(|name| dropped(format!("DROP {} {name}", DB::ROUTINE)));
    let ours: Vec<_> = OURS.into_iter().filter(|name| schema.column(name).is_some()).collect();
    let columns: Vec<String> = match DB::ALTERS_TOGETHER {
        true if ours.is_empty() => Vec::new(),
        true => vec![ours.join(",\n    DROP COLUMN ")],
        false => ours.into_iter().map(str::to_owned).collect(),
    };
    let columns = columns.into_iter().map(|columns| Step {
        sql: format!("ALTER TABLE t_resource_lock\n    DROP COLUMN {columns}"),
        locks: "exclusive, on t_resource_lock: for a moment, or until it is copied",
    });
    let tables = TABLES.into_iter().filter(|table| schema.has(table));
    let tables = tables.map(|table| dropped(format!("DROP TABLE {table}")));
    let steps: Vec<_> = functions.chain(columns).chain(tables).collect();
    let path = schema.place.as_ref().filter(|_| !steps.is_empty());
    let path = path.map(|place| Step { sql: format!("SET LOCAL search_path = {place}"), locks: "none" });
    path.into_iter().chain(steps).collect()
}

/// The attempts of one call to create or complete tables or functions.
///
/// Instances that start together conflict with each other (a type or column that already exists, a
/// busy file). An instance that fails looks again, and returns the error only if it persists.
struct Attempts {
    limit: Instant,
    failures: u32,
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
        Self { limit: begun + LIMIT, failures: 0, outcome: Certainty::NothingChanged, begun, blocker: None }
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

    fn failed(&self, failure: Failure, part: Part) -> Error {
        failure.into_error(Action::Migrate, part.subject().to_owned(), LIMIT, self.outcome)
    }

    /// Pauses before the next attempt.
    ///
    /// # Errors
    /// The error of the failure, if it was the tenth, or no connection was available.
    async fn again<DB: Database>(&mut self, failure: Failure, part: Part) -> Result<(), Error> {
        let was_sent = !matches!(failure, Failure::NoThreads(_) | Failure::NoConnection(_));
        if failure.is_unanswered() || (was_sent && !DB::CHANGES_ATOMICALLY) {
            self.changed();
        }
        if !was_sent || !self.looks_again().await {
            return Err(self.failed(failure, part));
        }
        Ok(())
    }

    /// Pauses before another attempt, ten times at most.
    async fn looks_again(&mut self) -> bool {
        self.failures += 1;
        if self.failures == 10 {
            return false;
        }
        sleep(Duration::from_millis(fastrand::u64(5..50)) * self.failures).await;
        self.begun = Instant::now();
        true
    }

    /// Pauses after an attempt that waited in vain for a lock on the table, so that the clients
    /// behind it go on.
    ///
    /// # Errors
    /// [`Error::InUse`], if the time is over.
    async fn blocked<DB: Database>(&mut self, connections: &Sessions<DB>) -> Result<(), Error> {
        if !DB::CHANGES_ATOMICALLY {
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

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    async fn outcome_after<DB: Database>(failures: impl IntoIterator<Item = Failure>) -> Certainty {
        let mut attempts = Attempts::new();
        for failure in failures {
            match attempts.again::<DB>(failure, Part::Locks).await {
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
        attempts.again::<sqlx::Sqlite>(Failure::NoReply, Part::Locks).await.unwrap();
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
