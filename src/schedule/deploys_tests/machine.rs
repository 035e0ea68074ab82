//! An instance, in the order of steps of `presence.rs`. What it has read it writes half a second
//! later.

use std::rc::Rc;

use chrono::{DateTime, TimeDelta, Utc};
use fastrand::Rng;

use super::tables::{LEASE, LIVES, Run, Tables};
use crate::{
    key::Key,
    schedule::{
        declarations::{Declarations, times_from, to_text},
        instances::{Declared, JUDGES, Judge},
        steps::Step,
        view::View,
    },
    store::{
        instances::{Beat, DeclaredSet, TimesChange},
        schedule::Times,
    },
};

const POLL: TimeDelta = TimeDelta::seconds(2);
const BEAT_MILLIS: std::ops::RangeInclusive<i64> = 5_400..=6_000;
const READ_EVERY: TimeDelta = TimeDelta::seconds(60);

/// What all instances of a release declare.
pub struct Release {
    pub declared: Vec<Declared>,
    /// The same as the others read it.
    pub read: Vec<Times>,
    pub id: i64,
    text: String,
    declarations: Declarations,
}

impl Release {
    pub fn new(declared: Vec<Declared>) -> Self {
        let text = to_text(declared.iter().map(|declared| (&declared.times, "")));
        let declarations = Declarations::new(&text);
        Self { declared, read: times_from(&text), id: declarations.own, text, declarations }
    }

    pub fn of(&self, name: &Key) -> Option<&Times> {
        self.read.iter().find(|times| times.name == *name)
    }
}

/// What was decided, and when: the changes of one row, or of two whose schedule gets another name.
type Decided = (Vec<TimesChange>, DateTime<Utc>);

/// A change that was made.
pub struct Changed {
    pub times: Times,
    pub fresh: bool,
    /// When it was decided.
    pub at: DateTime<Utc>,
}

pub struct Machine {
    pub id: u32,
    pub release: Rc<Release>,
    pub is_cut: bool,
    pub connected_since: DateTime<Utc>,
    /// The same since it announced itself, whatever the database did.
    pub reachable_since: DateTime<Utc>,
    runs: Vec<Run>,
    beats: Option<u32>,
    since: DateTime<Utc>,
    declarations: Declarations,
    seen: Vec<DeclaredSet>,
    contested: bool,
    read_at: Option<DateTime<Utc>>,
    decided: Vec<Decided>,
    poll_at: DateTime<Utc>,
    beat_at: DateTime<Utc>,
}

/// What machines share, as far as it is reachable.
pub struct Shared {
    pub db: Tables,
    pub releases: Vec<Rc<Release>>,
    pub rng: Rng,
    pub is_down: bool,
    pub now: DateTime<Utc>,
    /// The changes since they were looked at.
    pub changes: Vec<Changed>,
}

impl Machine {
    pub fn new(id: u32, release: Rc<Release>, now: DateTime<Utc>) -> Self {
        Self {
            id,
            is_cut: false,
            connected_since: now,
            reachable_since: now,
            runs: Vec::new(),
            beats: None,
            since: now,
            declarations: release.declarations.clone(),
            release,
            seen: Vec::new(),
            contested: true,
            read_at: None,
            decided: Vec::new(),
            poll_at: now,
            beat_at: now,
        }
    }

    pub fn step(&mut self, shared: &mut Shared) {
        let now = shared.now;
        if self.is_cut || shared.is_down {
            return;
        }
        if !self.runs.is_empty() {
            self.end_runs(shared);
        }
        for (changes, at) in std::mem::take(&mut self.decided) {
            if shared.db.change(&changes, now) {
                let new = changes.into_iter().filter(|change| change.new_times);
                shared.changes.extend(new.map(|change| Changed { times: change.times, fresh: change.afresh, at }));
            }
        }
        if now < self.poll_at {
            return;
        }
        self.poll_at = now + POLL;
        if self.beats.is_none() {
            self.join(shared);
        } else if self.beat_at <= now + POLL / 2 {
            self.beat(shared);
        } else {
            return self.claim(shared);
        }
        self.beat_at = now + TimeDelta::milliseconds(shared.rng.i64(BEAT_MILLIS));
    }

