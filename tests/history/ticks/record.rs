//! What workers and operators did with schedules: one line for each step. Times are from the clock
//! that all processes share.

use std::{fmt, time::Duration};

/// The time of a tick or of a trigger in microseconds, by the database's clock. A tick has whole
/// seconds, and a trigger has not.
pub type Micros = i64;
pub const SECOND: Micros = 1_000_000;

/// A step of a run, a fault of a process, or what an operator did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The work begins, on an instance of this version.
    Run {
        name: String,
        slot: Micros,
        attempt: u32,
        token: i64,
        version: u64,
    },
    /// The work is told to stop.
    Told {
        name: String,
        token: i64,
    },
    /// The work sends the commit that ends its tick.
    Commits {
        name: String,
        token: i64,
    },
    /// The commit has its reply.
    Committed {
        name: String,
        token: i64,
    },
    /// The work has ended.
    End {
        name: String,
        token: i64,
        how: How,
    },
    Killed,
    Stopped,
    Continued,
    /// The process was stalled since then.
    HeldUp {
        since: Duration,
    },
    /// An operator read the schedule's row.
    Seen(Seen),
    /// An operator sends a pause.
    Pauses {
        name: String,
    },
    /// The pause has its reply. The row was read after it.
    Paused {
        name: String,
        token: i64,
    },
    /// The row was read, and the resume is sent.
    Resumes {
        name: String,
        token: i64,
    },
    Resumed {
        name: String,
    },
    Triggers {
        name: String,
    },
    /// The trigger has its reply.
    Triggered {
        name: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Succeeded,
    Failed,
    /// The run lost its lease, or the runner was stopped.
    Dropped,
}

/// A schedule's row, as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub name: String,
    pub version: u64,
    /// The times, as one word.
    pub times: String,
    /// The first tick that has not come to its end.
    pub from: Micros,
    pub token: i64,
    /// When it was read, by the database's clock.
    pub now: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub at: Duration,
    pub process: usize,
    pub step: Step,
}

/// Returns the seconds of a slot.
fn seconds(slot: Micros) -> String {
    format!("{}.{:06}", slot / SECOND, slot % SECOND)
}

/// Parses a slot in seconds.
pub fn slot(text: &str) -> Micros {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let number = |text: &str| text.parse::<i64>().unwrap_or_else(|error| panic!("{text}: {error}"));
    number(whole) * SECOND + number(&format!("{part:0<6}"))
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.at.as_micros(), self.process)?;
        match &self.step {
            Step::Run { name, slot, attempt, token, version } => {
                write!(f, "run {name} {token} {} {attempt} {version}", seconds(*slot))
            }
            Step::Told { name, token } => write!(f, "told {name} {token}"),
            Step::Commits { name, token } => write!(f, "commits {name} {token}"),
            Step::Committed { name, token } => write!(f, "committed {name} {token}"),
            Step::End { name, token, how } => write!(f, "end {name} {token} {how:?}"),
            Step::Killed => f.write_str("killed"),
            Step::Stopped => f.write_str("stopped"),
            Step::Continued => f.write_str("continued"),
            Step::HeldUp { since } => write!(f, "held-up {}", since.as_micros()),
            Step::Seen(Seen { name, version, times, from, token, now }) => {
                write!(f, "seen {name} {token} {version} {times} {} {}", seconds(*from), seconds(*now))
            }
            Step::Pauses { name } => write!(f, "pauses {name}"),
            Step::Paused { name, token } => write!(f, "paused {name} {token}"),
            Step::Resumes { name, token } => write!(f, "resumes {name} {token}"),
            Step::Resumed { name } => write!(f, "resumed {name}"),
            Step::Triggers { name } => write!(f, "triggers {name}"),
            Step::Triggered { name } => write!(f, "triggered {name}"),
        }
    }
}

impl Entry {
    /// Parses a line whose times are in this number of microseconds.
    pub fn parse(line: &str, unit: u64) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<i64>().unwrap_or_else(|error| panic!("{line}: {error}"));
        let time = |place: usize| Duration::from_micros(u64::try_from(number(place)).unwrap() * unit);
        let name = || words[3].to_owned();
        let version = |place: usize| u64::try_from(number(place)).unwrap();
        let step = match words[2] {
            "run" => {
                // The runs of most tests of the checker have the first version.
                let (attempt, version) = (words[6].parse().unwrap(), if words.len() > 7 { version(7) } else { 0 });
                Step::Run { name: name(), token: number(4), slot: slot(words[5]), attempt, version }
            }
            "told" => Step::Told { name: name(), token: number(4) },
            "commits" => Step::Commits { name: name(), token: number(4) },
            "committed" => Step::Committed { name: name(), token: number(4) },
            "end" => {
                let all = [How::Succeeded, How::Failed, How::Dropped];
                let how = all.into_iter().find(|how| format!("{how:?}") == words[5]);
                Step::End { name: name(), token: number(4), how: how.unwrap_or_else(|| panic!("no end: {line}")) }
            }
            "killed" => Step::Killed,
            "stopped" => Step::Stopped,
            "continued" => Step::Continued,
            "held-up" => Step::HeldUp { since: time(3) },
            "seen" => {
                let (version, times, from, now) = (version(5), words[6].to_owned(), slot(words[7]), slot(words[8]));
                Step::Seen(Seen { name: name(), token: number(4), version, times, from, now })
            }
            "pauses" => Step::Pauses { name: name() },
            "paused" => Step::Paused { name: name(), token: number(4) },
            "resumes" => Step::Resumes { name: name(), token: number(4) },
            "resumed" => Step::Resumed { name: name() },
            "triggers" => Step::Triggers { name: name() },
            "triggered" => Step::Triggered { name: name() },
            other => panic!("no step {other}"),
        };
        Self { at: time(0), process: usize::try_from(number(1)).unwrap(), step }
    }
}
