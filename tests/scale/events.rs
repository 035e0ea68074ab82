//! Simulated time, and what happens when.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use chrono::{DateTime, Utc};

/// Microseconds since the simulation began.
pub type Time = u64;

pub const MILLISECOND: Time = 1_000;
pub const SECOND: Time = 1_000_000;
/// When the simulation begins on the wall clock.
const BEGIN: i64 = 1_767_261_480; // 2026-01-01 09:58:00 UTC

pub fn micros(duration: Duration) -> Time {
    u64::try_from(duration.as_micros()).unwrap_or(Time::MAX)
}

pub fn duration(time: Time) -> Duration {
    Duration::from_micros(time)
}

/// The database's clock.
pub fn clock(time: Time) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(BEGIN * 1_000_000 + i64::try_from(time).unwrap()).unwrap()
}

/// Events in the order of their times, and of their creation where times are equal.
pub struct Events<E> {
    pub now: Time,
    heap: BinaryHeap<Reverse<(Time, u64, usize)>>,
    /// The events themselves, which need no order, with their free places.
    stored: Vec<Option<E>>,
    free: Vec<usize>,
    created: u64,
}

impl<E> Events<E> {
    pub fn new() -> Self {
        Self { now: 0, heap: BinaryHeap::new(), stored: Vec::new(), free: Vec::new(), created: 0 }
    }

    pub fn at(&mut self, at: Time, event: E) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.stored.push(None);
            self.stored.len() - 1
        });
        self.stored[place] = Some(event);
        self.created += 1;
        self.heap.push(Reverse((at.max(self.now), self.created, place)));
    }

    /// Moves the time to the next event before `end`, and returns it.
    pub fn next(&mut self, end: Time) -> Option<E> {
        let Reverse((at, _, place)) = *self.heap.peek()?;
        if at >= end {
            return None;
        }
        self.heap.pop();
        self.now = at;
        self.free.push(place);
        self.stored[place].take()
    }
}
