//! Waiting for keys: by the local queue within this process, by ticket across processes on a fair
//! lock, and never past the limit.
//!
//! Of all tasks that wait for the same keys, one sends requests, at intervals that grow. It sends
//! one sooner on a notification of a release in this process, on a notification of a release
//! elsewhere (PostgreSQL), and at the end of the lease or minimum interval that the refusal named.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    error::{Action, Certainty, Error},
    key::{Holder, Key},
    lease::{
        attempt::{Try, queued},
        claims::Granted,
        handle::subject,
        shared::Shared,
    },
    lock::Attempt,
    metrics,
    queue::{
        local::{LocalQueue, Permit},
        position::Position,
        tickets::Ticket,
    },
    retry::{Backoff, DAY},
    rules::{Reason, Refusal},
    schema::Table,
    store::{Database, connection::PooledConn, failure::Failure},
    sync::lock,
};

/// The bounds of the interval between two requests, at first and in the end.
const PACE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a ticket that is not visible is waited for before it counts as gone.
const LAG: Duration = Duration::from_millis(100);
/// How long requesting the notification of a release may take.
const HINT: Duration = Duration::from_secs(1);
/// The wait that counts as indefinite: ten years.
const LONGEST: Duration = Duration::from_secs(3653 * DAY.as_secs());

/// Waits for all of these keys, sorted, for at most `wait`. A zero `wait` is one attempt.
pub(crate) async fn wait_for<DB: Database>(
    shared: &Shared<DB>,
    keys: Arc<[Key]>,
    since: Instant,
    wait: Duration,
) -> Result<Attempt<Granted<DB>>, Error> {
    let attempt = match wait.is_zero() {
        true => Try::new(shared, &keys, None, None)?.run().await?,
        false => wait_long(shared, keys, since, wait).await?,
    };
    if matches!(attempt, Attempt::Acquired(_)) {
        metrics::waited(since.elapsed());
    }
    Ok(attempt)
}

async fn wait_long<DB: Database>(
    shared: &Shared<DB>,
    keys: Arc<[Key]>,
    since: Instant,
    wait: Duration,
) -> Result<Attempt<Granted<DB>>, Error> {
    let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
    let until = since + wait.min(LONGEST);
    let queue = shared.waiting.queues.queue(&keys);
    let (claiming, unanswered) = (AtomicBool::new(false), AtomicBool::new(false));
    let (told, trouble) = (Mutex::default(), Mutex::default());
    let wanted = Wanted { lock: shared, runtime, keys, until, queue, claiming, unanswered, told, trouble };
    match timeout_at(until, wanted.granted_or_refused()).await {
        Ok(Err(error)) if error.is_retryable() && Instant::now() >= until => {
            wanted.refused_last().ok_or_else(|| wanted.out_of_time(error, wait))
        }
        Ok(attempt) => attempt,
        Err(_) => wanted.refused_last().ok_or_else(|| {
            let trouble = lock(&wanted.trouble).take();
            wanted.out_of_time(trouble.unwrap_or_else(|| wanted.unanswered()), wait)
        }),
    }
}

/// Returns the table's shape, which the first call of a lock object reads. One attempt has its time
/// limit for that; a wait has its whole duration.
pub(crate) async fn table_within<DB: Database>(
    shared: &Shared<DB>,
    since: Instant,
    wait: Duration,
) -> Result<&Table, Error> {
    let time_limit = shared.settings.time_limit;
    if wait.is_zero() {
        return shared.known_table(since + time_limit).await;
    }
    let (until, trouble) = (since + wait.min(LONGEST), Mutex::default());
    let mut patience = Patience::new(until, &trouble);
    loop {
        let table = shared.known_table(until.min(Instant::now() + time_limit)).await;
        if let Some(table) = patience.last(table).await {
            return table.map_err(|error| late(error, wait, false));
        }
    }
}

/// Retries through transient failures: an outage, contention, a pool without a spare connection.
struct Patience<'a> {
    until: Instant,
    pauses: Backoff,
    /// The failure that is being waited out.
    trouble: &'a Mutex<Option<Error>>,
}

impl<'a> Patience<'a> {
    fn new(until: Instant, trouble: &'a Mutex<Option<Error>>) -> Self {
        Self { until, pauses: Backoff::between(PACE.0, PACE.1), trouble }
    }

