//! Changes of the rows of schedules, as instances carry them out.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::{
    action::Action,
    error::Error,
    key::Key,
    metrics,
    schedule::{
        core::{Core, answered},
        instances::Decision,
    },
    session::time::Instant,
    store::{
        Database,
        instances::{TimesChange, What},
        schedule::ListedSchedule,
    },
};

/// A change of one or two rows.
pub enum Step {
    Change(Decision, TimesChange),
    /// The first one is removed, and the second one takes its place.
    Rename(Box<[TimesChange; 2]>),
}

/// Carries the steps out, until a time if there is one. Returns whether rows were changed. What is
/// left is found again at the next beat, since each step is of a row that is contested.
pub async fn carry_out_all<DB: Database>(
    core: &Core<DB>,
    mut steps: Vec<Step>,
    until: Option<Instant>,
) -> Result<bool, Error> {
    // A row that another transaction has locked keeps no others waiting for good.
    let begin = if steps.is_empty() { 0 } else { fastrand::usize(..steps.len()) };
    steps.rotate_left(begin);
    let mut changed = Ok(false);
    for step in steps {
        if until.is_some_and(|until| Instant::now() >= until) {
            break;
        }
        changed = match (changed, carry_out(core, &step).await) {
            (Ok(changed), Ok(done)) => Ok(changed | done),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
    }
    changed
}

/// Resumes the schedules whose pause is over, until a time if there is one. Returns whether there
/// was one, and how long the next pause lasts.
pub async fn end_pauses<DB: Database>(
    core: &Core<DB>,
    rows: &[&ListedSchedule],
    now: DateTime<Utc>,
    limit: Option<Instant>,
) -> (bool, Option<Duration>) {
    let (mut resumed, mut next) = (false, None);
    // A row that another transaction has locked keeps no others waiting for good.
    let (last, first) = rows.split_at(if rows.is_empty() { 0 } else { fastrand::usize(..rows.len()) });
    for (row, until) in first.iter().chain(last).filter_map(|row| Some((row, row.paused_until?))) {
        if limit.is_some_and(|limit| Instant::now() >= limit) {
            next = Some(Duration::ZERO);
            break;
        }
        let name = &row.times.name;
        let left = (until - now).to_std().unwrap_or_default();
        let done: Result<bool, Error> = match row.paused {
            true if !left.is_zero() => {
                next = Some(next.map_or(left, |next: Duration| next.min(left)));
                continue;
            }
            true => resume(core, name, until).await,
            // A version that knows of no such order has ended the pause.
            false => {
                let by = Some(until);
                answered!(core, Action::Update, &name.quoted(), conn => DB::cancel(conn, What::Pause, name.as_str(), by))
            }
        };
        match done {
            Ok(done) => resumed |= done && row.paused,
            Err(error) => {
                next = Some(Duration::ZERO);
                tracing::warn!(schedule = %name, ?error, "the end of its pause was not carried out; trying again");
            }
        }
    }
    (resumed, next)
}

/// Changes rows. Returns `false` if one has changed since it was read.
async fn carry_out<DB: Database>(core: &Core<DB>, step: &Step) -> Result<bool, Error> {
    match step {
        Step::Change(decision, change) => change_one(core, *decision, change).await,
        Step::Rename(both) => {
            let [old, new] = &**both;
            let names = format!("{} and {}", old.times.name.quoted(), new.times.name.quoted());
            let renamed = answered!(core, Action::Update, &names, conn => DB::rename(conn, old, new))?;
            if renamed {
                tracing::info!(schedule = %new.times.name, before = %old.times.name, slot = %new.slot, "the schedule was renamed");
            }
            Ok(renamed)
        }
    }
}

/// Resumes a schedule whose pause was to end at this time.
async fn resume<DB: Database>(core: &Core<DB>, name: &Key, until: DateTime<Utc>) -> Result<bool, Error> {
    let resume = async |conn: &mut DB::Connection| {
        let resumed = DB::pause(conn, name, false).await?;
        // Another pause may have begun since.
        let is_over = resumed && DB::cancel(conn, What::Pause, name.as_str(), Some(until)).await?;
        Ok(is_over.then(|| "its pause has ended".to_owned()))
    };
    core.change(Action::Update, ("resumed", name.as_str()), resume).await
}

async fn change_one<DB: Database>(core: &Core<DB>, decision: Decision, change: &TimesChange) -> Result<bool, Error> {
    let (times, name) = (&change.times, change.times.name.quoted());
    if decision == Decision::PutBack {
        tracing::warn!(schedule = %times.name, slot = %change.slot, "the database's clock was ahead: the slot is corrected");
    }
    let changed = answered!(core, Action::Update, &name, conn => DB::change_times(conn, change))?;
    if changed && decision == Decision::PutBack {
        metrics::slot_put_back(times.name.as_str());
    }
    if changed && decision != Decision::Return {
        tracing::info!(schedule = %times.name, times = times.spec, zone = times.zone, slot = %change.slot, "the times apply from now on");
    }
    Ok(changed)
}
