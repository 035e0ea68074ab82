//! One migration: what a database lacks, the statements that create it, and how these are printed.

use std::{fmt, time::Duration};

use sqlx::Pool;

use crate::{
    causes::Setup,
    error::Error,
    migration::attempts::{Attempts, LIMIT, LOOK},
    schema::{schema, unfit},
    session::{
        sessions::{Purpose, Sessions},
        time::Instant,
    },
    store::{
        Database,
        failure::Failure,
        fault::Fault,
        migration::{Part, Step},
        schema::{Installed, Schema},
    },
};

/// How long a removal may take once it has the lock: where a column is dropped by a copy, the table
/// is copied.
const REMOVAL: Duration = Duration::from_secs(600);
const NO_FUNCTIONS: &str =
    "SQLite has no stored functions: use the crate, the program `rowlock` or the Python client there";
const NOT_HIDDEN: &str = "this database has no INVISIBLE columns: statements of other programs that INSERT into \
                          t_resource_lock without a list of columns fail from now on; give them one first";

/// The statements of a migration. It is displayed as a script for the database's own client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub(super) parts: Vec<PlannedPart>,
    pub(super) notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPart {
    pub around: (&'static str, &'static str),
    pub steps: Vec<Step>,
}

impl Plan {
    pub(super) fn of(around: (&'static str, &'static str), steps: Vec<Step>) -> Self {
        let part = (!steps.is_empty()).then_some(PlannedPart { around, steps });
        Self { parts: part.into_iter().collect(), notes: Vec::new() }
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the statements, in their order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.parts.iter().flat_map(|part| &part.steps)
    }

    /// Returns notes to read before the plan is run.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "-- NOTE: {note}")?;
        }
        for PlannedPart { around: (before, after), steps } in &self.parts {
            f.write_str(before)?;
            for Step { sql, locks } in steps {
                writeln!(f, "-- lock: {locks}\n{sql};")?;
            }
            f.write_str(after)?;
        }
        Ok(())
    }
}

/// One call: its sessions, which end with it, and its attempts.
pub struct Work<DB: Database> {
    connections: Sessions<DB>,
    attempts: Attempts,
}

impl<DB: Database> Drop for Work<DB> {
    fn drop(&mut self) {
        self.connections.close_idle();
    }
}

impl<DB: Database> Work<DB> {
    pub fn new(pool: &Pool<DB>) -> Self {
        Self { connections: Sessions::new(pool.clone(), Purpose::Requests), attempts: Attempts::new() }
    }

    async fn schema(&self, part: Part) -> Result<Schema, Error> {
        let schema = schema(&self.connections, self.attempts.limit, LIMIT, part).await;
        schema.map_err(|error| self.attempts.error(error))
    }

    /// Returns what a part lacks.
    pub async fn look(&self, part: Part) -> Result<Plan, Error> {
        let schema = self.schema(part).await?;
        let exists = !schema.columns.is_empty();
        if let Some(wrong) = schema.foreign().or_else(|| schema.wrong.clone()) {
            return Err(unfit(wrong));
        }
        if part == Part::Functions && self.installed().await?.is_enough() {
            return Ok(Plan::default());
        }
        let steps = DB::steps(&schema, part);
        let is_seen = part == Part::Locks && exists && !schema.missing_columns().is_empty() && !schema.hides_columns;
        let mut plan = Plan::of(DB::around(part), steps);
        plan.notes.extend(is_seen.then(|| NOT_HIDDEN.to_owned()));
        Ok(plan)
    }

    /// Returns a note if a row is of a time that has not come yet, by the clock of other programs.
    /// A table that does not reply within a moment has none.
    pub async fn look_for_local_time(&self, offset: i64) -> Option<String> {
        let limit = (Instant::now() + LOOK).min(self.attempts.limit);
        let found = self.connections.send(limit, async |conn| DB::ahead(conn, offset).await).await;
        found.ok().flatten().map(|key| {
            format!(
                "the begin_time of key {key:?} is in the future: programs that write local time do that, and others \
                 then wait too long; declare them with their offset (`article_clients`, `--article-clients +08:00`)"
            )
        })
    }

    /// Returns the statements that leave the article's table alone.
    pub async fn look_back(&self) -> Result<(Schema, Plan), Error> {
        let mut schema = self.schema(Part::Locks).await?;
        if let Some(wrong) = schema.foreign() {
            return Err(unfit(wrong));
        }
        schema.routines = self.found_functions(false).await?.unwrap_or_default().routines;
        let plan = Plan::of(DB::around(Part::Removal), DB::steps(&schema, Part::Removal));
        Ok((schema, plan))
    }

