//! `runs --stats`: whether a schedule takes longer, or fails more often.

use std::{collections::BTreeMap, time::Duration};

use anstyle::Style;
use chrono::NaiveDate;
use rowlock::admin::{RunInfo, RunStatus};
use serde_json::{Value, json};

use crate::format::{brief, tabular};

/// The runs of one day, by the UTC date of their ends.
#[derive(Debug, Default, PartialEq)]
pub struct Day {
    succeeded: usize,
    failed: usize,
    lost: usize,
    /// Ticks that were skipped.
    missed: u32,
    /// How long the runs took that succeeded or failed, in order.
    times: Vec<Duration>,
}

/// Returns the days that have runs.
pub fn days(runs: &[RunInfo]) -> BTreeMap<NaiveDate, Day> {
    let mut days: BTreeMap<NaiveDate, Day> = BTreeMap::new();
    for run in runs {
        let day = days.entry(run.ended.date_naive()).or_default();
        match run.status {
            RunStatus::Succeeded => day.succeeded += 1,
            RunStatus::Lost => day.lost += 1,
            RunStatus::Missed => day.missed = day.missed.saturating_add(run.missed),
            _ => day.failed += 1,
        }
        if [RunStatus::Succeeded, RunStatus::Failed].contains(&run.status) {
            day.times.push((run.ended - run.began).to_std().unwrap_or_default());
        }
    }
    days.values_mut().for_each(|day| day.times.sort());
    days
}

impl Day {
    fn runs(&self) -> usize {
        self.succeeded + self.failed + self.lost
    }

    /// Returns how many of a hundred runs succeeded, rounded down: only all are 100.
    fn rate(&self) -> Option<usize> {
        (100 * self.succeeded).checked_div(self.runs())
    }

    /// Returns the shortest time that this part of the runs did not exceed.
    fn within(&self, percent: usize) -> Option<Duration> {
        self.times.get((self.times.len() * percent).div_ceil(100).checked_sub(1)?).copied()
    }
}

const HEADER: [&str; 9] = ["DAY (UTC)", "RUNS", "SUCCEEDED", "P50", "P95", "LONGEST", "FAILED", "LOST", "MISSED"];

/// Returns the days as a table, the latest first.
pub fn table(days: &BTreeMap<NaiveDate, Day>) -> String {
    let row = |(date, day): (&NaiveDate, &Day)| {
        let time = |percent| day.within(percent).map_or("-".to_owned(), brief);
        let rate = day.rate().map_or("-".to_owned(), |rate| format!("{rate} %"));
        let [failed, lost] = [day.failed, day.lost].map(|number| number.to_string());
        let runs = day.runs().to_string();
        [date.to_string(), runs, rate, time(50), time(95), time(100), failed, lost, day.missed.to_string()]
    };
    tabular(HEADER, days.iter().rev().map(|day| (Style::new(), row(day))))
}

pub fn objects(days: &BTreeMap<NaiveDate, Day>) -> Value {
    let object = |(date, day): (&NaiveDate, &Day)| {
        let time = |percent| day.within(percent).map(|time| time.as_secs_f64());
        json!({
            "day": date.to_string(),
            "runs": day.runs(),
            "succeeded": day.succeeded,
            "failed": day.failed,
            "lost": day.lost,
            "missed": day.missed,
            "p50": time(50),
            "p95": time(95),
            "longest": time(100),
        })
    };
    days.iter().rev().map(object).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_runs_did_not_exceed_a_time() {
        let day = |times: std::ops::RangeInclusive<u64>| Day {
            times: times.map(Duration::from_secs).collect(),
            ..Day::default()
        };
        let within = |day: &Day| [50, 95, 100].map(|percent| day.within(percent).map(|time| time.as_secs()));
        assert_eq!(within(&day(1..=100)), [Some(50), Some(95), Some(100)]);
        assert_eq!(within(&day(1..=3)), [Some(2), Some(3), Some(3)]);
        assert_eq!(within(&day(7..=7)), [Some(7); 3]);
        assert_eq!(within(&Day::default()), [None; 3]);
    }

    #[test]
    fn only_all_runs_are_a_hundred_percent() {
        let rate = |succeeded, failed, lost| Day { succeeded, failed, lost, ..Day::default() }.rate();
        assert_eq!(
            [rate(1, 0, 0), rate(999, 1, 0), rate(1, 1, 1), rate(0, 0, 0)],
            [Some(100), Some(99), Some(33), None]
        );
    }
}
