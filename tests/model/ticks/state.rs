//! The state: the row and its history, the clients, and what has ended so far.

use chrono::{DateTime, Utc};

use crate::schedule::plan;

/// A point in time. The clock moves by [`TICK`]; between two ticks there is room for triggers.
pub type Time = i64;

/// The period of the schedule. Slots are multiples of it.
pub const TICK: Time = 8;
/// The growth of the token in one unit of time.
pub const MICROS: i64 = 1_000;

pub type Id = usize;

pub fn at(time: Time) -> DateTime<Utc> {
    DateTime::from_timestamp(time, 0).unwrap()
}

/// The schedule's row, as committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    pub slot: Time,
    pub due: Time,
    pub triggered: Option<Time>,
    pub run_slot: Option<Time>,
    pub attempt: u32,
    pub missed: u32,
    pub holder: Option<u8>,
    pub token: i64,
    pub begin: Time,
}

impl Row {
    /// Returns the slot that a claim runs.
    pub fn to_run(self) -> Time {
        self.run_slot.filter(|_| self.attempt > 0).unwrap_or(self.triggered.unwrap_or(self.slot))
    }
}

/// A row of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Told {
    pub slot: Time,
    pub attempt: u32,
    pub status: char,
    pub token: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Claim {
    pub holder: u8,
    pub token: i64,
}

/// A claimed row, as its client knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    pub claim: Claim,
    pub slot: Time,
    pub triggered: bool,
    pub own: bool,
    pub attempt: u32,
    pub missed: u32,
    pub lost_since: Option<Time>,
    /// The time of the claim.
    pub now: Time,
    pub deadline: Time,
}

impl Run {
    pub fn row(&self) -> plan::Row {
        plan::Row {
            slot: at(self.slot),
            own: self.own,
            attempt: self.attempt,
            missed: self.missed,
            spent: self.attempt - 1,
            lost_since: self.lost_since.map(at),
            skip: None,
            stopped: false,
        }
    }
}

/// A move of the slot under a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pass {
    pub from: Time,
    pub to: Time,
    pub runs: bool,
    pub missed: u32,
    pub skipped: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct End {
    pub slot: Time,
    pub triggered: bool,
    pub attempt: u32,
    pub missed: u32,
    pub status: char,
    /// The next slot. `None`: the tick is run again.
    pub next: Option<Time>,
}

impl End {
    pub fn told(&self, token: i64) -> Told {
        Told { slot: self.slot, attempt: self.attempt, status: self.status, token }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Statement {
    /// The row as it was seen, and when.
    Claim {
        seen: Row,
        now: Time,
        holder: u8,
    },
    PutBack(u8),
    Pass(Claim, Pass),
    Renew(Claim),
    End(Claim, End),
    Abandon(Claim),
    /// Of [`Mutant::HistoryOptional`](crate::ticks::design::Mutant) alone.
    Tell(Told),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reply {
    Claimed(Run),
    /// The condition of the statement held.
    Done,
    Not,
    /// The statement failed, and changed nothing.
    Failed,
}

/// A statement in flight, and its reply once it has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    pub statement: Statement,
    /// On the client's monotonic clock.
    pub sent: Time,
    pub reply: Option<Reply>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Life {
    Running,
    /// The client wakes to take a step now and then, and does not check its clock before that.
    Paused,
    Crashed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    Idle,
    Looked {
        seen: Row,
        now: Time,
    },
    Claiming(u8),
    /// A claim whose reply was lost is undone.
    PuttingBack(u8),
    Passing(Run, Pass),
    Working(Run),
    Ending(Run, End),
    Telling,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Client {
    pub life: Life,
    pub stage: Stage,
    pub call: Option<Call>,
    /// The client no longer waits for this statement, and it may still run.
    pub late: Option<Call>,
    pub tries: u8,
}

impl Client {
    /// Returns the run whose work goes on while its lease is counted on.
    pub fn works(&self, monotonic: Time) -> Option<Run> {
        match self.stage {
            Stage::Working(run) if self.life != Life::Crashed && monotonic < run.deadline => Some(run),
            _ => None,
        }
    }
}

/// What must not happen and has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    TokenFell,
    SlotFell,
    SupersededChange,
    SucceededSaidWrongly,
}

/// What happened, recorded separately from the row, which mutants corrupt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// The slots and triggers that have ended or were counted as missed, sorted; each as often as
    /// that happened.
    pub ended: Vec<Time>,
    pub succeeded: Vec<i64>,
    /// The token of the claim that may change the row: the last one granted, unless it has ended.
    pub valid: Option<i64>,
    pub highest: i64,
    /// The triggers that an operator asked for.
    pub asked: Vec<Time>,
    pub forgotten: bool,
    pub faults: Vec<Fault>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub now: Time,
    /// How far the database's clock was stepped back. The other clocks were not.
    pub stepped_back: Time,
    pub row: Row,
    /// Sorted.
    pub history: Vec<Told>,
    pub clients: Vec<Client>,
    pub next_holder: u8,
    pub losses: u8,
    pub triggers: u8,
    pub forgets: u8,
    pub record: Record,
}

impl State {
    pub fn monotonic(&self) -> Time {
        self.now + self.stepped_back
    }

    /// The clients are interchangeable: of the states that differ only in the order of the clients,
    /// one is checked.
    pub fn forget_names(&mut self) {
        self.clients.sort();
    }

    pub fn fault(&mut self, fault: Fault) {
        if !self.record.faults.contains(&fault) {
            self.record.faults.push(fault);
        }
    }
}
