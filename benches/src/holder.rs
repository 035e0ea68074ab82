//! The process of `held`: acquires many keys, holds them, and reports the results on stdout.

use std::{fmt, str::FromStr, time::Duration};

use clap::Args;
use rowlock::{Lease, LeaseLock};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    Error,
    contender::URL,
    count::Queries,
    database::{Bench, Kind, on, patient_pool},
    options::seconds,
    statistics::{processor_time, ratio},
};

/// How many tasks acquire keys; also the number of connections that they use.
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
    #[arg(long)]
    connections: u32,
}

/// All keys are held: the process's memory before and after, in kilobytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewed {
    pub statements: i64,
    pub renewals: i64,
    /// The connections of the pool that renews.
    pub connections: i64,
    /// Nanoseconds of processor time of the process.
    pub processor: i64,
}

impl Renewed {
    pub fn statements_per_100(self) -> Option<f64> {
        ratio(100.0 * self.statements as f64, self.renewals as f64)
    }
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "taken {} {}", self.before, self.after)
    }
}

impl FromStr for Taken {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self, Error> {
        let [before, after] = numbers(line, "taken")?;
        Ok(Self { before, after })
    }
}

impl fmt::Display for Renewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "renewed {} {} {} {}", self.statements, self.renewals, self.connections, self.processor)
    }
}

impl FromStr for Renewed {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self, Error> {
        let [statements, renewals, connections, processor] = numbers(line, "renewed")?;
        Ok(Self { statements, renewals, connections, processor })
    }
}

fn numbers<const N: usize>(line: &str, word: &str) -> Result<[i64; N], Error> {
    let rest = line.strip_prefix(word).unwrap_or_default();
    let numbers = rest.split_whitespace().map(str::parse).collect::<Result<Vec<i64>, _>>()?;
    numbers.try_into().map_err(|_| format!("the process says {line:?}").into())
}

pub async fn run(options: &Options, queries: &Queries) -> Result<(), Error> {
    on!(options.database, hold(options, queries))
}

/// The pool is shared with the lock, so that it shows how few connections renewing uses at a time.
/// Each statement is then preceded by a check of its connection, which counts as a statement.
async fn hold<DB: Bench>(options: &Options, queries: &Queries) -> Result<(), Error> {
    let pool = patient_pool::<DB>(&options.url, options.connections, false).await?;
    let lock = LeaseLock::builder(pool.clone()).share_pool().build()?.lease(options.lease);
    for lease in take(&lock, "warm-up", WARM_UP).await? {
        lease.abandon().await?;
    }
    let before = resident();
    let leases = take(&lock, "held", options.keys).await?;
    let after = resident();
    println!("{}", Taken { before, after });
    let (statements, renewals, processor) = (queries.so_far(), queries.renewals(), processor_time());
    let until = Instant::now() + options.seconds;
    let mut connections = 0;
    while Instant::now() < until {
        connections = connections.max(pool.size().saturating_sub(u32::try_from(pool.num_idle())?));
        sleep(Duration::from_millis(20).min(until.saturating_duration_since(Instant::now()))).await;
    }
    let (statements, renewals) = (queries.so_far() - statements, queries.renewals() - renewals);
    let processor = processor_time() - processor;
    if let Some(lost) = leases.iter().find(|lease| !lease.is_held()) {
        return Err(format!("lost {}", lost.claim().key).into());
    }
    println!("{}", Renewed { statements, renewals, connections: connections.into(), processor });
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
    fn what_the_process_tells_is_read_as_it_was_told() -> Result<(), Error> {
        let taken = Taken { before: 10_240, after: 20_480 };
        assert_eq!((taken.to_string().parse::<Taken>()?, taken.bytes()), (taken, Some(10_485_760.0)));
        let renewed = Renewed { statements: 5, renewals: 1000, connections: 2, processor: 7 };
        assert_eq!(renewed.to_string().parse::<Renewed>()?, renewed);
        assert_eq!(renewed.statements_per_100(), Some(0.5));
        assert!("renewed 1 2".parse::<Renewed>().is_err());
        Ok(())
    }

    #[test]
    fn memory_is_read_from_what_the_system_tells() {
        assert_eq!(resident_in("VmPeak:\t  99 kB\nVmRSS:\t   12345 kB\n"), Some(12345));
        assert_eq!(resident_in("Name:\tx\n"), None);
    }
}
