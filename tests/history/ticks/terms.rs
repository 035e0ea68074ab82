//! The schedules that all workers know: one tick a second, in all combinations of times, catch-up
//! and how the work ends. Each deploy has a version, and changes the times of some.

use std::time::Duration;

use rowlock::{Schedule, jobs::CatchUp};

pub const LEASE: Duration = Duration::from_millis(1500);
/// New times apply within nine of these.
pub const POLL: Duration = Duration::from_millis(100);
/// For how long an instance counts as alive without a beat: for twelve polls, and at least for
/// this.
pub const LIFE: Duration = Duration::from_secs(3);
/// How many schedules there are: one of each combination.
pub const COUNT: usize = 12;
/// How often a failed tick is run again.
pub const RETRIES: u32 = 3;
/// With [`CatchUp::Skip`], the last tick is skipped if it is older than this.
const GRACE: Duration = Duration::from_millis(300);

/// What a deploy changes of a schedule's times. The ticks stay those of whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    Nothing,
    Pattern,
    /// The time zone alone.
    Zone,
}

/// What the checker knows of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub name: String,
    pub catch_up: CatchUp,
    /// The work ends its tick with `finish_in`, in the transaction of its effect.
    pub in_transaction: bool,
    pub cron: bool,
    pub changes: Changes,
}

impl Terms {
    pub fn all() -> impl Iterator<Item = Self> {
        let catch_up = [CatchUp::All(1_000), CatchUp::Once, CatchUp::Skip];
        (0..COUNT).map(move |number| Self {
            name: format!("s{number}"),
            catch_up: catch_up[number / 2 % 3],
            in_transaction: number / 6 % 2 == 0,
            cron: number % 2 == 0,
            changes: [Changes::Zone, Changes::Nothing, Changes::Nothing, Changes::Pattern][number % 4],
        })
    }

    /// The cron pattern and the zone of a version. `None`: a fixed rate.
    fn pattern(&self, version: u64) -> Option<(&'static str, &'static str)> {
        let turn = usize::try_from(version % 3).unwrap();
        match self.changes {
            Changes::Nothing => self.cron.then_some(("* * * * * *", "Europe/Berlin")),
            Changes::Zone => Some(("* * * * * *", ["Europe/Berlin", "UTC", "America/New_York"][turn])),
            Changes::Pattern => [None, Some(("* * * * * *", "UTC")), Some(("*/1 * * * * *", "UTC"))][turn],
        }
    }

    /// The times that instances of a version register, as one word.
    pub fn times(&self, version: u64) -> String {
        let times = self.pattern(version).map(|(pattern, zone)| format!("cron {pattern}|{zone}"));
        word(&times.unwrap_or_else(|| "every 1s|UTC".to_owned()))
    }

    pub fn schedule(&self, version: u64) -> Schedule {
        let schedule = match self.pattern(version) {
            Some((pattern, zone)) => Schedule::cron(&self.name, pattern).zone(zone),
            None => Schedule::every(&self.name, Duration::from_secs(1)),
        };
        let pause = Duration::from_millis(50);
        schedule.catch_up(self.catch_up).grace(GRACE).retry(RETRIES, pause..2 * pause)
    }
}

pub fn word(times: &str) -> String {
    times.replace(' ', "_")
}
