//! The conversion of a crontab: `cron --from-crontab`. It changes nothing, and prints a file of
//! jobs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use jiff::tz::TimeZone;
use nix::unistd::{Uid, User};
use rowlock::Schedule;

use crate::{
    exit::{Failure, USAGE},
    format::without_quotes,
    out,
    schedule::file::is_user,
};

const HEAD: &str = "\
# Each job runs on one of the machines that have this file. A job that every machine needs for itself,
# such as the rotation of its logs, stays in the machine's crontab.
# Unlike cron, the program never runs two ticks of a job at the same time, and it runs no job whose
# time was missed by more than `grace`; catch_up = \"once\" would run it later.
version = 1
";

/// Where cron keeps the crontabs of users. There, the owner of a file is the user whose it is.
const SPOOL: &str = "/var/spool/cron";
const NOT_KNOWN: &str = "\
# Cron runs these jobs as the user whose crontab it is, and in that user's home. Who that is does
# not show: set user = \"...\" and cwd = \"/...\" in [defaults].";

/// Reads a crontab, and returns a file with its jobs. In that of a system, the name of a user
/// stands before each command.
pub fn convert(path: &Path, is_system: bool) -> Result<String, Failure> {
    let failed = |why: &dyn Display| Failure::new(USAGE, format_args!("{}: {why}", path.display()));
    let zone = TimeZone::system();
    let zone = zone.iana_name().ok_or_else(|| {
        failed(&"this machine's time zone has no name: set the variable TZ to it, such as TZ=Europe/Berlin")
    })?;
    let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
    let owner = std::fs::metadata(path).map_err(|error| failed(&error))?.uid();
    // Any other file is owned by the user who wrote it, perhaps from `crontab -u USER -l`.
    let is_spooled = std::fs::canonicalize(path).is_ok_and(|path| path.starts_with(SPOOL));
    let owner = User::from_uid(owner.into()).ok().flatten().filter(|_| is_spooled);
    let home = |name: &str| User::from_name(name).ok().flatten().map(|user| user.dir.display().to_string());
    let with_home = |owner: User| {
        let own = std::env::home_dir().filter(|_| owner.uid == Uid::effective());
        (owner.name, own.unwrap_or(owner.dir).display().to_string())
    };
    let of_all = (!is_system).then(|| owner.map(with_home));
    Ok(converted(&text, zone, Users { of_all, home: &home }))
}

/// Whose jobs they are.
struct Users<'a> {
    /// The user of all jobs and the user's home, if they are known; `None` if each job names its
    /// user.
    of_all: Option<Option<(String, String)>>,
    /// Returns the home of a user who exists here.
    home: &'a dyn Fn(&str) -> Option<String>,
}

/// A line of a crontab.
#[derive(Debug, PartialEq)]
enum Line<'a> {
    Blank,
    Comment(&'a str),
    Variable(&'a str, &'a str),
    /// The times, and the rest: the command, behind its user in a system's crontab.
    Job(&'a str, &'a str),
}

fn line(text: &str) -> Line<'_> {
    let text = text.trim_start();
    match text.chars().next() {
        None => return Line::Blank,
        Some('#') => return Line::Comment(text),
        Some(_) => {}
    }
    if let Some((name, value)) = text.split_once('=').map(|(name, value)| (without_quotes(name.trim()), value.trim()))
        && !name.is_empty()
        && !name.contains(char::is_whitespace)
        && !text.starts_with(|first: char| first.is_ascii_digit() || "*@~".contains(first))
    {
        return Line::Variable(name, without_quotes(value));
    }
    let number = if text.starts_with('@') { 1 } else { 5 };
    let mut rest = text;
    for _ in 0..number {
        rest = rest.trim_start();
        rest = &rest[rest.find(char::is_whitespace).unwrap_or(rest.len())..];
    }
    Line::Job(text[..text.len() - rest.len()].trim_end(), rest.trim_start())
}

/// A part of the file.
enum Part {
    Text(String),
    /// A job: its name, its own lines, and those that other jobs may have too.
    Job(String, [String; 2], Vec<String>),
}

