//! A history: what the steps of all processes say of one schedule, what the database recorded of
//! it, and what the processes suffered.

use std::{collections::HashMap, time::Duration};

use crate::{
    record::{DATABASE, Span},
    ticks::{
        record::{Entry, How, Micros, SECOND, Seen, Step, slot},
        terms::Terms,
    },
};

/// A run, as its process recorded it.
#[derive(Clone, Debug)]
pub struct Run {
    pub process: usize,
    pub slot: Micros,
    pub attempt: u32,
    pub token: i64,
    /// The version of the instance.
    pub version: u64,
    pub began: Duration,
    pub told: Option<Duration>,
    /// When the commit that ends the tick was sent, and had its reply.
    pub commits: Option<Duration>,
    pub committed: Option<Duration>,
    pub ended: Option<(Duration, How)>,
}

/// A row of the table of runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub name: String,
    pub slot: Micros,
    pub attempt: u32,
    pub token: i64,
    pub process: usize,
    pub status: char,
    pub missed: u32,
    /// By the database's clock.
    pub ended: Micros,
}

impl Told {
    /// Whether the run was triggered.
    pub fn is_triggered(&self) -> bool {
        self.slot % SECOND != 0
    }

    /// The second of the tick.
    pub fn tick(&self) -> i64 {
        self.slot / SECOND
    }

    /// Parses a line of a test of the checker. A row without a time has ended before all others.
    pub fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<i64>().unwrap_or_else(|error| panic!("{line}: {error}"));
        Self {
            name: words[0].to_owned(),
            token: number(1),
            slot: slot(words[2]),
            attempt: words[3].parse().unwrap(),
            process: words[4].parse().unwrap(),
            status: words[5].parse().unwrap(),
            missed: words[6].parse().unwrap(),
            ended: words.get(7).map_or(0, |ended| slot(ended)),
        }
    }
}

/// A row of the application's own table, which the work has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub name: String,
    pub slot: Micros,
    pub token: i64,
}

impl Effect {
    pub fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split(' ').collect();
        Self { name: words[0].to_owned(), token: words[1].parse().unwrap(), slot: slot(words[2]) }
    }
}

/// A time in which an operator had paused the schedule. Each token is that of the row, after the
/// pause had its reply and before the resume was sent.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    pub sent: Duration,
    pub token: Option<i64>,
    pub resumes: Option<(Duration, i64)>,
    pub resumed: Duration,
}

#[derive(Clone, Copy, Debug)]
pub struct Trigger {
    pub sent: Duration,
    pub answered: bool,
}

/// What the table of runs had of the schedule before and after old runs were forgotten.
#[derive(Clone, Debug)]
pub struct Forgetting {
    pub had: Vec<Told>,
    pub left: Vec<Told>,
    /// Runs that ended before the first of these were to be forgotten, and none that ended after
    /// the second.
    pub limits: (Micros, Micros),
    /// The slot at which attempts were made before and after, if there was one. Its runs stay.
    pub under_way: (Option<Micros>, Option<Micros>),
}

/// A read of the row, which was over at this time.
#[derive(Clone, Debug)]
pub struct Read {
    pub at: Duration,
    pub seen: Seen,
}

/// Other times took effect between these two reads.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    pub before: &'a Read,
    pub after: &'a Read,
}

/// A process while it declares the times of one version.
#[derive(Clone, Copy, Debug)]
pub struct Instance {
    pub process: usize,
    pub version: u64,
    pub starts: Duration,
    /// When it had announced them.
    pub started: Option<Duration>,
    /// When it began to leave, or was killed.
    pub ends: Duration,
}

/// Everything that happened to one schedule.
#[derive(Clone, Debug)]
pub struct History {
    pub terms: Terms,
    /// The second of a slot that was observed after the registration, before any fault.
    pub first: i64,
    /// The second of the first slot that has not come to its end, when nothing ran any more.
    pub next: i64,
    /// In the order in which they began.
    pub runs: Vec<Run>,
    pub told: Vec<Told>,
    pub effects: Vec<Effect>,
    /// In the order in which the row was read.
    pub reads: Vec<Read>,
    pub instances: Vec<Instance>,
    /// The versions that all processes had, and until when their times had to be in effect.
    pub deployed: Vec<(u64, Duration)>,
    pub pauses: Vec<Pause>,
    pub triggers: Vec<Trigger>,
    pub forgettings: Vec<Forgetting>,
}

impl History {
    /// Collects what the steps say of a schedule.
    pub fn new(terms: Terms, (first, next): (i64, i64), entries: &[Entry]) -> Self {
        let mut history = Self {
            first,
            next,
            runs: runs(&terms.name, entries),
            told: Vec::new(),
            effects: Vec::new(),
            reads: Vec::new(),
            instances: instances(entries),
            deployed: Vec::new(),
            pauses: Vec::new(),
            triggers: Vec::new(),
            forgettings: Vec::new(),
            terms,
        };
        entries.iter().for_each(|entry| history.add(entry));
        history
    }

    fn add(&mut self, Entry { at, step, .. }: &Entry) {
        let name = &self.terms.name;
        match step {
            Step::Seen(seen) if seen.name == *name => self.reads.push(Read { at: *at, seen: seen.clone() }),
            Step::Deployed { version } => self.deployed.push((*version, *at)),
            Step::Pauses { name: of } if of == name => {
                self.pauses.push(Pause { sent: *at, token: None, resumes: None, resumed: Duration::MAX });
            }
            Step::Paused { name: of, token } if of == name => self.pause().token = Some(*token),
            Step::Resumes { name: of, token } if of == name => self.pause().resumes = Some((*at, *token)),
            Step::Resumed { name: of } if of == name => self.pause().resumed = *at,
            Step::Triggers { name: of } if of == name => self.triggers.push(Trigger { sent: *at, answered: false }),
            Step::Triggered { name: of } if of == name => {
                self.triggers.last_mut().expect("it was sent").answered = true;
            }
            _ => {}
        }
    }

