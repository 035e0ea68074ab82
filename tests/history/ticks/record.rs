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
    /// The process begins to announce the times of this version.
    Starts {
        version: u64,
    },
    /// It has announced them.
    Started {
        version: u64,
    },
    /// It begins to hand back what it runs: it no longer declares the times.
    Leaves,
    /// All processes have had this version for as long as its times may take to apply.
    Deployed {
        version: u64,
    },
    Killed,
    Stopped,
    Continued,
    /// The process was stalled since then.
    HeldUp {
        since: Duration,
    },
    /// Requests or replies of the process did not arrive since then.
    CutOff {
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
    /// The times, as one word.
    pub times: String,
    /// When they took effect, as the database says it. It is compared only.
    pub since: String,
    pub token: i64,
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
            Step::Starts { version } => write!(f, "starts {version}"),
            Step::Started { version } => write!(f, "started {version}"),
            Step::Leaves => f.write_str("leaves"),
            Step::Deployed { version } => write!(f, "deployed {version}"),
            Step::Killed => f.write_str("killed"),
            Step::Stopped => f.write_str("stopped"),
            Step::Continued => f.write_str("continued"),
            Step::HeldUp { since } => write!(f, "held-up {}", since.as_micros()),
            Step::CutOff { since } => write!(f, "cut-off {}", since.as_micros()),
            Step::Seen(Seen { name, times, since, token }) => write!(f, "seen {name} {token} {since} {times}"),
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
            "starts" => Step::Starts { version: version(3) },
            "started" => Step::Started { version: version(3) },
            "leaves" => Step::Leaves,
            "deployed" => Step::Deployed { version: version(3) },
            "killed" => Step::Killed,
            "stopped" => Step::Stopped,
            "continued" => Step::Continued,
            "held-up" => Step::HeldUp { since: time(3) },
            "cut-off" => Step::CutOff { since: time(3) },
            "seen" => {
                let (since, times) = (words[5].to_owned(), words[6].to_owned());
                Step::Seen(Seen { name: name(), token: number(4), times, since })
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
