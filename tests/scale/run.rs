//! The scenarios, and the figures that they show.

use std::{fmt, time::Duration};

use crate::{
    assumptions::Conditions,
    events::{SECOND, Time, micros},
    figures::{Figures, seconds, summary},
    locks::{self, Locks},
    net::Net,
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
}

/// How long a waiter holds its key.
const HOLD: Time = 2 * SECOND;
/// How long it then rests, on average.
const REST: Duration = Duration::from_secs(2);
/// Each instance begins at a time of its own within this time, as in a deploy.
const DEPLOY: Time = 20 * SECOND;
/// From here on figures are counted, when all instances have begun.
const STEADY: Time = 60 * SECOND;

#[derive(Clone, Debug)]
pub struct Setup {
    pub scenario: Scenario,
    pub instances: usize,
    pub keys: usize,
    /// Waiters are served in the order of their tickets.
    pub fair: bool,
    pub lease: Duration,
    pub conditions: Conditions,
    /// When the holder of the first key dies.
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
    let figures = figures(&setup);
    Report { setup, figures }
}

fn figures(setup: &Setup) -> Figures {
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
    let mut net = Net::new(setup.instances, setup.conditions.clone());
    for instance in 0..setup.instances {
        net.timer(fastrand::u64(0..DEPLOY), locks::Timer::Start(instance));
    }
    setup.death.into_iter().for_each(|death| net.timer(death, locks::Timer::Death));
    net.run(&mut locks, setup.end);
    net.figures
}

impl Setup {
    pub fn new(scenario: Scenario, instances: usize, keys: usize, conditions: Conditions) -> Self {
        Self {
            scenario,
            instances,
            keys,
            fair: false,
            lease: Duration::from_secs(30),
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
