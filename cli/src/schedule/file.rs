//! The file of `rowlock cron`: its jobs, and what is wrong with it, by line.

use std::{collections::BTreeMap, ffi::OsString, ops::Range, path::Path, time::Duration};

use rowlock::{CatchUp, Error, Retries, Schedule};
use toml::de::{DeTable, DeValue};

use crate::{
    args::{
        schedules::{CatchUpWith, DEFAULT_MAX},
        values::{self, duration, within},
    },
    exit::{Failure, USAGE},
    process::find::find,
};

/// A job: its schedule, and the command of each tick.
#[derive(Clone, Debug)]
pub struct Job {
    pub schedule: Schedule,
    pub command: Vec<OsString>,
    pub lease: Duration,
    /// The longest a run may take.
    pub timeout: Option<Duration>,
}

const LEASE: Duration = Duration::from_secs(30);
/// How long a pause between retries becomes, as a multiple of the first.
const LONGEST: u32 = 64;
const KEYS: &str =
    "cron, every, after, zone, command, catch_up, max, grace, retry, backoff, lease, timeout, exclusive_with";

/// Reads the jobs of a file. A file that is wrong in one place is refused as a whole.
pub fn read(path: &Path) -> Result<Vec<Job>, Failure> {
    let wrong = |why: &dyn std::fmt::Display| Failure::new(USAGE, format_args!("{}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    parse(&text).map_err(|Wrong { at, why }| {
        let line = 1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
        Failure::new(USAGE, format_args!("{}, line {line}: {why}", path.display()))
    })
}

/// What is wrong, and the offset in the text.
#[derive(Debug)]
struct Wrong {
    at: usize,
    why: String,
}

/// A value with its place.
struct At<T> {
    at: usize,
    value: T,
}

impl<T> At<T> {
    fn then<U>(self, next: impl FnOnce(T) -> Result<U, Error>) -> Result<U, Wrong> {
        next(self.value).map_err(|error| Wrong { at: self.at, why: error.to_string() })
    }
}

fn parse(text: &str) -> Result<Vec<Job>, Wrong> {
    let begin = |span: Option<Range<usize>>| span.map(|span| span.start).unwrap_or_default();
    let parsed =
        DeTable::parse(text).map_err(|error| Wrong { at: begin(error.span()), why: error.message().to_owned() })?;
    let mut sections: Vec<_> = parsed.get_ref().iter().collect();
    sections.sort_by_key(|(name, _)| name.span().start);
    let mut jobs = Vec::with_capacity(sections.len());
    for (name, value) in sections {
        let (at, name) = (name.span().start, &**name.get_ref());
        let Some(table) = value.get_ref().as_table() else {
            let why = format!("{name:?} is outside of a job: begin one with its name, like [nightly-report]");
            return Err(Wrong { at, why });
        };
        jobs.push(Section::new(At { at, value: name }, table).job()?);
    }
    match jobs.is_empty() {
        true => Err(Wrong { at: 0, why: "it has no job: begin one with its name, like [nightly-report]".into() }),
        false => Ok(jobs),
    }
}

/// The section of one job. Each key is taken out when it is read.
struct Section<'a> {
    name: At<&'a str>,
    fields: BTreeMap<&'a str, At<&'a DeValue<'a>>>,
}

impl<'a> Section<'a> {
    fn new(name: At<&'a str>, table: &'a DeTable<'a>) -> Self {
        let field = |key: &'a str, at, value| (key, At { at, value });
        let fields = table.iter().map(|(key, value)| field(key.get_ref(), key.span().start, value.get_ref())).collect();
        Self { name, fields }
    }

    fn wrong(&self, at: usize, why: impl std::fmt::Display) -> Wrong {
        Wrong { at, why: format!("{}: {why}", self.name.value) }
    }

