//! What a run counts.

use std::fmt;

use crate::events::{MILLISECOND, SECOND, Time};

/// The finer interval in which statements are counted: a herd returns within it.
const TENTH: Time = 100 * MILLISECOND;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Statements that arrived at the server in each tenth of a second.
    statements: Vec<u32>,
    /// Attempts to open a connection in each tenth of a second.
    connects: Vec<u32>,
    /// How long cores were kept busy by what arrived in each tenth of a second.
    busy: Vec<Time>,
    pub connections: usize,
    /// The longest that a statement waited for a core.
    pub queued: Time,
    /// How long tasks waited for a key.
    pub waits: Vec<Time>,
    /// From the death of an instance until its key had another holder.
    pub takeovers: Vec<Time>,
    /// From a release until the next claim.
    pub hand_overs: Vec<Time>,
    /// Leases whose deadline passed, or whose row was seen without the claim.
    pub lost: usize,
    pub granted: usize,
    pub renewed: usize,
    /// Statements that failed, or had no reply in time.
    pub failed: usize,
    /// How many times two held the same key. Zero.
    pub overlaps: usize,
}

fn add<T: Copy + Default + std::ops::AddAssign>(counts: &mut Vec<T>, at: Time, amount: T) {
    let index = (at / TENTH) as usize;
    if counts.len() <= index {
        counts.resize(index + 1, T::default());
    }
    counts[index] += amount;
}

impl Figures {
    pub fn statements(&mut self, now: Time, count: u32) {
        add(&mut self.statements, now, count);
    }

    pub fn connect(&mut self, now: Time) {
        add(&mut self.connects, now, 1);
    }

    pub fn worked(&mut self, now: Time, queued: Time, service: Time) {
        self.queued = self.queued.max(queued);
        add(&mut self.busy, now, service);
    }

    /// Statements a second, on average from `from` to `to`.
    pub fn rate(&self, from: Time, to: Time) -> f64 {
        let count: u64 = slice(&self.statements, from, to).iter().map(|count| u64::from(*count)).sum();
        count as f64 * SECOND as f64 / (to - from).max(1) as f64
    }

    /// The most statements within any second from `from` to `to`.
    pub fn peak_second(&self, from: Time, to: Time) -> u32 {
        most(slice(&self.statements, from, to), 10)
    }

    /// The most statements within a tenth of a second from `from` to `to`.
    pub fn peak_tenth(&self, from: Time, to: Time) -> u32 {
        most(slice(&self.statements, from, to), 1)
    }

    /// The most attempts to open a connection within any second from `from` to `to`.
    pub fn peak_connects(&self, from: Time, to: Time) -> u32 {
        most(slice(&self.connects, from, to), 10)
    }

    /// The most cores that were needed within any second from `from` to `to`.
    pub fn peak_cores(&self, from: Time, to: Time) -> f64 {
        let busy = slice(&self.busy, from, to);
        let most = busy.windows(10.min(busy.len().max(1))).map(|window| window.iter().sum::<Time>()).max();
        most.unwrap_or_default() as f64 / SECOND as f64
    }
}

fn slice<T>(counts: &[T], from: Time, to: Time) -> &[T] {
    let to = ((to / TENTH) as usize).min(counts.len());
    &counts[((from / TENTH) as usize).min(to)..to]
}

fn most(counts: &[u32], window: usize) -> u32 {
    counts.windows(window.min(counts.len().max(1))).map(|window| window.iter().sum()).max().unwrap_or_default()
}

/// Percentiles of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub count: usize,
    pub half: Time,
    pub most: Time,
    pub longest: Time,
}

pub fn summary(durations: &[Time]) -> Summary {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let at = |part: f64| sorted.get(((sorted.len() as f64 * part) as usize).min(sorted.len().max(1) - 1)).copied();
    let [half, most, longest] = [0.5, 0.99, 1.0].map(|part| at(part).unwrap_or_default());
    Summary { count: sorted.len(), half, most, longest }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.count == 0 {
            return f.write_str("-");
        }
        let [half, most, longest] = [self.half, self.most, self.longest].map(seconds);
        write!(f, "{half} / {most} / {longest}")
    }
}

/// Seconds, with as many digits as matter.
pub fn seconds(time: Time) -> String {
    let seconds = time as f64 / SECOND as f64;
    if seconds < 1.0 { format!("{seconds:.3}") } else { format!("{seconds:.1}") }
}