    fn claim(&mut self, Shared { db, rng, now, .. }: &mut Shared) {
        let release = self.release.clone();
        for Declared { times, .. } in &release.declared {
            if db.rows.get(&times.name).is_some_and(|row| row.listed.due_at <= *now) {
                let takes = TimeDelta::milliseconds([500, 1_000, 2_000, 4_000][rng.usize(..4)]);
                self.runs.extend(db.claim(times, takes, rng.u8(..10) == 0, *now));
            }
        }
    }

    /// Ends the runs whose work is done, and renews the others.
    fn end_runs(&mut self, Shared { db, now, .. }: &mut Shared) {
        self.runs.retain_mut(|run| {
            if *now >= run.end_at {
                db.end(run, *now);
            } else if *now >= run.renew_at {
                db.renew(run, *now);
                run.renew_at = *now + LEASE / 3;
            }
            *now < run.end_at
        });
    }

    fn join(&mut self, shared: &mut Shared) {
        let seen = shared.db.beat(None, shared.now);
        shared.db.announce(self.id, self.release.id, shared.now);
        (self.since, self.reachable_since) = (shared.now, shared.now);
        self.beats = Some(1);
        self.look_at(shared, seen);
    }

    fn beat(&mut self, shared: &mut Shared) {
        let beat = shared.db.beat(Some(self.id), shared.now);
        let Some(beats) = beat.beats else { return self.join(shared) };
        self.contested |= beats == 1;
        self.beats = Some(beats);
        self.look_at(shared, beat);
    }

    /// Stops in order: its runs end first.
    pub fn stop(mut self, shared: &mut Shared) {
        if self.is_cut || shared.is_down || self.beats.is_none() {
            return;
        }
        for run in std::mem::take(&mut self.runs) {
            shared.db.end(&run, shared.now);
        }
        shared.db.end_instance(self.id);
        let sets = shared.db.beat(None, shared.now).sets;
        self.learn(shared, &sets);
        shared.db.mark_gone(&self.declarations.gone(self.release.id, self.since, &sets), shared.now);
    }

    fn judges(&self) -> bool {
        self.beats.is_some_and(|beats| beats >= JUDGES)
    }

    fn learn(&mut self, shared: &Shared, sets: &[DeclaredSet]) {
        let unknown = self.declarations.unknown(sets);
        let read = shared.releases.iter().filter(|release| unknown.contains(&release.id));
        self.declarations.learn(read.map(|release| (release.id, &release.text)));
    }

    fn look_at(&mut self, shared: &mut Shared, Beat { sets, now, .. }: Beat) {
        self.learn(shared, &sets);
        if self.judges() && sets.iter().any(|set| set.forgotten > 0) {
            shared.db.mark_gone(&self.declarations.departed(&sets), now);
            shared.db.forget_instances(now);
        }
        let is_old = self.read_at.is_none_or(|read_at| now - read_at >= READ_EVERY);
        if self.contested || is_old || sets != self.seen {
            self.decide(shared, &sets, now);
            (self.seen, self.read_at) = (sets, Some(now));
        }
    }

    /// Decides on each row.
    fn decide(&mut self, shared: &Shared, sets: &[DeclaredSet], now: DateTime<Utc>) {
        let judge = Judge { judges: self.judges(), calls: false, lives: LIVES, here: now };
        let release = self.release.clone();
        let words = self.declarations.words(sets, now);
        let listed = shared.db.rows.iter().map(|(name, row)| (name.clone(), row.listed.clone()));
        let view = View { rows: listed.collect(), words, judge, now };
        let (judged, contested) = view.decide_all(&release.declared);
        self.contested = contested;
        self.decided.extend(judged.into_iter().filter_map(|judged| match judged.step.ok()?? {
            Step::Change(_, change) => Some((vec![change], now)),
            Step::Rename(both) => Some((both.to_vec(), now)),
        }));
    }
}
