//! The world of the random deploys: the instances, the releases that may start, and what may not
//! happen to the schedules.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use fastrand::Rng;

use super::{
    machine::{Changed, Machine, Release, Shared},
    tables::{LIVES, Tables},
};
use crate::{
    key::Key,
    schedule::{
        declarations::renamed_to,
        instances::Declared,
        spec::{Schedule, Timing},
    },
    store::schedule::{Times, is_trigger},
};

const STEP: TimeDelta = TimeDelta::milliseconds(500);
/// For how long a schedule is due at most, and after how long the times are settled at most: a
/// life, five beats, the lease of a run that died, and ten seconds.
pub const LATE: TimeDelta = TimeDelta::seconds(24 + 5 * 6 + 30 + 10);
/// After this time, three beats and two polls, an instance has told the others what it declares.
const HEARD: TimeDelta = TimeDelta::seconds(3 * 6 + 2 * 2);
/// Ticks of the last seconds may be run yet.
pub const OPEN: TimeDelta = TimeDelta::seconds(400);

/// The periods of a schedule in different releases.
const PERIODS: [u64; 6] = [20, 40, 60, 30, 45, 120];

/// What is recorded of the schedule of one name.
#[derive(Default)]
pub struct Record {
    pub changes: Vec<Changed>,
    /// All times, in the order in which they first took effect.
    order: Vec<Times>,
    late_since: Option<DateTime<Utc>>,
}

pub struct World {
    pub shared: Shared,
    pub machines: Vec<Machine>,
    pub started: u32,
    pub records: BTreeMap<Key, Record>,
    /// When an instance of each release was there last.
    there: HashMap<i64, DateTime<Utc>>,
    pub wrong: Vec<String>,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut world = Self::of(seed, Vec::new());
        let Shared { rng, releases, .. } = &mut world.shared;
        for _ in 0..rng.usize(2..=4) {
            let release = Release::new(declared(rng));
            if releases.iter().all(|other| other.id != release.id) {
                releases.push(Rc::new(release));
            }
        }
        world
    }

    /// A schedule that gets another name, and its old name back. A release need not say which name
    /// it had.
    pub fn of_renames(seed: u64) -> Self {
        let every = |name| Schedule::every(name, Duration::from_secs(40));
        let renamed = |name, old| Declared::all_of(&every(name).renamed_from(old));
        let releases =
            [vec![Declared::new(&every("x"))], renamed("y", "x"), renamed("x", "y"), vec![Declared::new(&every("y"))]];
        Self::of(seed, releases.map(|declared| Rc::new(Release::new(declared))).to_vec())
    }

    fn of(seed: u64, releases: Vec<Rc<Release>>) -> Self {
        // The database's clock has more digits than a slot.
        let now = DateTime::from_timestamp(1_767_600_000, 123_000).unwrap();
        let mut rng = Rng::with_seed(seed);
        let db = Tables::new(rng.bool());
        let shared = Shared { db, releases, rng, is_down: false, now, changes: Vec::new() };
        Self {
            shared,
            machines: Vec::new(),
            started: 0,
            records: BTreeMap::new(),
            there: HashMap::new(),
            wrong: Vec::new(),
        }
    }

    pub fn start(&mut self, release: Rc<Release>) {
        self.started += 1;
        self.machines.push(Machine::new(self.started, release, self.shared.now));
    }

    /// Kills an instance, or stops it in order.
    pub fn end(&mut self, place: usize, in_order: bool) -> Rc<Release> {
        let machine = self.machines.swap_remove(place);
        let release = machine.release.clone();
        if in_order {
            machine.stop(&mut self.shared);
        }
        release
    }

    pub fn cut(&mut self, place: usize, is_cut: bool) {
        let machine = &mut self.machines[place];
        (machine.is_cut, machine.connected_since, machine.reachable_since) = (is_cut, self.shared.now, self.shared.now);
    }

    pub fn run(&mut self, seconds: f64) {
        let end = self.shared.now + TimeDelta::milliseconds((seconds * 1_000.0) as i64);
        while self.shared.now < end {
            self.shared.now += STEP;
            self.shared.rng.shuffle(&mut self.machines);
            for machine in &mut self.machines {
                machine.step(&mut self.shared);
            }
            self.record();
            if self.shared.now.timestamp() % 2 == 0 {
                self.check_rows();
            }
        }
    }

    pub fn outage(&mut self, seconds: f64) {
        self.shared.is_down = true;
        self.run(seconds);
        self.shared.is_down = false;
        for machine in &mut self.machines {
            machine.connected_since = self.shared.now;
        }
    }

    /// Returns for how long an instance that declares the schedule has been connected.
    fn connected(&self, declares: impl Fn(&Release) -> bool) -> Option<TimeDelta> {
        let machines = self.machines.iter().filter(|machine| !machine.is_cut && declares(&machine.release));
        machines.map(|machine| self.shared.now - machine.connected_since).max().filter(|_| !self.shared.is_down)
    }

    /// Takes over the changes of a step. Older times come back only if no instance that could be
    /// heard declares the newer ones.
    fn record(&mut self) {
        self.there.extend(self.machines.iter().map(|machine| (machine.release.id, self.shared.now)));
        for changed in std::mem::take(&mut self.shared.changes) {
            let (name, times) = (changed.times.name.clone(), changed.times.clone());
            let record = self.records.entry(name.clone()).or_default();
            if !record.order.contains(&times) {
                record.order.push(times.clone());
            }
            let place = |times: &Times| record.order.iter().position(|other| other == times);
            let before = record.changes.last().map(|before| before.times.clone());
            let newer = before.filter(|before| place(&times) < place(before));
            record.changes.push(changed);
            self.check_rename(&name, &times);
            if let Some(newer) = newer
                && self.connected(|release| release.of(&name) == Some(&newer)) > Some(HEARD)
            {
                self.wrong.push(format!("{times:?} came back, although an instance declares {newer:?}"));
            }
        }
    }

    /// A name gets another one only if a living instance declares that, or none that could be heard
    /// before an outage runs it.
    fn check_rename(&mut self, name: &Key, times: &Times) {
        let runs = |release: &Release| release.of(name).is_some_and(|times| !times.are_removed());
        let reachable = self.machines.iter().filter(|machine| !machine.is_cut);
        let mut run = reachable.clone().filter(|machine| runs(&machine.release));
        let is_run = run.any(|machine| self.shared.now - machine.reachable_since > HEARD);
        // One that was there when the change was decided, as far as others could know.
        let declare = self.shared.releases.iter().filter(|release| release.of(name) == Some(times));
        let last = declare.filter_map(|release| self.there.get(&release.id)).max();
        let is_declared = last.is_some_and(|last| self.shared.now - *last <= LIVES + STEP);
        if renamed_to(&times.spec).is_some() && is_run && !is_declared {
            self.wrong.push(format!("{times:?} apply, although an instance runs {name}"));
        }
    }

    fn check_rows(&mut self) {
        for (name, row) in &self.shared.db.rows {
            if is_trigger(row.listed.slot) {
                self.wrong.push(format!("the slot {} of {name} would be taken for a trigger", row.listed.slot));
            }
            let is_late = row.listed.due_at <= self.shared.now && !row.listed.times.are_removed();
            let connected = if is_late { self.connected(|release| release.of(name).is_some()) } else { None };
            let record = self.records.entry(name.clone()).or_default();
            let Some(connected) = connected else {
                record.late_since = None;
                continue;
            };
            let late = self.shared.now - *record.late_since.get_or_insert(self.shared.now);
            if late > LATE && connected > LATE {
                self.wrong.push(format!("{name} is due for {late}, and nothing runs it"));
                record.late_since = None;
            }
        }
    }

    pub fn check_at_the_end(&mut self) {
        for (name, row) in &self.shared.db.rows {
            let record = &self.records[name];
            let declared: Vec<&Times> = self.machines.iter().filter_map(|machine| machine.release.of(name)).collect();
            let place = |times: &Times| record.order.iter().position(|other| other == times).unwrap_or(usize::MAX);
            let newest = declared.iter().copied().max_by_key(|times| place(times));
            if newest.is_some_and(|newest| *newest != row.listed.times) {
                self.wrong.push(format!("{:?} apply, the newest are {newest:?}", row.listed.times));
            }
            let repeated = self.shared.db.repeated(name);
            self.wrong.extend(repeated.iter().map(|slot| format!("the tick of {name} at {slot} ran twice")));
            if newest.is_some() {
                self.wrong.extend(self.lost_ticks(name).iter().map(|tick| format!("{name}: the tick {tick} is lost")));
            }
        }
    }

    /// Returns the ticks of times that were in effect, and that did not run.
    fn lost_ticks(&self, name: &Key) -> Vec<DateTime<Utc>> {
        let (changes, done) = (&self.records[name].changes, &self.shared.db.done);
        let none = Vec::new();
        let done = done.get(name).unwrap_or(&none);
        let ran: HashMap<_, _> = done.iter().map(|done| (done.slot, done.at)).collect();
        let mut lost = Vec::new();
        for (place, changed) in changes.iter().enumerate() {
            let end = changes.get(place + 1).map_or(self.shared.now, |next| next.at);
            let Some(schedule) = Schedule::of(&changed.times) else { continue };
            let ticks =
                schedule.upcoming(changed.at).unwrap().take_while(|tick| *tick < end.min(self.shared.now - OPEN));
            lost.extend(ticks.filter(|tick| !ran.contains_key(tick) && !is_excused(*tick, changes, &ran)));
        }
        lost
    }
}

