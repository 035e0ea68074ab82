//! Waiting within one process: which task may claim, and wakeups when a claim may succeed.
//!
//! Of all the tasks that want the same keys, the one with the permit sends claim requests, and the
//! others wait for the permit. A task that is granted the keys keeps the permit until the lease is
//! over, so that no task claims in vain while this process holds them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, Weak},
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, timeout_at},
};

use crate::{key::Key, retry::Backoff, rules::Refusal, sync::lock};

/// The queues of one object, by keys. `N` is the note that one permit holder leaves to the next.
pub(crate) struct LocalQueues<N = ()>(Mutex<Queues<N>>);

type Queues<N> = HashMap<Arc<[Key]>, Weak<LocalQueue<N>>>;

impl<N> Default for LocalQueues<N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<N> LocalQueues<N> {
    /// Returns the queue of the tasks that want all of these keys.
    pub fn queue(self: &Arc<Self>, keys: &Arc<[Key]>) -> Arc<LocalQueue<N>> {
        let mut queues = lock(&self.0);
        if let Some(queue) = queues.get(keys).and_then(Weak::upgrade) {
            return queue;
        }
        let queue = Arc::new(LocalQueue {
            keys: keys.clone(),
            queues: self.clone(),
            state: Mutex::default(),
            entry: tokio::sync::Mutex::default(),
        });
        queues.insert(keys.clone(), Arc::downgrade(&queue));
        queue
    }
}

/// The tasks of this process that want the same keys.
pub(crate) struct LocalQueue<N = ()> {
    keys: Arc<[Key]>,
    queues: Arc<LocalQueues<N>>,
    state: Mutex<State<N>>,
    /// Held while a ticket is drawn from the database, so that the local order is the order of the
    /// tickets.
    pub entry: tokio::sync::Mutex<()>,
}

/// The order of waiters: by ticket number, then by order of entry, which is unique.
type Rank = (i64, u64);

struct State<N> {
    taken: bool,
    entries: u64,
    waiting: BTreeMap<Rank, oneshot::Sender<Permit<N>>>,
    refusal: Option<Refusal>,
    pace: Option<(Backoff, Instant)>,
}

impl<N> Default for State<N> {
    fn default() -> Self {
        Self { taken: false, entries: 0, waiting: BTreeMap::new(), refusal: None, pace: None }
    }
}

impl<N> LocalQueue<N> {
    /// Waits for the permit, behind the waiters that entered without a ticket.
    pub async fn turn(self: &Arc<Self>) -> Permit<N> {
        match self.try_take() {
            Some(turn) => turn,
            None => self.enter(0).turn().await,
        }
    }

    /// Returns the permit, if it is free. While it is free, no task waits.
    pub fn try_take(self: &Arc<Self>) -> Option<Permit<N>> {
        let mut state = lock(&self.state);
        if state.taken {
            return None;
        }
        state.taken = true;
        Some(Permit::of(self))
    }

    /// Joins the queue, in front of waiters with higher numbers and behind all others.
    pub fn enter(self: &Arc<Self>, number: i64) -> Waiter<N> {
        let mut state = lock(&self.state);
        state.entries += 1;
        let rank = (number, state.entries);
        drop(state);
        Waiter { queue: self.clone(), rank, turn: self.wait_at(rank) }
    }

    /// Returns the channel through which a rank receives the permit. A free permit arrives at once.
    fn wait_at(self: &Arc<Self>, rank: Rank) -> oneshot::Receiver<Permit<N>> {
        let (sender, turn) = oneshot::channel();
        let mut state = lock(&self.state);
        state.waiting.insert(rank, sender);
        let was_free = !std::mem::replace(&mut state.taken, true);
        drop(state);
        drop(was_free.then(|| Permit::of(self)));
        turn
    }

    /// Returns whether a task with this number waits for the permit.
    pub fn has_waiting(&self, number: i64) -> bool {
        lock(&self.state).waiting.range((number, 0)..=(number, u64::MAX)).next().is_some()
    }

    /// Returns the last refusal that a permit holder received, for waiters that never got the
    /// permit.
    pub fn refusal(&self) -> Option<Refusal> {
        lock(&self.state).refusal.clone()
    }

    /// Returns the backoff of the previous permit holder and the time of its next claim request;
    /// `None` if its claim was granted.
    pub fn pace(&self) -> Option<(Backoff, Instant)> {
        lock(&self.state).pace
    }

