//! The files of `src/schedule` that decide, and what they use of their crate.

pub mod terms {
    use chrono::TimeDelta;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[allow(dead_code)]
    pub enum CatchUp {
        Skip,
        Once,
        All(u32),
    }

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
    use chrono::{DateTime, TimeDelta, Utc};

    use super::{
        cron::Pattern,
        terms::{CatchUp, Retries},
        zones::Zone,
    };

    #[derive(Clone, Debug)]
    #[allow(dead_code)]
    pub enum Timing {
        Cron { pattern: Box<Pattern>, zone: Zone },
        Every(TimeDelta),
        After(TimeDelta),
    }

    #[derive(Clone, Debug)]
    pub struct Schedule {
        pub timing: Timing,
        pub catch_up: CatchUp,
        pub grace: TimeDelta,
        pub retries: Retries,
    }

    impl Schedule {
        pub fn cron(pattern: &str) -> Self {
            let timing = Timing::Cron { pattern: Box::new(Pattern::parse(pattern).unwrap()), zone: Zone::UTC };
            Self { timing, catch_up: CatchUp::Once, grace: TimeDelta::minutes(5), retries: Retries { times: 0 } }
        }

        pub fn next(&self, after: DateTime<Utc>) -> DateTime<Utc> {
            let Timing::Cron { pattern, zone } = &self.timing else { unreachable!("all of them have patterns") };
            zone.next(pattern, after).unwrap()
        }
    }
}

#[path = "../../src/schedule/cron.rs"]
pub mod cron;
#[path = "../../src/schedule/pacing.rs"]
pub mod pacing;
#[path = "../../src/schedule/plan.rs"]
pub mod plan;
#[allow(dead_code)]
#[path = "../../src/schedule/zones.rs"]
pub mod zones;