    /// Removes what [`look_back`](Self::look_back) returns, unless a claim or an instance needs it.
    pub async fn remove(&mut self) -> Result<Plan, Error> {
        let mut whole = Plan::default();
        loop {
            let (schema, plan) = self.look_back().await?;
            // After an attempt that may have removed some of it, this is the rest.
            if !self.attempts.has_changed() {
                whole = plan.clone();
            }
            let Some(PlannedPart { steps, .. }) = plan.parts.first() else { return Ok(whole) };
            let refused = |failure: &Failure| matches!(failure.fault(), Fault::Denied | Fault::ReadOnly);
            let remove = async |conn: &mut DB::Connection| DB::remove(conn, &schema, steps).await;
            let (is_check, removed) = match self.check(steps).await {
                Ok(()) => (false, self.connections.send(Instant::now() + REMOVAL, remove).await),
                Err(lacking) => (true, Err(lacking)),
            };
            match removed {
                // The time for another look may be over.
                Ok(None) => return Ok(whole),
                Ok(Some(by)) => return Err(Setup::StillUsed { by }.into()),
                Err(failure) if refused(&failure) => {
                    if !is_check && !self.look_back().await.is_ok_and(|(_, now)| now == plan) {
                        self.attempts.changed();
                    }
                    return Err(self.attempts.failed(failure, Part::Removal));
                }
                Err(failure) => self.attempts.after(failure, Part::Removal, is_check, &self.connections).await?,
            }
        }
    }

    async fn check(&self, steps: &[Step]) -> Result<(), Failure> {
        self.connections.send(self.attempts.limit, async |conn| DB::check_rights(conn, steps).await).await
    }

    /// Carries steps out. Where each one commits, those before a failure are done, too.
    async fn alter(&self, steps: &[Step], done: &mut Vec<Step>) -> Result<(), Failure> {
        for steps in steps.chunks(if DB::CHANGES_ATOMICALLY { steps.len() } else { 1 }) {
            self.connections.send(self.attempts.limit, async |conn| DB::alter(conn, steps).await).await?;
            done.extend_from_slice(steps);
        }
        Ok(())
    }

    async fn found_functions(&self, with_version: bool) -> Result<Option<Installed>, Error> {
        let found = async |conn: &mut DB::Connection| DB::functions(conn, with_version).await;
        let found = self.connections.send_repeatedly(self.attempts.limit, found).await;
        found.map_err(|failure| self.attempts.failed(failure, Part::Functions))
    }

    /// Returns the functions that exist.
    pub async fn installed(&self) -> Result<Installed, Error> {
        self.found_functions(true).await?.ok_or_else(|| Error::Setup(Setup::Unsupported { wrong: NO_FUNCTIONS.into() }))
    }

    /// Creates what a part lacks, until nothing is missing.
    pub async fn complete(&mut self, part: Part, done: &mut Plan) -> Result<(), Error> {
        let mut is_first = true;
        loop {
            let plan = self.look(part).await?;
            let Some(planned) = plan.parts.first() else { return Ok(()) };
            // Another instance may be replacing what was created; otherwise it is somewhere else.
            if done.parts.contains(planned) && !self.attempts.looks_again().await {
                return Err(unfit("what was created is not found in it: check the search_path".to_owned()));
            }
            for note in plan.notes.iter().filter(|_| is_first) {
                tracing::warn!("{note}");
            }
            is_first = false;
            let denied = |failure: &Failure| match failure.fault() {
                Fault::Denied => true,
                Fault::ReadOnly => part != Part::Locks,
                _ => false,
            };
            let mut steps = Vec::new();
            let (is_check, altered) = match self.check(&planned.steps).await {
                Ok(()) => (false, self.alter(&planned.steps, &mut steps).await),
                lacking => (true, lacking),
            };
            if !steps.is_empty() {
                self.attempts.changed();
                done.parts.push(PlannedPart { around: planned.around, steps });
            }
            match altered {
                Ok(()) => {}
                Err(failure) if denied(&failure) => return self.denied(failure, part, done),
                Err(failure) => self.attempts.after(failure, part, is_check, &self.connections).await?,
            }
        }
    }

    /// Locks do without the tables of schedules.
    fn denied(&self, failure: Failure, part: Part, done: &mut Plan) -> Result<(), Error> {
        if matches!(part, Part::Locks | Part::Functions | Part::Removal) {
            return Err(self.attempts.failed(failure, part));
        }
        let note = format!("tables of schedules are missing, and could not be created: {failure}");
        tracing::warn!("{note}");
        done.notes.push(note);
        Ok(())
    }
}