    /// Returns the reply if it is final. Returns `None`, after a pause, if a retry makes sense.
    async fn last<T>(&mut self, reply: Result<T, Error>) -> Option<Result<T, Error>> {
        let left = self.until.saturating_duration_since(Instant::now());
        match reply {
            Err(error) if error.is_retryable() && !left.is_zero() => {
                tracing::warn!(%error, ?left, "the wait goes on");
                *lock(self.trouble) = Some(error);
                self.pauses.pause(left).await;
                None
            }
            reply => {
                *lock(self.trouble) = None;
                Some(reply)
            }
        }
    }
}

/// The error at the end of a wait, with the length of the wait and what is known of the outcome by
/// then.
fn late(mut error: Error, wait: Duration, unsure: bool) -> Error {
    if let Error::TimedOut { limit, .. } | Error::NoConnection { limit, .. } = &mut error {
        *limit = wait;
    }
    if let Error::TimedOut { outcome, .. } | Error::NoConnection { outcome, .. } | Error::Database { outcome, .. } =
        &mut error
        && unsure
    {
        *outcome = Certainty::Unknown;
    }
    error
}

/// The claim request of one waiting task.
struct Wanted<'a, DB: Database> {
    lock: &'a Shared<DB>,
    runtime: Handle,
    keys: Arc<[Key]>,
    until: Instant,
    queue: Arc<LocalQueue>,
    /// A claim request is in flight.
    claiming: AtomicBool,
    /// A claim request has no reply and may have been granted.
    unanswered: AtomicBool,
    /// The last refusal of this task's own requests.
    told: Mutex<Option<Refusal>>,
    /// The failure that is being waited out.
    trouble: Mutex<Option<Error>>,
}

/// The waiter's position in the database queues.
struct Spot<DB: Database> {
    ticket: Option<Ticket<DB>>,
    /// A claim request of this holder was sent and not answered. Another request finds the claim if
    /// it was granted.
    unanswered: Option<Holder>,
}

/// The outcome of a request, with a value that shows whether the state has changed since the last
/// request.
enum Asked<DB: Database> {
    Granted(Granted<DB>),
    Refused(Refusal, i64),
    /// The ticket is gone.
    Displaced,
    /// A waiter of the same local queue precedes this one and waits for the permit.
    BehindOwn,
}

/// How sending requests under a permit ended.
enum Ended<DB: Database> {
    With(Attempt<Granted<DB>>),
    /// The permit belongs to another waiter of this process. Numbers that were drawn one after the
    /// other need not grow where several nodes assign them.
    Behind(Option<Ticket<DB>>),
    /// A ticket is needed.
    WithoutPlace,
}

