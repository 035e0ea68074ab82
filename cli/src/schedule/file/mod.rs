//! The file of `rowlock cron`: its jobs, and what is wrong with it, by line.

mod job;
mod section;
mod values;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::unistd::Uid;
use rowlock::Key;
use toml::de::DeTable;

use crate::{
    exit::{Failure, USAGE},
    schedule::file::{
        section::{DEFAULTS, Defaults, Entry, Wrong, entry},
        values::{integer, version},
    },
};
pub use job::Job;
pub use values::is_user;

/// The jobs of a file, and the names of those that were removed.
#[derive(Clone, Debug, Default)]
pub struct Jobs {
    pub jobs: Vec<Job>,
    pub removed: Vec<Key>,
    /// The number of jobs that are not enabled.
    disabled: usize,
    /// How many commands the instance runs at the same time.
    pub max_concurrent_runs: Option<u32>,
    path: PathBuf,
    text: String,
    /// Who may change what runs as root, besides root.
    open_to: Option<String>,
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
    let text = std::fs::read_to_string(path)
        .map_err(|error| vec![Failure::new(USAGE, format_args!("{}: {error}", path.display()))])?;
    let failure = |wrong: Wrong| Failure::new(USAGE, at_line(path, &text, &wrong));
    let mut jobs = parse(&text).map_err(|all| all.into_iter().map(failure).collect::<Vec<_>>())?;
    (jobs.path, jobs.text, jobs.open_to) = (path.to_owned(), text, open_to(path));
    jobs.look_for_commands();
    Ok(jobs)
}

/// Says who else may change a file of root's commands.
fn open_to(path: &Path) -> Option<String> {
    let found = std::fs::metadata(path).ok().filter(|_| Uid::effective().is_root())?;
    let others = match (found.uid(), found.mode()) {
        (0, mode) if mode & 0o022 == 0 => return None,
        (0, _) => "others than root may write it".to_owned(),
        (owner, _) => format!("it belongs to user {owner}"),
    };
    Some(format!("{}: {others}, and its commands run as root, or as any user", path.display()))
}

fn at_line(path: &Path, text: &str, Wrong { at, why }: &Wrong) -> String {
    let line = 1 + text.bytes().take(*at).filter(|byte| *byte == b'\n').count();
    format!("{}, line {line}: {why}", path.display())
}

/// The file's name, and the numbers of its jobs.
impl fmt::Display for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let jobs = self.jobs.len();
        let jobs = format!("{jobs} {}", if jobs == 1 { "job" } else { "jobs" });
        let others = [(self.disabled, "not enabled"), (self.removed.len(), "removed")];
        let others = others.into_iter().filter(|(number, _)| *number > 0);
        let number = others.fold(jobs, |text, (number, what)| format!("{text}, {number} {what}"));
        write!(f, "{}: {number}", self.path.display())
    }
}

impl Jobs {
    /// Looks whether this machine can run the commands.
    pub fn look_for_commands(&mut self) {
        for job in &mut self.jobs {
            let told = |why: String| {
                let wrong = Wrong { at: job.command_at, why: format!("{}: {why}", job.schedule.name()) };
                at_line(&self.path, &self.text, &wrong)
            };
            job.unable = job.terms.surroundings.refusal(&job.command).map(told);
            let hooks = [("on_success", &job.terms.hooks.on_success), ("on_failure", &job.terms.hooks.on_failure)];
            let hooks = hooks.into_iter().filter(|(_, words)| job.unable.is_none() && !words.is_empty());
            let refusals =
                hooks.filter_map(|(hook, words)| Some(format!("{hook}: {}", job.terms.surroundings.refusal(words)?)));
            job.warnings = refusals.map(told).collect();
        }
    }