/// The jobs of a crontab, as they are read.
struct Conversion<'a> {
    parts: Vec<Part>,
    /// The time zone in effect.
    zone: String,
    users: Users<'a>,
    /// The variables in effect.
    variables: BTreeMap<String, String>,
    shell: String,
    names: BTreeSet<String>,
}

fn converted(text: &str, zone: &str, users: Users<'_>) -> String {
    let mut conversion = Conversion {
        parts: Vec::new(),
        zone: zone.to_owned(),
        users,
        variables: BTreeMap::new(),
        shell: "/bin/sh".to_owned(),
        names: BTreeSet::from(["defaults".to_owned(), "version".to_owned(), "max_concurrent_runs".to_owned()]),
    };
    if let Some(None) = conversion.users.of_all {
        NOT_KNOWN.lines().for_each(|line| conversion.say(line));
    }
    for text in text.lines() {
        match line(text) {
            Line::Blank => conversion.say(""),
            Line::Comment(text) => conversion.say(text),
            Line::Variable(name, value) => conversion.set(name, value),
            Line::Job(times, rest) => {
                if let Err(why) = conversion.job(times, rest) {
                    conversion.note(&format!("{text}\n{why}"));
                }
            }
        }
    }
    text_of(&conversion.parts, zone)
}

/// Writes the file. What all jobs have in common is a default.
fn text_of(parts: &[Part], zone: &str) -> String {
    let jobs = || {
        parts.iter().filter_map(|part| match part {
            Part::Job(_, _, lines) => Some(lines),
            Part::Text(_) => None,
        })
    };
    let is_common = |line: &&String| jobs().all(|lines| lines.contains(line));
    let common: Vec<&String> = jobs().next().into_iter().flatten().filter(is_common).collect();
    let zone = format!("zone = {}", quoted(zone));
    let own = Some(&zone).filter(|_| !common.iter().any(|line| line.starts_with("zone = ")));
    let defaults: Vec<&String> = own.into_iter().chain(common).collect();
    let mut out = format!("{HEAD}\n[defaults]\ncatch_up = \"skip\"\n");
    let mut say = |line: &str| out.extend([line, "\n"]);
    defaults.iter().for_each(|line| say(line));
    for part in parts {
        match part {
            Part::Text(text) => say(text),
            Part::Job(name, own, lines) => {
                say(&format!("[{}]", key(name)));
                own.iter().chain(lines.iter().filter(|line| !defaults.contains(line))).for_each(|line| say(line));
            }
        }
    }
    out
}

