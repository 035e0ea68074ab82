//! Contenders run alternately in short rounds, so that other load on the machine affects all of
//! them alike.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use sqlx::PgPool;
use tokio::{task::JoinSet, time::Instant};

use crate::{
    error::Error,
    options::Rounds,
    report::{Line, Report, Row},
    statistics::{Summary, now, processor_time, ratio},
};

/// A cycle in progress. It returns the number of attempts that it took.
pub type Cycling<'a> = Pin<Box<dyn Future<Output = Result<u32, Error>> + Send + 'a>>;
pub type Ending<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// One way of doing what is compared.
pub trait Contender: Send + Sync + 'static {
    /// The unit that is counted: done once, by one of the tasks.
    fn cycle(&self, _: usize) -> Cycling<'_> {
        Box::pin(async { Err("it makes whole rounds only".into()) })
    }

    /// This number of tasks repeats it.
    fn round(self: Arc<Self>, tasks: usize, span: Duration) -> Ending<Round> {
        Box::pin(cycles(self, tasks, span))
    }
}

/// The result of one round.
pub struct Round {
    pub per_second: f64,
    /// For each cycle.
    pub attempts: f64,
    pub latencies: Summary,
}

async fn cycles<C: Contender + ?Sized>(contender: Arc<C>, tasks: usize, span: Duration) -> Result<Round, Error> {
    let begin = Instant::now();
    let mut working = JoinSet::new();
    for task in 0..tasks {
        let contender = contender.clone();
        working.spawn(async move {
            let (mut latencies, mut attempts) = (Vec::new(), 0u64);
            while latencies.is_empty() || begin.elapsed() < span {
                let from = now();
                attempts += u64::from(contender.cycle(task).await?);
                latencies.push(now() - from);
            }
            Ok::<_, Error>((latencies, attempts))
        });
    }
    let (mut latencies, mut attempts) = (Vec::new(), 0);
    while let Some(ended) = working.join_next().await {
        let (own, tried) = ended??;
        latencies.extend(own);
        attempts += tried;
    }
    let cycles = latencies.len() as f64;
    let per_second = cycles / begin.elapsed().as_secs_f64();
    Ok(Round { per_second, attempts: attempts as f64 / cycles, latencies: Summary::of(latencies) })
}

/// A contender's entry in a contest.
pub struct Entry {
    pub name: &'static str,
    /// The number of rows or accounts from which a cycle picks one.
    pub size: usize,
    /// The contender with whose figures it is compared.
    pub base: (&'static str, usize),
    pub contender: Arc<dyn Contender>,
}

impl Entry {
    /// Compared with rowlock with default settings.
    pub fn new(name: &'static str, size: usize, contender: Arc<dyn Contender>) -> Self {
        Self { name, size, base: ("rowlock", size), contender }
    }
}

pub struct Contest<'a> {
    pub scenario: &'static str,
    pub server: &'static str,
    pub tasks: usize,
    pub entries: Vec<Entry>,
    pub rounds: &'a Rounds,
    /// The database whose write-ahead log is measured.
    pub wal: Option<PgPool>,
}

impl Contest<'_> {
    /// Runs all rounds, then writes a row of the table for each contender.
    pub async fn run(&self, report: &mut Report) -> Result<(), Error> {
        if self.entries.is_empty() {
            eprintln!("{} {}: none of the contenders that were named", self.scenario, self.server);
        }
        for entry in &self.entries {
            entry
                .contender
                .clone()
                .round(self.tasks, self.rounds.warm_up)
                .await
                .map_err(|error| told(entry, &error))?;
        }
        let mut lines: Vec<Vec<Line>> = self.entries.iter().map(|_| Vec::new()).collect();
        for round in 0..self.rounds.rounds {
            for turn in 0..self.entries.len() {
                let place = (turn + round) % self.entries.len();
                let line = self.turn(&self.entries[place], round).await?;
                report.line(&line)?;
                lines[place].push(line);
            }
            let Self { scenario, server, tasks, rounds, .. } = self;
            eprintln!("{scenario} {server}, {tasks} tasks: round {} of {}", round + 1, rounds.rounds);
        }
        for (entry, own) in self.entries.iter().zip(&lines) {
            let base = self.entries.iter().position(|other| (other.name, other.size) == entry.base);
            report.row(&Row::new(own, base.map(|base| &lines[base][..])));
        }
        Ok(())
    }

    async fn turn(&self, entry: &Entry, round: usize) -> Result<Line, Error> {
        let before = self.written().await?;
        let busy = processor_time();
        let done = entry.contender.clone().round(self.tasks, self.rounds.seconds).await;
        let busy = processor_time() - busy;
        let done = done.map_err(|error| told(entry, &error))?;
        let after = self.written().await?;
        let cycles = done.latencies.count() as f64;
        let micros = |percent| done.latencies.percentile(percent).map(|nanos| nanos as f64 / 1e3);
        Ok(Line {
            scenario: self.scenario.to_owned(),
            server: self.server.to_owned(),
            contender: entry.name.to_owned(),
            tasks: self.tasks,
            size: entry.size,
            round,
            per_second: Some(done.per_second),
            p50_us: micros(50),
            p99_us: micros(99),
            attempts: Some(done.attempts),
            wal_bytes: before.zip(after).and_then(|(before, after)| ratio(after - before, cycles)),
            processor_us: ratio(busy as f64 / 1e3, cycles),
            ..Line::default()
        })
    }

    /// How many bytes of log were written so far, including those that no commit waited for.
    async fn written(&self) -> Result<Option<f64>, Error> {
        let Some(pool) = &self.wal else { return Ok(None) };
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
        Ok(Some(sqlx::query_scalar(sql).fetch_one(pool).await?))
    }
}

fn told(entry: &Entry, error: &Error) -> Error {
    format!("{}: {error}", entry.name).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(rates: &[f64]) -> Vec<Line> {
        rates.iter().map(|rate| Line { per_second: Some(*rate), ..Line::default() }).collect()
    }

    #[test]
    fn a_ratio_is_that_of_the_same_round() {
        let row = Row::new(&lines(&[10.0, 40.0, 100.0]), Some(&lines(&[20.0, 40.0, 400.0])));
        assert_eq!((row.line.per_second, row.ratio), (Some(40.0), Some(0.5)));
        assert_eq!(Row::new(&lines(&[10.0]), None).ratio, None);
    }
}
