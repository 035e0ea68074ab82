//! A section of a file of jobs: its keys, and what they say.

use std::{collections::BTreeMap, fmt::Display, time::Duration};

use rowlock::{Key, Schedule, jobs::CatchUp};
use toml::de::{DeTable, DeValue};

use crate::{
    args::{process::Beginning, schedules::DEFAULT_MAX},
    process::surroundings::Surroundings,
    schedule::file::{
        job::{Hooks, Job, Terms},
        values::*,
    },
};

/// The section whose keys apply to all jobs.
pub const DEFAULTS: &str = "defaults";
/// How long a pause between retries becomes, as a multiple of the first.
const LONGEST: u32 = 64;
/// The lease of a job that has none of its own.
const LEASE: Duration = Duration::from_secs(30);
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// The keys that a job alone has.
const OF_JOB: [&str; 9] =
    ["cron", "every", "after", "command", "description", "enabled", "exclusive_with", "renamed_from", "removed"];
/// The keys that `[defaults]` has too.
const OF_ALL: [&str; 18] = [
    "zone",
    "jitter",
    "catch_up",
    "max",
    "grace",
    "retry",
    "backoff",
    "lease",
    "timeout",
    "env",
    "path",
    "cwd",
    "user",
    "umask",
    "database_url",
    "keep_output",
    "on_success",
    "on_failure",
];

/// What is wrong, and the offset in the text.
#[derive(Debug)]
pub struct Wrong {
    pub at: usize,
    pub why: String,
}

/// A value with its place.
struct At<T> {
    at: usize,
    value: T,
}

/// The value of a key, with its place and the section that it is from.
#[derive(Clone, Copy)]
struct Field<'a> {
    at: usize,
    of: &'a str,
    value: &'a DeValue<'a>,
}

type Fields<'a> = BTreeMap<&'a str, Field<'a>>;

/// The keys of `[defaults]`.
#[derive(Default)]
pub struct Defaults<'a>(Fields<'a>);

impl<'a> Defaults<'a> {
    /// Reads the section, as if it was that of a job.
    pub fn read(table: &'a DeTable<'a>) -> Result<Self, Vec<Wrong>> {
        let defaults = Self(fields(DEFAULTS, table));
        let mut section = Section::new(0, DEFAULTS, defaults.0.clone());
        for (key, field) in &defaults.0 {
            if !OF_ALL.contains(key) {
                let keys = OF_ALL.join(", ");
                section.wrong(field.at, format_args!("{key:?} is no key that all jobs can have: they are {keys}"));
            }
        }
        // They go with a key that a job may have.
        if !says_all(defaults.0.get("catch_up")) {
            section.take("max", max);
        }
        if !defaults.0.contains_key("retry") {
            section.take("backoff", time);
        }
        section.terms();
        if section.wrong.is_empty() { Ok(defaults) } else { Err(section.wrong) }
    }
}

/// Returns whether each tick that is late is to be run.
fn says_all(catch_up: Option<&Field<'_>>) -> bool {
    catch_up.is_some_and(|with| with.value.as_str() == Some("all"))
}

fn fields<'a>(of: &'a str, table: &'a DeTable<'a>) -> Fields<'a> {
    let field = |key: &'a str, at, value| (key, Field { at, of, value });
    table.iter().map(|(key, value)| field(key.get_ref(), key.span().start, value.get_ref())).collect()
}

/// What a section says.
pub enum Entry {
    Job(Box<Job>),
    /// A job that this machine does not run.
    Disabled,
    Removed(Key),
}

/// The section of one job. Each key is taken out when it is read.
struct Section<'a> {
    at: usize,
    name: &'a str,
    fields: Fields<'a>,
    wrong: Vec<Wrong>,
    /// What was read so far. Until the times are known, and if they are wrong, it has other ones,
    /// which show what else is wrong.
    schedule: Schedule,
    /// The keys that were probably meant by others, and are not missed then.
    meant: Vec<&'static str>,
}

/// Reads the section of a job.
pub fn entry<'a>(
    (at, name): (usize, &'a str),
    table: &'a DeTable<'a>,
    defaults: &Defaults<'a>,
) -> Result<Entry, Vec<Wrong>> {
    let mut section = Section::new(at, name, fields(name, table));
    if section.fields.contains_key("removed") {
        return section.removed();
    }
    section.inherit(defaults);
    section.job(defaults)
}

impl<'a> Section<'a> {
    fn new(at: usize, name: &'a str, fields: Fields<'a>) -> Self {
        let (key, wrong) = match Key::new(name) {
            Ok(_) => (name, Vec::new()),
            Err(error) => ("job", vec![Wrong { at, why: error.to_string() }]),
        };
        Self { at, name, fields, wrong, schedule: Schedule::cron(key, "@daily"), meant: Vec::new() }
    }

