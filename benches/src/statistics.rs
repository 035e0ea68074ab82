//! A clock that all processes of the machine share, and summaries of durations.

use std::fmt;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since a point in time that is the same for every process.
pub fn now() -> i64 {
    nanos(ClockId::Monotonic)
}

/// Nanoseconds for which this process was executed, on all processors.
pub fn processor_time() -> i64 {
    nanos(ClockId::ProcessCPUTime)
}

fn nanos(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

pub fn millis(nanos: i64) -> f64 {
    nanos as f64 / 1e6
}

/// The middle value, or the mean of the two middle values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

/// The first value divided by the second; `None` where that is not finite.
pub fn ratio(of: f64, to: f64) -> Option<f64> {
    Some(of / to).filter(|ratio| ratio.is_finite())
}

/// A summary of durations.
pub struct Summary(Vec<i64>);

impl Summary {
    pub fn of(mut nanos: Vec<i64>) -> Self {
        nanos.sort_unstable();
        Self(nanos)
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The smallest value that at least this percentage of the values do not exceed.
    pub fn percentile(&self, percent: usize) -> Option<i64> {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied()
    }
}

/// Minimum, median, p90, p99 and maximum, in milliseconds.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for percent in [0, 50, 90, 99, 100] {
            match self.percentile(percent) {
                Some(nanos) => write!(f, "{:>9.2}", millis(nanos))?,
                None => write!(f, "{:>9}", "-")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let summary = Summary::of((1..=200).rev().collect());
        let all = [0, 50, 90, 99, 100].map(|percent| summary.percentile(percent));
        assert_eq!(all, [Some(1), Some(100), Some(180), Some(198), Some(200)]);
        assert_eq!(Summary::of(vec![]).percentile(50), None);
    }

    #[test]
    fn the_median_is_in_the_middle_in_whatever_order_they_come() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn nothing_is_no_number_of_times_nothing() {
        assert_eq!(ratio(1.0, 4.0), Some(0.25));
        assert_eq!((ratio(1.0, 0.0), ratio(0.0, 0.0)), (None, None));
    }
}
