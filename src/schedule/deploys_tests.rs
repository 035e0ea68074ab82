//! Random histories of deploys: instances of several releases start, stop, die, are cut off and
//! crash over and over, while the database fails now and then. The decisions are those of
//! `instances.rs`, the tables are in memory.
//!
//! After each history, the newest times that a living instance declares are in effect, and no tick
//! was lost or run twice. In between, no schedule is due for long beside an instance that declares
//! it, and older times do not come back while an instance declares the newer ones.

mod machine;
mod tables;
mod world;

use std::{rc::Rc, time::Duration};

use chrono::TimeDelta;
use fastrand::Rng;

use self::{
    machine::{Release, Shared},
    world::{LATE, OPEN, World},
};
use crate::{
    key::Key,
    schedule::{instances::Declared, spec::Schedule},
    store::schedule::is_trigger,
};

/// Numbers of a history.
#[derive(Debug, Default)]
struct Figures {
    changes: usize,
    ticks: usize,
    /// How long after the last event the times changed.
    settled: TimeDelta,
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
    let figures = events(&mut world);
    world.check_at_the_end();
    (figures, world.wrong)
}

/// Many things happen to the instances, and then nothing for a while.
fn events(world: &mut World) -> Figures {
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
    let changes: Vec<_> = world.records.values().flat_map(|record| &record.changes).collect();
    let settled = changes.iter().map(|changed| changed.at - ended).max().unwrap_or_default().max(TimeDelta::zero());
    if settled > LATE {
        world.wrong.push(format!("the times or names changed {settled} after the last event"));
    }
    let ticks = world.shared.db.done.values().map(Vec::len).sum();
    Figures { changes: changes.len() - world.records.len(), ticks, settled }
}

/// A history of a schedule that has the name `x`, and `y` in some releases.
fn history_of_renames(seed: u64) -> (Figures, Vec<String>) {
    let mut world = World::of_renames(seed);
    // The tables may be new, or restored, while an older release is still deployed.
    let is_new_first = world.shared.rng.u8(..4) == 0;
    for is_new in [is_new_first, !is_new_first] {
        let release = world.shared.releases[usize::from(is_new)].clone();
        world.start(release);
        let seconds = 60.0 + 60.0 * world.shared.rng.f64();
        world.run(seconds);
    }
    if is_new_first {
        // Both names had ticks until the older one was removed.
        world.shared.db.done.clear();
    }
    let figures = events(&mut world);
    let mut slots: Vec<_> = world.shared.db.done.values().flatten().map(|done| done.slot).collect();
    slots.retain(|slot| !is_trigger(*slot));
    slots.sort_unstable();
    let mut wrong = world.wrong;
    let gaps = slots.windows(2).filter(|pair| pair[1] - pair[0] != TimeDelta::seconds(40));
    wrong.extend(gaps.map(|pair| format!("{} is followed by {}", pair[0], pair[1])));
    if slots.last().is_none_or(|last| *last < world.shared.now - OPEN) {
        wrong.push("nothing runs any more".to_owned());
    }
    let in_effect = world.shared.db.rows.values().filter(|row| !row.listed.times.are_removed()).count();
    if in_effect != 1 {
        wrong.push(format!("{in_effect} names are in effect"));
    }
    (figures, wrong)
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
