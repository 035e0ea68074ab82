//! The file of `rowlock cron`: its jobs, and what is wrong with it, by line.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fmt::Display,
    ops::Range,
    path::Path,
    time::Duration,
};

use rowlock::{CatchUp, Error, Key, Retries, Schedule};
use toml::de::{DeTable, DeValue};

use crate::{
    args::{
        schedules::{CatchUpWith, DEFAULT_MAX},
        values::{self, duration},
    },
    exit::{Failure, USAGE},
    process::find::find,
};

/// A job: its schedule, and the command of each tick.
#[derive(Clone, Debug)]
pub struct Job {
    pub schedule: Schedule,
    pub command: Vec<OsString>,
    /// The longest a run may take.
    pub timeout: Option<Duration>,
    renamed_from: Vec<Key>,
}

/// How long a pause between retries becomes, as a multiple of the first.
const LONGEST: u32 = 64;
const KEYS: &str = "cron, every, after, zone, command, catch_up, max, grace, retry, backoff, lease, timeout, exclusive_with, renamed_from, removed";

/// The jobs of a file, and the names of those that were removed.
#[derive(Clone, Debug, Default)]
pub struct Jobs {
    pub jobs: Vec<Job>,
    pub removed: Vec<Key>,
}

/// Reads the jobs of a file. A file that is wrong in one place is refused as a whole.
pub fn read(path: &Path) -> Result<Jobs, Failure> {
    check(path).map_err(|wrong| {
        let more = wrong.len().saturating_sub(1);
        let Some(first) = wrong.into_iter().next() else { return Failure::new(USAGE, path.display()) };
        match more {
            0 => first,
            _ => Failure::new(USAGE, format_args!("{first} ({more} more: `rowlock cron --check FILE` lists them)")),
        }
    })
}

