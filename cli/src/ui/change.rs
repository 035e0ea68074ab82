//! Changes of a key or a job, as an operator asks for them.

use std::{future::Future, pin::Pin};

use chrono::{DateTime, Utc};
use rowlock::{
    Database, LeaseLock, Schedules, Status,
    admin::{ForcedRelease, LockInfo, ScheduleInfo},
};
use sqlx::Pool;

use crate::{
    args::keys::MinInterval,
    database,
    exit::{Failure, REFUSED},
    keys::rows::claim,
    schedule::change::{ask_for_run, nothing_to_stop},
};

const ANYWAY: &str = "tick the box on the page \"Run now\" to request the run anyway";

/// What an operator asks for, of a key or a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Release,
    Pause,
    Resume,
    Trigger,
    Skip,
    Stop,
}

/// A change, as its form says it.
#[derive(Clone, Debug)]
pub struct Change {
    pub verb: Verb,
    /// Who asks, as the label under which the change is recorded.
    pub who: String,
    /// The key or the job.
    pub name: String,
    /// The row that the page showed. A key that has changed hands since is not released, and of a
    /// job that has gone on to another tick, none is stopped or skipped.
    pub seen: String,
    pub status: Status,
    /// A run is asked for although no instance that is alive would run it.
    pub anyway: bool,
}

pub type Changer = Box<dyn Fn(Change) -> Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>> + Send + Sync>;

/// Returns what makes changes on a database.
pub fn changer<DB: Database>(pool: Pool<DB>, judged_by: MinInterval) -> Changer {
    Box::new(move |change| {
        let pool = pool.clone();
        Box::pin(async move { make(pool, judged_by, &change).await })
    })
}

async fn make<DB: Database>(pool: Pool<DB>, judged_by: MinInterval, change: &Change) -> Result<(), Failure> {
    let name = change.name.as_str();
    let schedules = Schedules::new(pool.clone()).label(&change.who);
    let is_another = |job: &ScheduleInfo| seen_tick(change.verb, job) != change.seen;
    if change.verb.is_of_tick() && schedules.inspect(name).await?.as_ref().is_some_and(is_another) {
        let text = format!("{name}: the job has gone on to another tick since the page was shown, and was left alone");
        return Err(Failure::new(REFUSED, text));
    }
    match change.verb {
        Verb::Pause => Ok(schedules.pause(name).await?),
        Verb::Resume => Ok(schedules.resume(name).await?),
        Verb::Trigger => ask_for_run(&schedules, name, change.anyway, ANYWAY).await,
        Verb::Skip => Ok(schedules.skip(name).await.map(drop)?),
        Verb::Stop => schedules.stop(name).await?.then_some(()).ok_or_else(|| nothing_to_stop(name)),
        Verb::Release => {
            let lock = database::lock(pool, Some(&change.who))?.min_interval(judged_by.min_interval);
            release(&lock, change).await
        }
    }
}

/// Releases the key, if its row is still the one that the page showed.
async fn release<DB: Database>(lock: &LeaseLock<DB>, change: &Change) -> Result<(), Failure> {
    let now = match lock.inspect(&change.name).await? {
        Some(row) if seen(&row) == change.seen => match lock.force_release_if_unchanged(&row, change.status).await? {
            ForcedRelease::Released(_) => return Ok(()),
            ForcedRelease::Changed(now) => now,
        },
        now => now,
    };
    Err(changed(now.as_ref()))
}

/// Writes down what tells a row from every later one of its key, for a form to carry.
pub fn seen(row: &LockInfo) -> String {
    let micros = |time: Option<DateTime<Utc>>| time.map(|time| time.timestamp_micros()).unwrap_or_default();
    let holder = row.holder.map(|holder| holder.to_string()).unwrap_or_default();
    format!("{}/{holder}/{}/{}", row.token, micros(row.since), micros(row.ended))
}

/// Writes down what tells the tick that is stopped, or that is skipped, from every other one of the
/// job, for a form to carry.
pub fn seen_tick(verb: Verb, job: &ScheduleInfo) -> String {
    let of = if verb == Verb::Stop { [job.run_slot, None] } else { [Some(job.slot), job.skipped_until] };
    let of = of.map(|time| time.map_or(0, |time| time.timestamp_micros()).to_string()).join("/");
    if verb == Verb::Skip && is_begun(job) { format!("after {of}") } else { of }
}

/// Returns whether the tick of the row is under way, so that the next one comes after it.
pub fn is_begun(job: &ScheduleInfo) -> bool {
    job.attempt > 0 && job.run_slot == Some(job.slot)
}

/// Says that a key was left alone, and what it is now.
fn changed(now: Option<&LockInfo>) -> Failure {
    let now = match now {
        None => "its row was deleted".to_owned(),
        Some(row) => format!("it is now {}", claim(row)),
    };
    let text = format!("the key has changed hands since the page was shown, and was left alone: {now}");
    Failure::new(REFUSED, text)
}

impl Verb {
    pub const ALL: [Self; 6] = [Self::Release, Self::Pause, Self::Resume, Self::Trigger, Self::Skip, Self::Stop];

    /// Returns whether it concerns one tick of a job.
    pub fn is_of_tick(self) -> bool {
        matches!(self, Self::Skip | Self::Stop)
    }

    /// Returns the name, which is also the path of its form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Trigger => "trigger",
            Self::Skip => "skip",
            Self::Stop => "stop",
        }
    }
}
