//! What `src/schedule/plan.rs` uses of its crate, and that file itself.

pub mod terms {
    use chrono::TimeDelta;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum CatchUp {
        Skip,
        Once,
        All(u32),
    }

    /// A failed attempt is followed by the next one at once.
    #[derive(Clone, Copy, Debug)]
    pub struct Retries {
        pub times: u32,
    }

    impl Retries {
        pub fn pause(self, _: u32) -> TimeDelta {
            TimeDelta::zero()
        }
    }
}

pub mod spec {
    use std::time::Duration;

    use chrono::{DateTime, TimeDelta, Utc};

    use super::terms::{CatchUp, Retries};

    #[derive(Clone, Debug)]
    #[allow(dead_code)]
    pub enum Timing {
        Cron { pattern: (), zone: () },
        Every(TimeDelta),
        After(TimeDelta),
    }

    /// A schedule with a fixed rate.
    #[derive(Clone, Debug)]
    pub struct Schedule {
        pub timing: Timing,
        pub catch_up: CatchUp,
        pub grace: TimeDelta,
        pub retries: Retries,
    }

    /// The constructors and setters have the code's own forms, because the tests of that file,
    /// which do not run here, are compiled with it.
    impl Schedule {
        pub fn every(_: &str, period: Duration) -> Self {
            let timing = Timing::Every(TimeDelta::from_std(period).unwrap());
            Self { timing, catch_up: CatchUp::Once, grace: TimeDelta::zero(), retries: Retries { times: 0 } }
        }

        pub fn cron(name: &str, _: &str) -> Self {
            Self::every(name, Duration::from_secs(60))
        }

        pub fn catch_up(self, catch_up: CatchUp) -> Self {
            Self { catch_up, ..self }
        }

        pub fn grace(self, grace: Duration) -> Self {
            Self { grace: TimeDelta::from_std(grace).unwrap(), ..self }
        }

        pub fn next(&self, after: DateTime<Utc>) -> DateTime<Utc> {
            let Timing::Every(period) = self.timing else { unreachable!("the model has a fixed rate") };
            let period = period.num_seconds();
            DateTime::from_timestamp((after.timestamp().div_euclid(period) + 1) * period, 0).unwrap()
        }
    }
}

#[path = "../../src/schedule/plan.rs"]
#[allow(dead_code, unused_imports)]
pub mod plan;
