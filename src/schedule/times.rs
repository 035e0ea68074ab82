//! The times of a schedule: the text in which its row keeps them, and the ticks that they lead to.

use std::time::Duration;

use chrono::{DateTime, FixedOffset, Offset as _, SubsecRound as _, TimeDelta, Utc};

use crate::{
    invalid::Invalid,
    schedule::{
        spec::{Schedule, Timing},
        zones::RELEASE,
    },
    store::schedule::Times,
};

/// What stands between times and how much later the ticks come.
const SHIFTED: &str = " +";

/// The slot of a schedule whose pattern has no further time: the end of what all databases hold.
pub(super) const NEVER: DateTime<Utc> = match DateTime::from_timestamp(253_370_764_800, 0) {
    Some(year_9999) => year_9999,
    None => DateTime::UNIX_EPOCH,
};

impl Schedule {
    /// Returns the schedule that has these times. `None` if they are of another version, or
    /// removed.
    pub(super) fn of(times: &Times) -> Option<Self> {
        let (spec, shift) = match times.spec.rsplit_once(SHIFTED) {
            Some((spec, shift)) => (spec, TimeDelta::from_std(duration(shift)?).ok()?),
            None => (times.spec.as_str(), TimeDelta::zero()),
        };
        let (kind, rest) = spec.split_once(' ')?;
        let name = times.name.as_str();
        let schedule = match kind {
            "cron" => Self::cron(name, rest).zone(&times.zone),
            "every" => Self::every(name, duration(rest)?),
            "after" => Self::after(name, duration(rest)?),
            _ => return None,
        };
        schedule.check().is_ok().then_some(Self { shift, ..schedule })
    }

    /// Returns the times as the row keeps them.
    pub(super) fn times(&self) -> Times {
        let shift = self.shift.to_std().ok().filter(|shift| !shift.is_zero());
        let shifted = shift.map(|shift| format!("{SHIFTED}{shift:?}")).unwrap_or_default();
        let spec = format!("{}{shifted}", self.text);
        Times { name: self.name.clone(), spec, zone: self.zone.name().to_owned() }
    }

    /// Returns by how much later each tick comes than the same tick of another schedule. `None` if
    /// they differ in more than that.
    pub(super) fn later_than(&self, other: &Self) -> Option<TimeDelta> {
        let same = self.text == other.text && self.zone.name() == other.zone.name();
        same.then(|| self.shift - other.shift)
    }

    /// Returns the ticks that come after `after`, without end: an iterator.
    ///
    /// It reads no database, and knows no tick that was moved or triggered. A schedule with a fixed
    /// delay has no ticks ahead of time, since each follows the end of a run: the iterator is
    /// empty.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    ///
    /// # Examples
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use chrono::{DateTime, Utc};
    /// use rowlock::Schedule;
    ///
    /// let report = Schedule::cron("report", "30 2 * * *").zone("Europe/Berlin");
    /// let after: DateTime<Utc> = "2026-10-24T12:00:00Z".parse()?;
    /// let ticks = report.upcoming(after)?.take(2).map(|tick| tick.to_rfc3339());
    /// assert_eq!(ticks.collect::<Vec<_>>(), ["2026-10-25T00:30:00+00:00", "2026-10-26T01:30:00+00:00"]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn upcoming(&self, after: DateTime<Utc>) -> Result<impl Iterator<Item = DateTime<Utc>> + '_, Invalid> {
        self.check()?;
        let is_ahead = |tick: &DateTime<Utc>| *tick < NEVER && !matches!(self.timing, Timing::After(_));
        let next = move |tick: DateTime<Utc>| Some(self.next(tick)).filter(is_ahead);
        Ok(std::iter::successors(next(after), move |tick| next(*tick)))
    }

    /// Returns what the clocks in the schedule's time zone show at an instant: in UTC, if the zone
    /// is not possible.
    pub fn in_zone(&self, at: DateTime<Utc>) -> DateTime<FixedOffset> {
        let east = i32::try_from(self.zone.offset(at).num_seconds()).ok().and_then(FixedOffset::east_opt);
        at.with_timezone(&east.unwrap_or(Utc.fix()))
    }

    /// Returns the release of the tz database that the time zones come from, such as `2026f`.
    ///
    /// The database is compiled into the program, so that all instances of one build agree on the
    /// ticks.
    pub fn zones_release() -> &'static str {
        RELEASE
    }

    /// Returns the first slot of a schedule that is registered at `now`.
    pub(super) fn first(&self, now: DateTime<Utc>) -> DateTime<Utc> {
        match self.timing {
            Timing::After(_) => now.trunc_subsecs(3),
            _ => self.next(now),
        }
    }

    /// Returns the first slot after `after`, which is strictly later. For a fixed delay, `after` is
    /// the end of a run.
    pub(super) fn next(&self, after: DateTime<Utc>) -> DateTime<Utc> {
        match self.next_unshifted(after.checked_sub_signed(self.shift).unwrap_or(after)) {
            slot if slot < NEVER => slot + self.shift,
            never => never,
        }
    }

    fn next_unshifted(&self, after: DateTime<Utc>) -> DateTime<Utc> {
        match &self.timing {
            Timing::Cron { pattern } => {
                let next = pattern.as_ref().and_then(|pattern| self.zone.next(pattern, after));
                next.unwrap_or(NEVER).min(NEVER)
            }
            Timing::Every(period) => {
                let period = period.num_milliseconds();
                let slot = (after.timestamp_millis().div_euclid(period) + 1) * period;
                DateTime::from_timestamp_millis(slot).unwrap_or(NEVER)
            }
            Timing::After(delay) => after.trunc_subsecs(3).checked_add_signed(*delay).unwrap_or(NEVER),
        }
    }
}

/// Reads a period as a row keeps it: `30s`, `1.5s`, `100ms`.
fn duration(text: &str) -> Option<Duration> {
    if let Some(millis) = text.strip_suffix("ms") {
        return Some(Duration::from_millis(millis.parse().ok()?));
    }
    let (whole, part) = text.strip_suffix('s').map(|text| text.split_once('.').unwrap_or((text, "0")))?;
    let millis: u64 = format!("{part:0<3}").parse().ok()?;
    Duration::from_secs(whole.parse().ok()?).checked_add(Duration::from_millis(millis))
}
