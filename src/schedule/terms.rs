//! What happens with ticks that are late or fail.

use std::{
    ops::{Range, RangeInclusive},
    time::Duration,
};

use chrono::TimeDelta;

use crate::{invalid::Invalid, retry::within};

pub(super) const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// What happens with ticks that nothing ran at their time: all instances were down, the schedule
/// was paused, or a run took longer than the period.
///
/// ```
/// use rowlock::{Schedule, jobs::CatchUp};
/// use std::time::Duration;
///
/// // A tick that is more than an hour late is skipped.
/// let backup = Schedule::cron("backup", "0 3 * * *").catch_up(CatchUp::Skip);
/// let backup = backup.grace(Duration::from_secs(3600));
/// // Each day is billed by a run of its own, up to the last 31 of them.
/// let billing = Schedule::cron("billing", "0 1 * * *").catch_up(CatchUp::All(31));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CatchUp {
    /// The last tick runs if it is not older than the [grace](crate::Schedule::grace). All others
    /// are skipped, and the history counts them.
    Skip,
    /// The last tick runs, and stands for all others.
    #[default]
    Once,
    /// The last ticks run one after another, at most this many: 1 to 1,000. The first of them
    /// stands for those before it.
    All(u32),
}

/// The pauses before a tick whose run failed is run again: always one duration, or a range. The
/// first pause is then the start of the range, and each other one twice the one before, up to the
/// end.
///
/// ```
/// use rowlock::Schedule;
/// use std::time::Duration;
///
/// // Four attempts at most, the last three after 10, 20 and 40 seconds.
/// let (first, longest) = (Duration::from_secs(10), Duration::from_secs(60));
/// let import = Schedule::every("import", Duration::from_secs(600)).retry(3, first..longest);
/// // At once, and once.
/// let sweep = Schedule::every("sweep", Duration::from_secs(600)).retry(1, Duration::ZERO);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
}

impl From<Duration> for Backoff {
    fn from(always: Duration) -> Self {
        Self { first: always, longest: always }
    }
}

impl From<Range<Duration>> for Backoff {
    fn from(range: Range<Duration>) -> Self {
        Self { first: range.start, longest: range.end }
    }
}

impl From<RangeInclusive<Duration>> for Backoff {
    fn from(range: RangeInclusive<Duration>) -> Self {
        Self { first: *range.start(), longest: *range.end() }
    }
}

/// How often, and after which pauses, a tick whose run failed is run again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Retries {
    pub times: u32,
    first: TimeDelta,
    longest: TimeDelta,
}

impl Retries {
    pub fn new(times: u32, Backoff { first, longest }: Backoff) -> Result<Self, Invalid> {
        if times > 1_000 {
            return Err(Invalid::setting("a number of retries", times, "it has to be at most 1,000"));
        }
        let pause =
            |pause| within("a pause before a retry", pause, Duration::ZERO, YEAR, "it has to be at most 366 days");
        let checked = Self { times, first: pause(first)?, longest: pause(longest)? };
        match longest < first {
            true => Err(Invalid::new(format!(
                "the longest pause before a retry, {longest:?}, is below the first, {first:?}"
            ))),
            false => Ok(checked),
        }
    }

    /// Returns the pause after the failure of this attempt, counted from 1.
    pub fn pause(self, attempt: u32) -> TimeDelta {
        let factor = 1 << attempt.saturating_sub(1).min(30);
        self.first.checked_mul(factor).map_or(self.longest, |pause| pause.min(self.longest))
    }
}
