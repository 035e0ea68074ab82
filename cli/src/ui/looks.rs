//! Looks at the database. All pages share them: how often it is asked does not depend on how many
//! pages are open, and it is not asked while none is.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use chrono::{DateTime, TimeDelta, Utc};
use rowlock::{
    Database, Error, LeaseLock, Schedules,
    admin::{ListOptions, RunOptions},
    errors::Setup,
};
use tokio::{
    sync::{Mutex, Notify, watch},
    task::JoinError,
    time::{sleep, timeout},
};

use crate::{
    exit::{self, Failure},
    keys::names::{PAGE, pages},
    ui::snapshot::{CHANGES, EACH, MAX_RUNS, Part, Runs, Snapshot, Unread, WEEK},
};

/// What is known of the database.
#[derive(Clone, Debug)]
pub struct View {
    /// When the last look was begun, and how long it stays fresh.
    pub began: Instant,
    pub fresh_for: Duration,
    /// The last look that succeeded.
    pub snapshot: Option<Arc<Snapshot>>,
    /// Why looks have failed since then.
    pub problem: Option<Problem>,
}

#[derive(Clone, Debug)]
pub struct Problem {
    pub text: String,
    /// When the first of these looks failed.
    pub since: DateTime<Utc>,
}

impl View {
    /// Returns whether several looks should have been made since: the one that is under way does
    /// not come to its end.
    pub fn is_old(&self) -> bool {
        self.began.elapsed() > 4 * self.fresh_for
    }

    fn is_fresh(&self) -> bool {
        self.began.elapsed() < self.fresh_for
    }
}

/// The looks, as the pages see them.
#[derive(Clone, Debug)]
pub struct Looks {
    view: watch::Receiver<View>,
    /// Asks for a look, at the next time for one.
    wanted: Arc<Notify>,
    /// Asks for a look at once.
    urgent: Arc<Notify>,
}

impl Looks {
    /// Starts the task that looks.
    pub fn start<DB: Database>(lock: LeaseLock<DB>, schedules: Schedules<DB>) -> Self {
        let reader = Reader { lock, schedules, runs: Arc::default(), is_complete: false };
        let reader = Arc::new(Mutex::new(reader));
        Self::by(move || {
            let reader = reader.clone();
            async move { reader.lock().await.read().await }
        })
    }

