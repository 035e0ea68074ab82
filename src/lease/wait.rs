//! Waiting for keys: by the local queue within this process, by ticket across processes on a fair
//! lock, and never past the limit.
//!
//! Of all tasks that wait for the same keys, one sends requests, at intervals that grow. It sends
//! one sooner on a notification of a release in this process, on a notification of a release
//! elsewhere (PostgreSQL, SQLite), and soon after the end of the lease or minimum interval that the
//! refusal named.

use std::{
    ops::ControlFlow,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{
    action::{Action, Certainty},
    error::Error,
    grant::Attempt,
    key::Key,
    lease::{
        attempt::{ClaimAttempt, REPLY},
        handle::{LeaseHandle, subject},
        ledger::Pending,
        replies::queued,
        shared::Shared,
        terms::KeyTerms,
        wanted::Wanted,
    },
    metrics::Counted,
    pacing::{Backoff, poll_backoff, poll_pause, poll_sooner},
    queue::{
        local::{LocalQueue, Turn},
        position::Position,
        releases::Releases,
        tickets::Ticket,
    },
    retry::{DAY, Repeat, late},
    rules::{Reason, Refusal},
    session::{
        time::Instant,
        timers::{sleep, timeout_of_requests},
    },
    store::{Database, failure::Failure, schema::Schema},
    sync::lock,
};

/// How long a ticket that is not visible is waited for before it counts as missing.
const REPLICATION_LAG: Duration = Duration::from_millis(100);
/// How long a waiter that was granted its keys waits until its ticket is deleted.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// The wait that counts as indefinite: ten years.
pub(crate) const LONGEST: Duration = Duration::from_secs(3653 * DAY.as_secs());

/// Waits for these keys, for at most `wait`. `asked` tells of a claim that may stand, also if the
/// future is dropped.
pub(crate) async fn wait_for<DB: Database>(
    shared: &Shared<DB>,
    key_terms: &Arc<KeyTerms<DB>>,
    wanted: &Wanted,
    since: Instant,
    wait: Duration,
    asked: &Pending,
) -> Result<Attempt<LeaseHandle<DB>>, Error> {
    let _counted = Counted::waiter();
    let until = since + wait.min(LONGEST);
    let queue = key_terms.queues.queue(&wanted.keys, wanted.any);
    let (asking_since, last_refusal, last_error) = (Mutex::default(), Mutex::default(), Mutex::default());
    let pending =
        PendingAcquire { shared, key_terms, wanted, until, queue, asked, asking_since, last_refusal, last_error };
    let failed = match timeout_of_requests(until, pending.granted_or_refused()).await {
        Ok(Err(error)) if error.is_retryable() && Instant::now() >= until => Some(error),
        Ok(attempt) => return attempt,
        Err(_) => None,
    };
    pending.take_last_refusal().ok_or_else(|| {
        let failed = failed.or_else(|| lock(&pending.last_error).take());
        let no_reply =
            || Error::timed_out(Action::Acquire, subject(wanted.keys.iter()), wait, Certainty::NothingChanged);
        late(failed.unwrap_or_else(no_reply), wait, asked.may_stand())
    })
}

/// Returns the table's shape, for a wait.
pub(crate) async fn table_within<DB: Database>(
    shared: &Shared<DB>,
    since: Instant,
    wait: Duration,
) -> Result<&Schema, Error> {
    let time_limit = shared.time_limit;
    let (until, last_error) = (since + wait.min(LONGEST), Mutex::default());
    let mut retry = Repeat::recording(until, &last_error);
    loop {
        let table = shared.known_table(until.min(Instant::now() + time_limit)).await;
        if let Some(table) = retry.final_or_pause(table).await {
            return table.map_err(|error| late(error, wait, false));
        }
    }
}

/// The claim request of one waiting task.
struct PendingAcquire<'a, DB: Database> {
    shared: &'a Shared<DB>,
    key_terms: &'a Arc<KeyTerms<DB>>,
    wanted: &'a Wanted,
    until: Instant,
    queue: Arc<LocalQueue>,
    asked: &'a Pending,
    /// Since when this task's own requests have no reply.
    asking_since: Mutex<Option<Instant>>,
    /// The last refusal of this task's own requests.
    last_refusal: Mutex<Option<Refusal>>,
    /// The failure that is being waited out.
    last_error: Mutex<Option<Error>>,
}

