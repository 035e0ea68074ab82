//! Waiting within one process: whose turn it is to ask, and word that asking makes sense.
//!
//! Of all the tasks that want the same keys one asks the database, and the others wait for its turn. Whoever is granted
//! the keys keeps the turn until the lease is over, so that nobody asks in vain while this process holds them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, Weak},
};

use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, timeout_at},
};

use crate::{key::Key, retry::Backoff, rules::Refusal, sync::lock};

/// The queues of one object, by what is wanted, and with what one leaves to the next.
pub(crate) struct LocalQueues<N = ()>(Mutex<Queues<N>>);

type Queues<N> = HashMap<Arc<[Key]>, Weak<LocalQueue<N>>>;

impl<N> Default for LocalQueues<N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<N> LocalQueues<N> {
    /// The queue of those who want all of these keys.
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

/// Those of this process who want the same keys.
pub(crate) struct LocalQueue<N = ()> {
    keys: Arc<[Key]>,
    queues: Arc<LocalQueues<N>>,
    state: Mutex<State<N>>,
    /// Held while a place in the database's queue is drawn, so that the order here is the order there.
    pub entry: tokio::sync::Mutex<()>,
}

/// Who comes before whom: by the number in the database's queue, then by the order of entry, in which no two are alike.
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
    /// The turn, behind all the others.
    pub async fn turn(self: &Arc<Self>) -> Permit<N> {
        match self.try_take() {
            Some(turn) => turn,
            None => self.enter(0).turn().await,
        }
    }

    /// The turn, if it is free and nobody waits.
    pub fn try_take(self: &Arc<Self>) -> Option<Permit<N>> {
        let mut state = lock(&self.state);
        if state.taken {
            return None;
        }
        state.taken = true;
        Some(Permit::of(self))
    }

    /// A place in the queue, in front of those with higher numbers and behind all the others.
    pub fn enter(self: &Arc<Self>, number: i64) -> Waiter<N> {
        let mut state = lock(&self.state);
        state.entries += 1;
        let rank = (number, state.entries);
        drop(state);
        Waiter { queue: self.clone(), rank, turn: self.wait_at(rank) }
    }

    /// What a rank's turn comes through; a turn that is free comes at once.
    fn wait_at(self: &Arc<Self>, rank: Rank) -> oneshot::Receiver<Permit<N>> {
        let (sender, turn) = oneshot::channel();
        let mut state = lock(&self.state);
        state.waiting.insert(rank, sender);
        let was_free = !std::mem::replace(&mut state.taken, true);
        drop(state);
        drop(was_free.then(|| Permit::of(self)));
        turn
    }

    /// Whether one with this number waits for its turn.
    pub fn has_waiting(&self, number: i64) -> bool {
        lock(&self.state).waiting.range((number, 0)..=(number, u64::MAX)).next().is_some()
    }

    /// What the one who asked was told last, for those who did not get to ask.
    pub fn refusal(&self) -> Option<Refusal> {
        lock(&self.state).refusal.clone()
    }

    /// At what pace the one who had the turn before asked, and when it would have asked again; `None` if it got what it wanted.
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
        // A new one may stand in its place by now.
        if queues.get(&self.keys).is_some_and(|queue| queue.strong_count() == 0) {
            queues.remove(&self.keys);
        }
    }
}

/// A place in a queue; dropped, it is given up.
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
                // A rank is one entry's alone, so that no other drops its sender. It would cost nothing but this: it waits anew.
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

/// The right to ask for the queue's keys; dropped, it goes to the next who still waits, with whatever is left to them.
pub(crate) struct Permit<N = ()> {
    queue: Option<Arc<LocalQueue<N>>>,
    /// Of the turn before, or for the next.
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
            // Whoever has just gone gives it back.
            (turn, note) = (unsent.queue.take(), unsent.note.take());
        }
    }
}

/// Those who wait for a word about a key, in this process.
#[derive(Default)]
pub(crate) struct Wakeups(Mutex<HashMap<Key, Vec<Arc<Notify>>>>);

impl Wakeups {
    /// Hears of all of these keys until it is dropped.
    pub fn listen(self: &Arc<Self>, keys: &Arc<[Key]>) -> Subscription {
        let heard = Arc::new(Notify::new());
        let mut wakeups = lock(&self.0);
        for key in keys.iter() {
            wakeups.entry(key.clone()).or_default().push(heard.clone());
        }
        Subscription { keys: keys.clone(), wakeups: self.clone(), heard }
    }

    /// The key may be free.
    pub fn notify(&self, key: &str) {
        for heard in lock(&self.0).get(key).into_iter().flatten() {
            heard.notify_one();
        }
    }

    /// Any key may be free.
    pub fn notify_all(&self) {
        for heard in lock(&self.0).values().flatten() {
            heard.notify_one();
        }
    }
}

/// Hears when one of its keys may be free.
pub(crate) struct Subscription {
    keys: Arc<[Key]>,
    wakeups: Arc<Wakeups>,
    heard: Arc<Notify>,
}

impl Subscription {
    /// Waits for the next word until this time; one that came before is not lost.
    pub async fn heard_before(&self, limit: Instant) {
        // Nothing was heard: it is time all the same.
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