    /// Starts a task that looks by this function, which returns how many statements that took, too.
    fn by<L>(mut look: impl FnMut() -> L + Send + 'static) -> Self
    where
        L: Future<Output = (Result<Snapshot, Failure>, u32)> + Send + 'static,
    {
        let nothing = View { began: Instant::now(), fresh_for: Duration::ZERO, snapshot: None, problem: None };
        let (sender, view) = watch::channel(nothing);
        let looks = Self { view, wanted: Arc::default(), urgent: Arc::default() };
        let Self { wanted, urgent, .. } = looks.clone();
        tokio::spawn(async move {
            loop {
                wanted.notified().await;
                let began = Instant::now();
                // A look that panics ends a task of its own, and has failed as any other.
                let looked = tokio::spawn(look()).await;
                let (read, statements) = looked.unwrap_or_else(|error| (Err(panicked(&error)), 0));
                let took = began.elapsed();
                let fresh_for = if read.is_ok() { pause(statements, took) } else { AGAIN.max(took * 2) };
                let since = sender.borrow().problem.as_ref().map_or_else(Utc::now, |problem| problem.since);
                sender.send_modify(|view| {
                    (view.began, view.fresh_for) = (began, fresh_for);
                    match read {
                        Ok(snapshot) => (view.snapshot, view.problem) = (Some(Arc::new(snapshot)), None),
                        Err(failure) => view.problem = Some(Problem { text: failure.to_string(), since }),
                    }
                });
                tokio::select! {
                    () = sleep(fresh_for.saturating_sub(began.elapsed())) => {}
                    () = async { urgent.notified().await; sleep(URGENT.saturating_sub(began.elapsed())).await } => {}
                }
            }
        });
        looks
    }

    /// Returns what is known now, after a look if the last one is old. After a failure, the next
    /// look is waited for a moment only: the database may still not answer.
    pub async fn fresh(&self) -> View {
        let mut view = self.view.clone();
        let seen = view.borrow_and_update().clone();
        if seen.is_fresh() {
            return seen;
        }
        match seen.problem {
            Some(_) => timeout(BACK, self.after(view)).await.unwrap_or(seen),
            None => self.after(view).await,
        }
    }

    /// Returns the result of the next look.
    pub async fn next(&self) -> View {
        let mut view = self.view.clone();
        view.mark_unchanged();
        self.after(view).await
    }

    /// Returns what is known, however old it is.
    pub fn last(&self) -> View {
        self.view.borrow().clone()
    }

    /// Looks at once, so that what was changed just now is seen. A look that takes long is not
    /// waited for.
    pub async fn at_once(&self) {
        let asked = Instant::now();
        self.urgent.notify_one();
        let seen = async { while self.next().await.began < asked {} };
        let _ = timeout(AT_ONCE, seen).await;
    }

    async fn after(&self, mut view: watch::Receiver<View>) -> View {
        self.wanted.notify_one();
        if view.changed().await.is_err() {
            // No task looks any more. Callers that wait for one look after the other must not spin.
            sleep(AGAIN).await;
        }
        view.borrow_and_update().clone()
    }
}

fn panicked(error: &JoinError) -> Failure {
    Failure::new(exit::UNAVAILABLE, format_args!("rowlock ui failed while it read the database: {error}"))
}

/// The least pause from the start of a look to one that is asked for at once.
const URGENT: Duration = Duration::from_secs(1);
/// How long a change waits for the look that shows it.
const AT_ONCE: Duration = Duration::from_secs(10);
/// How long the look after one that failed is waited for.
const BACK: Duration = Duration::from_secs(4);
/// The pause after a look that failed.
const AGAIN: Duration = Duration::from_secs(2);

/// Returns the pause from the start of a look to the next one: at most two statements a second, and
/// fewer looks if they take long.
fn pause(statements: u32, took: Duration) -> Duration {
    const EACH: Duration = Duration::from_millis(600);
    const LONGEST: Duration = Duration::from_secs(15);
    (EACH * statements).max(EACH * 4).max((took * 10).min(LONGEST)).max(took * 2)
}

/// Reads the database.
struct Reader<DB: Database> {
    lock: LeaseLock<DB>,
    schedules: Schedules<DB>,
    runs: Arc<Runs>,
    /// Whether the runs were read completely, so that the latest ones are enough.
    is_complete: bool,
}

/// A transaction may commit later than its time of end says.
const LATE: TimeDelta = TimeDelta::minutes(1);
/// The library refuses an age of more than ten years.
const OLDEST: Duration = Duration::from_secs(3_650 * 24 * 60 * 60);
/// How many statements read the instances, and what they declare, if there are no more than two
/// versions.
const INSTANCES: u32 = 6;
/// The rows of one statement that lists schedules.
const SCHEDULES: usize = 500;

impl<DB: Database> Reader<DB> {
    /// Looks once. Returns how many statements that took, too.
    async fn read(&mut self) -> (Result<Snapshot, Failure>, u32) {
        let mut statements = 3;
        let read = self.read_all(&mut statements).await;
        (read.map_err(Failure::from), statements)
    }

    /// Reads what can be read. A database that does not answer is an error, and so is one of which
    /// neither locks nor schedules can be read.
    async fn read_all(&mut self, statements: &mut u32) -> Result<Snapshot, Error> {
        let (begun, mut unread) = (Utc::now(), Vec::new());
        let locks = match pages(&self.lock, &ListOptions::default()).await {
            Err(error) if error.is_retryable() => return Err(error),
            locks => locks,
        };
        *statements += u32::try_from(locks.as_ref().map_or(0, Vec::len)).unwrap_or_default() / PAGE;
        let waiting = match &locks {
            Ok(_) => or_unread(self.lock.queue_lengths().await, Part::Queues, &mut unread),
            Err(_) => Vec::new(),
        };
        let jobs = match self.schedules.list().await {
            Err(Error::Setup(Setup::ScheduleTablesMissing)) => None,
            jobs => {
                *statements += u32::try_from(jobs.as_ref().map_or(0, Vec::len) / SCHEDULES).unwrap_or_default() + 2;
                Some(jobs)
            }
        };
        let reads_runs = matches!(jobs, Some(Ok(_)));
        let mut locks = match locks {
            Err(error) if !reads_runs => return Err(error),
            locks => or_unread(locks, Part::Locks, &mut unread),
        };
        // A table of another program's may have an order of its own.
        locks.sort_by(|one, other| one.key.cmp(&other.key));
        let jobs = or_unread(jobs.unwrap_or(Ok(Vec::new())), Part::Schedules, &mut unread);
        let times = locks.iter().map(|lock| lock.now).chain(jobs.iter().map(|job| job.now));
        let now = times.max().unwrap_or_else(Utc::now);
        if reads_runs {
            match self.read_runs(now, begun).await {
                Ok(more) => *statements += more,
                Err(error) => unread.push(Unread::new(Part::Runs, error)),
            }
        }
        let instances = match reads_runs {
            true => or_unread(self.schedules.instances().await, Part::Instances, &mut unread),
            false => Vec::new(),
        };
        *statements += if reads_runs { INSTANCES } else { 0 };
        let changes = or_unread(self.lock.changes(None, CHANGES).await, Part::Changes, &mut unread);
        if unread.iter().any(|unread| unread.passes) {
            // The database may have gone away after the locks were read.
            self.lock.list(&ListOptions::default().limit(1)).await?;
        }
        let waiting = waiting.into_iter().collect();
        Ok(Snapshot { now, locks, waiting, jobs, runs: self.runs.clone(), instances, changes, unread })
    }