    pub fn note_pace(&self, pace: Option<(Backoff, Instant)>) {
        lock(&self.state).pace = pace;
    }

    pub fn note(&self, refusal: Option<Refusal>) {
        lock(&self.state).refusal = refusal;
    }
}

impl<N> Drop for LocalQueue<N> {
    fn drop(&mut self) {
        let mut queues = lock(&self.queues.0);
        // A new queue for the same keys may be in the map by now.
        if queues.get(&self.keys).is_some_and(|queue| queue.strong_count() == 0) {
            queues.remove(&self.keys);
        }
    }
}

/// A waiter in a queue. Dropping it leaves the queue.
pub(crate) struct Waiter<N = ()> {
    queue: Arc<LocalQueue<N>>,
    rank: Rank,
    turn: oneshot::Receiver<Permit<N>>,
}

impl<N> Waiter<N> {
    pub async fn turn(mut self) -> Permit<N> {
        loop {
            match (&mut self.turn).await {
                Ok(turn) => return turn,
                // A rank belongs to one waiter, so no other waiter replaces its sender. If one did,
                // this waiter would merely queue again.
                Err(_) => self.turn = self.queue.wait_at(self.rank),
            }
        }
    }
}

impl<N> Drop for Waiter<N> {
    fn drop(&mut self) {
        lock(&self.queue.state).waiting.remove(&self.rank);
    }
}

/// The right to claim the queue's keys. When it is dropped, it passes to the next waiter, with the
/// note.
pub(crate) struct Permit<N = ()> {
    queue: Option<Arc<LocalQueue<N>>>,
    /// The note from the previous permit holder, or for the next.
    pub note: Option<N>,
}

impl<N> Permit<N> {
    fn of(queue: &Arc<LocalQueue<N>>) -> Self {
        Self { queue: Some(queue.clone()), note: None }
    }
}

impl<N> Drop for Permit<N> {
    fn drop(&mut self) {
        let mut note = self.note.take();
        let mut turn = self.queue.take();
        while let Some(queue) = turn {
            let mut state = lock(&queue.state);
            let Some((_, next)) = state.waiting.pop_first() else {
                state.taken = false;
                return;
            };
            drop(state);
            let Err(mut unsent) = next.send(Permit { queue: Some(queue), note: note.take() }) else { return };
            // The waiter has just been dropped: the permit and the note go to the next.
            (turn, note) = (unsent.queue.take(), unsent.note.take());
        }
    }
}

/// The tasks of this process that wait for a wakeup for a key.
#[derive(Default)]
pub(crate) struct Wakeups(Mutex<HashMap<Key, Vec<Arc<Notify>>>>);

impl Wakeups {
    /// Subscribes to all of these keys until the subscription is dropped.
    pub fn listen(self: &Arc<Self>, keys: &Arc<[Key]>) -> Subscription {
        let heard = Arc::new(Notify::new());
        let mut wakeups = lock(&self.0);
        for key in keys.iter() {
            wakeups.entry(key.clone()).or_default().push(heard.clone());
        }
        Subscription { keys: keys.clone(), wakeups: self.clone(), heard }
    }

    /// Wakes the subscribers of this key, which may be free.
    pub fn notify(&self, key: &str) {
        for heard in lock(&self.0).get(key).into_iter().flatten() {
            heard.notify_one();
        }
    }

    /// Wakes all subscribers: any key may be free.
    pub fn notify_all(&self) {
        for heard in lock(&self.0).values().flatten() {
            heard.notify_one();
        }
    }
}

/// Receives a wakeup when one of its keys may be free.
pub(crate) struct Subscription {
    keys: Arc<[Key]>,
    wakeups: Arc<Wakeups>,
    heard: Arc<Notify>,
}

impl Subscription {
    /// Waits for the next wakeup, up to this limit. A wakeup that arrived before the call is not
    /// lost.
    pub async fn heard_before(&self, limit: Instant) {
        // The limit ends the wait like a wakeup.
        let _ = timeout_at(limit, self.heard.notified()).await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut wakeups = lock(&self.wakeups.0);
        for key in self.keys.iter() {
            if let Some(heard) = wakeups.get_mut(key) {
                heard.retain(|heard| !Arc::ptr_eq(heard, &self.heard));
                if heard.is_empty() {
                    wakeups.remove(key);
                }
            }
        }
    }
}
