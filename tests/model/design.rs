//! What is checked: sizes, rules, and deliberate mistakes.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use chrono::TimeDelta;

use crate::{
    rules::{Rules, Terms},
    state::Tick,
};

/// A wrong design that looks equally good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    RenewByUpsert,
    ReleaseByDelete,
    /// The claim's clock is read as the statement starts, before it waits for the row.
    ClockBeforeRowLock,
    /// Confirm reads the row and does not keep it locked.
    ConfirmWithoutRow,
    /// `token + 1`, independent of the clock.
    CounterAsToken,
    ClaimedAtIgnored,
    /// The deadline is counted from the arrival of the reply.
    DeadlineFromReply,
    /// `confirms` is read past an open transaction.
    ConfirmsReadWithoutWaiting,
    /// After a try without a reply, a row without the claim is interpreted as lost, though that try
    /// may itself have ended the claim.
    LostAfterSilence,
    /// A free row with the client's token is interpreted as released by the client, though another
    /// program may have freed it and left the holder.
    DoneByAnother,
    /// The row's lease ends with the holder's.
    DelayIgnored,
    /// A row is deleted whose token the clock has not passed.
    ForgottenAhead,
    /// The server carries a statement out whenever it comes to it.
    NotAfterIgnored,
    /// What was abandoned is not abandoned once more when a renewal without a reply is void.
    AbandonedOnce,
    /// It is abandoned once more before that renewal is void.
    AbandonedAgainTooSoon,
    /// It is not abandoned once more if that renewal is void when the reply is read.
    AbandonedAgainUnlessVoid,
    /// A renewal without a reply is forgotten at the reply to a later one.
    RenewalForgottenByReply,
    /// A claim without a reply is taken to end a lease after the client left it.
    ClaimKeptFromNow,
    /// A claim without a reply is forgotten at a reply to the same holder.
    ClaimForgottenByReply,
    /// It is forgotten when the holder's claim is ended.
    ClaimForgottenByEnding,
    /// Of a request that was sent twice, the first reply counts, whether it settles it or not.
    UnsettledCounts,
    /// When one copy of a request has a reply, the other one is forgotten.
    OtherCopyForgotten,
    /// The deadline is counted from the second copy, whichever was answered.
    DeadlineFromSecondCopy,
}

/// Events that occur, counted over all transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Acquired,
    TakenOver,
    AbandonedTakenOver,
    SameAgain,
    LateClaimGranted,
    LateRenewalRevived,
    TooLate,
    SentTwice,
    FirstReplyReadFirst,
    UnsettledSetAside,
    EndedAgain,
    ForeignLockSeen,
    ForeignTakenOver,
    Trampled,
    RenewalLost,
    RenewalSkipped,
    DoneByReading,
    ToldLost,
    ConfirmLost,
    Committed,
    CommittedExpired,
    SaidCommitted,
    SaidNotCommitted,
    SaidUnknown,
    ForceReleased,
    RowDeleted,
    WithinMinInterval,
    TimedOutUnfinished,
    LastRunFailed,
}

const EVENTS: usize = Event::LastRunFailed as usize + 1;

#[derive(Debug)]
pub struct Design {
    pub name: &'static str,
    pub terms: Terms,
    /// In ticks, as in `terms`.
    pub lease: Tick,
    /// The lock-delay: the row's lease is as much longer.
    pub delay: Tick,
    pub min_interval: Tick,
    /// The row's column `time`.
    pub minutes: Tick,
    pub clients: usize,
    /// The number of claims that each client makes.
    pub tries: u8,
    /// How long the model runs.
    pub ticks: Tick,
    pub transactions: u8,
    pub releases: bool,
    pub failures: bool,
    pub abandons: bool,
    pub pauses: bool,
    pub crashes: bool,
    /// The number of statements and replies that time out: delayed or lost.
    pub losses: u8,
    pub foreign_tries: u8,
    pub force_releases: u8,
    pub deletions: u8,
    pub step_back: Tick,
    pub mutant: Option<Mutant>,
    /// How long after a claim or a renewal was sent the server may carry it out. The client keeps
    /// until when that is, if there is no reply, and may send a request twice.
    pub patience: Option<Tick>,
    /// Another task of the client commits under the same claim.
    pub shared_claim: bool,
    /// The one property to check. `None` is all of them.
    pub only: Option<&'static str>,
    pub met: [AtomicUsize; EVENTS],
}

impl Design {
    /// Two clients, one claim each, on `Rules::Recover`.
    pub fn new(name: &'static str) -> Self {
        let terms = Terms { lease: TimeDelta::minutes(2), ..Terms::default() };
        Self {
            name,
            terms,
            lease: 2,
            delay: 0,
            min_interval: 0,
            minutes: 2,
            clients: 2,
            tries: 1,
            ticks: 5,
            transactions: 0,
            releases: true,
            failures: false,
            abandons: false,
            pauses: false,
            crashes: false,
            losses: 0,
            foreign_tries: 0,
            force_releases: 0,
            deletions: 0,
            step_back: 0,
            mutant: None,
            patience: None,
            shared_claim: false,
            only: None,
            met: Default::default(),
        }
    }

    pub fn min_interval(mut self, ticks: Tick) -> Self {
        self.min_interval = ticks;
        self.terms.min_interval = TimeDelta::minutes(ticks);
        self
    }

    pub fn lease(mut self, ticks: Tick) -> Self {
        self.lease = ticks;
        self.terms.lease = TimeDelta::minutes(ticks);
        self
    }

    pub fn rules(mut self, rules: Rules) -> Self {
        self.terms.rules = rules;
        self
    }

    pub fn article_clients(mut self) -> Self {
        self.terms.article_clients = Some(TimeDelta::zero());
        self
    }

    /// The lease of the row.
    pub fn row_lease(&self) -> Tick {
        self.lease + if self.is(Mutant::DelayIgnored) { 0 } else { self.delay }
    }

    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    pub fn meet(&self, event: Event) {
        self.met[event as usize].fetch_add(1, Relaxed);
    }

    pub fn met(&self, event: Event) -> usize {
        self.met[event as usize].load(Relaxed)
    }
}
