//! Batches requests: those that wait when a session is free are sent together.
//!
//! There is no timer. A request starts a worker, and joins those that wait. The worker takes a
//! session, and then all that wait by then: requests that arrive while a statement is in flight
//! form the next one. If a reply takes longer than `SLOW`, requests that wait start another worker,
//! with a session of its own.
//!
//! Each request gets its own reply. An output that is valid for all requests for its key, such as a
//! refusal, serves those that waited before the statement was sent. A request cancelled before
//! sending is removed; one cancelled later has its result dropped, which abandons the lease. A
//! statement that no caller waits for any more goes on for `GRACE`, and then its session is closed.
//! After a statement has failed, each of its requests is sent by itself, or the first receives the
//! failure and the others one that is retried.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    future::Future,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OnceCell, oneshot};
use tokio_util::task::TaskTracker;

use crate::{
    key::Key,
    session::{
        loan::Loan,
        sessions::Sessions,
        threads,
        time::Instant,
        timers::{sleep, timeout, timeout_at},
    },
    store::{
        Database, Form,
        failure::{Failure, Remedy, remedy},
        fault::Fault,
        schema::Schema,
    },
    sync::{OnDrop, lock},
};

/// The most requests in one statement. A larger statement only takes longer.
const MAX_REQUESTS: usize = 256;
/// After this time without a reply, a worker lets another one send what waits.
const SLOW: Duration = Duration::from_millis(20);
/// How long a statement goes on of which no caller waits for a reply any more. Its session is
/// needed for other requests.
const GRACE: Duration = Duration::from_secs(1);

/// A request that one statement may carry together with others of its kind.
pub(crate) trait Batched<DB: Database>: Sized + Send + Sync + 'static {
    type Output: Send + 'static;

    /// Whether the requests of a statement that the server refused are sent again by their callers,
    /// each by itself and side by side, as after contention. The queue sends others one after the
    /// other.
    const APART_BY_CALLER: bool = false;

    /// Returns the key of the request. One statement never carries two requests for the same key. A
    /// request of several keys has none, and is sent by itself.
    fn key(&self) -> Option<&Key>;

    /// Returns whether one statement can carry both requests.
    fn can_share_statement(&self, other: &Self) -> bool;

    /// Returns a copy of the output, if it is valid for every request for the same key that was
    /// queued before the statement was sent.
    fn share(_output: &Self::Output) -> Option<Self::Output> {
        None
    }

    /// Sends all requests, of which this is the first, up to the limit. Returns one output per
    /// request, in order.
    fn run(
        &self,
        all: &[Self],
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> impl Future<Output = Result<Vec<Self::Output>, Failure>> + Send;
}

/// The deadlines of a request.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// When the caller stops waiting.
    pub caller: Instant,
    /// When the statement is given up.
    pub statement: Instant,
}

impl Limits {
    pub fn both(limit: Instant) -> Self {
        Self { caller: limit, statement: limit }
    }
}

struct Waiting<DB: Database, R: Batched<DB>> {
    request: R,
    reply: oneshot::Sender<Result<R::Output, Failure>>,
    limits: Limits,
    /// Set by the one that is first: the worker that sends it, or the caller that leaves.
    begun: Arc<AtomicBool>,
}

impl<DB: Database, R: Batched<DB>> Waiting<DB, R> {
    /// Returns whether the request is to be sent: its caller has not left.
    fn begin(&self) -> bool {
        !self.begun.swap(true, Ordering::Relaxed)
    }
}

type Numbered<DB, R> = (u64, Waiting<DB, R>);

/// A request to send, and the requests for the same key that may share its output.
struct Slot<DB: Database, R: Batched<DB>> {
    first: Waiting<DB, R>,
    others: Vec<Numbered<DB, R>>,
}

/// What to send, and requests whose callers have just left. These are dropped after the lock.
type Batch<DB, R> = (Vec<Slot<DB, R>>, Vec<Waiting<DB, R>>);

/// The requests of one lock, of one kind.
pub(crate) struct Queue<DB: Database, R: Batched<DB>> {
    sessions: Sessions<DB>,
    tracker: TaskTracker,
    /// The shape of the lock's table, once it is known.
    table: Arc<OnceCell<Schema>>,
    /// Unset: each request is sent by itself.
    batching: bool,
    state: Mutex<State<DB, R>>,
}

struct State<DB: Database, R: Batched<DB>> {
    /// The requests to be sent, in order of arrival.
    waiting: BTreeMap<u64, Waiting<DB, R>>,
    last_number: u64,
    /// A worker is about to take the waiting requests.
    collecting: bool,
    /// The number of workers whose statement was sent a moment ago.
    fresh: usize,
}

impl<DB: Database, R: Batched<DB>> State<DB, R> {
    /// Puts requests back in their original order. A cancelled request is dropped.
    fn put_back(&mut self, waiting: Vec<Numbered<DB, R>>) {
        let waiting = waiting.into_iter().filter(|(_, waiting)| !waiting.reply.is_closed());
        self.waiting.extend(waiting.inspect(|(_, waiting)| waiting.begun.store(false, Ordering::Relaxed)));
    }

