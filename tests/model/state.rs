//! The state: the database, the clients, and what has been granted so far.

use crate::rules::Status;

/// A point in time, in minutes since 1970.
pub type Tick = i64;

/// Index of a client.
pub type Id = usize;

/// The growth of the token in one tick.
pub const MICROS: i64 = 60_000_000;

/// A claim on the one key of this model. A holder's number is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Claim {
    pub holder: u8,
    pub token: i64,
}

/// The row, as committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    pub locked: bool,
    pub status: &'static str,
    pub begin_time: Tick,
    pub holder: Option<u8>,
    pub token: i64,
    pub expires_at: Option<Tick>,
    pub claimed_at: Option<Tick>,
    /// `end_time` is set.
    pub ended: bool,
    pub confirms: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Database {
    pub now: Tick,
    pub row: Option<Row>,
    /// The client whose open transaction keeps the row locked.
    pub lock: Option<Id>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    Renew,
    Release(Ended),
    Abandon,
}

/// `rules::Status`, with a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Ended {
    Succeeded,
    Failed,
}

impl Ended {
    pub fn letter(self) -> &'static str {
        match self {
            Self::Succeeded => Status::Succeeded.letter(),
            Self::Failed => Status::Failed.letter(),
        }
    }
}

/// What a client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Statement {
    Create,
    Claim { holder: u8 },
    Change(Claim, Change),
    Confirm(Claim),
    Commit(Claim),
    ReadConfirms(Claim),
}

impl Statement {
    /// Whether it grants or extends. Such a statement has a limit, and depends on when it was sent.
    pub fn extends(self) -> bool {
        matches!(self, Self::Claim { .. } | Self::Change(_, Change::Renew))
    }
}

/// The result of a claim. `rules::judge` has read the row that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    Granted { token: i64 },
    NoRow,
    Refused,
    Skipped,
    TooLate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    Done,
    /// The row was seen without the claim.
    Lost,
    /// The claim is valid, but another transaction had the row locked.
    Skipped {
        left: Tick,
    },
    TooLate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reply {
    Created,
    Claim(Answer),
    Change(Outcome),
    /// The count after the commit of the transaction. `None` if the row does not have the claim.
    Confirm(Option<u8>),
    Commit,
    Confirms(Option<u8>),
}

impl Reply {
    /// Whether it settles a request that was sent twice. What one copy skipped may be locked by the
    /// other one.
    pub fn is_settled(self) -> bool {
        !matches!(self, Self::Claim(Answer::Skipped | Answer::TooLate) | Self::Change(Outcome::Skipped { .. }))
    }
}

/// A statement in flight, and its reply once it has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Call {
    pub statement: Statement,
    /// On the client's monotonic clock.
    pub sent: Tick,
    /// On the database's clock. After this time the statement grants and extends nothing.
    pub not_after: Option<Tick>,
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
pub struct Held {
    pub claim: Claim,
    pub deadline: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    Idle,
    Trying {
        holder: u8,
    },
    Held(Held),
    Ending {
        held: Held,
        change: Change,
        /// An attempt to end the claim was not answered.
        unanswered: bool,
        /// The actual outcome: the row records it.
        done: bool,
    },
    /// The claim was abandoned, and is abandoned once more when no renewal can extend it any more.
    EndingAgain(Claim),
    /// Nothing is left of this holder, but for what a claim without a reply may be granted.
    Over {
        holder: u8,
    },
}

