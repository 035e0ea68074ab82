//! The conversion of a crontab: `cron --from-crontab`. It changes nothing, and prints a file of jobs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::Path,
};

use nix::unistd::User;
use rowlock::{Error, Schedule};

use crate::exit::{Failure, USAGE};

const HEAD: &str = "\
# Each job runs on one of the machines that have this file. A job that every machine needs for itself,
# such as the rotation of its logs, stays in the machine's crontab.
# Unlike cron, the program never runs two ticks of a job at the same time, and it runs no job whose
# time was missed by more than `grace`; catch_up = \"once\" would run it later.
version = 1
";

/// Reads a crontab, and returns a file with its jobs.
pub fn convert(path: &Path, zone: &str) -> Result<String, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::new(USAGE, format_args!("{}: {error}", path.display())))?;
    let home = |user: Option<&str>| match user {
        Some(user) => User::from_name(user).ok().flatten().map(|user| user.dir.display().to_string()),
        None => std::env::home_dir().map(|home| home.display().to_string()),
    };
    Ok(converted(&text, zone, &home))
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
    if let Some((name, value)) = text.split_once('=').map(|(name, value)| (unquoted(name.trim()), value.trim()))
        && !name.is_empty()
        && !name.contains(char::is_whitespace)
        && !text.starts_with(|first: char| first.is_ascii_digit() || "*@~".contains(first))
    {
        return Line::Variable(name, unquoted(value));
    }
    let number = if text.starts_with('@') { 1 } else { 5 };
    let mut rest = text;
    for _ in 0..number {
        rest = rest.trim_start();
        rest = &rest[rest.find(char::is_whitespace).unwrap_or(rest.len())..];
    }
    Line::Job(text[..text.len() - rest.len()].trim_end(), rest.trim_start())
}

/// Takes the quotes away that stand around a whole value.
fn unquoted(text: &str) -> &str {
    let within = |quote| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    within('"').or_else(|| within('\'')).unwrap_or(text)
}

/// Returns whether a crontab is that of a system: each of its jobs has the name of a user before the
/// command.
fn has_users(text: &str, home: Home<'_>) -> bool {
    let jobs = text.lines().map(line).filter_map(|line| match line {
        Line::Job(_, rest) => Some(rest),
        _ => None,
    });
    let mut users = jobs.map(|rest| rest.split_whitespace().next().is_some_and(|user| home(Some(user)).is_some()));
    users.next() == Some(true) && users.all(|known| known)
}

/// Returns the home of a user, if there is one, or of the user whose crontab it is.
type Home<'a> = &'a dyn Fn(Option<&str>) -> Option<String>;

/// A part of the file.
enum Part {
    Text(String),
    /// A job: its name, its own lines, and those that other jobs may have too.
    Job(String, [String; 2], Vec<String>),
}

/// The jobs of a crontab, as they are read.
struct Conversion<'a> {
    parts: Vec<Part>,
    /// The time zone of the machine, and the one in effect.
    own_zone: String,
    zone: String,
    has_users: bool,
    home: Home<'a>,
    /// The variables in effect.
    variables: BTreeMap<String, String>,
    shell: String,
    names: BTreeSet<String>,
}

fn converted(text: &str, zone: &str, home: Home<'_>) -> String {
    let mut conversion = Conversion {
        parts: Vec::new(),
        own_zone: zone.to_owned(),
        zone: zone.to_owned(),
        has_users: has_users(text, home),
        home,
        variables: BTreeMap::new(),
        shell: "/bin/sh".to_owned(),
        names: BTreeSet::from(["defaults".to_owned(), "version".to_owned(), "max_runs".to_owned()]),
    };
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
    file(&conversion.parts, zone)
}

/// Writes the file. What all jobs have in common is a default.
fn file(parts: &[Part], zone: &str) -> String {
    let jobs = || {
        parts.iter().filter_map(|part| match part {
            Part::Job(_, _, lines) => Some(lines),
            Part::Text(_) => None,
        })
    };
    let is_common = |line: &&String| jobs().all(|lines| lines.contains(line));
    let common: Vec<&String> = jobs().next().into_iter().flatten().filter(is_common).collect();
    let mut out = format!("{HEAD}\n[defaults]\ncatch_up = \"skip\"\nzone = {}\n", quoted(zone));
    let mut say = |line: &str| out.extend([line, "\n"]);
    common.iter().for_each(|line| say(line));
    for part in parts {
        match part {
            Part::Text(text) => say(text),
            Part::Job(name, own, lines) => {
                say(&format!("[{}]", key(name)));
                own.iter().chain(lines.iter().filter(|line| !common.contains(line))).for_each(|line| say(line));
            }
        }
    }
    out
}

impl Conversion<'_> {
    fn say(&mut self, text: &str) {
        self.parts.push(Part::Text(text.to_owned()));
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
            "CRON_TZ" | "TZ" => value.clone_into(&mut self.zone),
            _ => drop(self.variables.insert(name.to_owned(), value.to_owned())),
        }
    }

    /// Writes the section of a job, or returns why there is none.
    fn job(&mut self, times: &str, rest: &str) -> Result<(), String> {
        let (user, command) = match self.has_users {
            true => rest.split_once(char::is_whitespace).map(|(user, rest)| (Some(user), rest.trim_start())),
            false => Some((None, rest)),
        }
        .unwrap_or_default();
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
        let schedule = Schedule::cron("job", &pattern).and_then(|schedule| schedule.zone(&self.zone));
        schedule.map_err(|error| match error {
            Error::InvalidSchedule { wrong, .. } => format!("no job: {wrong}"),
            error => format!("no job: {error}"),
        })?;
        let name = self.name(command);
        let script = script(command);
        let own = [
            format!("cron = {}", quoted(&pattern)),
            format!("command = [{}, \"-c\", {}]", quoted(&self.shell), quoted(&script)),
        ];
        // Cron begins there.
        let home = self.variables.get("HOME").cloned().or_else(|| (self.home)(user));
        let others = self.variables.iter().filter(|(name, _)| *name != "PATH" && !name.starts_with("ROWLOCK_"));
        let others: Vec<_> = others.map(|(name, value)| format!("{} = {}", key(name), quoted(value))).collect();
        let line = |key: &str, value: &str| format!("{key} = {}", quoted(value));
        let lines = [
            (self.zone != self.own_zone).then(|| line("zone", &self.zone)),
            user.map(|user| line("user", user)),
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

/// Returns what the shell is to do. The first `%` of a line begins the input of the command, and
/// each further one a line of it.
fn script(command: &str) -> String {
    let mut parts = vec![String::new()];
    let mut chars = command.chars().peekable();
    while let Some(c) = chars.next() {
        let part = parts.last_mut();
        match (c, chars.peek(), part) {
            ('\\', Some('%'), Some(part)) => {
                part.push('%');
                chars.next();
            }
            ('%', ..) => parts.push(String::new()),
            (c, _, Some(part)) => part.push(c),
            (_, _, None) => {}
        }
    }
    let mut parts = parts.into_iter();
    let command = parts.next().unwrap_or_default();
    let input: Vec<String> = parts.map(|line| format!("'{}'", line.replace('\'', r"'\''"))).collect();
    match input.is_empty() {
        true => command,
        false => format!("printf '%s\\n' {} | {{\n{command}\n}}", input.join(" ")),
    }
}

/// Returns a name as TOML has it before an equals sign.
fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if is_bare { name.to_owned() } else { quoted(name) }
}

/// Returns a text as TOML has it between quotes.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
#[path = "crontab_tests.rs"]
mod tests;
