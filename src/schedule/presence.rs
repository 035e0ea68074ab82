//! An instance among others: it announces what it declares, beats, and applies its times where
//! `instances.rs` allows it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, SystemTime},
};

use chrono::{DateTime, TimeDelta, Utc};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{
    action::Action,
    error::Error,
    key::{Holder, Key},
    schedule::{
        core::{Core, answered},
        declarations::{Declarations, hash, renamed_to, to_text},
        instances::{Decision, Declared, JUDGES, Judge},
        spec::Schedule,
        steps::{carry_out_all, end_pauses},
        view::{Judged, View},
    },
    session::time::Instant,
    store::{
        Database,
        instances::{Announcement, Beat, DeclaredSet, Given, What},
        schedule::ListedSchedule,
    },
};

/// The pause between two beats, as a multiple of the longest pause between polls, and its bounds.
const BEATS: u32 = 3;
const LEAST_BEAT: Duration = Duration::from_millis(300);
const MOST_BEAT: Duration = Duration::from_secs(20);
/// For how many pauses between beats an instance counts as alive, and for how long at least.
const LIVES: u32 = 4;
const LEAST_LIFE: Duration = Duration::from_secs(3);
/// For how long after its next tick the declaration of a crontab counts, and for how long at most.
const CALLS_AGAIN: TimeDelta = TimeDelta::minutes(5);
const MOST_LIFE: TimeDelta = TimeDelta::days(3653);
/// How long one pass over the schedules may take, as a part of the pause between two beats.
const PASS: u32 = 2;
/// An instance takes nothing from others before this part of the longest life among them is over,
/// so that all can have beaten after an outage.
const SETTLED: (i32, i32) = (3, 4);
/// The rows are read at least this often: after this many of the longest pauses between polls, and
/// after a minute.
const READ_EVERY: (u32, Duration) = (30, Duration::from_secs(60));

pub const INSTANCES: &str = "the table t_resource_schedule_instance";

/// Returns the pause between two beats.
pub fn beat_pause(poll_interval: Duration) -> Duration {
    (BEATS * poll_interval).clamp(LEAST_BEAT, MOST_BEAT)
}

fn life(poll_interval: Duration) -> TimeDelta {
    let life = (LIVES * beat_pause(poll_interval)).max(LEAST_LIFE);
    TimeDelta::from_std(life).unwrap_or(TimeDelta::minutes(1))
}

/// An instance as the others see it, and what it knows of them.
#[derive(Clone)]
pub struct Presence {
    announcement: Announcement,
    declared: Vec<Declared>,
    /// How long an instance with a loop counts as alive.
    lives: TimeDelta,
    beats: u32,
    declarations: Declarations,
    /// The sets as they were seen last.
    seen: Vec<DeclaredSet>,
    /// A row has other times, or may be changed later.
    contested: bool,
    /// Another process calls at the next tick.
    calls_again: bool,
    read_at: Option<Instant>,
    /// When the pause of a schedule ends.
    resumes_at: Option<Instant>,
    /// An operator has ordered that this instance ends.
    pub is_drained: bool,
    told: Told,
    /// When the instance started, and since when it has beaten without a break.
    since: DateTime<Utc>,
    unbroken: Instant,
    /// The longest life of another instance with a loop.
    longest_life: TimeDelta,
}

/// What was told once.
#[derive(Clone, Default)]
struct Told {
    /// Schedules that this instance does not run, since others have newer times.
    left_alone: HashSet<Key>,
    /// Schedules whose run is waited for before they get another name.
    awaited: HashSet<Key>,
}

