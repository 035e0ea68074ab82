//! What is checked: sizes, and deliberate mistakes.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use crate::{
    schedule::{
        spec::Schedule,
        terms::{CatchUp, Retries},
    },
    ticks::state::{TICK, Time},
};

/// A wrong design that looks equally good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The slot is moved on when it is claimed, and nothing is kept of the one that runs.
    AdvanceAtClaim,
    /// Of what was seen of the row, a claim compares the token alone.
    CompareTokenAlone,
    /// An end is accepted by its token, whether its run has ended or not.
    EndWithoutHolder,
    /// A renewal is accepted by its token, and makes its holder the row's.
    RenewalRevives,
    /// The row of the history is added after the end, in a statement of its own.
    HistoryOptional,
    /// A run counts as triggered if the row still has its trigger, which another one may replace.
    TriggerByRow,
}

/// Events that occur, counted over all transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Claimed,
    TakenOver,
    /// The row was no longer as it had been seen.
    ClaimMissed,
    LateClaimTaken,
    PutBack,
    HandedBack,
    Moved,
    Skipped,
    Renewed,
    RenewalLost,
    Ended,
    EndedLate,
    EndRefused,
    /// An end that was sent again was found in the history.
    FoundInHistory,
    Retried,
    ToldLost,
    TriggeredRun,
    TriggeredDuringRun,
    AllDone,
}

const EVENTS: usize = Event::AllDone as usize + 1;

#[derive(Debug)]
pub struct Design {
    pub name: &'static str,
    pub schedule: Schedule,
    pub lease: Time,
    pub clients: usize,
    /// The number of claims that each client makes.
    pub tries: u8,
    /// By how much the clock moves at a time.
    pub step: Time,
    /// How long the model runs, in periods of the schedule.
    pub ticks: Time,
    pub failures: bool,
    pub pauses: bool,
    pub crashes: bool,
    /// Runs are handed back.
    pub stops: bool,
    /// The number of statements and replies that time out: delayed or lost.
    pub losses: u8,
    pub triggers: u8,
    /// How often an operator deletes the history.
    pub forgets: u8,
    pub step_back: Time,
    pub mutant: Option<Mutant>,
    /// The one property to check. `None` is all of them.
    pub only: Option<&'static str>,
    pub met: [AtomicUsize; EVENTS],
}

impl Design {
    /// Two clients, two claims each, on a schedule that catches up on all ticks. A lease is as long
    /// as a period.
    pub fn new(name: &'static str) -> Self {
        let schedule = Schedule::every(name, Duration::from_secs(TICK.unsigned_abs()));
        let schedule = Schedule { retries: Retries { times: 1 }, ..schedule.catch_up(CatchUp::All(9)) };
        Self {
            name,
            schedule,
            lease: TICK,
            step: TICK,
            clients: 2,
            tries: 2,
            ticks: 2,
            failures: false,
            pauses: false,
            crashes: false,
            stops: false,
            losses: 0,
            triggers: 0,
            forgets: 0,
            step_back: 0,
            mutant: None,
            only: None,
            met: Default::default(),
        }
    }

    pub fn catch_up(mut self, catch_up: CatchUp) -> Self {
        self.schedule.catch_up = catch_up;
        self
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
