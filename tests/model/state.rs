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
    Claim {
        holder: u8,
    },
    Change(Claim, Change),
    Confirm(Claim),
    Commit(Claim),
    ReadConfirms(Claim),
    /// Ends what the holder has, if anything.
    Clear {
        holder: u8,
    },
}

impl Statement {
    /// The holder for which it grants or extends.
    pub fn extends_for(self) -> Option<u8> {
        match self {
            Self::Claim { holder } | Self::Change(Claim { holder, .. }, Change::Renew) => Some(holder),
            _ => None,
        }
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
    Cleared,
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
        /// A claim of this try was sent and not answered.
        unanswered: bool,
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
    /// The claim is over for the client, and a request that has no reply may still be carried out.
    Clearing {
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
    /// The client no longer waits for this statement, and it may still run. If the client has sent
    /// the request again, it reads whichever reply is first.
    pub late: Option<Call>,
    /// The last `not_after` of the requests for the claim that have no reply.
    pub void: Option<Tick>,
    pub transaction: Option<Transaction>,
    pub tries: u8,
    pub transactions: u8,
}

impl Client {
    pub fn held(&self) -> Option<&Held> {
        match &self.stage {
            Stage::Held(held) | Stage::Ending { held, .. } => Some(held),
            _ => None,
        }
    }

    /// Whether it answers for what this holder may be granted.
    pub fn answers_for(&self, holder: u8) -> bool {
        match self.stage {
            Stage::Idle => false,
            Stage::Trying { holder: own, .. } | Stage::Clearing { holder: own } => own == holder,
            Stage::Held(held) | Stage::Ending { held, .. } => held.claim.holder == holder,
        }
    }

    /// Whether the statement that it waits for was sent before, and may still run.
    pub fn has_sent_twice(&self) -> bool {
        let statement = |call: Option<Call>| call.map(|call| call.statement);
        self.life != Life::Crashed && self.call.is_some() && statement(self.call) == statement(self.late)
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
    StartedWithinWindow,
    ForeignLockTaken,
    DoneSaidWrongly,
    LostSaidWrongly,
    CommitSaidWrongly,
    StartedWithinDelay,
    GrantedLate,
    ExtendedLate,
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