    /// Takes the requests that fit in one statement, always including the first.
    fn take_batch(&mut self) -> Batch<DB, R> {
        let (mut slots, mut queued): (Vec<Slot<DB, R>>, HashMap<Key, usize>) = (Vec::new(), HashMap::new());
        let (mut stay, mut left) = (BTreeMap::new(), Vec::new());
        while slots.len() < MAX_REQUESTS
            && let Some((number, waiting)) = self.waiting.pop_first()
        {
            let Some(key) = waiting.request.key().cloned() else { continue };
            if slots.first().is_some_and(|slot| !waiting.request.can_share_statement(&slot.first.request)) {
                stay.insert(number, waiting);
                continue;
            }
            if !waiting.begin() {
                left.push(waiting);
                continue;
            }
            match queued.entry(key) {
                Entry::Vacant(queued) => {
                    queued.insert(slots.len());
                    slots.push(Slot { first: waiting, others: Vec::new() });
                }
                Entry::Occupied(queued) => slots[*queued.get()].others.push((number, waiting)),
            }
        }
        self.waiting.append(&mut stay);
        (slots, left)
    }

    /// Returns whether a worker has to be started for what waits.
    fn needs_worker(&self) -> bool {
        !self.waiting.is_empty() && !self.collecting && self.fresh == 0
    }
}

impl<DB: Database, R: Batched<DB>> Queue<DB, R> {
    pub fn new(
        sessions: &Sessions<DB>,
        tracker: &TaskTracker,
        table: &Arc<OnceCell<Schema>>,
        batching: bool,
    ) -> Arc<Self> {
        let state = State { waiting: BTreeMap::new(), last_number: 0, collecting: false, fresh: 0 };
        let (sessions, tracker, table) = (sessions.clone(), tracker.clone(), table.clone());
        Arc::new(Self { sessions, tracker, table, batching, state: Mutex::new(state) })
    }

    /// Sends a request, on the thread `rowlock`; without others, if it is to be `alone`. If the
    /// future is dropped, an unsent request is not sent, and the result of a sent one is dropped.
    pub async fn send(self: &Arc<Self>, request: R, limits: Limits, alone: bool) -> Result<R::Output, Failure> {
        let (reply, output) = oneshot::channel();
        let begun = Arc::<AtomicBool>::default();
        let waiting = Waiting { request, reply, limits, begun: begun.clone() };
        let _queued = if self.batching && !alone && waiting.request.key().is_some() {
            let number = self.push(waiting);
            Some(OnDrop(move || {
                let left = lock(&self.state).waiting.remove(&number);
                drop(left); // not under the lock, because it may wake a caller
            }))
        } else {
            let queue = self.clone();
            threads::spawn(self.tracker.track_future(async move { queue.send_alone(waiting).await }));
            None
        };
        match threads::reply(timeout_at(limits.caller, output)).await {
            // The sender is dropped without a reply if its task panics.
            Ok(output) => output.unwrap_or(Err(Failure::NoReply)),
            Err(_) if begun.swap(true, Ordering::Relaxed) => Err(Failure::NoReply),
            Err(_) => Err(Failure::NoConnection(self.sessions.why_none())),
        }
    }

    fn push(self: &Arc<Self>, waiting: Waiting<DB, R>) -> u64 {
        let mut state = lock(&self.state);
        state.last_number += 1;
        let number = state.last_number;
        state.waiting.insert(number, waiting);
        self.start_worker(state);
        number
    }

    /// Starts a worker for what waits, unless one is about to take it.
    fn start_worker(self: &Arc<Self>, mut state: std::sync::MutexGuard<'_, State<DB, R>>) {
        if state.needs_worker() {
            state.collecting = true;
            drop(state);
            threads::spawn(self.clone().work());
        }
    }

    /// Sends waiting requests until there are none, or another worker does.
    async fn work(self: Arc<Self>) {
        let _restart = OnDrop(|| self.restart_after_panic());
        loop {
            let Some((number, limit)) = self.first() else { return };
            // Others that wait for the session that this worker has given back are served first.
            // Requests of callers that have asked by then join.
            tokio::task::yield_now().await;
            match self.sessions.take(limit).await {
                Ok(session) => self.send_what_waits(session).await,
                Err(failure) => {
                    let waiting = lock(&self.state).waiting.remove(&number);
                    drop(waiting.map(|waiting| waiting.reply.send(Err(failure))));
                    continue;
                }
            }
            if mem::replace(&mut lock(&self.state).collecting, true) {
                return;
            }
        }
    }

    /// What waits goes on without the first request if a hook of the pool panics, or the driver.
    fn restart_after_panic(self: &Arc<Self>) {
        if std::thread::panicking() {
            let mut state = lock(&self.state);
            let first = if mem::take(&mut state.collecting) { state.waiting.pop_first() } else { None };
            self.start_worker(state);
            drop(first);
        }
    }

    /// Returns the first waiting request and its limit. If there is none, the worker ends.
    fn first(&self) -> Option<(u64, Instant)> {
        let mut state = lock(&self.state);
        let first = state.waiting.first_key_value().map(|(number, waiting)| (*number, waiting.limits.caller));
        state.collecting = first.is_some();
        first
    }