    fn pause(&mut self) -> &mut Pause {
        self.pauses.last_mut().expect("it was sent")
    }

    pub fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        let pairs = self.reads.windows(2).map(|pair| Change { before: &pair[0], after: &pair[1] });
        pairs.filter(|change| change.before.seen.times != change.after.seen.times)
    }

    pub fn instances_of(&self, times: &str) -> impl Iterator<Item = &Instance> {
        self.instances.iter().filter(move |instance| self.terms.times(instance.version) == times)
    }

    /// Whether the first times are known to be older than the second: they were in effect before
    /// any instance could have announced the second.
    pub fn is_older(&self, times: &str, others: &str) -> bool {
        let seen = self.reads.iter().find(|read| read.seen.times == times).map(|read| read.at);
        let announced = self.instances_of(others).map(|instance| instance.starts).min();
        seen.zip(announced).is_some_and(|(seen, announced)| seen < announced)
    }
}

/// What the processes suffered.
#[derive(Clone, Debug, Default)]
pub struct Suffered {
    pub lease: Duration,
    pub killed: Vec<(usize, Duration)>,
    /// Processes that were stalled.
    pub stood_still: Vec<(usize, Span)>,
    /// Processes whose messages did not arrive.
    pub cut_off: Vec<(usize, Span)>,
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
                Step::CutOff { since } => suffered.cut_off.push((*process, (*since, *at))),
                _ => {}
            }
        }
        suffered
    }

    /// Returns when the process was killed.
    pub fn death(&self, process: usize) -> Option<Duration> {
        self.killed.iter().find(|(who, _)| *who == process).map(|killed| killed.1)
    }

    fn stalls(&self, process: usize, within: Span) -> impl Iterator<Item = Duration> {
        parts(&self.stood_still, process, within)
    }

    /// Whether the process was stalled within this time.
    pub fn stalled(&self, process: usize, within: Span) -> bool {
        self.stalls(process, within).any(|stall| !stall.is_zero())
    }

    /// Whether the process or the database was stalled for at least `so_long` in all within this
    /// time.
    pub fn was_slow(&self, process: usize, within: Span, so_long: Duration) -> bool {
        [process, DATABASE].into_iter().any(|who| self.stalls(who, within).sum::<Duration>() >= so_long)
    }

    /// Whether the process could not reach the database for at least `so_long` in all within this
    /// time.
    pub fn was_cut_off(&self, process: usize, within: Span, so_long: Duration) -> bool {
        self.was_slow(process, within, so_long) || parts(&self.cut_off, process, within).sum::<Duration>() >= so_long
    }
}

/// Returns how long each of these spans of the process was within this time.
fn parts(all: &[(usize, Span)], process: usize, (from, to): Span) -> impl Iterator<Item = Duration> {
    let spans = all.iter().filter(move |(who, _)| *who == process).map(|part| part.1);
    spans.filter_map(move |(since, until)| until.min(to).checked_sub(since.max(from)))
}

/// Collects when each process declared the times of which version.
fn instances(entries: &[Entry]) -> Vec<Instance> {
    let mut instances: Vec<Instance> = Vec::new();
    for Entry { at, process, step } in entries {
        let is = |instance: &&mut Instance| instance.process == *process && instance.ends == Duration::MAX;
        match step {
            Step::Starts { version } => {
                let (process, version, starts) = (*process, *version, *at);
                instances.push(Instance { process, version, starts, started: None, ends: Duration::MAX });
            }
            Step::Started { .. } => {
                instances.iter_mut().rfind(is).into_iter().for_each(|instance| instance.started = Some(*at));
            }
            Step::Leaves | Step::Killed => {
                instances.iter_mut().rfind(is).into_iter().for_each(|instance| instance.ends = *at);
            }
            _ => {}
        }
    }
    instances
}

/// Collects the runs of one schedule.
fn runs(name: &str, entries: &[Entry]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for Entry { at, process, step } in entries {
        let (of, token) = match step {
            Step::Run { name: of, slot, attempt, token, version } if of == name => {
                runs.push(Run {
                    process: *process,
                    slot: *slot,
                    attempt: *attempt,
                    token: *token,
                    version: *version,
                    began: *at,
                    told: None,
                    commits: None,
                    committed: None,
                    ended: None,
                });
                continue;
            }
            Step::Told { name, token }
            | Step::Commits { name, token }
            | Step::Committed { name, token }
            | Step::End { name, token, .. } => (name, *token),
            _ => continue,
        };
        let is = |run: &&mut Run| run.process == *process && run.token == token && run.ended.is_none();
        // The token of a run is cancelled when its work has ended, too.
        let Some(run) = runs.iter_mut().rfind(is).filter(|_| of == name) else { continue };
        match step {
            Step::Told { .. } => run.told = Some(*at),
            Step::Commits { .. } => run.commits = Some(*at),
            Step::Committed { .. } => run.committed = Some(*at),
            Step::End { how, .. } => run.ended = Some((*at, *how)),
            _ => {}
        }
    }
    runs
}
