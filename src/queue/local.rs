//! Waiting within one process: which task may claim.
//!
//! Of all the tasks that want the same keys, the one whose turn it is sends claim requests, and the
//! others wait for the turn. A task that is granted the keys keeps the turn until the lease is
//! over, so that no task claims in vain while this process holds them.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::{Notify, oneshot};

use crate::{key::Key, pacing::Backoff, queue::places::Places, rules::Refusal, session::time::Instant, sync::lock};

/// The queues of one object, by keys and by whether any one of them is enough. `N` is the note that
/// the owner of the turn leaves to the next.
pub(crate) struct LocalQueues<N = ()>(Mutex<Queues<N>>);

type Queues<N> = HashMap<(Arc<[Key]>, bool), Weak<LocalQueue<N>>>;

impl<N> Default for LocalQueues<N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<N> LocalQueues<N> {
    /// Returns the queue of the tasks that want all of these keys, or any one of them.
    pub fn queue(self: &Arc<Self>, keys: &Arc<[Key]>, any: bool) -> Arc<LocalQueue<N>> {
        let mut queues = lock(&self.0);
        let wanted = (keys.clone(), any);
        if let Some(queue) = queues.get(&wanted).and_then(Weak::upgrade) {
            return queue;
        }
        let queue = Arc::new(LocalQueue {
            wanted: wanted.clone(),
            queues: self.clone(),
            state: Mutex::new(State {
                taken: false,
                entries: 0,
                waiting: BTreeMap::new(),
                refusal: None,
                poll_backoff: None,
            }),
            places: Mutex::new(Places::new(keys.len())),
            place_left: Notify::new(),
            entry: tokio::sync::Mutex::default(),
        });
        queues.insert(wanted, Arc::downgrade(&queue));
        queue
    }
}

/// The tasks of this process that want the same keys, all of them or any one.
pub(crate) struct LocalQueue<N = ()> {
    wanted: (Arc<[Key]>, bool),
    queues: Arc<LocalQueues<N>>,
    state: Mutex<State<N>>,
    /// The keys by index, where any one of them is enough.
    places: Mutex<Places>,
    /// Notified when a task gives up a place.
    place_left: Notify,
    /// Held while a ticket is drawn from the database, so that the local order is the order of the
    /// tickets.
    pub entry: tokio::sync::Mutex<()>,
}

/// The order of waiters: by ticket number, then by order of entry, which is unique.
type Rank = (i64, u64);

struct State<N> {
    taken: bool,
    entries: u64,
    waiting: BTreeMap<Rank, oneshot::Sender<Turn<N>>>,
    refusal: Option<Refusal>,
    poll_backoff: Option<(Backoff, Instant)>,
}

impl<N> LocalQueue<N> {
    /// Waits for the turn, behind the waiters that entered without a ticket.
    pub async fn acquire(self: &Arc<Self>) -> Turn<N> {
        match self.try_take() {
            Some(turn) => turn,
            None => self.enter(0).acquire().await,
        }
    }

    /// Returns the turn, if it is free. While it is free, no task waits.
    pub fn try_take(self: &Arc<Self>) -> Option<Turn<N>> {
        let mut state = lock(&self.state);
        if state.taken {
            return None;
        }
        state.taken = true;
        Some(Turn::of(self))
    }

    /// Joins the queue, in front of waiters with higher numbers and behind all others. A free
    /// turn arrives at once.
    pub fn enter(self: &Arc<Self>, number: i64) -> Waiter<N> {
        let (sender, turn) = oneshot::channel();
        let mut state = lock(&self.state);
        state.entries += 1;
        let rank = (number, state.entries);
        state.waiting.insert(rank, sender);
        let was_free = !std::mem::replace(&mut state.taken, true);
        drop(state);
        drop(was_free.then(|| Turn::of(self)));
        Waiter { queue: self.clone(), rank, turn }
    }

    /// Returns whether a task with this number waits for the turn.
    pub fn has_waiting(&self, number: i64) -> bool {
        lock(&self.state).waiting.range((number, 0)..=(number, u64::MAX)).next().is_some()
    }