    /// Returns which jobs are others than before, as the end of a sentence.
    pub fn changes_since(&self, before: &Self) -> String {
        let texts = |jobs: &Self| -> BTreeMap<String, String> {
            // Neither its place nor what this machine has is a part of a job.
            let part = |job: &Job| Job { command_at: 0, unable: None, warnings: Vec::new(), ..job.clone() };
            jobs.jobs.iter().map(|job| (job.schedule.name().to_owned(), format!("{:?}", part(job)))).collect()
        };
        let (before, now) = (texts(before), texts(self));
        let names = |all: &BTreeMap<String, String>, is_one: &dyn Fn(&str, &str) -> bool| {
            let names = all.iter().filter(|(name, text)| is_one(name, text)).map(|(name, _)| name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        [
            ("added", names(&now, &|name, _| !before.contains_key(name))),
            ("changed", names(&now, &|name, text| before.get(name).is_some_and(|before| before != text))),
            ("gone", names(&before, &|name, _| !now.contains_key(name))),
        ]
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(what, names)| format!("; {what}: {names}"))
        .collect()
    }

    /// Returns who else may change the file, if others than root may.
    pub fn open_to(&self) -> impl Iterator<Item = &str> {
        self.open_to.as_deref().into_iter()
    }

    /// Returns what is wrong on this machine with jobs that it runs.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.jobs.iter().flat_map(|job| &job.warnings).map(String::as_str)
    }

    /// Returns why the machine cannot run some of the jobs.
    pub fn unable(&self) -> impl Iterator<Item = &str> {
        self.jobs.iter().filter_map(|job| job.unable.as_deref())
    }
}

fn parse(text: &str) -> Result<Jobs, Vec<Wrong>> {
    let begin = |span: Option<Range<usize>>| span.map(|span| span.start).unwrap_or_default();
    let (parsed, errors) = DeTable::parse_recoverable(text);
    let error = |error: toml::de::Error| {
        let of = error.span().filter(|_| error.message() == "duplicate key").and_then(|span| text.get(span));
        let why = of.map_or_else(|| error.message().to_owned(), |key| format!("duplicate key: {key}"));
        Wrong { at: begin(error.span()), why }
    };
    let mut wrong: Vec<Wrong> = errors.into_iter().map(error).collect();
    // What is missing may be in a part that could not be read.
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let root = parsed.get_ref();
    let defaults = root.get(DEFAULTS).and_then(|value| value.get_ref().as_table()).map(Defaults::read);
    let defaults = defaults.unwrap_or(Ok(Defaults::default())).unwrap_or_else(|all| {
        wrong.extend(all);
        Defaults::default()
    });
    let mut jobs = Jobs::default();
    let mut entries = Vec::with_capacity(root.len());
    for (name, value) in root {
        let (at, name, value) = (name.span().start, &**name.get_ref(), value.get_ref());
        let mut says = |why: String| wrong.push(Wrong { at, why: format!("{name}: {why}") });
        match (name, value.as_table()) {
            (DEFAULTS, Some(_)) => {}
            (_, Some(table)) => match entry((at, name), table, &defaults) {
                Ok(entry) => entries.push((at, entry)),
                Err(all) => wrong.extend(all),
            },
            ("version", None) => version(value).unwrap_or_else(says),
            ("max_concurrent_runs", None) => {
                jobs.max_concurrent_runs = integer(value, 1..=10_000).map_err(&mut says).ok()
            }
            (_, None) => {
                let why = format!("{name:?} is outside of a job: begin one with its name, like [nightly-report]");
                wrong.push(Wrong { at, why });
            }
        }
    }
    wrong.extend(used_twice(root.keys().map(|name| &**name.get_ref()), &entries));
    wrong.sort_by_key(|wrong| wrong.at);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    entries.sort_by_key(|(at, _)| *at);
    for (_, entry) in entries {
        match entry {
            Entry::Job(job) => jobs.jobs.push(*job),
            Entry::Disabled => jobs.disabled += 1,
            Entry::Removed(name) => jobs.removed.push(name),
        }
    }
    Ok(jobs)
}

/// Returns the old names that are those of other sections, or have two new ones.
fn used_twice<'a>(names: impl Iterator<Item = &'a str>, entries: &[(usize, Entry)]) -> Vec<Wrong> {
    let mut names: BTreeSet<String> = names.map(str::to_owned).collect();
    let mut wrong = Vec::new();
    for (at, entry) in entries {
        let Entry::Job(job) = entry else { continue };
        for old in job.renamed_from.iter().filter(|old| !names.insert(old.as_str().to_owned())) {
            let (name, old) = (job.schedule.name(), old.as_str());
            let why = format!("{name}: renamed_from: {old:?} has a section of its own, or another new name");
            wrong.push(Wrong { at: *at, why });
        }
    }
    wrong
}

#[cfg(test)]
mod tests;