/// The state of a waiter that polls in its turn, until it claims one of several keys.
struct RequestState<'a, DB: Database> {
    /// Passed on before the claim on one of several keys is sent, so that the next waiter can claim
    /// another one.
    turn: Option<Turn>,
    ticket: Option<Ticket<DB>>,
    /// A claim request of this attempt was sent and not answered. Another request finds the claim
    /// if it was granted.
    unanswered: Option<ClaimAttempt<'a, DB>>,
    /// A request of this process was refused before.
    waited: bool,
    backoff: Backoff,
    /// The value that the last refusal came with. A different one means that the state of the keys
    /// has changed.
    last_seen: Option<i64>,
    /// The last request was sent without a pause, because the key was found to be free.
    retried_after_free: bool,
}

impl<DB: Database> RequestState<'_, DB> {
    fn new(turn: Turn, ticket: Option<Ticket<DB>>) -> Self {
        let (unanswered, last_seen) = (None, None);
        let (turn, backoff) = (Some(turn), poll_backoff(DB::NOTIFIES));
        Self { turn, ticket, unanswered, waited: false, backoff, last_seen, retried_after_free: false }
    }

    /// Records a refusal. The next pauses are shorter if the state of the keys has changed.
    fn on_refused(&mut self, seen: i64) {
        if self.last_seen.replace(seen).is_some_and(|before| before != seen) {
            self.backoff = poll_sooner(self.backoff);
        }
        self.waited = true;
    }
}

/// How sending requests in a turn ended.
enum PollEnd<DB: Database> {
    Finished(Attempt<LeaseHandle<DB>>),
    /// The turn belongs to another waiter of this process. Numbers that were drawn one after the
    /// other need not grow where several nodes assign them. A waiter without a ticket has passed
    /// its turn on and was then refused.
    YieldTurn(Option<Ticket<DB>>),
    /// A ticket is needed.
    NeedsTicket,
}

/// The outcome of one request. A refusal comes with a value that shows whether the state of the
/// keys has changed since the last request.
type Polled<DB> = ControlFlow<PollEnd<DB>, (Refusal, i64)>;