impl Presence {
    pub fn new<DB: Database>(core: &Core<DB>, declared: Vec<Declared>) -> Self {
        let declares = to_text(declared.iter().map(|declared| (&declared.times, declared.description())));
        let (declarations, lives) = (Declarations::new(&declares), life(core.poll_interval));
        let announcement = Announcement {
            id: *Holder::unique().as_uuid(),
            label: core.label.clone(),
            build: core.build.clone(),
            calls: false,
            lives,
            declares_id: declarations.own,
            declares,
        };
        Self {
            announcement,
            declared,
            lives,
            beats: 1,
            declarations,
            seen: Vec::new(),
            contested: true,
            calls_again: false,
            read_at: None,
            resumes_at: None,
            is_drained: false,
            told: Told::default(),
            since: DateTime::UNIX_EPOCH,
            unbroken: Instant::now(),
            longest_life: lives,
        }
    }

    /// Returns all processes that run one tick of a schedule in a call. They count as one instance,
    /// those of a crontab, which call again, until five minutes after their next tick.
    pub fn of_calls<DB: Database>(core: &Core<DB>, schedule: &Schedule, call_again: bool) -> Self {
        let mut presence = Self::new(core, Declared::all_of(schedule));
        let announcement = &mut presence.announcement;
        let part = |salt| hash(&[salt, &announcement.declares]);
        announcement.id = Uuid::from_u64_pair(part("calls"), part(if call_again { "of a crontab" } else { "by hand" }));
        announcement.calls = true;
        presence.calls_again = call_again;
        presence
    }

    pub fn id(&self) -> Uuid {
        self.announcement.id
    }

    /// Returns how many instances that are alive declare the same, with this one.
    pub fn instances(&self) -> u32 {
        let same = self.seen.iter().find(|set| set.declares_id == self.announcement.declares_id);
        same.and_then(|set| u32::try_from(set.alive).ok()).unwrap_or_default().max(1)
    }

    fn judge(&self) -> Judge {
        let settled = self.longest_life * SETTLED.0 / SETTLED.1;
        let is_settled =
            self.beats >= JUDGES && TimeDelta::from_std(self.unbroken.elapsed()).is_ok_and(|since| since >= settled);
        let here = SystemTime::now().into();
        Judge { judges: is_settled, calls: self.announcement.calls, lives: self.lives, here }
    }

    /// Announces the instance, and creates the rows that are missing.
    pub async fn join<DB: Database>(&mut self, core: &Core<DB>) -> Result<(), Error> {
        let seen = answered!(core, Action::Inspect, INSTANCES, conn => DB::beat(conn, None))?;
        if let (true, [.., Declared { schedule: Some(schedule), .. }]) = (self.calls_again, &self.declared[..]) {
            let lives = self.announcement.lives.max(schedule.next(seen.now) - seen.now + CALLS_AGAIN);
            self.announcement.lives = lives.min(MOST_LIFE);
        }
        if let Err(error) = self.announce(core).await {
            // The database may not hold the characters of a description.
            let before = self.clone();
            if error.is_retryable() || !self.leaves_descriptions_out() {
                return Err(error);
            }
            if self.announce(core).await.is_err() {
                *self = before;
                return Err(error);
            }
            tracing::warn!(?error, "the instance was announced without descriptions");
        }
        (self.beats, self.since, self.unbroken) = (1, seen.now, Instant::now());
        self.look_at(core, seen, None).await.map(drop)
    }

    async fn announce<DB: Database>(&self, core: &Core<DB>) -> Result<(), Error> {
        let announcement = &self.announcement;
        answered!(core, Action::Update, INSTANCES, conn => DB::announce(conn, announcement))
    }

    /// Returns `false` if there are no descriptions.
    fn leaves_descriptions_out(&mut self) -> bool {
        let declares = to_text(self.declared.iter().map(|declared| (&declared.times, "")));
        let had = declares != self.announcement.declares;
        self.declarations = Declarations::new(&declares);
        (self.announcement.declares, self.announcement.declares_id) = (declares, self.declarations.own);
        had
    }

