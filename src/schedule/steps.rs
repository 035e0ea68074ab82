//! Changes of the rows of schedules, as instances carry them out.

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
    store::{
        Database,
        changes::{Change, recorded},
        instances::TimesChange,
        orders::What,
        schedule::Times,
    },
};

/// A change of one or two rows.
pub enum Step<'a> {
    Return(&'a Times),
    Change(&'a Times, Decision, TimesChange),
    /// The first one is removed, and the second one takes its place.
    Rename(Box<[(Times, TimesChange); 2]>),
}

/// Changes rows. Returns `false` if one has changed since it was read.
pub async fn carry_out<DB: Database>(core: &Core<DB>, step: &Step<'_>) -> Result<bool, Error> {
    match step {
        Step::Return(times) => {
            let names = std::slice::from_ref(&times.name);
            answered!(core, Action::Update, &times.name.quoted(), conn => DB::mark_gone(conn, names, false))?;
            Ok(true)
        }
        Step::Change(times, decision, change) => change_one(core, times, *decision, change).await,
        Step::Rename(both) => {
            let [(old, removal), (new, change)] = &**both;
            let names = format!("{} and {}", old.name.quoted(), new.name.quoted());
            let renamed =
                answered!(core, Action::Update, &names, conn => DB::rename(conn, (old, removal), (new, change)))?;
            if renamed {
                tracing::info!(schedule = %new.name, before = %old.name, slot = %change.slot, "the schedule was renamed");
            }
            Ok(renamed)
        }
    }
}

/// Deletes the end of a pause that was ended by a version which knows of no such order.
pub async fn forget_pause<DB: Database>(core: &Core<DB>, name: &Key, until: DateTime<Utc>) -> Result<(), Error> {
    let forgotten: Result<bool, Error> = answered!(core, Action::Update, &name.quoted(), conn => DB::cancel(conn, What::Pause, name.as_str(), Some(until)));
    forgotten.map(drop)
}

/// Resumes a schedule whose pause was to end at this time.
pub async fn resume<DB: Database>(core: &Core<DB>, name: &Key, until: DateTime<Utc>) -> Result<bool, Error> {
    let change = Change { who: &core.label, what: "resumed", name: name.as_str() };
    let resume = async |conn: &mut DB::Connection| {
        let resumed = DB::pause(conn, name, false).await?;
        // Another pause may have begun since.
        let is_over = resumed && DB::cancel(conn, What::Pause, name.as_str(), Some(until)).await?;
        Ok(is_over.then(|| ((), "its pause has ended".to_owned())))
    };
    let resumed = answered!(core, Action::Update, &name.quoted(), conn => recorded::<DB, _>(conn, &change, resume))?;
    Ok(resumed.is_some())
}

async fn change_one<DB: Database>(
    core: &Core<DB>,
    times: &Times,
    decision: Decision,
    change: &TimesChange,
) -> Result<bool, Error> {
    let name = times.name.quoted();
    if decision == Decision::PutBack {
        tracing::warn!(schedule = %times.name, slot = %change.slot, "the database's clock was ahead: the slot is corrected");
    }
    if change.run_ahead {
        let forgotten: Result<(), Error> =
            answered!(core, Action::Update, &name, conn => DB::forget_runs_ahead(conn, &times.name));
        if let Err(error) = forgotten {
            tracing::warn!(schedule = %times.name, ?error, "runs whose slot is in the future were not deleted from the history");
        }
    }
    let changed = answered!(core, Action::Update, &name, conn => DB::change_times(conn, times, change))?;
    if changed && decision == Decision::PutBack {
        metrics::slot_put_back(times.name.as_str());
    }
    if changed {
        tracing::info!(schedule = %times.name, times = times.spec, zone = times.zone, slot = %change.slot, "the times apply from now on");
    }
    Ok(changed)
}