    /// Adds the defaults that the section does not have itself, as far as they go with its own
    /// keys.
    fn inherit(&mut self, defaults: &Defaults<'a>) {
        let mut add = |key: &'a str, applies: bool| {
            if let Some(field) = defaults.0.get(key).filter(|_| applies) {
                self.fields.entry(key).or_insert(*field);
            }
            self.fields.get(key).copied()
        };
        let (is_cron, is_delay) = (add("cron", false).is_some(), add("after", false).is_some());
        let catch_up = add("catch_up", true);
        let has_retry = add("retry", true).is_some();
        for key in OF_ALL {
            let applies = match key {
                "zone" => is_cron,
                "jitter" => !is_delay,
                "max" => says_all(catch_up.as_ref()),
                "backoff" => has_retry,
                // The variables of both are put together.
                "env" => false,
                _ => true,
            };
            add(key, applies);
        }
    }

    fn wrong(&mut self, at: usize, why: impl Display) {
        self.wrong.push(Wrong { at, why: format!("{}: {why}", self.name) });
    }

    /// Takes a key out, and reads its value.
    fn take<T>(&mut self, key: &str, read: impl FnOnce(&DeValue<'_>) -> Result<T, String>) -> Option<At<T>> {
        let Field { at, of, value } = self.fields.remove(key)?;
        match read(value) {
            Ok(value) => Some(At { at, value }),
            Err(why) => {
                self.wrong.push(Wrong { at, why: format!("{of}: {key}: {why}") });
                None
            }
        }
    }

    /// Takes a key out whose value needs no place.
    fn value<T>(&mut self, key: &str, read: impl FnOnce(&DeValue<'_>) -> Result<T, String>) -> Option<T> {
        self.take(key, read).map(|value| value.value)
    }

    /// Changes the schedule as a value says, unless that is not possible.
    fn set<T>(&mut self, value: Option<At<T>>, set: impl FnOnce(Schedule, T) -> Schedule) {
        let Some(At { at, value }) = value else { return };
        let schedule = set(self.schedule.clone(), value);
        match schedule.check() {
            Ok(()) => self.schedule = schedule,
            Err(fault) => self.wrong(at, fault),
        }
    }

    fn removed(mut self) -> Result<Entry, Vec<Wrong>> {
        self.take("removed", yes);
        for (key, value) in std::mem::take(&mut self.fields) {
            self.wrong(value.at, format_args!("{key}: a job that is removed has no other key"));
        }
        match Key::new(self.name) {
            Ok(name) if self.wrong.is_empty() => Ok(Entry::Removed(name)),
            _ => Err(self.wrong),
        }
    }

    /// Takes the keys out that no job has.
    fn unknown(&mut self) {
        let known = || OF_JOB.into_iter().chain(OF_ALL);
        for (key, field) in self.fields.extract_if(.., |key, _| !known().any(|known| known == *key)) {
            let likeness = |known: &str| (strsim::jaro(key, known) * 1_000.0) as u32;
            let meant = known().max_by_key(|known| likeness(known)).filter(|known| likeness(known) > 800);
            let why = match meant {
                Some(meant) => format!("did you mean {meant:?}?"),
                None => format!("it has {}", known().collect::<Vec<_>>().join(", ")),
            };
            let why = format!("{}: {key:?} is no key of a job: {why}", self.name);
            self.wrong.push(Wrong { at: field.at, why });
            self.meant.extend(meant);
        }
    }

    fn job(mut self, defaults: &Defaults<'a>) -> Result<Entry, Vec<Wrong>> {
        self.unknown();
        self.times();
        let key = self.take("exclusive_with", string);
        self.set(key, |schedule, key| schedule.exclusive_with(&key));
        let olds = self.take("renamed_from", names);
        let keys = |olds: &At<Vec<String>>| olds.value.iter().filter_map(|old| Key::new(old).ok()).collect();
        let renamed_from = olds.as_ref().map(keys).unwrap_or_default();
        self.set(olds, |schedule, olds| olds.iter().fold(schedule, |one, old| one.renamed_from(old)));
        let description = self.value("description", string).unwrap_or_default();
        let enabled = self.value("enabled", boolean).unwrap_or(true);
        let mut terms = self.terms();
        let inherited = defaults.0.get("env").and_then(|env| variables(env.value).ok()).unwrap_or_default();
        for (name, value) in inherited {
            terms.surroundings.variables.entry(name).or_insert(value);
        }
        if !self.fields.contains_key("command") && !self.meant.contains(&"command") {
            let why = "it has no command: write one like command = [\"/opt/app/report\", \"--full\"]";
            self.wrong(self.at, why);
        }
        let (Some(At { at, value: command }), true) = (self.take("command", words), self.wrong.is_empty()) else {
            return Err(self.wrong);
        };
        if !enabled {
            return Ok(Entry::Disabled);
        }
        Ok(Entry::Job(Box::new(Job {
            schedule: self.schedule,
            description,
            command,
            command_at: at,
            terms,
            renamed_from,
            unable: None,
            warnings: Vec::new(),
        })))
    }

    /// Reads the times: exactly one of three keys.
    fn times(&mut self) {
        let keys = ["cron", "every", "after"];
        let number = keys.iter().filter(|key| self.fields.contains_key(**key)).count();
        let (cron, every, after) = (self.take("cron", string), self.take("every", period), self.take("after", period));
        if number != 1 {
            let why = "it needs exactly one of these: cron = \"30 2 * * *\", every = \"30s\", after = \"10m\"";
            if number > 0 || !keys.iter().any(|key| self.meant.contains(key)) {
                self.wrong(self.at, why);
            }
            // Without times it cannot be said whether a zone goes with them.
            self.fields.remove("zone");
            return;
        }
        self.set(cron, |other, cron| Schedule::cron(other.name(), &cron));
        self.set(every, |other, every| Schedule::every(other.name(), every));
        self.set(after, |other, after| Schedule::after(other.name(), after));
    }

    /// Reads the keys that all jobs may have in common.
    fn terms(&mut self) -> Terms {
        let zone = self.take("zone", string);
        self.set(zone, |schedule, zone| schedule.zone(&zone));
        let jitter = self.take("jitter", time);
        self.set(jitter, Schedule::jitter);
        self.lateness();
        let retries = self.retries();
        let of_schedule = self.take("lease", time);
        let lease = of_schedule.as_ref().map_or(LEASE, |lease| lease.value);
        self.set(of_schedule, Schedule::lease);
        let timeout = self.value("timeout", timeout);
        let keep_output = self.value("keep_output", |value| integer(value, 0..=MOST_OUTPUT));
        let keep_output = keep_output.unwrap_or(MOST_OUTPUT) as usize;
        let surroundings = self.surroundings();
        let mut hook = |key| self.value(key, hook).unwrap_or_default();
        let hooks = Hooks { on_success: hook("on_success"), on_failure: hook("on_failure") };
        Terms { lease, timeout, retries, keep_output, surroundings, hooks }
    }

    /// Reads what happens with late ticks.
    fn lateness(&mut self) {
        let says_all = says_all(self.fields.get("catch_up"));
        let (with, max) = (self.take("catch_up", catch_up), self.take("max", max));
        let with = match (with, max) {
            (_, Some(max)) if says_all => Some(At { at: max.at, value: CatchUp::All(max.value) }),
            (_, Some(max)) => {
                self.wrong(max.at, "max goes with catch_up = \"all\" alone");
                None
            }
            (with, None) => with.map(|with| At { at: with.at, value: with.value.at_most(DEFAULT_MAX) }),
        };
        self.set(with, Schedule::catch_up);
        let grace = self.take("grace", time);
        self.set(grace, Schedule::grace);
    }

    /// Returns how often a tick is run again.
    fn retries(&mut self) -> u32 {
        let has_retry = self.fields.contains_key("retry");
        let retry = self.take("retry", |value| integer(value, 0..=1_000));
        let backoff = self.take("backoff", time);
        if let (Some(backoff), false) = (&backoff, has_retry) {
            self.wrong(backoff.at, "backoff goes with retry: write one like retry = 3");
        }
        let Some(At { at, value: times }) = retry else { return 0 };
        let at = backoff.as_ref().map_or(at, |backoff| backoff.at.min(at));
        let first = backoff.map_or(Duration::ZERO, |backoff| backoff.value);
        let longest = first.saturating_mul(LONGEST).min(YEAR);
        self.set(Some(At { at, value: times }), |schedule, times| schedule.retry(times, first..=longest));
        times
    }

    fn surroundings(&mut self) -> Surroundings {
        let variables_at = self.fields.get("env").map(|env| env.at);
        let mut variables = self.value("env", variables).unwrap_or_default();
        if let Some((at, _)) = variables_at.zip(variables.remove("PATH")) {
            self.wrong(at, "env: PATH is a key of its own: write path = \"/usr/local/bin:/usr/bin:/bin\"");
        }
        let path = self.value("path", string);
        variables.extend(path.map(|path| ("PATH".to_owned(), path)));
        let beginning = Beginning {
            user: self.value("user", user),
            umask: self.value("umask", umask),
            cwd: self.value("cwd", folder),
        };
        let database_url = self.value("database_url", boolean).unwrap_or_default();
        Surroundings { variables, beginning, database_url }
    }
}