    /// Records that the instance lives, and applies its times where that is due. Returns whether
    /// rows were changed.
    pub async fn beat<DB: Database>(&mut self, core: &Core<DB>) -> Result<bool, Error> {
        let (id, until) = (self.id(), Instant::now() + beat_pause(core.poll_interval) / PASS);
        let beat = answered!(core, Action::Update, INSTANCES, conn => DB::beat(conn, Some(id)))?;
        let Some(beats) = beat.beats else { return self.join(core).await.map(|()| true) };
        if beats == 1 {
            // After a break, the times may be other ones.
            (self.contested, self.unbroken) = (true, Instant::now());
        }
        self.beats = beats;
        self.look_at(core, beat, Some(until)).await
    }

    /// Removes the declarations of the instance. Cancels the token if an operator has ordered that
    /// it ends, which may have been since the last beat.
    pub async fn leave<DB: Database>(mut self, core: &Core<DB>, drained: &CancellationToken) -> Result<(), Error> {
        let id = self.id();
        answered!(core, Action::Update, INSTANCES, conn => DB::end_instance(conn, id))?;
        let name = id.simple().to_string();
        let ordered: Option<Given> =
            answered!(core, Action::Inspect, INSTANCES, conn => DB::ordered(conn, What::Drain, &name))?;
        if ordered.is_some() {
            drained.cancel();
            let done: Result<bool, Error> =
                answered!(core, Action::Update, INSTANCES, conn => DB::cancel(conn, What::Drain, &name, None));
            if let Err(error) = done {
                tracing::debug!(?error, "an order for an instance that has ended stays");
            }
        }
        let seen = answered!(core, Action::Inspect, INSTANCES, conn => DB::beat(conn, None))?;
        if seen.sets.iter().any(|set| set.declares_id == self.announcement.declares_id && set.alive > 0) {
            return Ok(());
        }
        // Instances may have come since the last beat, such as the one that replaces this one.
        self.learn(core, &seen.sets).await?;
        mark_gone(core, &self.declarations.gone(self.announcement.declares_id, self.since, &seen.sets)).await
    }

    /// Applies the times of this instance where that is due, until a time if there is one.
    async fn look_at<DB: Database>(
        &mut self,
        core: &Core<DB>,
        Beat { sets, drained, .. }: Beat,
        until: Option<Instant>,
    ) -> Result<bool, Error> {
        self.is_drained |= drained;
        self.longest_life = sets.iter().map(|set| set.lives).fold(self.lives, TimeDelta::max);
        if !self.announcement.calls {
            self.learn(core, &sets).await?;
        }
        if self.judge().judges && sets.iter().any(|set| set.forgotten > 0) {
            mark_gone(core, &self.declarations.departed(&sets)).await?;
            answered!(core, Action::Update, INSTANCES, conn => DB::forget_instances(conn))?;
        }
        let read_every = (READ_EVERY.0 * core.poll_interval).min(READ_EVERY.1);
        let is_old = self.read_at.is_none_or(|read_at| read_at.elapsed() >= read_every)
            || self.resumes_at.is_some_and(|resumes_at| resumes_at <= Instant::now());
        if !self.contested && !is_old && sets == self.seen {
            return Ok(false);
        }
        let changed = self.apply(core, &sets, until).await?;
        self.seen = sets;
        self.read_at = Some(Instant::now());
        Ok(changed)
    }

    /// Reads what sets of instances declare that are not known yet.
    async fn learn<DB: Database>(&mut self, core: &Core<DB>, sets: &[DeclaredSet]) -> Result<(), Error> {
        let unknown = self.declarations.unknown(sets);
        self.declarations.learn(texts_of(core, unknown).await?);
        Ok(())
    }