/// A transaction that depends on a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transaction {
    pub claim: Claim,
    pub step: Step,
    /// The actual outcome.
    pub committed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    Confirming,
    Confirmed(u8),
    Committing(u8),
    /// COMMIT was not answered: `confirms` must show the outcome.
    Unsure(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Client {
    pub life: Life,
    pub stage: Stage,
    pub call: Option<Call>,
    /// The first copy of a request that was sent twice. `call` is the second one. The first reply
    /// that settles the request counts.
    pub first: Option<Call>,
    /// Statements whose replies are not read. They may still run. Sorted.
    pub late: Vec<Call>,
    /// Until when the server may carry out a claim that has no reply.
    pub claiming: Option<Tick>,
    /// Until when it may carry out a renewal that has no reply.
    pub renewing: Option<Tick>,
    pub transaction: Option<Transaction>,
    pub tries: u8,
    pub transactions: u8,
}

impl Client {
    pub fn new(tries: u8, transactions: u8) -> Self {
        Self {
            life: Life::Running,
            stage: Stage::Idle,
            call: None,
            first: None,
            late: vec![],
            claiming: None,
            renewing: None,
            transaction: None,
            tries,
            transactions,
        }
    }

    pub fn held(&self) -> Option<&Held> {
        match &self.stage {
            Stage::Held(held) | Stage::Ending { held, .. } => Some(held),
            _ => None,
        }
    }

    /// The holder of which it says that nothing stands.
    pub fn says_over(&self, now: Tick, row_lease: Tick) -> Option<u8> {
        match self.stage {
            Stage::Over { holder } if self.claiming.is_none_or(|until| until + row_lease <= now) => Some(holder),
            _ => None,
        }
    }

    /// Whether work that checks its lease goes on.
    pub fn stands(&self, monotonic: Tick) -> bool {
        matches!(self.stage, Stage::Held(held) if self.life != Life::Crashed && monotonic < held.deadline)
    }

    /// Whether its connection still belongs to its open transaction.
    pub fn is_in_transaction(&self) -> bool {
        let under_way = |statement| self.call.is_some_and(|call| call.statement == statement);
        self.life != Life::Crashed
            && self.transaction.is_some_and(|transaction| match transaction.step {
                Step::Confirming => under_way(Statement::Confirm(transaction.claim)),
                Step::Confirmed(_) => true,
                Step::Committing(_) => under_way(Statement::Commit(transaction.claim)),
                Step::Unsure(_) => false,
            })
    }
}

/// The program that knows only the article's columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Foreign {
    pub working: bool,
    /// The row is locked by this program.
    pub has_row: bool,
    pub tries: u8,
}

/// What must not happen and has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    TokenFell,
    StaleCommit,
    SupersededChange,
    StartedWithinMinInterval,
    ForeignLockTaken,
    DoneSaidWrongly,
    LostSaidWrongly,
    CommitSaidWrongly,
    StartedWithinDelay,
    CarriedOutLate,
}

/// What was granted, recorded separately from the row, which mutants corrupt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Granted {
    /// The token of the claim that may change the row: the last one granted, unless it was ended or
    /// overruled.
    pub valid: Option<i64>,
    /// Token and end of every claim whose lease is not over.
    pub unexpired: Vec<(i64, Tick)>,
    pub highest: i64,
    pub last_start: Option<Tick>,
    /// The token of the last lease, and when the lock-delay after it is over, unless it is ended
    /// before.
    pub closed_until: Option<(i64, Tick)>,
    pub faults: Vec<Fault>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub db: Database,
    /// How far the database's clock was stepped back. The other clocks were not.
    pub stepped_back: Tick,
    pub next_holder: u8,
    pub clients: Vec<Client>,
    pub foreign: Foreign,
    /// How many replies may still be lost.
    pub losses: u8,
    pub force_releases: u8,
    pub deletions: u8,
    pub granted: Granted,
}

impl State {
    pub fn monotonic(&self) -> Tick {
        self.db.now + self.stepped_back
    }

    /// The clients are interchangeable: of the states that differ only in the order of the clients,
    /// one is checked.
    pub fn forget_names(&mut self) {
        if !self.clients.is_sorted() {
            let mut named: Vec<(Client, Id)> = self.clients.drain(..).zip(0..).collect();
            named.sort();
            self.db.lock = self.db.lock.and_then(|owner| named.iter().position(|(_, id)| *id == owner));
            self.clients = named.into_iter().map(|(client, _)| client).collect();
        }
    }

    pub fn fault(&mut self, fault: Fault) {
        if !self.granted.faults.contains(&fault) {
            self.granted.faults.push(fault);
        }
    }
}
