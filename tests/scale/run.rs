//! The scenarios, and the figures that they show.

use std::{fmt, time::Duration};

use crate::{
    assumptions::Conditions,
    code::Constants,
    events::{SECOND, Time, micros},
    figures::{Figures, seconds, summary},
    locks::{self, Locks},
    net::Net,
    slots::Slots,
    ticks::{self, Ticks},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Each instance holds its share of the keys.
    Held,
    /// Each instance waits for one of the keys, holds it for two seconds, and waits again.
    Waiting,
    /// All instances are candidates of one election.
    Election,
    /// The same, and each leader dies after a while and comes back later.
    Successions,
    /// The keys are schedules, many of which are due at the full hour.
    Schedules,
}

/// How long a waiter holds its key.
const HOLD: Time = 2 * SECOND;
/// How long it then rests, on average.
const REST: Duration = Duration::from_secs(2);
/// How long the run of a tick takes at the median.
const RUN: Time = SECOND;
/// Each instance begins at a time of its own within this time, as in a deploy.
const DEPLOY: Time = 20 * SECOND;
/// From here on figures are counted, when all instances have begun.
const STEADY: Time = 60 * SECOND;

#[derive(Clone, Debug)]
pub struct Setup {
    pub scenario: Scenario,
    pub instances: usize,
    pub keys: usize,
    /// How many schedules an instance knows, and others with it.
    pub known: usize,
    /// The pattern of all schedules; a mixture by default.
    pub pattern: Option<String>,
    /// Waiters are served in the order of their tickets.
    pub fair: bool,
    /// The most connections of an instance's pool.
    pub pool: usize,
    pub lease: Duration,
    /// The longest pause between two looks; that of the code by default.
    pub poll_interval: Option<Duration>,
    pub conditions: Conditions,
    /// When an instance dies: the holder of the first key, or the one with the most runs.
    pub death: Option<Time>,
    pub end: Time,
    pub seed: u64,
}

/// The figures of a run, and when to read them.
pub struct Report {
    pub setup: Setup,
    pub figures: Figures,
}

pub fn run(setup: Setup) -> Report {
    fastrand::seed(setup.seed);
    let figures = match setup.scenario {
        Scenario::Schedules => run_ticks(&setup),
        _ => run_locks(&setup),
    };
    Report { setup, figures }
}

fn run_locks(setup: &Setup) -> Figures {
    let (hold, rest, dies) = match setup.scenario {
        Scenario::Waiting => (Some(HOLD), REST, false),
        Scenario::Successions => (Some(micros(2 * setup.lease)), 2 * setup.lease, true),
        _ => (None, REST, false),
    };
    let work = locks::Work { lease: setup.lease, hold, rest, dies, fair: setup.fair };
    let keys = if matches!(setup.scenario, Scenario::Election | Scenario::Successions) { 1 } else { setup.keys };
    let share = |instance: usize| match setup.scenario {
        Scenario::Held => (instance..keys).step_by(setup.instances).collect(),
        _ => vec![instance % keys],
    };
    let mut locks = Locks::new(work, keys, (0..setup.instances).map(share).collect());
    let mut net = Net::new(setup.instances, setup.pool, setup.conditions.clone());
    for instance in 0..setup.instances {
        net.timer(fastrand::u64(0..DEPLOY), locks::Timer::Start(instance));
    }
    setup.death.into_iter().for_each(|death| net.timer(death, locks::Timer::Death));
    net.run(&mut locks, setup.end);
    net.figures
}

fn run_ticks(setup: &Setup) -> Figures {
    let constants = Constants::read();
    let groups = setup.keys.div_ceil(setup.known.min(constants.known));
    let poll_interval = setup.poll_interval.unwrap_or(Duration::from_micros(constants.poll_interval));
    let work = ticks::Work {
        lease: setup.lease,
        poll_interval,
        max_concurrent_runs: constants.max_concurrent_runs,
        runs: RUN,
    };
    let slots = match &setup.pattern {
        Some(pattern) => Slots::new(groups, std::slice::from_ref(pattern), std::iter::repeat_n(0, setup.keys)),
        None => Slots::new(groups, &patterns(), (0..setup.keys).map(|_| pattern())),
    };
    let mut ticks = Ticks::new(work, slots, setup.instances, groups);
    let mut net = Net::new(setup.instances, setup.pool, setup.conditions.clone());
    for instance in 0..setup.instances {
        ticks.poll_at(&mut net, instance, fastrand::u64(0..DEPLOY));
    }
    setup.death.into_iter().for_each(|death| net.timer(death, ticks::Timer::Death));
    net.run(&mut ticks, setup.end);
    net.figures
}