    /// Applies the times of this instance where they are the newest.
    async fn apply<DB: Database>(
        &mut self,
        core: &Core<DB>,
        sets: &[DeclaredSet],
        until: Option<Instant>,
    ) -> Result<bool, Error> {
        let names = self.declared.iter().map(|declared| declared.times.name.clone()).collect();
        let (rows, now) = read(core, names).await?;
        let has_own = |declared: &Declared| match rows.get(&declared.times.name) {
            Some(row) => row.times == declared.times,
            None => declared.schedule.is_none(),
        };
        if self.announcement.calls && !self.declared.iter().all(has_own) {
            self.learn(core, sets).await?;
        }
        let words = self.declarations.words(sets, now);
        let view = View { rows, words, judge: self.judge(), now };
        let (judged, contested) = view.decide_all(&self.declared);
        self.contested = contested;
        judged.iter().for_each(|judged| self.told.tell(&view, judged));
        let steps = judged.into_iter().filter_map(|judged| judged.step.ok().flatten()).collect();
        let rows = self.declared.iter().filter_map(|declared| view.rows.get(&declared.times.name));
        let (resumed, resumes_in) = end_pauses(core, &rows.collect::<Vec<_>>(), now, until).await;
        self.resumes_at = resumes_in.map(|left| Instant::now() + left);
        Ok(carry_out_all(core, steps, until).await? | resumed)
    }
}

impl Told {
    /// Tells once why a schedule is left as it is.
    fn tell(&mut self, view: &View, Judged { declared, decision, step }: &Judged<'_>) {
        let name = &declared.times.name;
        match (decision, view.rows.get(name), step) {
            (Decision::Leave, Some(row), _) if view.has_other_times(declared) => {
                // A call tells its caller.
                if !view.judge.calls && self.left_alone.insert(name.clone()) {
                    tracing::warn!(schedule = %name, times = row.times.spec, zone = row.times.zone,
                        "an instance with newer times runs the schedule: not run by this instance");
                }
            }
            (_, _, Err(live)) => {
                if self.awaited.insert(name.clone()) {
                    tracing::info!(schedule = %name, name = %live.times.name, by = live.label,
                        "the schedule is renamed when its current run ends");
                }
            }
            (Decision::Wait, ..) => {}
            _ => {
                self.left_alone.remove(name);
                self.awaited.remove(name);
            }
        }
    }
}

/// Reads these rows, and those of the other names that schedules among them have, one after
/// another, and the database's time. After a rollback, their place is taken back.
async fn read<DB: Database>(
    core: &Core<DB>,
    mut names: Vec<Key>,
) -> Result<(HashMap<Key, ListedSchedule>, DateTime<Utc>), Error> {
    let (mut rows, mut first) = (HashMap::new(), None);
    let mut asked: HashSet<Key> = names.iter().cloned().collect();
    loop {
        let found = answered!(core, Action::Inspect, "schedules", conn => DB::registered(conn, &names))?;
        first = first.or(found.first().map(|row| row.now));
        let others = found.iter().filter_map(|row| Key::new(renamed_to(&row.times.spec)?).ok());
        names = others.filter(|name| asked.insert(name.clone())).collect();
        rows.extend(found.into_iter().map(|row| (row.times.name.clone(), row)));
        if names.is_empty() {
            let now = match first {
                Some(now) => now,
                None => answered!(core, Action::Inspect, "schedules", conn => DB::now(conn))?,
            };
            return Ok((rows, now));
        }
    }
}

/// Reads the texts in which sets of instances declare their schedules.
pub async fn texts_of<DB: Database>(core: &Core<DB>, sets: Vec<i64>) -> Result<HashMap<i64, String>, Error> {
    if sets.is_empty() {
        return Ok(HashMap::new());
    }
    let texts = answered!(core, Action::Inspect, INSTANCES, conn => DB::declares(conn, &sets))?;
    Ok(texts.into_iter().collect())
}

async fn mark_gone<DB: Database>(core: &Core<DB>, names: &[Key]) -> Result<(), Error> {
    if names.is_empty() {
        return Ok(());
    }
    for name in names {
        tracing::info!(schedule = %name, "no instance has the schedule any more, although its service lives");
    }
    answered!(core, Action::Update, INSTANCES, conn => DB::mark_gone(conn, names))
}
