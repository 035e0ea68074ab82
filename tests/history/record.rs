//! What processes did, and when: one line for each step, by a clock that all processes of the
//! machine share.

use std::{collections::HashMap, fmt, time::Duration};

use rustix::time::{ClockId, clock_gettime};

/// Time since the machine was started, the same in every process.
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// A step of an operation, or a fault of a process or a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The process asks for a key.
    Ask {
        key: String,
        kind: Kind,
    },
    /// The key of the permit that is granted, where the process asked for any one.
    Permit {
        key: String,
    },
    /// The claim was granted, for at least `left`. `prior` is the claim that was taken over, with
    /// its process.
    Granted {
        token: i64,
        left: Duration,
        prior: Option<(i64, usize)>,
    },
    /// The token by which the work of a reader is fenced.
    Fence {
        token: i64,
    },
    /// The process checked its lease, which had `left` remaining. With nothing left, the process
    /// counts as notified of the loss.
    Sure {
        left: Duration,
    },
    Lost,
    /// The process calls `release`, `abandon`, or drops the lease.
    End(How),
    /// The work in a transaction begins: the claim is confirmed.
    Working {
        token: i64,
    },
    /// The work in a transaction ends, before the commit.
    Worked,
    Done(Outcome),
    /// The process waits for the order to continue.
    Paused,
    /// The process was stalled since then.
    HeldUp {
        since: Duration,
    },
    Killed,
    Stopped,
    Continued,
    /// The process has no connection to its database; it has one again.
    CutOff,
    Reached,
    /// The row of a key is about to be deleted; the row has been deleted.
    Deleting {
        key: String,
    },
    Deleted {
        key: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The process does not wait.
    Try,
    Lease,
    /// As a reader.
    Read,
    /// As the writer.
    Write,
    Transaction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Release,
    Abandon,
    Drop,
}

/// The reported outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Refused,
    /// The claim was lost, and nothing was changed.
    Lost,
    /// The operation failed, and nothing was changed.
    Nothing,
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub at: Duration,
    pub process: usize,
    /// The number of the operation in the process.
    pub op: u64,
    pub step: Step,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.at.as_micros(), self.process, self.op)?;
        match &self.step {
            Step::Ask { key, kind } => write!(f, "ask {key} {kind:?}"),
            Step::Permit { key } => write!(f, "permit {key}"),
            Step::Granted { token, left, prior } => {
                write!(f, "granted {token} {}", left.as_micros())?;
                prior.map_or(Ok(()), |(token, process)| write!(f, " {token} {process}"))
            }
            Step::Fence { token } => write!(f, "fence {token}"),
            Step::Sure { left } => write!(f, "sure {}", left.as_micros()),
            Step::Lost => f.write_str("lost"),
            Step::End(how) => write!(f, "end {how:?}"),
            Step::Working { token } => write!(f, "working {token}"),
            Step::Worked => f.write_str("worked"),
            Step::Done(outcome) => write!(f, "done {outcome:?}"),
            Step::Paused => f.write_str("paused"),
            Step::HeldUp { since } => write!(f, "held-up {}", since.as_micros()),
            Step::Killed => f.write_str("killed"),
            Step::Stopped => f.write_str("stopped"),
            Step::Continued => f.write_str("continued"),
            Step::CutOff => f.write_str("cut-off"),
            Step::Reached => f.write_str("reached"),
            Step::Deleting { key } => write!(f, "deleting {key}"),
            Step::Deleted { key } => write!(f, "deleted {key}"),
        }
    }
}

/// Finds a value by its name.
fn named<T: fmt::Debug + Copy>(all: &[T], name: &str) -> T {
    *all.iter().find(|one| format!("{one:?}") == name).unwrap_or_else(|| panic!("{name} is none of {all:?}"))
}

