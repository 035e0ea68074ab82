//! What operators see of instances, and do about schedules that no instance has.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::{
    action::Action,
    error::Error,
    key::Key,
    schedule::{
        core::{Core, answered, not_found, refused},
        declarations::{Word, from_text, times_from},
        info::Said,
        instances::{AHEAD, Decision, Declared, is_live},
        presence::{INSTANCES, texts_of},
        schedules::Schedules,
        spec::Schedule,
    },
    store::{
        Database,
        instances::{Beat, DeclaredTimes, InstanceInfo, OF_SCHEDULES, TimesChange},
        schedule::Times,
    },
};

/// Returns what a text declares, in the order of the names.
fn declared_in(text: &str) -> Vec<DeclaredTimes> {
    let declared = |Times { name, spec, zone }| DeclaredTimes { name: name.as_str().to_owned(), times: spec, zone };
    let mut declares: Vec<DeclaredTimes> = times_from(text).into_iter().map(declared).collect();
    declares.sort_by(|one, other| one.name.cmp(&other.name));
    declares
}

/// Reads what the instances declare that are alive.
pub async fn declared<DB: Database>(core: &Core<DB>) -> Result<HashMap<Key, Said>, Error> {
    let Beat { sets, .. } = answered!(core, Action::Inspect, INSTANCES, conn => DB::beat(conn, None))?;
    let mut living: Vec<_> = sets.into_iter().filter(|set| set.alive > 0).collect();
    living.sort_by_key(|set| set.since);
    let texts = texts_of(core, living.iter().map(|set| set.declares_id).collect()).await?;
    let mut said: HashMap<Key, Said> = HashMap::new();
    for set in living {
        let Some(text) = texts.get(&set.declares_id) else { continue };
        for (times, description) in from_text(text) {
            let said = said.entry(times.name.clone()).or_default();
            said.times.push((times, u32::try_from(set.alive).unwrap_or(u32::MAX)));
            if !description.is_empty() {
                said.description = description;
            }
        }
    }
    Ok(said)
}

/// Operations on instances, and on schedules that no instance has.
impl<DB: Database> Schedules<DB> {
    /// Lists the instances that run schedules of the database, in the order of their labels.
    ///
    /// An instance that has died is listed until another one forgets it, after twice the time for
    /// which an instance counts as alive.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// The method only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # rowlock::migrate(&pool).await?;
    /// for instance in rowlock::Schedules::new(pool).instances().await? {
    ///     println!("{} {} declares {} schedules", instance.label, instance.build, instance.declares.len());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn instances(&self) -> Result<Vec<InstanceInfo>, Error> {
        let core = self.core()?;
        let listed = answered!(&*core, Action::Inspect, INSTANCES, conn => DB::instances(conn))?;
        let sets: BTreeSet<i64> = listed.iter().map(|(declares_id, _)| *declares_id).collect();
        let texts = texts_of(&core, sets.into_iter().collect()).await?;
        let with_declared = |(declares_id, instance)| {
            let declares = texts.get(&declares_id).map(|text| declared_in(text)).unwrap_or_default();
            InstanceInfo { declares, ..instance }
        };
        Ok(listed.into_iter().map(with_declared).collect())
    }

    /// Removes the declarations of an instance at once, for example after its machine was shut
    /// down. An instance that is alive announces itself again. Returns `false` if there is none.
    ///
    /// # Errors
    /// As [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If the future is dropped, the instance may be forgotten.
    pub async fn forget_instance(&self, id: Uuid) -> Result<bool, Error> {
        let core = self.core()?;
        answered!(&*core, Action::Update, INSTANCES, conn => DB::end_instance(conn, id))
    }

    /// Deletes the row of a schedule that no living instance declares, with its trigger, its pause
    /// and its pending tick. Its history stays.
    ///
    /// # Errors
    /// [`Error::Setup`] if an instance that is alive declares the schedule, or a run is
    /// under way; [`Error::NotFound`]; otherwise as [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the schedule may be removed.
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        if core.row(&name).await?.is_none() {
            return Err(not_found(&name, None));
        }
        let declared = declared(&core).await?.remove(&name).unwrap_or_default();
        if !declared.times.is_empty() {
            let wrong = "instances that are alive declare it, or that it is removed: deploy the application without it, or stop them";
            return Err(refused(&name, wrong));
        }
        let remove = async |conn: &mut DB::Connection| {
            let removed = DB::remove_schedule(conn, &name).await?;
            for what in OF_SCHEDULES {
                DB::cancel(conn, what, name.as_str(), None).await?;
            }
            Ok(removed.then(String::new))
        };
        let removed = core.change(Action::Forget, ("removed", name.as_str()), remove).await?;
        // A removal whose reply was lost is sent again, and finds no row.
        if !removed && core.row(&name).await?.is_some() {
            return Err(refused(&name, "a run is under way: it can be removed after that"));
        }
        Ok(())
    }

    /// Moves the slot of a schedule to the first one from now on: what was due is skipped, and
    /// a slot that a wrong clock moved far ahead is corrected. If the row has a run that was lost,
    /// its tick is not tried again, and a trigger that waited for its end is dropped.
    ///
    /// # Errors
    /// [`Error::Setup`] if a run is under way, the times of the row are of another version of
    /// rowlock, or the schedule was removed; [`Error::NotFound`]; otherwise as
    /// [`pause`](Self::pause).
    ///
    /// # Cancel safety
    /// If the future is dropped, the slot may be moved.
    pub async fn reset(&self, name: &str) -> Result<DateTime<Utc>, Error> {
        let (core, name) = (self.core()?, Key::new(name)?);
        loop {
            let row = core.row(&name).await?.ok_or_else(|| not_found(&name, None))?;
            let now = row.now;
            let Some(schedule) = Schedule::of(&row.times) else {
                return Err(refused(&name, format!("its times {:?} have no next tick", row.times.spec)));
            };
            if is_live(&row, now) {
                return Err(refused(&name, "a run is under way: it can be reset after that"));
            }
            let (slot, none) = (schedule.next(now), Word::default());
            let decision = if row.running { Decision::Fresh } else { Decision::PutBack };
            let change = Declared::new(&schedule).change_to(slot, decision, Some(&row), &none, now);
            // Another version may write the same times in another form. What was run ahead of the
            // clock is forgotten also if other runs came after it.
            let change = TimesChange { times: row.times.clone(), forgets_after: Some(now), ..change };
            // The clock was ahead when the pause before the next attempt began, perhaps.
            let wakes = row.due_at > change.slot.max(now + AHEAD);
            let reset = async |conn: &mut DB::Connection| {
                if !DB::change_within(conn, &change).await? {
                    return Ok(None);
                }
                if wakes {
                    DB::wake(conn, &name).await?;
                }
                Ok(Some(format!("to {}", change.slot)))
            };
            // A run that has just begun or ended has changed the row.
            if core.change(Action::Update, ("reset", name.as_str()), reset).await? {
                return Ok(change.slot);
            }
        }
    }
}
