//! The state of a waiter that polls, and the outcomes of its requests.

use crate::{
    grant::Attempt,
    lease::{attempt::ClaimAttempt, handle::LeaseHandle},
    pacing::{Backoff, poll_backoff, poll_sooner},
    queue::{local::Turn, tickets::Ticket},
    rules::Refusal,
    store::Database,
};

/// The state of a waiter that polls in its turn, until it claims one of several keys.
pub(crate) struct RequestState<'a, DB: Database> {
    /// Passed on before the claim on one of several keys is sent, so that the next waiter can claim
    /// another one.
    pub turn: Option<Turn>,
    pub ticket: Option<Ticket<DB>>,
    /// A claim request of this attempt was sent and not answered. Another request finds the claim
    /// if it was granted.
    pub unanswered: Option<ClaimAttempt<'a, DB>>,
    /// A request of this process was refused before.
    pub waited: bool,
    pub backoff: Backoff,
    /// The value that the last refusal came with. A different one means that the state of the keys
    /// has changed.
    pub last_seen: Option<i64>,
    /// The last request was sent without a pause, because the key was found to be free.
    pub retried_after_free: bool,
}

impl<DB: Database> RequestState<'_, DB> {
    pub fn new(turn: Turn, ticket: Option<Ticket<DB>>) -> Self {
        let (unanswered, last_seen) = (None, None);
        let (turn, backoff) = (Some(turn), poll_backoff(DB::NOTIFIES));
        Self { turn, ticket, unanswered, waited: false, backoff, last_seen, retried_after_free: false }
    }

    /// Records a refusal. The next pauses are shorter if the state of the keys has changed.
    pub fn on_refused(&mut self, seen: i64) {
        if self.last_seen.replace(seen).is_some_and(|before| before != seen) {
            self.backoff = poll_sooner(self.backoff);
        }
        self.waited = true;
    }
}

/// The outcome of a request, with a value that shows whether the state has changed since the last
/// request.
pub(crate) enum PollOutcome<DB: Database> {
    Granted(LeaseHandle<DB>),
    Refused(Refusal, i64),
    /// The ticket is missing.
    TicketLost,
    /// A waiter of the same local queue precedes this one and waits for the turn.
    BehindLocalWaiter,
}

/// How sending requests in a turn ended.
pub(crate) enum PollEnd<DB: Database> {
    Finished(Attempt<LeaseHandle<DB>>),
    /// The turn belongs to another waiter of this process. Numbers that were drawn one after the
    /// other need not grow where several nodes assign them. A waiter without a ticket has passed
    /// its turn on and was then refused.
    YieldTurn(Option<Ticket<DB>>),
    /// A ticket is needed.
    NeedsTicket,
}
