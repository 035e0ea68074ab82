//! Which runs an operator asks for.

use std::time::Duration;

/// Selects the runs that [`Schedules::runs`](crate::Schedules::runs) returns: the last hundred of
/// all schedules, by default.
///
/// ```
/// use std::time::Duration;
///
/// use rowlock::admin::RunOptions;
///
/// let day = Duration::from_secs(24 * 60 * 60);
/// let bad = RunOptions::default().of("nightly-report").unsuccessful().within(day);
/// ```
#[derive(Clone, Debug)]
pub struct RunOptions {
    pub(crate) name: Option<String>,
    pub(crate) unsuccessful: bool,
    pub(crate) within: Option<Duration>,
    pub(crate) limit: u32,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { name: None, unsuccessful: false, within: None, limit: 100 }
    }
}

impl RunOptions {
    /// Selects only the runs of this schedule.
    pub fn of(mut self, name: &str) -> Self {
        self.name = Some(name.to_owned());
        self
    }

    /// Selects only runs that have not succeeded: failed, lost and missed ones.
    pub fn unsuccessful(mut self) -> Self {
        self.unsuccessful = true;
        self
    }

    /// Selects only runs that ended at most `age` ago, by the database's clock.
    pub fn within(mut self, age: Duration) -> Self {
        self.within = Some(age);
        self
    }

    /// Returns at most `runs` runs.
    pub fn limit(mut self, runs: u32) -> Self {
        self.limit = runs;
        self
    }
}