    /// Takes a key out, and reads its value.
    fn take<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&DeValue<'_>) -> Result<T, String>,
    ) -> Result<Option<At<T>>, Wrong> {
        let Some(At { at, value }) = self.fields.remove(key) else { return Ok(None) };
        match read(value) {
            Ok(value) => Ok(Some(At { at, value })),
            Err(why) => Err(self.wrong(at, format_args!("{key}: {why}"))),
        }
    }

    fn job(mut self) -> Result<Job, Wrong> {
        let schedule = self.times()?;
        let schedule = self.lateness(schedule)?;
        let schedule = self.retries(schedule)?;
        let schedule = match self.take("exclusive_with", string)? {
            Some(key) => key.then(|key| schedule.exclusive_with(&key))?,
            None => schedule,
        };
        let command = self.take("command", words)?;
        let lease = self.take("lease", lease)?.map_or(LEASE, |lease| lease.value);
        let timeout = self.take("timeout", timeout)?.map(|timeout| timeout.value);
        if let Some((key, value)) = self.fields.iter().min_by_key(|(_, value)| value.at) {
            return Err(self.wrong(value.at, format_args!("{key:?} is no key of a job: it has {KEYS}")));
        }
        let Some(command) = command else {
            let why = "it has no command: write one like command = [\"/opt/app/report\", \"--full\"]";
            return Err(self.wrong(self.name.at, why));
        };
        find(&command.value).map_err(|failure| self.wrong(command.at, format_args!("command: {failure}")))?;
        Ok(Job { schedule, command: command.value, lease, timeout })
    }

    /// Reads the times: exactly one of three keys.
    fn times(&mut self) -> Result<Schedule, Wrong> {
        let name = self.name.value;
        let (cron, every, after) = (self.take("cron", string)?, self.take("every", time)?, self.take("after", time)?);
        let schedule = match (cron, every, after) {
            (Some(cron), None, None) => cron.then(|cron| Schedule::cron(name, &cron))?,
            (None, Some(every), None) => every.then(|every| Schedule::every(name, every))?,
            (None, None, Some(after)) => after.then(|after| Schedule::after(name, after))?,
            _ => {
                let why = "it needs exactly one of these: cron = \"30 2 * * *\", every = \"30s\", after = \"10m\"";
                return Err(self.wrong(self.name.at, why));
            }
        };
        match self.take("zone", string)? {
            Some(zone) => zone.then(|zone| schedule.zone(&zone)),
            None => Ok(schedule),
        }
    }

    /// Reads what happens with late ticks.
    fn lateness(&mut self, schedule: Schedule) -> Result<Schedule, Wrong> {
        let with = self.take("catch_up", catch_up)?;
        let max = self.take("max", number)?;
        let with = match (with, max) {
            (Some(with), Some(max)) if with.value == CatchUpWith::All => {
                At { at: max.at, value: CatchUp::All(max.value) }
            }
            (_, Some(max)) => return Err(self.wrong(max.at, "max goes with catch_up = \"all\" alone")),
            (Some(with), None) => At { at: with.at, value: with.value.at_most(DEFAULT_MAX) },
            (None, None) => At { at: self.name.at, value: CatchUp::default() },
        };
        let schedule = with.then(|with| schedule.catch_up(with))?;
        match self.take("grace", time)? {
            Some(grace) => grace.then(|grace| schedule.grace(grace)),
            None => Ok(schedule),
        }
    }

    fn retries(&mut self, schedule: Schedule) -> Result<Schedule, Wrong> {
        let (retry, backoff) = (self.take("retry", number)?, self.take("backoff", time)?);
        match (retry, backoff) {
            (Some(retry), None) => retry.then(|retry| schedule.retry(Retries::times(retry))),
            (Some(retry), Some(backoff)) => {
                let times = Retries::times(retry.value);
                let at = backoff.at;
                let times = backoff.then(|first| times.backoff(first, first.saturating_mul(LONGEST).min(YEAR)))?;
                At { at: at.min(retry.at), value: times }.then(|times| schedule.retry(times))
            }
            (None, Some(backoff)) => Err(self.wrong(backoff.at, "backoff goes with retry: write one like retry = 3")),
            (None, None) => Ok(schedule),
        }
    }
}

const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

fn string(value: &DeValue<'_>) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "it has to be a text in quotes".to_owned())
}

fn time(value: &DeValue<'_>) -> Result<Duration, String> {
    duration(&string(value)?)
}

fn lease(value: &DeValue<'_>) -> Result<Duration, String> {
    let most = 30 * Duration::from_secs(24 * 60 * 60);
    within(time(value)?, Duration::from_millis(100)..=most, "it has to be from 100ms to 30days")
}

fn timeout(value: &DeValue<'_>) -> Result<Duration, String> {
    values::timeout(&string(value)?)
}

fn number(value: &DeValue<'_>) -> Result<u32, String> {
    let digits = value.as_integer().filter(|integer| integer.radix() == 10);
    let number = digits.and_then(|integer| integer.as_str().parse().ok());
    number.ok_or_else(|| "it has to be a whole number, without quotes".to_owned())
}

fn catch_up(value: &DeValue<'_>) -> Result<CatchUpWith, String> {
    match value.as_str() {
        Some("skip") => Ok(CatchUpWith::Skip),
        Some("once") => Ok(CatchUpWith::Once),
        Some("all") => Ok(CatchUpWith::All),
        _ => Err("it has to be \"skip\", \"once\" or \"all\"".to_owned()),
    }
}

/// The words of a command, which no shell splits.
fn words(value: &DeValue<'_>) -> Result<Vec<OsString>, String> {
    let words = value.as_array().map(|words| words.iter().map(|word| word.get_ref().as_str().map(OsString::from)));
    match words.and_then(|words| words.collect::<Option<Vec<_>>>()) {
        Some(words) if !words.is_empty() => Ok(words),
        _ => Err("it has to be a list of texts, like [\"/opt/app/report\", \"--full\"]".to_owned()),
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