impl Entry {
    /// Parses a line whose times are in this unit.
    pub fn parse(line: &str, unit: Duration) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<i64>().unwrap_or_else(|error| panic!("{line}: {error}"));
        let time = |place: usize| {
            unit * u32::try_from(number(place) / 1_000_000).unwrap() * 1_000_000
                + unit * u32::try_from(number(place) % 1_000_000).unwrap()
        };
        let key = || words[4].to_owned();
        let step = match words[3] {
            "ask" => {
                use Kind::*;
                Step::Ask { key: key(), kind: named(&[Try, Lease, Read, Write, Transaction], words[5]) }
            }
            "permit" => Step::Permit { key: key() },
            "granted" => {
                let prior = (words.len() > 6).then(|| (number(6), usize::try_from(number(7)).unwrap()));
                Step::Granted { token: number(4), left: time(5), prior }
            }
            "fence" => Step::Fence { token: number(4) },
            "sure" => Step::Sure { left: time(4) },
            "lost" => Step::Lost,
            "end" => Step::End(named(&[How::Release, How::Abandon, How::Drop], words[4])),
            "working" => Step::Working { token: number(4) },
            "worked" => Step::Worked,
            "done" => {
                use Outcome::*;
                Step::Done(named(&[Done, Refused, Lost, Nothing, Unknown], words[4]))
            }
            "paused" => Step::Paused,
            "held-up" => Step::HeldUp { since: time(4) },
            "killed" => Step::Killed,
            "stopped" => Step::Stopped,
            "continued" => Step::Continued,
            "cut-off" => Step::CutOff,
            "reached" => Step::Reached,
            "deleting" => Step::Deleting { key: key() },
            "deleted" => Step::Deleted { key: key() },
            other => panic!("no step {other}"),
        };
        let (process, op) = (usize::try_from(number(1)).unwrap(), u64::try_from(number(2)).unwrap());
        Self { at: time(0), process, op, step }
    }
}

/// An accepted write, as recorded in the application's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    pub key: String,
    /// One more than what its writer had read.
    pub number: i64,
    pub token: i64,
    pub process: usize,
    pub op: u64,
    /// Which run of the operation's work it was, from 0.
    pub run: usize,
}

impl Write {
    pub fn parse(line: &str) -> Self {
        let mut words = line.split(' ');
        let key = words.next().unwrap().to_owned();
        let mut number = || words.next().unwrap().parse::<i64>().unwrap();
        let (number, token, process, op, run) = (number(), number(), number(), number(), number());
        let place = |number: i64| usize::try_from(number).unwrap();
        Self { key, number, token, process: place(process), op: u64::try_from(op).unwrap(), run: place(run) }
    }
}

/// Work in a transaction, confirmed under a token.
#[derive(Clone, Debug)]
pub struct Work {
    pub token: i64,
    pub from: Duration,
    pub to: Option<Duration>,
}

#[derive(Clone, Debug)]
pub struct Grant {
    pub token: i64,
    pub at: Duration,
    pub prior: Option<(i64, usize)>,
}

/// One operation, from its request to its outcome, as far as it got.
#[derive(Clone, Debug)]
pub struct Op {
    pub process: usize,
    pub op: u64,
    /// What was asked for: a key, or the name of a semaphore.
    pub key: String,
    /// The key of the permit that was granted.
    pub permit: Option<String>,
    pub kind: Kind,
    pub asked: Duration,
    /// A transaction that is retried may be granted several times.
    pub grants: Vec<Grant>,
    /// The token by which the work of a reader is fenced.
    pub fence: Option<i64>,
    /// The latest time until which the process knew its lease to last.
    pub sure_until: Duration,
    /// When the process was notified of the loss, or saw that no time was left.
    pub lost: Option<Duration>,
    pub end: Option<(Duration, How)>,
    pub works: Vec<Work>,
    pub done: Option<(Duration, Outcome)>,
}

/// In place of a process: what the database itself suffered.
pub const DATABASE: usize = 999;

/// From, to.
pub type Span = (Duration, Duration);

/// What the processes were promised.
#[derive(Clone, Copy, Debug, Default)]
pub struct Promised {
    pub lease: Duration,
    /// The lock-delay.
    pub delay: Duration,
    /// How many may hold what they asked for at a time.
    pub most: usize,
    /// Many readers hold it together, or one writer.
    pub shared: bool,
}

/// Everything that happened.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub promised: Promised,
    pub ops: Vec<Op>,
    pub killed: Vec<(usize, Duration)>,
    /// Processes that were stalled, or the database.
    pub stood_still: Vec<(usize, Span)>,
    /// Processes that had no connection.
    pub cut_off: Vec<(usize, Span)>,
    pub deleted: Vec<(String, Span)>,
    pub writes: Vec<Write>,
}

