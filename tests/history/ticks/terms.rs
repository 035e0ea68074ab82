//! The schedules that all workers know: one tick a second, in all combinations of times, catch-up
//! and how the work ends.

use std::time::Duration;

use rowlock::{CatchUp, Retries, Schedule};

pub const LEASE: Duration = Duration::from_millis(1500);
/// How many schedules there are: one of each combination.
pub const COUNT: usize = 12;
/// How often a failed tick is run again.
pub const RETRIES: u32 = 3;
/// With [`CatchUp::Skip`], the last tick is passed over if it is older than this.
const GRACE: Duration = Duration::from_millis(300);

/// What the checker knows of a schedule. Slots are in seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    pub name: String,
    pub catch_up: CatchUp,
    /// The work ends its tick with `finish_in`, in the transaction of its effect.
    pub in_transaction: bool,
    pub cron: bool,
}

impl Terms {
    pub fn all() -> impl Iterator<Item = Self> {
        let catch_up = [CatchUp::All(1_000), CatchUp::Once, CatchUp::Skip];
        (0..COUNT).map(move |number| Self {
            name: format!("s{number}"),
            catch_up: catch_up[number / 2 % 3],
            in_transaction: number / 6 % 2 == 0,
            cron: number % 2 == 0,
        })
    }

    pub fn schedule(&self) -> Schedule {
        let schedule = if self.cron {
            Schedule::cron(&self.name, "* * * * * *").unwrap().zone("Europe/Berlin").unwrap()
        } else {
            Schedule::every(&self.name, Duration::from_secs(1)).unwrap()
        };
        let pause = Duration::from_millis(50);
        let retries = Retries::times(RETRIES).backoff(pause, 2 * pause).unwrap();
        schedule.catch_up(self.catch_up).unwrap().grace(GRACE).unwrap().retry(retries).unwrap()
    }
}
