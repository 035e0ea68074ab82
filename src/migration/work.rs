//! One migration: what a database lacks, and how it is created.

use sqlx::Pool;

use crate::{
    error::Error,
    migration::{
        Functions, Plan,
        attempts::{Attempts, LIMIT},
        plan::{PlannedPart, removal},
    },
    schema::{schema, unfit},
    session::sessions::{Purpose, Sessions},
    store::{
        Database,
        failure::Failure,
        fault::Fault,
        schema::{Part, Schema, THEIRS},
    },
};

const NO_FUNCTIONS: &str =
    "SQLite has no stored functions: use the crate, the program `rowlock` or the Python client there";
const NOT_HIDDEN: &str = "this database has no INVISIBLE columns: statements of other programs that INSERT into \
                          t_resource_lock without a list of columns fail from now on; give them one first";

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

    /// Returns what a part lacks.
    pub async fn look(&self, part: Part) -> Result<Plan, Error> {
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
    pub async fn look_for_local_time(&self) -> Result<Option<String>, Error> {
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
    pub async fn look_back(&self) -> Result<(Schema, Plan), Error> {
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
    pub async fn refuse_instances(&self, pool: &Pool<DB>) -> Result<(), Error> {
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
    pub async fn remove(&mut self) -> Result<Plan, Error> {
        loop {
            let (schema, plan) = self.look_back().await?;
            let Some(PlannedPart { steps, .. }) = plan.parts.first() else { return Ok(plan) };
            // Without the column there are no claims.
            let has_claims = schema.column("holder").is_some();
            let removed = self.connections.send(self.attempts.limit, async |conn| match has_claims {
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

    pub async fn installed(&self) -> Result<Functions, Error> {
        let found = self.connections.send_repeatedly(self.attempts.limit, async |conn| DB::functions(conn).await).await;
        let found = found.map_err(|failure| self.attempts.failed(failure, Part::Functions))?;
        found.map(|found| found.judge()).ok_or_else(|| Error::Unsupported { wrong: NO_FUNCTIONS.into() })
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
