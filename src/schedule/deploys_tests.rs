//! Random histories of deploys: instances of several releases start, stop, die, are cut off and
//! crash over and over, while the database fails now and then. The decisions are those of
//! `instances.rs`, the tables are in memory.
//!
//! After each history, the newest times that a living instance declares are in effect, and no tick
//! was lost or run twice. In between, no schedule is due for long beside an instance that declares
//! it, and older times do not come back while an instance declares the newer ones.

mod machine;
mod tables;

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    time::Duration,
};

use chrono::{DateTime, TimeDelta, Utc};
use fastrand::Rng;

use self::{
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
const LATE: TimeDelta = TimeDelta::seconds(24 + 5 * 6 + 30 + 10);
/// After this time, three beats and two polls, an instance has told the others what it declares.
const HEARD: TimeDelta = TimeDelta::seconds(3 * 6 + 2 * 2);
/// Ticks of the last seconds may be run yet.
const OPEN: TimeDelta = TimeDelta::seconds(400);

/// The periods of a schedule in different releases.
const PERIODS: [u64; 6] = [20, 40, 60, 30, 45, 120];

/// What is recorded of the schedule of one name.
#[derive(Default)]
struct Record {
    changes: Vec<Changed>,
    /// All times, in the order in which they first took effect.
    order: Vec<Times>,
    late_since: Option<DateTime<Utc>>,
}

struct World {
    shared: Shared,
    machines: Vec<Machine>,
    started: u32,
    records: BTreeMap<Key, Record>,
    /// When an instance of each release was there last.
    there: HashMap<i64, DateTime<Utc>>,
    wrong: Vec<String>,
}

/// Numbers of a history.
#[derive(Debug, Default)]
struct Figures {
    changes: usize,
    ticks: usize,
    /// How long after the last event the times changed.
    settled: TimeDelta,
}

impl World {
    fn new(seed: u64) -> Self {
        // The database's clock has more digits than a slot.
        let now = DateTime::from_timestamp(1_767_600_000, 123_000).unwrap();
        let mut rng = Rng::with_seed(seed);
        let db = Tables::new(rng.bool());
        let mut releases: Vec<Rc<Release>> = Vec::new();
        for _ in 0..rng.usize(2..=4) {
            let release = Release::new(declared(&mut rng));
            if releases.iter().all(|other| other.id != release.id) {
                releases.push(Rc::new(release));
            }
        }
        Self::with(db, releases, rng, now)
    }

    /// A schedule that gets another name, and its old name back. A release need not say which name
    /// it had.
    fn of_renames(seed: u64) -> Self {
        let now = DateTime::from_timestamp(1_767_600_000, 123_000).unwrap();
        let mut rng = Rng::with_seed(seed);
        let db = Tables::new(rng.bool());
        let every = |name| Schedule::every(name, Duration::from_secs(40));
        let renamed = |name, old| Declared::all_of(&every(name).renamed_from(old));
        let releases =
            [vec![Declared::new(&every("x"))], renamed("y", "x"), renamed("x", "y"), vec![Declared::new(&every("y"))]];
        let releases = releases.into_iter().map(|declared| Rc::new(Release::new(declared))).collect();
        Self::with(db, releases, rng, now)
    }

    fn with(db: Tables, releases: Vec<Rc<Release>>, rng: Rng, now: DateTime<Utc>) -> Self {
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

    fn start(&mut self, release: Rc<Release>) {
        self.started += 1;
        self.machines.push(Machine::new(self.started, release, self.shared.now));
    }

    /// Kills an instance, or stops it in order.
    fn end(&mut self, place: usize, in_order: bool) -> Rc<Release> {
        let machine = self.machines.swap_remove(place);
        let release = machine.release.clone();
        if in_order {
            machine.stop(&mut self.shared);
        }
        release
    }

    fn cut(&mut self, place: usize, is_cut: bool) {
        let machine = &mut self.machines[place];
        (machine.is_cut, machine.connected_since, machine.reachable_since) = (is_cut, self.shared.now, self.shared.now);
    }

    fn run(&mut self, seconds: f64) {
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

    fn outage(&mut self, seconds: f64) {
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

    fn check_at_the_end(&mut self) {
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

fn one_of<T: Clone>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.usize(..all.len())].clone()
}

/// Something happens to the instances.
fn event(world: &mut World) {
    let Shared { rng, releases, .. } = &mut world.shared;
    let (chance, other, in_order) = (rng.f64(), one_of(rng, releases), rng.bool());
    let place = rng.usize(..world.machines.len().max(1));
    match chance {
        _ if world.machines.is_empty() => world.start(other),
        ..0.38 => world.start(other),
        ..0.52 => drop(world.end(place, false)),
        ..0.66 => drop(world.end(place, true)),
        ..0.76 => world.cut(place, !world.machines[place].is_cut),
        ..0.80 => {
            let seconds = 5.0 + 115.0 * rng.f64();
            world.outage(seconds);
        }
        ..0.86 => {
            let name = Key::new(one_of(rng, &["x", "y", "z"])).unwrap();
            world.shared.db.trigger(&name, world.shared.now);
        }
        ..0.93 => {
            let (pause, is_same) = (one_of(rng, &[1.0, 5.0, 20.0]), rng.f64() < 0.7);
            let release = world.end(place, in_order);
            world.run(pause);
            world.start(if is_same { release } else { other });
        }
        _ => crash_loop(world, &other),
    }
}

fn crash_loop(world: &mut World, release: &Rc<Release>) {
    for _ in 0..world.shared.rng.usize(3..9) {
        world.start(release.clone());
        let id = world.started;
        let (life, pause) =
            (one_of(&mut world.shared.rng, &[1.0, 3.0, 8.0]), one_of(&mut world.shared.rng, &[1.0, 5.0, 15.0, 40.0]));
        world.run(life);
        world.machines.retain(|machine| machine.id != id);
        world.run(pause);
    }
}

fn history(seed: u64) -> (Figures, Vec<String>) {
    let mut world = World::new(seed);
    let first = world.shared.releases[0].clone();
    world.start(first);
    let seconds = 5.0 + 115.0 * world.shared.rng.f64();
    world.run(seconds);
    let ended = events(&mut world);
    world.check_at_the_end();
    let changes = || world.records.values().flat_map(|record| &record.changes);
    let settled = changes().map(|changed| changed.at - ended).max().unwrap_or_default().max(TimeDelta::zero());
    if settled > LATE {
        world.wrong.push(format!("the times changed {settled} after the last event"));
    }
    let ticks = world.shared.db.done.values().map(Vec::len).sum();
    (Figures { changes: changes().count() - world.records.len(), ticks, settled }, world.wrong)
}

/// Many things happen to the instances, and then nothing for a while. Returns when it began.
fn events(world: &mut World) -> DateTime<Utc> {
    for _ in 0..world.shared.rng.usize(8..26) {
        event(world);
        let pause = one_of(&mut world.shared.rng, &[0.5, 2.0, 7.0, 15.0, 40.0, 90.0]);
        world.run(pause);
    }
    for place in 0..world.machines.len() {
        if world.machines[place].is_cut {
            world.cut(place, false);
        }
    }
    if world.machines.is_empty() {
        let release = world.shared.releases[0].clone();
        world.start(release);
    }
    let ended = world.shared.now;
    world.run(OPEN.as_seconds_f64() + 200.0);
    ended
}

/// A history of a schedule that has the name `x`, and `y` in some releases.
fn history_of_renames(seed: u64) -> (Figures, Vec<String>) {
    let mut world = World::of_renames(seed);
    for place in 0..2 {
        let release = world.shared.releases[place].clone();
        world.start(release);
        let seconds = 60.0 + 60.0 * world.shared.rng.f64();
        world.run(seconds);
    }
    let ended = events(&mut world);
    let mut changes: Vec<&Changed> = world.records.values().flat_map(|record| &record.changes).collect();
    changes.sort_by_key(|changed| changed.at);
    let settled = changes.last().map_or(TimeDelta::zero(), |last| (last.at - ended).max(TimeDelta::zero()));
    let mut slots: Vec<_> = world.shared.db.done.values().flatten().map(|done| done.slot).collect();
    slots.retain(|slot| !is_trigger(*slot));
    slots.sort_unstable();
    let mut wrong = world.wrong;
    if settled > LATE {
        wrong.push(format!("the names changed {settled} after the last event"));
    }
    let gaps = slots.windows(2).filter(|pair| pair[1] - pair[0] != TimeDelta::seconds(40));
    wrong.extend(gaps.map(|pair| format!("{} is followed by {}", pair[0], pair[1])));
    if slots.last().is_none_or(|last| *last < world.shared.now - OPEN) {
        wrong.push("nothing runs any more".to_owned());
    }
    let in_effect = world.shared.db.rows.values().filter(|row| !row.listed.times.are_removed()).count();
    if in_effect != 1 {
        wrong.push(format!("{in_effect} names are in effect"));
    }
    (Figures { changes: changes.len(), ticks: slots.len(), settled }, wrong)
}

/// Three instances have the schedule `x` each 600 seconds; a newer release has it each 420.
fn three_old_ones(seed: u64) -> (World, Rc<Release>) {
    let mut world = World::new(seed);
    let [old, new] = [600, 420].map(|seconds| {
        let schedule = Schedule::every("x", Duration::from_secs(seconds));
        Rc::new(Release::new(vec![Declared::new(&schedule)]))
    });
    world.shared.releases = vec![old.clone(), new.clone()];
    for _ in 0..3 {
        world.start(old.clone());
        world.run(7.0);
    }
    world.run(90.0);
    (world, new)
}

/// Returns the times that took effect, one after another.
fn effects(world: &World) -> Vec<&str> {
    world.records.values().flat_map(|record| &record.changes).map(|changed| changed.times.spec.as_str()).collect()
}

#[test]
fn a_release_that_crashes_over_and_over_changes_nothing() {
    for seed in 0..20 {
        let (mut world, new) = three_old_ones(seed);
        for pause in [1.0, 1.0, 10.0, 20.0, 40.0, 80.0] {
            world.start(new.clone());
            let id = world.started;
            world.run(8.0);
            world.machines.retain(|machine| machine.id != id);
            world.run(pause);
        }
        assert_eq!(effects(&world), ["every 600s"], "seed {seed}");
        world.start(new);
        world.run(30.0);
        assert_eq!(effects(&world), ["every 600s", "every 420s"], "seed {seed}: it lives");
    }
}

#[test]
fn an_outage_takes_nothing_back() {
    for seed in 0..20 {
        let (mut world, new) = three_old_ones(seed);
        world.start(new.clone());
        world.start(new);
        world.run(60.0);
        world.outage(300.0);
        world.run(120.0);
        assert_eq!(effects(&world), ["every 600s", "every 420s"], "seed {seed}");
        assert_eq!(world.wrong, [""; 0]);
    }
}

#[test]
fn the_newest_times_apply_and_no_tick_is_lost() {
    check_all(history);
}

#[test]
fn a_schedule_with_another_name_loses_no_tick() {
    check_all(history_of_renames);
}

/// The number of histories is that of the variable `ROWLOCK_DEPLOYS`, if it is set.
#[expect(clippy::print_stderr, reason = "how many changes and ticks there were is seen with --nocapture")]
fn check_all(history: fn(u64) -> (Figures, Vec<String>)) {
    let count = std::env::var("ROWLOCK_DEPLOYS").ok().and_then(|count| count.parse().ok()).unwrap_or(300);
    let (mut all, mut failed) = (Figures::default(), 0);
    for seed in 0..count {
        let (Figures { changes, ticks, settled }, wrong) = history(seed);
        (all.changes, all.ticks) = (all.changes + changes, all.ticks + ticks);
        all.settled = all.settled.max(settled);
        failed += usize::from(!wrong.is_empty());
        if !wrong.is_empty() && failed <= 5 {
            eprintln!("seed {seed}: {:#?}", &wrong[..wrong.len().min(3)]);
        }
    }
    eprintln!("{count} histories, {all:?}");
    assert_eq!(failed, 0, "of {count} histories");
    assert!(all.changes > 0 && all.ticks > 0);
}