impl History {
    pub fn new(promised: Promised, entries: &[Entry], writes: Vec<Write>) -> Self {
        let mut history = Self { promised, writes, ..Self::default() };
        let mut places: HashMap<(usize, u64), usize> = HashMap::new();
        for entry in entries {
            if let Step::Ask { key, kind } = &entry.step {
                places.insert((entry.process, entry.op), history.ops.len());
                history.ops.push(Op::asks(entry, key, *kind));
            } else if let Some(place) = places.get(&(entry.process, entry.op)) {
                history.ops[*place].goes_on(entry);
            }
            history.suffers(entry);
        }
        history
    }

    fn suffers(&mut self, Entry { at, process, step, .. }: &Entry) {
        match step {
            Step::Killed => self.killed.push((*process, *at)),
            Step::Stopped => self.stood_still.push((*process, (*at, Duration::MAX))),
            Step::Continued => {
                let stopped =
                    self.stood_still.iter_mut().rev().find(|(who, (_, to))| who == process && *to == Duration::MAX);
                stopped.expect("it was stopped").1.1 = *at;
            }
            Step::CutOff => self.cut_off.push((*process, (*at, Duration::MAX))),
            Step::Reached => {
                let cut_off = self.cut_off.iter_mut().rev().find(|(who, _)| who == process);
                cut_off.expect("it was cut off").1.1 = *at;
            }
            Step::HeldUp { since } => self.stood_still.push((*process, (*since, *at))),
            Step::Deleting { key } => self.deleted.push((key.clone(), (*at, Duration::MAX))),
            Step::Deleted { key } => {
                self.deleted.iter_mut().rev().find(|(deleted, _)| deleted == key).expect("it began").1.1 = *at;
            }
            _ => {}
        }
    }
}

impl Op {
    fn asks(entry: &Entry, key: &str, kind: Kind) -> Self {
        Self {
            process: entry.process,
            op: entry.op,
            key: key.to_owned(),
            permit: None,
            kind,
            asked: entry.at,
            grants: Vec::new(),
            fence: None,
            sure_until: Duration::ZERO,
            lost: None,
            end: None,
            works: Vec::new(),
            done: None,
        }
    }

    fn goes_on(&mut self, Entry { at, step, .. }: &Entry) {
        match step {
            Step::Permit { key } => self.permit = Some(key.clone()),
            Step::Granted { token, left, prior } => {
                self.grants.push(Grant { token: *token, at: *at, prior: *prior });
                self.sure_until = *at + *left;
            }
            Step::Fence { token } => self.fence = Some(*token),
            Step::Sure { left } if left.is_zero() => self.lost = self.lost.or(Some(*at)),
            Step::Sure { left } => self.sure_until = self.sure_until.max(*at + *left),
            Step::Lost => self.lost = Some(self.lost.map_or(*at, |lost| lost.min(*at))),
            Step::End(how) => self.end = Some((*at, *how)),
            Step::Working { token } => self.works.push(Work { token: *token, from: *at, to: None }),
            Step::Worked => self.works.last_mut().expect("it had begun").to = Some(*at),
            Step::Done(outcome) => self.done = Some((*at, *outcome)),
            _ => {}
        }
    }

    /// The tokens that the process received, and when it received each.
    pub fn heard(&self) -> impl Iterator<Item = (i64, Duration)> {
        self.grants.iter().map(|grant| (grant.token, grant.at))
    }

    /// The grant of a lease. Work in a transaction checks no clock.
    pub fn lease(&self) -> Option<&Grant> {
        self.grants.first().filter(|_| self.kind != Kind::Transaction)
    }

    /// The key of the row that was granted, or that was asked for.
    pub fn row(&self) -> &str {
        self.permit.as_ref().unwrap_or(&self.key)
    }

    /// Whether it was granted a reader's key.
    pub fn is_reader(&self) -> bool {
        self.permit.as_ref().is_some_and(|permit| permit.contains("#r"))
    }

    pub fn outcome(&self) -> Option<Outcome> {
        self.done.map(|done| done.1)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {} of process {} on {}", self.op, self.process, self.key)
    }
}