impl<DB: Database> Wanted<'_, DB> {
    async fn granted_or_refused(&self) -> Result<Attempt<Granted<DB>>, Error> {
        let fair = self.lock.settings.fair;
        let mut next = self.queue.try_take();
        let mut ticket = None;
        loop {
            let turn = match next.take() {
                Some(turn) => turn,
                None if !fair => self.queue.turn().await,
                None => {
                    // Drawn one by one, so that the order within the process is the order of the
                    // numbers.
                    let drawing = self.queue.entry.lock().await;
                    let drawn = self.draw().await?;
                    let entry = self.queue.enter(drawn.number);
                    drop(drawing);
                    ticket = Some(drawn);
                    entry.turn().await
                }
            };
            match self.ask_in_turn(turn, ticket.take()).await? {
                Ended::With(attempt) => return Ok(attempt),
                Ended::WithoutPlace => {}
                Ended::Behind(place) => {
                    let entry = self.queue.enter(place.as_ref().map_or(0, |place| place.number));
                    (next, ticket) = (Some(entry.turn().await), place);
                }
            }
        }
    }

    /// Sends requests until the keys are granted, or until only time can help and too little of it
    /// is left.
    async fn ask_in_turn(&self, turn: Permit, ticket: Option<Ticket<DB>>) -> Result<Ended<DB>, Error> {
        let waiting = &self.lock.waiting;
        // Subscribed before the first request, so that no later notification is missed.
        let subscription = waiting.wakeups.listen(&self.keys);
        let mut listening = None;
        let mut spot = Spot { ticket, unanswered: None };
        let (mut pace, mut sign, mut waited, mut told_free) = (Backoff::between(PACE.0, PACE.1), None, false, false);
        if let Some((before, next)) = self.queue.pace() {
            // The previous owner of the permit gave up, which is no reason to send a request
            // sooner.
            (pace, waited) = (before, true);
            subscription.heard_before(next).await;
        }
        loop {
            let (refusal, seen) = match self.ask_on(&mut spot, waited).await.inspect_err(|_| self.failed())? {
                Asked::Granted(granted) => return Ok(self.have(granted, turn, spot.ticket).await),
                Asked::Refused(refusal, seen) => (refusal, seen),
                Asked::Displaced => return Ok(Ended::WithoutPlace),
                Asked::BehindOwn => return Ok(Ended::Behind(spot.ticket)),
            };
            self.queue.note(Some(refusal.clone()));
            *lock(&self.told) = Some(refusal.clone());
            let left = self.until.saturating_duration_since(Instant::now());
            let window = refusal.retry_after.filter(|_| refusal.reason == Reason::WithinWindow);
            if window.is_some_and(|window| window > left) {
                return Ok(Ended::With(Attempt::Refused(refusal)));
            }
            if self.lock.settings.fair && spot.ticket.is_none() {
                return Ok(Ended::WithoutPlace);
            }
            if sign.replace(seen).is_some_and(|before| before != seen) {
                pace = Backoff::between(PACE.0, PACE.1);
            }
            waited = true;
            // A request that is granted at once opens no connection.
            let listening = listening.get_or_insert_with(|| waiting.listener.attend(&self.runtime));
            let may_end = matches!(refusal.reason, Reason::Held | Reason::TimedOutUnfinished);
            // Not twice in a row: a key that stays free and refused is waited for like any other.
            told_free =
                may_end && !refusal.awaited && listening.hears() && !told_free && self.ask_for_word(&refusal.key).await;
            if told_free {
                continue;
            }
            // A holder may release early, so the interval applies, but the pause does not extend
            // past the end of the lease.
            let pause = window.unwrap_or_else(|| pace.next().min(refusal.retry_after.unwrap_or(left)));
            let next = Instant::now() + pause;
            // The end of a minimum interval may be further off than the time that the next waiter
            // has.
            self.queue.note_pace(window.is_none().then_some((pace, next)));
            subscription.heard_before(next).await;
        }
    }

    /// The lease keeps the permit until it is over. The ticket is no longer needed.
    async fn have(&self, granted: Granted<DB>, turn: Permit, ticket: Option<Ticket<DB>>) -> Ended<DB> {
        self.queue.note(Some(self.held_here(&granted)));
        self.queue.note_pace(None);
        granted.handle.keep(turn);
        if let Some(ticket) = ticket {
            ticket.leave(Instant::now() + HINT).await;
        }
        Ended::With(Attempt::Acquired(granted))
    }

    /// A failure that ends the wait is no refusal, and must not be reported as one to the other
    /// waiters. Running out of time is no such failure.
    fn failed(&self) {
        if Instant::now() < self.until {
            self.queue.note(None);
        }
    }

    async fn ask_on(&self, spot: &mut Spot<DB>, waited: bool) -> Result<Asked<DB>, Error> {
        let mut patience = Patience::new(self.until, &self.trouble);
        loop {
            let asked = self.ask(spot, waited).await;
            if let Some(asked) = patience.last(asked).await {
                return asked;
            }
        }
    }

    async fn ask(&self, spot: &mut Spot<DB>, waited: bool) -> Result<Asked<DB>, Error> {
        // Checked before each claim, because a ticket may lapse at any time, and its waiter is then
        // no longer first. A claim that may have been granted is requested first of all, because it
        // keeps other holders out.
        if let (Some(ticket), None) = (&spot.ticket, spot.unanswered) {
            match self.look(ticket.number).await? {
                Position::First => {}
                Position::Behind { number, .. } if self.queue.has_waiting(number) => return Ok(Asked::BehindOwn),
                Position::Behind { key, number, left } => return Ok(Asked::Refused(queued(key, left), number)),
                Position::Gone | Position::Unseen => return Ok(Asked::Displaced),
            }
        }
        let attempt = Try::new(self.lock, &self.keys, Some(self.until), spot.unanswered)?;
        let mut attempt = attempt.reporting_to(&self.unanswered);
        if waited || spot.ticket.is_some() {
            attempt = attempt.after_waiting(spot.ticket.is_some());
        }
        self.claiming.store(true, Ordering::Relaxed);
        let answer = attempt.run().await;
        self.claiming.store(false, Ordering::Relaxed);
        spot.unanswered = answer.as_ref().err().and_then(|_| attempt.unanswered());
        if spot.unanswered.is_none() {
            self.unanswered.store(false, Ordering::Relaxed);
        }
        Ok(match answer? {
            Attempt::Acquired(granted) => Asked::Granted(granted),
            Attempt::Refused(refusal) => {
                let since = refusal.since.map_or(0, |since| since.timestamp_micros());
                Asked::Refused(refusal, since)
            }
        })
    }

    /// Draws a ticket in the database queues.
    async fn draw(&self) -> Result<Ticket<DB>, Error> {
        let tickets = &self.lock.waiting.tickets;
        let mut patience = Patience::new(self.until, &self.trouble);
        loop {
            let drawn = tickets.join(&self.runtime, &self.keys, self.limit()).await;
            if let Some(drawn) = patience.last(drawn.map_err(|failure| self.error(failure))).await {
                return drawn;
            }
        }
    }

    /// Returns the position of a ticket. A ticket that is missing may only be late, where a node of
    /// a cluster lags behind.
    async fn look(&self, number: i64) -> Result<Position, Error> {
        let tickets = &self.lock.waiting.tickets;
        let at = tickets.stand(&self.keys, number, self.limit()).await.map_err(|failure| self.error(failure))?;
        if at != Position::Gone {
            return Ok(at);
        }
        sleep(LAG).await;
        tickets.stand(&self.keys, number, self.limit()).await.map_err(|failure| self.error(failure))
    }

    /// Requests that the holder notifies of its release. Returns whether the key is already free.
    async fn ask_for_word(&self, key: &Key) -> bool {
        let limit = self.until.min(Instant::now() + HINT);
        let Ok(mut conn) = PooledConn::checkout(&self.lock.settings.pool, limit).await else { return false };
        let reply = timeout_at(limit, DB::request_notification(conn.get(), key)).await;
        conn.settle(reply).is_ok_and(|free| free)
    }

    /// Returns when one statement is given up.
    fn limit(&self) -> Instant {
        self.until.min(Instant::now() + self.lock.settings.time_limit)
    }

    /// The refusal for other waiters while this process holds the lease.
    fn held_here(&self, granted: &Granted<DB>) -> Refusal {
        Refusal {
            key: self.keys[0].clone(),
            reason: Reason::Held,
            by: self.lock.settings.terms.label.clone(),
            since: None,
            until: None,
            retry_after: Some(granted.handle.time_left()),
            awaited: true,
        }
    }

    /// Returns the last refusal, unless a later claim may have been granted although no reply
    /// arrived. A claim in flight is finished, and put back if it is granted.
    fn refused_last(&self) -> Option<Attempt<Granted<DB>>> {
        if self.unanswered.load(Ordering::Relaxed) {
            return None;
        }
        let told = lock(&self.told).take();
        self.queue.refusal().or(told).map(Attempt::Refused)
    }

    fn unanswered(&self) -> Error {
        let (action, outcome) = (Action::Acquire, Certainty::NothingChanged);
        Error::TimedOut { action, subject: self.subject(), limit: Duration::ZERO, outcome }
    }

    fn out_of_time(&self, error: Error, wait: Duration) -> Error {
        let unsure = [&self.claiming, &self.unanswered].iter().any(|flag| flag.load(Ordering::Relaxed));
        late(error, wait, unsure)
    }

    fn error(&self, failure: Failure) -> Error {
        let limit = self.lock.settings.time_limit;
        failure.into_error(Action::Acquire, self.subject(), limit, Certainty::NothingChanged)
    }

    fn subject(&self) -> String {
        subject(self.keys.iter().map(Key::as_str))
    }
}