/// Every minute, every five minutes, and each minute of the hour.
fn patterns() -> Vec<String> {
    let hourly = (0..60).map(|minute| format!("{minute} * * * *"));
    ["* * * * *".to_owned(), "*/5 * * * *".to_owned()].into_iter().chain(hourly).collect()
}

/// Draws a pattern: one in a hundred is due every minute, one in twenty every five minutes, one in
/// ten at the full hour, and the others at any minute of the hour.
fn pattern() -> usize {
    match fastrand::usize(..100) {
        0 => 0,
        1..6 => 1,
        6..16 => 2,
        _ => 2 + fastrand::usize(..60),
    }
}

impl Setup {
    pub fn new(scenario: Scenario, instances: usize, keys: usize, conditions: Conditions) -> Self {
        Self {
            scenario,
            instances,
            keys,
            known: 1_000,
            pattern: None,
            fair: false,
            pool: 10,
            lease: Duration::from_secs(30),
            poll_interval: None,
            conditions,
            death: None,
            end: 300 * SECOND,
            seed: 1,
        }
    }
}

impl Report {
    /// The window after the instances have begun, and before a fault or a death.
    pub fn steady(&self) -> (Time, Time) {
        let fault = self.setup.conditions.fault.map(|(_, begin, _)| begin);
        (STEADY, [fault, self.setup.death, Some(self.setup.end)].into_iter().flatten().min().unwrap_or(STEADY))
    }

    /// The ten seconds after a fault, or the time in which a dead instance's leases end: the herd
    /// that returns.
    pub fn herd(&self) -> Option<(Time, Time)> {
        let recovered = self.setup.conditions.recovered().map(|at| (at, at + 10 * SECOND));
        let lease = micros(self.setup.lease);
        recovered.or(self.setup.death.map(|at| (at + lease / 2, at + lease + 5 * SECOND)))
    }

    /// The minute that begins a minute after the fault.
    pub fn later(&self) -> Option<(Time, Time)> {
        let at = self.setup.conditions.recovered()? + 60 * SECOND;
        Some((at, at + 60 * SECOND))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setup, figures } = self;
        let window = |from: Time, to: Time| {
            format!(
                "{:.0} statements a second, at most {} in a second and {} in 0.1 s, {:.1} cores, {} connects in a second",
                figures.rate(from, to),
                figures.peak_second(from, to),
                figures.peak_tenth(from, to),
                figures.peak_cores(from, to),
                figures.peak_connects(from, to),
            )
        };
        writeln!(
            f,
            "{:?}: {} instances, {} keys, lease {:?}, fault {:?}, death {:?}",
            setup.scenario, setup.instances, setup.keys, setup.lease, setup.conditions.fault, setup.death
        )?;
        let (from, to) = self.steady();
        writeln!(f, "  steady: {}", window(from, to))?;
        for (name, (from, to)) in
            [("herd", self.herd()), ("later", self.later())].into_iter().filter_map(|(n, w)| Some((n, w?)))
        {
            writeln!(f, "  {name}: {}", window(from, to))?;
        }
        writeln!(
            f,
            "  connections {}, longest queue {} s, granted {}, renewed {}, lost {}, failed {}, overlaps {}",
            figures.connections,
            seconds(figures.queued),
            figures.granted,
            figures.renewed,
            figures.lost,
            figures.failed,
            figures.overlaps
        )?;
        writeln!(
            f,
            "  waits {}, hand-overs {}, takeovers {} (p50 / p99 / longest, s)",
            summary(&figures.waits),
            summary(&figures.hand_overs),
            summary(&figures.takeovers)
        )
    }
}
