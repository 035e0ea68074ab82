//! What happens with ticks that are late or fail.

use std::time::Duration;

use chrono::TimeDelta;

use crate::{error::Error, retry::within};

pub(super) const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// What happens with ticks that nothing ran at their time: all instances were down, the schedule
/// was paused, or a run took longer than the period.
///
/// ```
/// # fn example() -> Result<(), rowlock::Error> {
/// use rowlock::{CatchUp, Schedule};
/// use std::time::Duration;
///
/// // A tick that is more than an hour late is passed over.
/// let backup = Schedule::cron("backup", "0 3 * * *")?.catch_up(CatchUp::Skip)?;
/// let backup = backup.grace(Duration::from_secs(3600))?;
/// // Each day is billed by a run of its own, up to the last 31 of them.
/// let billing = Schedule::cron("billing", "0 1 * * *")?.catch_up(CatchUp::All(31))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CatchUp {
    /// The last tick runs if it is not older than the [grace](crate::Schedule::grace). All others
    /// are passed over, and the history counts them.
    Skip,
    /// The last tick runs, and stands for all others.
    #[default]
    Once,
    /// The last ticks run one after another, at most this many: 1 to 1,000. The first of them
    /// stands for those before it.
    All(u32),
}

/// How often, and after which pauses, a tick whose run failed is run again.
///
/// ```
/// # fn example() -> Result<(), rowlock::Error> {
/// use rowlock::{Retries, Schedule};
/// use std::time::Duration;
///
/// // Four attempts at most, the last three after 10, 20 and 40 seconds.
/// let retries = Retries::times(3).backoff(Duration::from_secs(10), Duration::from_secs(60))?;
/// let import = Schedule::every("import", Duration::from_secs(600))?.retry(retries)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retries {
    pub(super) times: u32,
    pub(super) first: TimeDelta,
    pub(super) longest: TimeDelta,
}

impl Retries {
    /// Runs a tick again up to `times` times after failures, at once. Zero is the default.
    ///
    /// A run whose process died, or that was handed back, counts as one of them. It is always taken
    /// over. A tick that kills its processes ends as failed after its first attempt, its retries
    /// and ten further attempts.
    pub fn times(times: u32) -> Self {
        Self { times, first: TimeDelta::zero(), longest: TimeDelta::zero() }
    }

    /// Sets the pause after the first failure, and the longest: each pause is twice the one before.
    ///
    /// # Errors
    /// [`Error::InvalidSetting`] for a pause of more than 366 days, or a longest pause below the
    /// first.
    pub fn backoff(self, first: Duration, longest: Duration) -> Result<Self, Error> {
        let rule = "it has to be at most 366 days, and the longest not below the first";
        let first = within("a back-off", first, Duration::ZERO, longest, rule)?;
        let longest = within("a back-off", longest, Duration::ZERO, YEAR, rule)?;
        Ok(Self { first, longest, ..self })
    }

    /// Returns the pause after the failure of this attempt, counted from 1.
    pub(super) fn pause(self, attempt: u32) -> TimeDelta {
        let factor = 1 << attempt.saturating_sub(1).min(30);
        self.first.checked_mul(factor).map_or(self.longest, |pause| pause.min(self.longest))
    }
}
