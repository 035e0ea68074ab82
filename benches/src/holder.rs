//! The process of `held`: acquires many keys, holds them, and reports the results on stdout.

use std::time::Duration;

use clap::Args;
use rowlock::{Lease, LeaseLock};
use serde::{Deserialize, Serialize};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    contender::{URL, tell},
    database::{Bench, Kind, on, patient_pool},
    error::Error,
    options::seconds,
    renewals::Renewals,
    statistics::processor_time,
};

/// How many tasks acquire keys.
const TAKERS: usize = 16;
/// How many keys are acquired and abandoned before anything is measured.
const WARM_UP: usize = 200;

#[derive(Args)]
pub struct Options {
    #[arg(long)]
    database: Kind,
    #[arg(long, env = URL, hide_env_values = true)]
    url: String,
    #[arg(long)]
    keys: usize,
    #[arg(long, value_parser = seconds)]
    seconds: Duration,
    #[arg(long, value_parser = seconds)]
    lease: Duration,
}

/// All keys are held: the process's memory before and after, in kilobytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    before: i64,
    after: i64,
}

impl Taken {
    /// `None` where the system does not report it.
    pub fn bytes(self) -> Option<f64> {
        (self.before > 0).then(|| (self.after - self.before) as f64 * 1024.0)
    }
}

/// The keys have been held for the whole time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renewed {
    pub renewals: i64,
    /// Nanoseconds of processor time of the process.
    pub processor: i64,
}

pub async fn run(options: &Options, renewals: &Renewals) -> Result<(), Error> {
    on!(options.database, hold(options, renewals))
}

async fn hold<DB: Bench>(options: &Options, renewals: &Renewals) -> Result<(), Error> {
    let lock = LeaseLock::new(patient_pool::<DB>(&options.url, 1).await?).lease(options.lease);
    for lease in take(&lock, "warm-up", WARM_UP).await? {
        lease.abandon().await?;
    }
    let before = resident();
    let leases = take(&lock, "held", options.keys).await?;
    let after = resident();
    tell(&Taken { before, after })?;
    let (so_far, processor) = (renewals.so_far(), processor_time());
    sleep(options.seconds).await;
    let (renewals, processor) = (renewals.so_far() - so_far, processor_time() - processor);
    if let Some(lost) = leases.iter().find(|lease| !lease.is_held()) {
        return Err(format!("lost {}", lost.claim().key).into());
    }
    tell(&Renewed { renewals, processor })?;
    for lease in leases {
        lease.detach();
    }
    Ok(())
}

async fn take<DB: Bench>(lock: &LeaseLock<DB>, name: &'static str, keys: usize) -> Result<Vec<Lease<DB>>, Error> {
    let mut taking = JoinSet::new();
    for taker in 0..TAKERS {
        let lock = lock.clone();
        taking.spawn(async move {
            let mut own = Vec::new();
            for key in (taker..keys).step_by(TAKERS) {
                own.push(lock.acquire(&format!("{name}/{key}"), crate::database::PATIENCE).await?);
            }
            Ok::<_, Error>(own)
        });
    }
    let mut all = Vec::with_capacity(keys);
    while let Some(own) = taking.join_next().await {
        all.extend(own??);
    }
    Ok(all)
}

/// Kilobytes, or 0 where the system does not report it.
fn resident() -> i64 {
    std::fs::read_to_string("/proc/self/status").ok().and_then(|status| resident_in(&status)).unwrap_or_default()
}

fn resident_in(status: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_told_in_bytes() {
        assert_eq!(Taken { before: 10_240, after: 20_480 }.bytes(), Some(10_485_760.0));
        assert_eq!(Taken { before: 0, after: 0 }.bytes(), None);
    }

    #[test]
    fn memory_is_read_from_what_the_system_tells() {
        assert_eq!(resident_in("VmPeak:\t  99 kB\nVmRSS:\t   12345 kB\n"), Some(12345));
        assert_eq!(resident_in("Name:\tx\n"), None);
    }
}