impl Conversion<'_> {
    fn say(&mut self, text: &str) {
        // TOML has no control characters in comments.
        let text = text.chars().filter(|c| !c.is_control() || *c == '\t').collect();
        self.parts.push(Part::Text(text));
    }

    /// Says why a line has no equal.
    fn note(&mut self, text: &str) {
        for line in text.lines() {
            self.say(&format!("# {line}"));
        }
    }

    fn set(&mut self, name: &str, value: &str) {
        match name {
            "MAILTO" | "MAILFROM" if value.is_empty() => {}
            "MAILTO" | "MAILFROM" => self.note(&format!(
                "{name}={value}: no mail is sent; write on_failure = [\"...\"] in [defaults] for what is to happen instead"
            )),
            "SHELL" => value.clone_into(&mut self.shell),
            "CRON_TZ" => value.clone_into(&mut self.zone),
            _ => drop(self.variables.insert(name.to_owned(), value.to_owned())),
        }
    }

    /// Writes the section of a job, or returns why there is none.
    fn job(&mut self, times: &str, rest: &str) -> Result<(), String> {
        let (user, home, command) = match &self.users.of_all {
            Some(of_all) => {
                let (user, home) = of_all.clone().unzip();
                (user, home, rest)
            }
            None => {
                let (user, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                (Some(user.to_owned()), (self.users.home)(user), rest.trim_start())
            }
        };
        if let Some(user) = user.as_ref().filter(|user| !is_user(user)) {
            return Err(format!("no job: {user:?} is not the name of a user"));
        }
        if command.is_empty() {
            return Err("no job: there is no command".to_owned());
        }
        if times == "@reboot" {
            return Err(
                "no job: it runs when a machine starts; leave it there, or make a systemd unit of it".to_owned()
            );
        }
        if command.contains("run-parts") || command.contains("logrotate") || command.contains("anacron") {
            return Err("no job: each machine needs it for itself; leave it in the machine's crontab".to_owned());
        }
        let pattern = times.split_whitespace().collect::<Vec<_>>().join(" ");
        let schedule = Schedule::cron("job", &pattern).zone(&self.zone);
        schedule.check().map_err(|wrong| format!("no job: {wrong}"))?;
        let name = self.name(command);
        let script = script(command);
        let own = [
            format!("cron = {}", quoted(&pattern)),
            format!("command = [{}, \"-c\", {}]", quoted(&self.shell), quoted(&script)),
        ];
        // Cron begins there.
        let home = self.variables.get("HOME").cloned().or(home);
        let others = self.variables.iter().filter(|(name, _)| *name != "PATH" && !name.starts_with("ROWLOCK_"));
        let others: Vec<_> = others.map(|(name, value)| format!("{} = {}", key(name), quoted(value))).collect();
        let line = |key: &str, value: &str| format!("{key} = {}", quoted(value));
        let lines = [
            Some(line("zone", &self.zone)),
            user.map(|user| line("user", &user)),
            home.filter(|home| Path::new(home).is_absolute()).map(|home| line("cwd", &home)),
            self.variables.get("PATH").map(|path| line("path", path)),
            (!others.is_empty()).then(|| format!("env = {{ {} }}", others.join(", "))),
        ];
        self.parts.push(Part::Job(name, own, lines.into_iter().flatten().collect()));
        Ok(())
    }

    /// Returns a name for a job: that of the program it runs, and a number if another job has it.
    fn name(&mut self, command: &str) -> String {
        let mut words = command.split_whitespace();
        let word = loop {
            match words.next() {
                Some("cd") => drop(words.next()),
                Some("nice" | "ionice" | "exec" | "&&" | "test" | "[") => {}
                Some(word) if word.contains('=') || word.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {}
                word => break word.unwrap_or("job"),
            }
        };
        let last = word.trim_end_matches('/').rsplit('/').next().unwrap_or(word);
        let last: String = last.chars().filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c)).take(40).collect();
        let last = if last.is_empty() { "job".to_owned() } else { last };
        let numbered = (1..).map(|number| if number == 1 { last.clone() } else { format!("{last}-{number}") });
        let name = numbered.into_iter().find(|name| !self.names.contains(name)).unwrap_or(last.clone());
        self.names.insert(name.clone());
        name
    }
}

/// Returns what the shell is to do. As for cron, a `%` without a backslash before it ends the
/// command, and begins its input.
fn script(command: &str) -> String {
    let (mut script, mut chars, mut input) = (String::new(), command.chars(), None);
    while let Some(c) = chars.next() {
        match (c, chars.clone().next()) {
            ('\\', Some(next @ ('%' | '\\'))) => {
                chars.next();
                script.push(next);
            }
            ('%', _) => {
                input = Some(chars.as_str());
                break;
            }
            _ => script.push(c),
        }
    }
    match input {
        None => script,
        Some(text) => format!("printf %s '{}' | {{\n{script}\n}}", lines(text).replace('\'', r"'\''")),
    }
}

/// Returns the input of a command: each `%` without a backslash before it ends a line, and the last
/// line has an end.
fn lines(text: &str) -> String {
    let parts = text.split(r"\%").map(|part| part.replace('%', "\n"));
    let mut lines = parts.collect::<Vec<_>>().join("%");
    if !lines.is_empty() && !lines.ends_with('\n') {
        lines.push('\n');
    }
    lines
}

/// Returns a name as TOML has it before an equals sign.
fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if is_bare { name.to_owned() } else { quoted(name) }
}

/// Returns a text as TOML has it between quotes, which is as JSON has it.
fn quoted(text: &str) -> String {
    out::escaped(&text.into())
}

#[cfg(test)]
#[path = "crontab_tests.rs"]
mod tests;