    /// Takes a key that no task of this process uses and that is believed to be free.
    pub fn take_place(self: &Arc<Self>) -> Option<Place<N>> {
        let index = lock(&self.places).take(fastrand::usize(..))?;
        Some(Place { queue: self.clone(), index, refused: false })
    }

    /// Takes the key at this index, which was seen to be free.
    pub fn take_place_at(self: &Arc<Self>, index: usize) -> Place<N> {
        lock(&self.places).take_at(index);
        Place { queue: self.clone(), index, refused: false }
    }

    /// Returns whether tasks of this process hold or claim every key.
    pub fn are_all_places_in_use(&self) -> bool {
        lock(&self.places).are_all_in_use()
    }

    /// Waits until a task gives up a place. One task waits at a time, and a place that was given up
    /// since the last wait ends this one.
    pub async fn place_left(&self) {
        self.place_left.notified().await;
    }

    /// Returns the last refusal that an owner of the turn received, for waiters that never got the
    /// turn.
    pub fn refusal(&self) -> Option<Refusal> {
        lock(&self.state).refusal.clone()
    }

    /// Returns the backoff of the previous owner of the turn and the time of its next claim
    /// request; `None` if its claim was granted.
    pub fn poll_backoff(&self) -> Option<(Backoff, Instant)> {
        lock(&self.state).poll_backoff
    }

    pub fn set_poll_backoff(&self, poll_backoff: Option<(Backoff, Instant)>) {
        lock(&self.state).poll_backoff = poll_backoff;
    }

    pub fn set_refusal(&self, refusal: Option<Refusal>) {
        lock(&self.state).refusal = refusal;
    }
}

impl<N> Drop for LocalQueue<N> {
    fn drop(&mut self) {
        let mut queues = lock(&self.queues.0);
        // A new queue for the same keys may be in the map by now.
        if queues.get(&self.wanted).is_some_and(|queue| queue.strong_count() == 0) {
            queues.remove(&self.wanted);
        }
    }
}

/// A waiter in a queue. Dropping it leaves the queue.
pub(crate) struct Waiter<N = ()> {
    queue: Arc<LocalQueue<N>>,
    rank: Rank,
    turn: oneshot::Receiver<Turn<N>>,
}

impl<N> Waiter<N> {
    pub async fn acquire(mut self) -> Turn<N> {
        match (&mut self.turn).await {
            Ok(turn) => turn,
            // It cannot be: the sender stays in the queue for as long as this waiter.
            Err(_) => std::future::pending().await,
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
pub(crate) struct Turn<N = ()> {
    queue: Option<Arc<LocalQueue<N>>>,
    /// The note from the previous owner of the turn, or for the next.
    pub note: Option<N>,
}

impl<N> Turn<N> {
    fn of(queue: &Arc<LocalQueue<N>>) -> Self {
        Self { queue: Some(queue.clone()), note: None }
    }
}

impl<N> Drop for Turn<N> {
    fn drop(&mut self) {
        let mut note = self.note.take();
        let mut unsent = self.queue.take();
        while let Some(queue) = unsent {
            let mut state = lock(&queue.state);
            let Some((_, next)) = state.waiting.pop_first() else {
                state.taken = false;
                return;
            };
            drop(state);
            let Err(mut turn) = next.send(Turn { queue: Some(queue), note: note.take() }) else { return };
            // The waiter has just been dropped: the turn and the note go to the next.
            (unsent, note) = (turn.queue.take(), turn.note.take());
        }
    }
}

/// One of the keys of which any is enough, while a task of this process claims or holds it.
pub(crate) struct Place<N = ()> {
    queue: Arc<LocalQueue<N>>,
    index: usize,
    refused: bool,
}

impl<N> Place<N> {
    /// Returns the index of the key.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Gives up the key, which another process holds.
    pub fn refused(mut self) {
        self.refused = true;
    }
}

impl<N> Drop for Place<N> {
    fn drop(&mut self) {
        lock(&self.queue.places).leave(self.index, self.refused);
        self.queue.place_left.notify_one();
    }
}