/// Reads the jobs of a file, or returns all that is wrong with it, in the order of its lines.
pub fn check(path: &Path) -> Result<Jobs, Vec<Failure>> {
    let failure =
        |line: &dyn Display, why: &dyn Display| Failure::new(USAGE, format_args!("{}{line}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| vec![failure(&"", &error)])?;
    parse(&text).map_err(|all| {
        let line = |at| 1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count();
        all.iter().map(|wrong| failure(&format_args!(", line {}", line(wrong.at)), &wrong.why)).collect()
    })
}

impl Jobs {
    /// Returns the numbers of jobs as a text.
    pub fn number(&self) -> String {
        let jobs = self.jobs.len();
        let jobs = format!("{jobs} {}", if jobs == 1 { "job" } else { "jobs" });
        match self.removed.len() {
            0 => jobs,
            removed => format!("{jobs}, {removed} removed"),
        }
    }
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

/// What a section says.
enum Entry {
    Job(Box<Job>),
    Removed(Key),
}

fn parse(text: &str) -> Result<Jobs, Vec<Wrong>> {
    let begin = |span: Option<Range<usize>>| span.map(|span| span.start).unwrap_or_default();
    let (parsed, errors) = DeTable::parse_recoverable(text);
    let error = |error: toml::de::Error| Wrong { at: begin(error.span()), why: error.message().to_owned() };
    let mut wrong: Vec<Wrong> = errors.into_iter().map(error).collect();
    // What is missing may be in a part that could not be read.
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let mut entries = Vec::with_capacity(parsed.get_ref().len());
    for (name, value) in parsed.get_ref() {
        let (at, name) = (name.span().start, &**name.get_ref());
        let Some(table) = value.get_ref().as_table() else {
            let why = format!("{name:?} is outside of a job: begin one with its name, like [nightly-report]");
            wrong.push(Wrong { at, why });
            continue;
        };
        match Section::new(At { at, value: name }, table).entry() {
            Ok(entry) => entries.push((at, entry)),
            Err(all) => wrong.extend(all),
        }
    }
    let mut names: BTreeSet<String> = parsed.get_ref().keys().map(|name| name.get_ref().to_string()).collect();
    for (at, entry) in &entries {
        let Entry::Job(job) = entry else { continue };
        for old in job.renamed_from.iter().filter(|old| !names.insert(old.as_str().to_owned())) {
            let (name, old) = (job.schedule.name(), old.as_str());
            let why = format!("{name}: renamed_from: {old:?} has a section of its own, or another new name");
            wrong.push(Wrong { at: *at, why });
        }
    }
    if !wrong.is_empty() {
        wrong.sort_by_key(|wrong| wrong.at);
        return Err(wrong);
    }
    entries.sort_by_key(|(at, _)| *at);
    let mut all = Jobs::default();
    for (_, entry) in entries {
        match entry {
            Entry::Job(job) => all.jobs.push(*job),
            Entry::Removed(name) => all.removed.push(name),
        }
    }
    Ok(all)
}

/// The section of one job. Each key is taken out when it is read.
struct Section<'a> {
    name: At<&'a str>,
    /// The name, or another one if it is not possible.
    key: &'a str,
    fields: BTreeMap<&'a str, At<&'a DeValue<'a>>>,
    wrong: Vec<Wrong>,
}

impl<'a> Section<'a> {
    fn new(name: At<&'a str>, table: &'a DeTable<'a>) -> Self {
        let field = |key: &'a str, at, value| (key, At { at, value });
        let fields = table.iter().map(|(key, value)| field(key.get_ref(), key.span().start, value.get_ref())).collect();
        let mut section = Self { key: name.value, name, fields, wrong: Vec::new() };
        if let Err(error) = Key::new(section.key) {
            section.key = "job";
            section.wrong.push(Wrong { at: section.name.at, why: error.to_string() });
        }
        section
    }

    fn wrong(&mut self, at: usize, why: impl Display) {
        self.wrong.push(Wrong { at, why: format!("{}: {why}", self.name.value) });
    }

    /// Takes a key out, and reads its value.
    fn take<T>(&mut self, key: &str, read: impl FnOnce(&DeValue<'_>) -> Result<T, String>) -> Option<At<T>> {
        let At { at, value } = self.fields.remove(key)?;
        match read(value) {
            Ok(value) => Some(At { at, value }),
            Err(why) => {
                self.wrong(at, format_args!("{key}: {why}"));
                None
            }
        }
    }

    /// Does what a value says.
    fn apply<T, U>(&mut self, value: At<T>, apply: impl FnOnce(T) -> Result<U, Error>) -> Option<U> {
        let why = |error: Error| match error {
            Error::InvalidSetting { .. } => format!("{}: {error}", self.name.value),
            error => error.to_string(),
        };
        let wrong = |error: Error| Wrong { at: value.at, why: why(error) };
        apply(value.value).map_err(wrong).map_err(|wrong| self.wrong.push(wrong)).ok()
    }

    /// Changes the schedule as a value says. If the times are wrong, a schedule with other times
    /// shows what else is wrong.
    fn set<T>(
        &mut self,
        schedule: Option<Schedule>,
        value: Option<At<T>>,
        set: impl FnOnce(Schedule, T) -> Result<Schedule, Error>,
    ) -> Option<Schedule> {
        let Some(value) = value else { return schedule };
        let is_right = schedule.is_some();
        let schedule = schedule.or_else(|| Schedule::cron(self.key, "@daily").ok())?;
        self.apply(value, |value| set(schedule, value)).filter(|_| is_right)
    }

    fn entry(mut self) -> Result<Entry, Vec<Wrong>> {
        if !self.fields.contains_key("removed") {
            return self.job().map(Box::new).map(Entry::Job);
        }
        self.take("removed", yes);
        for (key, value) in std::mem::take(&mut self.fields) {
            self.wrong(value.at, format_args!("{key}: a job that is removed has no other key"));
        }
        match Key::new(self.name.value) {
            Ok(name) if self.wrong.is_empty() => Ok(Entry::Removed(name)),
            _ => Err(self.wrong),
        }
    }

    fn job(mut self) -> Result<Job, Vec<Wrong>> {
        let schedule = self.times();
        let schedule = self.lateness(schedule);
        let schedule = self.retries(schedule);
        let key = self.take("exclusive_with", string);
        let schedule = self.set(schedule, key, |schedule, key| schedule.exclusive_with(&key));
        let lease = self.take("lease", time);
        let schedule = self.set(schedule, lease, Schedule::lease);
        let olds = self.take("renamed_from", names);
        let keys = |olds: &At<Vec<String>>| olds.value.iter().filter_map(|old| Key::new(old).ok()).collect();
        let renamed_from = olds.as_ref().map(keys).unwrap_or_default();
        let schedule =
            self.set(schedule, olds, |schedule, olds| olds.iter().try_fold(schedule, |one, old| one.renamed_from(old)));
        let command = self.command();
        let timeout = self.take("timeout", timeout).map(|timeout| timeout.value);
        for (key, value) in std::mem::take(&mut self.fields) {
            self.wrong(value.at, format_args!("{key:?} is no key of a job: it has {KEYS}"));
        }
        match (schedule, command) {
            (Some(schedule), Some(command)) if self.wrong.is_empty() => {
                Ok(Job { schedule, command, timeout, renamed_from })
            }
            _ => Err(self.wrong),
        }
    }

    fn command(&mut self) -> Option<Vec<OsString>> {
        if !self.fields.contains_key("command") {
            let why = "it has no command: write one like command = [\"/opt/app/report\", \"--full\"]";
            self.wrong(self.name.at, why);
        }
        let command = self.take("command", words)?;
        if let Err(failure) = find(&command.value) {
            self.wrong(command.at, format_args!("command: {failure}"));
        }
        Some(command.value)
    }

    /// Reads the times: exactly one of three keys.
    fn times(&mut self) -> Option<Schedule> {
        let name = self.key;
        let number = ["cron", "every", "after"].iter().filter(|key| self.fields.contains_key(**key)).count();
        let (cron, every, after) = (self.take("cron", string), self.take("every", period), self.take("after", period));
        let zone = self.take("zone", string);
        if number != 1 {
            let why = "it needs exactly one of these: cron = \"30 2 * * *\", every = \"30s\", after = \"10m\"";
            self.wrong(self.name.at, why);
            return None;
        }
        let schedule = match (cron, every, after) {
            (Some(cron), _, _) => self.apply(cron, |cron| Schedule::cron(name, &cron)),
            (_, Some(every), _) => self.apply(every, |every| Schedule::every(name, every)),
            (_, _, after) => after.and_then(|after| self.apply(after, |after| Schedule::after(name, after))),
        };
        self.set(schedule, zone, |schedule, zone| schedule.zone(&zone))
    }

    /// Reads what happens with late ticks.
    fn lateness(&mut self, schedule: Option<Schedule>) -> Option<Schedule> {
        let says_all = self.fields.get("catch_up").is_some_and(|with| with.value.as_str() == Some("all"));
        let (with, max) = (self.take("catch_up", catch_up), self.take("max", integer));
        let with = match (with, max) {
            (_, Some(max)) if says_all => Some(At { at: max.at, value: CatchUp::All(max.value) }),
            (_, Some(max)) => {
                self.wrong(max.at, "max goes with catch_up = \"all\" alone");
                None
            }
            (with, None) => with.map(|with| At { at: with.at, value: with.value.at_most(DEFAULT_MAX) }),
        };
        let schedule = self.set(schedule, with, Schedule::catch_up);
        let grace = self.take("grace", time);
        self.set(schedule, grace, Schedule::grace)
    }

    fn retries(&mut self, schedule: Option<Schedule>) -> Option<Schedule> {
        let (has_retry, retry) = (self.fields.contains_key("retry"), self.take("retry", integer));
        let backoff = self.take("backoff", time);
        if let (Some(backoff), false) = (&backoff, has_retry) {
            self.wrong(backoff.at, "backoff goes with retry: write one like retry = 3");
        }
        let Some(retry) = retry else { return schedule };
        let times = Retries::times(retry.value);
        let Some(backoff) = backoff else {
            return self.set(schedule, Some(retry), |schedule, _| schedule.retry(times));
        };
        let at = backoff.at.min(retry.at);
        let times = self.apply(backoff, |first| times.backoff(first, first.saturating_mul(LONGEST).min(YEAR)))?;
        self.set(schedule, Some(At { at, value: times }), Schedule::retry)
    }
}

const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

fn string(value: &DeValue<'_>) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "it has to be a text in quotes".to_owned())
}

fn yes(value: &DeValue<'_>) -> Result<(), String> {
    let wrong = "it has to be true; a job that is run has no such key";
    value.as_bool().filter(|yes| *yes).map(drop).ok_or_else(|| wrong.to_owned())
}

fn time(value: &DeValue<'_>) -> Result<Duration, String> {
    duration(&string(value)?)
}

fn period(value: &DeValue<'_>) -> Result<Duration, String> {
    values::period(&string(value)?)
}

fn timeout(value: &DeValue<'_>) -> Result<Duration, String> {
    values::timeout(&string(value)?)
}

fn integer(value: &DeValue<'_>) -> Result<u32, String> {
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

/// One name, or several.
fn names(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let texts = match value.as_array() {
        Some(names) => names.iter().map(|name| name.get_ref().as_str().map(str::to_owned)).collect(),
        None => value.as_str().map(|name| vec![name.to_owned()]),
    };
    texts.ok_or_else(|| "it has to be a text in quotes, or a list of texts".to_owned())
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