    /// Reads the runs that are new, or at first those of a week. If there may be more of them than
    /// one statement reads, the last ones of each schedule are read too. The look has begun at
    /// `begun` by this machine's clock. Returns how many statements it took beside the one that
    /// every look needs.
    async fn read_runs(&mut self, now: DateTime<Utc>, begun: DateTime<Utc>) -> Result<u32, Error> {
        // A run that ended by a clock that was ahead tells nothing of those since, and may have
        // been deleted when the clock was put right.
        if self.runs.newest().is_some_and(|end| end > now) {
            (self.runs, self.is_complete) = (Arc::default(), false);
        }
        let newest = self.runs.newest().filter(|_| self.is_complete);
        let age = newest.map_or(WEEK, |end| now - end + LATE).to_std().unwrap_or_default();
        let since = RunOptions::default().within(age.min(OLDEST)).limit(MAX_RUNS);
        let mut found = self.schedules.runs(&since).await?;
        // What ended between the last look and the first of these runs is not among them.
        let more = !self.is_complete || found.len() >= MAX_RUNS as usize;
        if more {
            found.extend(self.schedules.latest_runs(EACH).await?);
        }
        let runs = Arc::make_mut(&mut self.runs);
        if runs.add(found) {
            runs.prune(now);
        }
        // The server subtracts the age from a later time than `now`.
        self.is_complete = Utc::now() - begun < LATE / 2;
        Ok(if more { 2 } else { 0 })
    }
}

/// Returns what was read, or nothing and records why.
fn or_unread<T>(read: Result<Vec<T>, Error>, part: Part, unread: &mut Vec<Unread>) -> Vec<T> {
    read.unwrap_or_else(|error| {
        unread.push(Unread::new(part, error));
        Vec::new()
    })
}

impl Unread {
    fn new(part: Part, error: Error) -> Self {
        let failure = match (part, error) {
            // The error means the table of locks.
            (Part::Changes, Error::Setup(Setup::TableMissing)) => {
                Failure::new(exit::UNFIT, "the table t_resource_change does not exist here: run `rowlock migrate` once")
            }
            (_, error) => Failure::from(error),
        };
        Self { part, why: failure.to_string(), passes: failure.passes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_look_that_panics_has_failed_and_is_made_again() {
        let mut number = 0;
        let looks = Looks::by(move || {
            number += 1;
            async move {
                assert!(number != 2, "a fault");
                (Ok(Snapshot::default()), 2)
            }
        });
        assert!(looks.fresh().await.problem.is_none());
        looks.urgent.notify_one();
        let failed = looks.next().await;
        assert!(failed.problem.is_some_and(|problem| problem.text.contains("a fault")) && failed.snapshot.is_some());
        looks.urgent.notify_one();
        assert!(looks.next().await.problem.is_none());
    }

    #[tokio::test]
    async fn an_old_failure_is_not_reported_again() {
        let mut number = 0;
        let looks = Looks::by(move || {
            number += 1;
            async move {
                let failed = Failure::new(exit::UNAVAILABLE, "away");
                (if number == 1 { Err(failed) } else { Ok(Snapshot::default()) }, 2)
            }
        });
        assert!(looks.fresh().await.problem.is_some());
        while looks.last().is_fresh() {
            sleep(Duration::from_millis(10)).await;
        }
        assert!(looks.fresh().await.problem.is_none(), "the database is back");
    }

    #[tokio::test]
    async fn pages_do_not_spin_when_no_task_looks() {
        let looks = Looks::by(async || (Ok(Snapshot::default()), 2));
        let view = watch::channel(looks.fresh().await).1;
        let looks = Looks { view, ..looks };
        assert!(timeout(Duration::from_millis(200), looks.next()).await.is_err());
    }

    #[test]
    fn looks_cost_two_statements_a_second_and_half_of_the_time_at_most() {
        for statements in 1..20 {
            for millis in [0, 10, 500, 5_000] {
                let took = Duration::from_millis(millis);
                let pause = pause(statements, took);
                assert!(
                    f64::from(statements) / pause.as_secs_f64() < 2.0 && pause >= 2 * took,
                    "{statements} {took:?}"
                );
            }
        }
    }
}