    fn take_batch(&self) -> Vec<Slot<DB, R>> {
        let mut state = lock(&self.state);
        let (slots, left) = state.take_batch();
        state.collecting = false;
        state.fresh += 1;
        drop(state);
        drop(left);
        slots
    }

    /// Sends one batch. While its reply is slow, another worker may begin.
    async fn send_what_waits(self: &Arc<Self>, session: Loan<DB>) {
        let slots = self.take_batch();
        let fresh = OnDrop(|| lock(&self.state).fresh -= 1);
        let mut sending = std::pin::pin!(self.tracker.track_future(self.send_together(session, slots)));
        if timeout(SLOW, &mut sending).await.is_err() {
            drop(fresh);
            self.start_worker(lock(&self.state));
            sending.await;
        }
    }

    /// Sends requests in one statement.
    async fn send_together(self: &Arc<Self>, session: Loan<DB>, slots: Vec<Slot<DB, R>>) {
        let limit = slots.iter().map(|slot| slot.first.limits.statement).max();
        let (mut requests, mut replies) = (Vec::with_capacity(slots.len()), Vec::with_capacity(slots.len()));
        for Slot { first: Waiting { request, reply, limits, begun }, others } in slots {
            requests.push(request);
            replies.push((reply, (limits, begun), others));
        }
        let (Some(first), Some(limit)) = (requests.first(), limit) else { return session.give_back() };
        let form = self.table.get().map(|table| table.form).unwrap_or_default();
        let ran = if Instant::now() < limit {
            tokio::select! {
                ran = first.run(&requests, session, &self.sessions, form, limit) => ran,
                () = abandoned(replies.iter_mut().map(|(reply, ..)| reply)) => Err(Failure::NoReply),
            }
        } else {
            // A statement that is started and abandoned at once may still be carried out.
            session.give_back();
            Err(Failure::NoConnection(sqlx::Error::PoolTimedOut))
        };
        match ran {
            Ok(outputs) => {
                for ((reply, _, others), output) in replies.into_iter().zip(outputs) {
                    self.share(&output, others);
                    // The result of a cancelled request is dropped, which abandons a granted lease.
                    drop(reply.send(Ok(output)));
                }
            }
            Err(failure) => {
                let mut firsts = Vec::with_capacity(replies.len());
                for (request, (reply, (limits, begun), others)) in requests.into_iter().zip(replies) {
                    lock(&self.state).put_back(others);
                    firsts.push(Waiting { request, reply, limits, begun });
                }
                // Those that were put back wait for none of the first ones, which may be sent one
                // after the other.
                self.start_worker(lock(&self.state));
                self.fail(firsts, failure).await;
            }
        }
    }

    fn share(&self, output: &R::Output, others: Vec<Numbered<DB, R>>) {
        if others.is_empty() {
            return;
        }
        let mut rest = Vec::new();
        for (number, other) in others {
            match R::share(output) {
                Some(output) => drop(other.reply.send(Ok(output))),
                None => rest.push((number, other)),
            }
        }
        lock(&self.state).put_back(rest);
    }

    /// Handles a statement that failed, or whose outcome is unknown.
    async fn fail(self: &Arc<Self>, firsts: Vec<Waiting<DB, R>>, failure: Failure) {
        let fault = failure.fault();
        // One of the requests may have caused the failure, and each caller needs an error of its
        // own.
        if firsts.len() > 1 && remedy(&failure, firsts.len()) != Remedy::Again {
            for first in firsts {
                if R::APART_BY_CALLER {
                    drop(first.reply.send(Err(Failure::Undone)));
                    continue;
                }
                first.begun.store(false, Ordering::Relaxed);
                Box::pin(self.send_alone(first)).await;
            }
            return;
        }
        let mut failure = Some(failure);
        for first in firsts {
            let other = match fault {
                Fault::Contention | Fault::ReadOnly => Failure::Undone,
                Fault::NoConnection => Failure::NoConnection(sqlx::Error::PoolTimedOut),
                _ => Failure::NoReply,
            };
            drop(first.reply.send(Err(failure.take().unwrap_or(other))));
        }
    }

    /// Sends one request, unless its caller has left before a session is free.
    async fn send_alone(self: &Arc<Self>, mut waiting: Waiting<DB, R>) {
        let session = tokio::select! {
            biased;
            () = waiting.reply.closed() => return,
            session = self.sessions.take(waiting.limits.caller) => session,
        };
        match session {
            Ok(session) if waiting.begin() => {
                self.send_together(session, vec![Slot { first: waiting, others: Vec::new() }]).await;
            }
            Ok(session) => session.give_back(),
            Err(failure) => drop(waiting.reply.send(Err(failure))),
        }
    }
}

/// Waits until no caller has waited for these replies for a time.
async fn abandoned<'a, T: 'a>(replies: impl Iterator<Item = &'a mut oneshot::Sender<T>>) {
    for reply in replies {
        reply.closed().await;
    }
    sleep(GRACE).await;
}
