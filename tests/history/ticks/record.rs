//! What workers did with ticks, and what the database recorded of them. Times are from the clock
//! that all processes share, slots in seconds.

use std::{collections::HashMap, fmt, time::Duration};

use crate::{record::Span, ticks::terms::Terms};

/// A step of a run, or a fault of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The work begins.
    Run {
        name: String,
        slot: i64,
        attempt: u32,
        token: i64,
    },
    /// The work sends the commit that ends its tick.
    Commits {
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Succeeded,
    Failed,
    /// The run lost its lease, or the runner was stopped.
    Dropped,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub at: Duration,
    pub process: usize,
    pub step: Step,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ", self.at.as_micros(), self.process)?;
        match &self.step {
            Step::Run { name, slot, attempt, token } => write!(f, "run {name} {token} {slot} {attempt}"),
            Step::Commits { name, token } => write!(f, "commits {name} {token}"),
            Step::End { name, token, how } => write!(f, "end {name} {token} {how:?}"),
            Step::Killed => f.write_str("killed"),
            Step::Stopped => f.write_str("stopped"),
            Step::Continued => f.write_str("continued"),
            Step::HeldUp { since } => write!(f, "held-up {}", since.as_micros()),
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
        let step = match words[2] {
            "run" => Step::Run { name: name(), token: number(4), slot: number(5), attempt: words[6].parse().unwrap() },
            "commits" => Step::Commits { name: name(), token: number(4) },
            "end" => {
                let all = [How::Succeeded, How::Failed, How::Dropped];
                let how = all.into_iter().find(|how| format!("{how:?}") == words[5]);
                Step::End { name: name(), token: number(4), how: how.unwrap_or_else(|| panic!("no end: {line}")) }
            }
            "killed" => Step::Killed,
            "stopped" => Step::Stopped,
            "continued" => Step::Continued,
            "held-up" => Step::HeldUp { since: time(3) },
            other => panic!("no step {other}"),
        };
        Self { at: time(0), process: usize::try_from(number(1)).unwrap(), step }
    }
}

/// A run, as its process recorded it.
#[derive(Clone, Debug)]
pub struct Run {
    pub process: usize,
    pub slot: i64,
    pub attempt: u32,
    pub token: i64,
    pub began: Duration,
    /// When the commit that ends the tick was sent.
    pub commits: Option<Duration>,
    pub ended: Option<(Duration, How)>,
}

/// A row of the table of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub name: String,
    pub slot: i64,
    pub attempt: u32,
    pub token: i64,
    pub process: usize,
    pub status: char,
    pub missed: u32,
}

/// A row of the application's own table, which the work has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub name: String,
    pub slot: i64,
    pub token: i64,
}

impl Told {
    /// Parses a line of a test of the checker.
    pub fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<i64>().unwrap_or_else(|error| panic!("{line}: {error}"));
        Self {
            name: words[0].to_owned(),
            token: number(1),
            slot: number(2),
            attempt: words[3].parse().unwrap(),
            process: words[4].parse().unwrap(),
            status: words[5].parse().unwrap(),
            missed: words[6].parse().unwrap(),
        }
    }
}

impl Effect {
    pub fn parse(line: &str) -> Self {
        let mut words = line.split(' ');
        let name = words.next().unwrap().to_owned();
        let mut number = || words.next().unwrap().parse().unwrap();
        Self { name, token: number(), slot: number() }
    }
}

/// Everything that happened to one schedule.
#[derive(Clone, Debug)]
pub struct History {
    pub terms: Terms,
    /// A slot that was observed after the registration, before any fault.
    pub first: i64,
    /// The first slot that has not come to its end, when nothing ran any more.
    pub next: i64,
    /// In the order in which they began.
    pub runs: Vec<Run>,
    pub told: Vec<Told>,
    pub effects: Vec<Effect>,
}

/// What the processes suffered.
#[derive(Clone, Debug, Default)]
pub struct Suffered {
    pub lease: Duration,
    pub killed: Vec<(usize, Duration)>,
    /// Processes that were stalled.
    pub stood_still: Vec<(usize, Span)>,
}

impl Suffered {
    pub fn new(lease: Duration, entries: &[Entry]) -> Self {
        let mut suffered = Self { lease, ..Self::default() };
        let mut stopped: HashMap<usize, Duration> = HashMap::new();
        for Entry { at, process, step } in entries {
            match step {
                Step::Killed => suffered.killed.push((*process, *at)),
                Step::Stopped => drop(stopped.insert(*process, *at)),
                Step::Continued => {
                    let since = stopped.remove(process).expect("it was stopped");
                    suffered.stood_still.push((*process, (since, *at)));
                }
                Step::HeldUp { since } => suffered.stood_still.push((*process, (*since, *at))),
                Step::Run { .. } | Step::Commits { .. } | Step::End { .. } => {}
            }
        }
        suffered
    }

    /// Returns when the process was killed.
    pub fn death(&self, process: usize) -> Option<Duration> {
        self.killed.iter().find(|(who, _)| *who == process).map(|killed| killed.1)
    }

    /// Whether the process was stalled for at least `so_long` within this time.
    pub fn stalled(&self, process: usize, (from, to): Span, so_long: Duration) -> bool {
        let spans = self.stood_still.iter().filter(|(who, _)| *who == process).map(|still| still.1);
        spans.into_iter().any(|(since, until)| {
            let (since, until) = (since.max(from), until.min(to));
            since < until && until - since >= so_long
        })
    }
}

/// Collects the runs of one schedule.
pub fn runs(name: &str, entries: &[Entry]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for Entry { at, process, step } in entries {
        match step {
            Step::Run { name: of, slot, attempt, token } if of == name => {
                let (slot, attempt, token) = (*slot, *attempt, *token);
                runs.push(Run { process: *process, slot, attempt, token, began: *at, commits: None, ended: None });
            }
            Step::Commits { name: of, token } if of == name => {
                unfinished(&mut runs, *process, *token).commits = Some(*at);
            }
            Step::End { name: of, token, how } if of == name => {
                unfinished(&mut runs, *process, *token).ended = Some((*at, *how));
            }
            _ => {}
        }
    }
    runs
}

fn unfinished(runs: &mut [Run], process: usize, token: i64) -> &mut Run {
    let is = |run: &&mut Run| run.process == process && run.token == token && run.ended.is_none();
    runs.iter_mut().rfind(is).expect("it had begun")
}