/// Returns whether a change of times left out a tick that did not run: to times that do not have
/// it, while an earlier one was to be run first. The earliest one that is due stays due.
fn is_excused(tick: DateTime<Utc>, changes: &[Changed], ran: &HashMap<DateTime<Utc>, DateTime<Utc>>) -> bool {
    let later = ran.iter().filter(|(slot, _)| **slot > tick && !is_trigger(**slot));
    let over = later.map(|(_, at)| *at).min().unwrap_or(DateTime::<Utc>::MAX_UTC);
    changes.iter().filter(|changed| tick < changed.at && changed.at <= over).any(|changed| {
        let earlier = || ran.iter().any(|(slot, at)| *slot < tick && !is_trigger(*slot) && *at > changed.at);
        match Schedule::of(&changed.times) {
            None => true,
            Some(_) if changed.fresh => true,
            Some(Schedule { timing: Timing::Every(period), .. }) => {
                tick.timestamp_millis() % period.num_milliseconds() != 0 && earlier()
            }
            Some(_) => earlier(),
        }
    })
}

/// Returns what a release declares: up to three schedules, some of which it removes.
fn declared(rng: &mut Rng) -> Vec<Declared> {
    let mut names = ["x", "y", "z"];
    rng.shuffle(&mut names);
    let count = [1, 2, 3, 3][rng.usize(..4)];
    let mut one = |name: &&str| match rng.usize(..16) {
        0 => Declared::removed(Key::new(name).unwrap()),
        1 => Declared::new(&Schedule::after(name, Duration::from_secs(25))),
        _ => Declared::new(&Schedule::every(name, Duration::from_secs(PERIODS[rng.usize(..6)]))),
    };
    names[..count].iter().map(&mut one).collect()
}