impl<'a, DB: Database> PendingAcquire<'a, DB> {
    async fn granted_or_refused(&self) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let fair = self.key_terms.terms.fair;
        let mut next = self.queue.try_take();
        let mut ticket = None;
        loop {
            let turn = match next.take() {
                Some(turn) => turn,
                None if !fair => self.queue.acquire().await,
                None => {
                    // Drawn one by one, so that the order within the process is the order of the
                    // numbers.
                    let drawing = self.queue.entry.lock().await;
                    let drawn = self.draw().await?;
                    let entry = self.queue.enter(drawn.number);
                    drop(drawing);
                    ticket = Some(drawn);
                    entry.acquire().await
                }
            };
            match self.poll_in_turn(turn, ticket.take()).await? {
                PollEnd::Finished(attempt) => return Ok(attempt),
                PollEnd::NeedsTicket => {}
                PollEnd::YieldTurn(returned) => {
                    // Without a ticket it has waited before all others.
                    let entry = self.queue.enter(returned.as_ref().map_or(-1, |ticket| ticket.number));
                    (next, ticket) = (Some(entry.acquire().await), returned);
                }
            }
        }
    }

    /// Sends requests until the keys are granted, or are refused within their minimum interval.
    async fn poll_in_turn(&self, turn: Turn, ticket: Option<Ticket<DB>>) -> Result<PollEnd<DB>, Error> {
        let subscribe = || Releases::of(&self.shared.listener, &self.wanted.keys);
        // Before the first request, so that no later notification is missed. A claim on one of
        // several keys that is believed to be free needs none, because no pause follows it.
        let any = self.wanted.any && !self.key_terms.terms.fair;
        let mut releases = (!any).then(subscribe);
        let mut state = RequestState::new(turn, ticket);
        if let Some((before, next)) = self.queue.poll_backoff() {
            // The previous owner of the turn gave up, which is no reason to send a request
            // sooner.
            (state.backoff, state.waited) = (before, true);
            releases.get_or_insert_with(subscribe).notified_before(next).await;
        }
        loop {
            if any {
                self.wait_for_place().await;
            }
            let (refusal, seen) = match self.poll_through_failures(&mut state).await? {
                ControlFlow::Continue(refused) => refused,
                ControlFlow::Break(PollEnd::Finished(Attempt::Acquired(granted))) => {
                    return Ok(self.on_granted(granted, state).await);
                }
                ControlFlow::Break(end) => return Ok(end),
            };
            self.record_refusal(&refusal);
            if state.turn.is_none() {
                return Ok(PollEnd::YieldTurn(None));
            }
            let left = self.until - Instant::now();
            if refusal.reason == Reason::WithinMinInterval {
                return Ok(PollEnd::Finished(Attempt::Refused(refusal)));
            }
            if self.key_terms.terms.fair && state.ticket.is_none() {
                return Ok(PollEnd::NeedsTicket);
            }
            state.on_refused(seen);
            let Some(releases) = &mut releases else {
                releases = Some(subscribe());
                continue;
            };
            // Not twice in a row: a key that stays free and refused is waited for like any other.
            let keys: &[Key] = if state.retried_after_free { &[] } else { self.keys_to_mark(&refusal) };
            // Only now: a request that is granted at once opens no connection.
            state.retried_after_free = releases.request(&self.shared.sessions, keys, Some(self.until)).await;
            if state.retried_after_free {
                continue;
            }
            let ends_in = refusal.retry_after.unwrap_or(left);
            let pause = poll_pause(state.backoff.next(), ends_in, left);
            let next = Instant::now() + pause;
            self.queue.set_poll_backoff(Some((state.backoff, next)));
            releases.notified_before(next).await;
        }
    }

    /// Waits while this process holds or claims each of the keys of which one is enough. A request
    /// could only be refused.
    async fn wait_for_place(&self) {
        while self.queue.are_all_places_in_use() {
            self.record_refusal(&self.refusal_for_local_waiters(None));
            self.queue.place_left().await;
            self.queue.set_refusal(None);
        }
    }

    /// Records a refusal, which is reported if the wait ends before another request has a reply.
    fn record_refusal(&self, refusal: &Refusal) {
        self.queue.set_refusal(Some(refusal.clone()));
        *lock(&self.last_refusal) = Some(refusal.clone());
    }

    /// Returns the keys whose rows are to be marked: none, if the key cannot be released or is
    /// marked.
    fn keys_to_mark<'r>(&'r self, refusal: &'r Refusal) -> &'r [Key] {
        let can_be_released = matches!(refusal.reason, Reason::Held | Reason::TimedOutUnfinished);
        if !can_be_released || refusal.awaited {
            return &[];
        }
        // All holders notify of their release if any key is enough.
        if self.wanted.any { &self.wanted.keys } else { std::slice::from_ref(&refusal.key) }
    }

    /// The lease keeps the turn until it is over, unless another key is as good. The ticket is no
    /// longer needed.
    async fn on_granted(&self, granted: LeaseHandle<DB>, state: RequestState<'a, DB>) -> PollEnd<DB> {
        let RequestState { turn, ticket, .. } = state;
        if !self.wanted.any {
            self.queue.set_refusal(Some(self.refusal_for_local_waiters(Some(granted.held.time_left()))));
        }
        // Passed on after the ticket is left, so that the next waiter is then the first in the
        // queue.
        let mut passed_on = turn;
        if passed_on.is_some() {
            self.queue.set_poll_backoff(None);
        }
        if !self.wanted.any
            && let Some(turn) = passed_on.take()
        {
            granted.held.keep(turn);
        }
        if let Some(ticket) = ticket {
            // A wait that is over by then would be refused, although its keys are granted.
            let now = Instant::now();
            ticket.leave(now + LEAVE_TIMEOUT.min((self.until - now) / 2)).await;
        }
        drop(passed_on);
        PollEnd::Finished(Attempt::Acquired(granted))
    }

    /// Sends requests until one has a reply, or until the wait is over.
    async fn poll_through_failures(&self, state: &mut RequestState<'a, DB>) -> Result<Polled<DB>, Error> {
        let mut retry = Repeat::recording(self.until, &self.last_error);
        loop {
            let outcome = self.poll_once(state).await;
            if let Some(outcome) = retry.final_or_pause(outcome).await {
                // A failure that ends the wait is no refusal, and must not be reported as one to
                // the other waiters. Running out of time is no such failure.
                if outcome.is_err() && Instant::now() < self.until {
                    self.queue.set_refusal(None);
                }
                return outcome;
            }
        }
    }

    /// Checks the position in the queues and sends one request.
    async fn poll_once(&self, state: &mut RequestState<'a, DB>) -> Result<Polled<DB>, Error> {
        // Checked before each claim, because a ticket may lapse at any time, and its waiter is then
        // no longer first. A claim that may have been granted is requested first of all, because it
        // keeps other holders out.
        if let (Some(ticket), None) = (&state.ticket, &state.unanswered) {
            let behind = match self.ticket_position(ticket.number).await? {
                Position::First => None,
                // It waits for the turn too.
                Position::Behind { number, .. } if self.queue.has_waiting(number) => {
                    Some(ControlFlow::Break(PollEnd::YieldTurn(state.ticket.take())))
                }
                Position::Behind { key, number, left } => {
                    Some(ControlFlow::Continue((queued(self.wanted.asked(key), left), number)))
                }
                Position::TicketMissing | Position::Unknown => Some(ControlFlow::Break(PollEnd::NeedsTicket)),
            };
            if let Some(behind) = behind {
                *lock(&self.asking_since) = None;
                return Ok(behind);
            }
        }
        lock(&self.asking_since).get_or_insert_with(Instant::now);
        let attempt = state.unanswered.take().unwrap_or_else(|| {
            ClaimAttempt::new(self.shared, self.key_terms, self.wanted, Some(self.until), self.asked)
        });
        // A fair waiter keeps the turn: the next one is not the first in the queue.
        if attempt.has_chosen() && !self.key_terms.terms.fair {
            self.queue.set_poll_backoff(None);
            state.turn = None;
        }
        let has_waited = state.waited || state.ticket.is_some();
        let mut attempt = if has_waited { attempt.after_waiting(state.ticket.is_some()) } else { attempt };
        let answer = attempt.run().await;
        state.unanswered = attempt.into_unanswered();
        let answer = answer?;
        *lock(&self.asking_since) = None;
        Ok(match answer {
            Attempt::Refused(refusal) => {
                let since = refusal.since.map_or(0, |since| since.timestamp_micros());
                ControlFlow::Continue((refusal, since))
            }
            acquired => ControlFlow::Break(PollEnd::Finished(acquired)),
        })
    }

    /// Draws a ticket in the database queues.
    async fn draw(&self) -> Result<Ticket<DB>, Error> {
        let tickets = &self.shared.tickets;
        let mut retry = Repeat::recording(self.until, &self.last_error);
        loop {
            let drawn = tickets.join(&self.wanted.queues, self.limit()).await;
            if let Some(drawn) = retry.final_or_pause(drawn.map_err(|failure| self.error(failure))).await {
                return drawn;
            }
        }
    }

    /// Returns the position of a ticket. A ticket that is missing may only be late, where a node of
    /// a cluster lags behind.
    async fn ticket_position(&self, number: i64) -> Result<Position, Error> {
        let tickets = &self.shared.tickets;
        let mut at = tickets.position(&self.wanted.queues, number, self.limit()).await;
        if let Ok(Position::TicketMissing) = at {
            sleep(REPLICATION_LAG).await;
            at = tickets.position(&self.wanted.queues, number, self.limit()).await;
        }
        at.map_err(|failure| self.error(failure))
    }

    /// Returns when one statement is given up.
    fn limit(&self) -> Instant {
        self.until.min(Instant::now() + self.shared.time_limit)
    }

    /// The refusal for other waiters while this process holds the lease, for as long as this.
    fn refusal_for_local_waiters(&self, left: Option<Duration>) -> Refusal {
        let (by, refusal) =
            (self.key_terms.terms.label.clone(), Refusal::bare(self.wanted.keys[0].clone(), Reason::Held));
        Refusal { by, retry_after: left, awaited: true, ..refusal }
    }

    /// Returns the last refusal, unless a later claim may have been granted although no reply
    /// arrived. A claim in flight is finished, and put back if it is granted.
    ///
    /// The shared refusal does not count if this task has asked since and has no reply, for longer
    /// than a reply takes or for another one of several keys.
    fn take_last_refusal(&self) -> Option<Attempt<LeaseHandle<DB>>> {
        if self.asked.is_unanswered() {
            return None;
        }
        let last_refusal = lock(&self.last_refusal).take();
        let longest = REPLY.min(self.shared.time_limit);
        let has_no_reply = lock(&self.asking_since).is_some_and(|since| self.wanted.any || since.elapsed() >= longest);
        let only_its_own = has_no_reply || lock(&self.last_error).is_some();
        self.queue.refusal().filter(|_| !only_its_own).or(last_refusal).map(Attempt::Refused)
    }

    fn error(&self, failure: Failure) -> Error {
        let limit = self.shared.time_limit;
        failure.into_error(Action::Acquire, subject(self.wanted.keys.iter()), limit, Certainty::NothingChanged)
    }
}
