//! Waiting in order, across processes: places in the table `t_resource_lock_queue`.
//!
//! A place is a number, drawn when its waiter arrives, and kept alive by the process. Whoever has the lowest number that
//! is alive may claim. A place that is not kept alive lapses after [`ALIVE_SECONDS`]; the others look past it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use sqlx::Pool;
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use crate::{
    fault::Fault,
    finish::{Background, Finish, Ongoing},
    held::lock,
    keeper::BATCH,
    key::Key,
    retry::Backoff,
    store::{
        Database, Reply,
        borrowed::{Borrowed, Failure},
        wait::{ALIVE_SECONDS, FRONT, Place},
    },
};

/// How often the places are kept alive.
const SIGN_OF_LIFE: Duration = Duration::from_secs(ALIVE_SECONDS / 3);
/// How soon a row is marked that somebody was at.
const SOON: Duration = Duration::from_millis(50);
/// How long a statement of the background may take.
const LIMIT: Duration = Duration::from_secs(ALIVE_SECONDS / 4);

/// The places of one lock object.
pub(crate) struct Line<DB: Database> {
    pool: Pool<DB>,
    state: Mutex<State>,
    work: Notify,
    background: Background,
}

struct State {
    running: bool,
    places: HashMap<i64, Arc<[Key]>>,
    leaving: Vec<(i64, Ongoing)>,
    due: Instant,
}

/// A place; dropped, it is given up in the background.
pub(crate) struct Ticket<DB: Database> {
    line: Arc<Line<DB>>,
    pub number: i64,
}

impl<DB: Database> Drop for Ticket<DB> {
    fn drop(&mut self) {
        self.line.give_up([self.number]);
    }
}

impl<DB: Database> Line<DB> {
    pub fn new(pool: Pool<DB>, background: Background) -> Arc<Self> {
        let state = State { running: false, places: HashMap::new(), leaving: Vec::new(), due: Instant::now() };
        Arc::new(Self { pool, state: Mutex::new(state), work: Notify::new(), background })
    }

    /// Takes a place behind all that are there.
    pub async fn join(
        self: &Arc<Self>,
        runtime: &Handle,
        keys: &Arc<[Key]>,
        limit: Instant,
    ) -> Result<Ticket<DB>, Failure> {
        let mut pauses = Backoff::up_to(Duration::from_millis(40));
        loop {
            let conn = Borrowed::checkout(&self.pool, limit).await?;
            let joining = self.clone().draw(conn, keys.clone(), limit);
            match Finish::new(runtime.clone(), &self.background, joining).await {
                // A place that was drawn unheard lapses.
                Err(failure)
                    if matches!(failure.fault(), Fault::Contention | Fault::Outage) && Instant::now() < limit =>
                {
                    pauses.pause(SOON).await;
                }
                other => return other,
            }
        }
    }

    async fn draw(
        self: Arc<Self>,
        mut conn: Borrowed<DB>,
        keys: Arc<[Key]>,
        limit: Instant,
    ) -> Result<Ticket<DB>, Failure> {
        let reply = timeout_at(limit, DB::join(conn.get(), &keys)).await;
        let (mut conn, number) = conn.proceed(reply)?;
        let ticket = self.take(number, keys.clone());
        // From here on nobody comes in without a look at the queue.
        let reply = timeout_at(limit, DB::announce(conn.get(), &keys, true)).await;
        if !conn.settle(reply).is_ok_and(|marked| marked.all) {
            lock(&self.state).due = Instant::now() + SOON;
            self.work.notify_one();
        }
        Ok(ticket)
    }

    /// Keeps a place alive that was drawn.
    fn take(self: &Arc<Self>, number: i64, keys: Arc<[Key]>) -> Ticket<DB> {
        let mut state = lock(&self.state);
        if state.places.is_empty() {
            state.due = Instant::now() + SIGN_OF_LIFE;
        }
        state.places.insert(number, keys);
        self.run(state);
        Ticket { line: self.clone(), number }
    }

    /// Gives a place up that has served, and those that have lapsed before it.
    pub async fn leave(&self, ticket: &Ticket<DB>, lapsed: Vec<i64>, limit: Instant) {
        let mut numbers = lapsed;
        numbers.push(ticket.number);
        lock(&self.state).places.remove(&ticket.number);
        let left = self.send(limit, async |conn| DB::leave(conn, &numbers).await).await;
        if let Err(failure) = left {
            tracing::debug!(?failure, "a place in a queue was not given up; it lapses");
        }
    }

    /// Where somebody stands in the queues of these keys; `i64::MAX` is for one who has no place.
    pub async fn stand(&self, keys: &[Key], number: i64, limit: Instant) -> Result<Standing, Failure> {
        let mut pauses = Backoff::up_to(SOON);
        loop {
            match self.send(limit, async |conn| DB::front(conn, keys, number).await).await {
                Ok(front) => {
                    let standing = standing(keys, number, &front);
                    if standing.at != At::Unseen {
                        return Ok(standing);
                    }
                    self.send(limit, async |conn| DB::leave(conn, &standing.lapsed).await).await?;
                }
                Err(failure) if failure.fault().is_transient() && Instant::now() < limit => pauses.pause(SOON).await,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Gives places up in the background.
    pub fn give_up(self: &Arc<Self>, numbers: impl IntoIterator<Item = i64>) {
        let mut state = lock(&self.state);
        for number in numbers {
            state.places.remove(&number);
            state.leaving.push((number, self.background.begin()));
        }
        self.work.notify_one();
        self.run(state);
    }

    /// Goes on giving places up, if the runtime that did so has ended.
    pub fn go_on(self: &Arc<Self>) {
        self.run(lock(&self.state));
    }

    /// Starts the task, where there is a runtime and none runs yet.
    fn run(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let idle = state.leaving.is_empty() && state.places.is_empty();
        if state.running || idle {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        state.running = true;
        drop(state);
        runtime.spawn(self.clone().tend(OnStop { line: self.clone(), armed: true }));
    }

    /// Gives signs of life, and gives places up, as long as there are any.
    async fn tend(self: Arc<Self>, mut on_stop: OnStop<DB>) {
        loop {
            let (leaving, places, due) = {
                let mut state = lock(&self.state);
                if state.leaving.is_empty() && state.places.is_empty() {
                    state.running = false;
                    on_stop.armed = false;
                    return;
                }
                let places = if state.due <= Instant::now() { state.places.clone() } else { HashMap::new() };
                let count = state.leaving.len().min(BATCH);
                (state.leaving.drain(..count).collect::<Vec<_>>(), places, state.due)
            };
            if leaving.is_empty() && places.is_empty() {
                tokio::select! {
                    () = self.work.notified() => {}
                    () = sleep_until(due) => {}
                }
                continue;
            }
            let limit = Instant::now() + LIMIT;
            if !leaving.is_empty() {
                self.clear(leaving, limit).await;
            }
            if !places.is_empty() {
                let next = self.stay(&places, limit).await;
                lock(&self.state).due = Instant::now() + next;
            }
        }
    }

    async fn clear(&self, leaving: Vec<(i64, Ongoing)>, limit: Instant) {
        let (numbers, _ongoing): (Vec<i64>, Vec<Ongoing>) = leaving.into_iter().unzip();
        if let Err(failure) = self.send(limit, async |conn| DB::leave(conn, &numbers).await).await {
            tracing::debug!(?failure, "places in queues were not given up; they lapse");
        }
    }

    /// A sign of life for these places; when the next is due.
    async fn stay(&self, places: &HashMap<i64, Arc<[Key]>>, limit: Instant) -> Duration {
        let numbers: Vec<i64> = places.keys().copied().collect();
        let mut keys: Vec<Key> = places.values().flat_map(|keys| keys.iter().cloned()).collect();
        keys.sort_unstable();
        keys.dedup();
        for numbers in numbers.chunks(BATCH) {
            if let Err(failure) = self.send(limit, async |conn| DB::stay(conn, numbers).await).await {
                tracing::warn!(places = numbers.len(), ?failure, "places in queues were not kept alive, trying again");
                return SIGN_OF_LIFE / 4;
            }
        }
        for keys in keys.chunks(BATCH) {
            if !self.send(limit, async |conn| DB::announce(conn, keys, true).await).await.is_ok_and(|marked| marked.all)
            {
                return SOON;
            }
        }
        SIGN_OF_LIFE
    }

    async fn send<T>(
        &self,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = Borrowed::checkout(&self.pool, limit).await?;
        let reply = timeout_at(limit, statement(conn.get())).await;
        conn.settle(reply)
    }
}

/// The runtime may go away under the task.
struct OnStop<DB: Database> {
    line: Arc<Line<DB>>,
    armed: bool,
}

impl<DB: Database> Drop for OnStop<DB> {
    fn drop(&mut self) {
        if self.armed {
            lock(&self.line.state).running = false;
        }
    }
}

/// Where somebody stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub at: At,
    /// Places before it whose waiters have gone.
    pub lapsed: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// Nobody is before it.
    First,
    /// Somebody is, whose place is kept for so long unless there is another sign of life.
    Behind { key: Key, number: i64, left: Duration },
    /// Its own place has lapsed, and somebody has cleared it away.
    Gone,
    /// Nobody knows: the front of a queue has lapsed altogether, and hides the rest.
    Unseen,
}

/// Reads the fronts of the queues of these keys; a number of `i64::MAX` stands for somebody without a place.
fn standing(keys: &[Key], number: i64, front: &[Place]) -> Standing {
    let mut at = At::First;
    let mut lapsed = Vec::new();
    for key in keys {
        let places: Vec<&Place> = front.iter().filter(|place| place.key == key.as_str()).collect();
        lapsed.extend(
            places.iter().filter(|place| place.number < number && place.left_micros <= 0).map(|place| place.number),
        );
        let first = places.iter().find(|place| place.number == number || place.left_micros > 0);
        let full = u64::try_from(places.len()).is_ok_and(|count| count >= FRONT);
        let here = match first {
            Some(place) if place.number == number => At::First,
            Some(place) => {
                let left = Duration::from_micros(place.left_micros.unsigned_abs());
                At::Behind { key: key.clone(), number: place.number, left }
            }
            None if full => At::Unseen,
            None if number == i64::MAX => At::First,
            None => At::Gone,
        };
        if at == At::First || matches!(here, At::Gone | At::Unseen) {
            at = here;
        }
    }
    Standing { at, lapsed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: &str, number: i64, left_micros: i64) -> Place {
        Place { key: key.into(), number, left_micros }
    }

    fn at(keys: &[&str], number: i64, front: &[Place]) -> Standing {
        let keys: Vec<Key> = keys.iter().map(|key| Key::new(key).unwrap()).collect();
        standing(&keys, number, front)
    }

    #[test]
    fn the_lowest_number_that_is_alive_is_first() {
        let front = [place("a", 1, -5), place("a", 2, 7), place("a", 3, 7)];
        assert_eq!(at(&["a"], 2, &front[..2]), Standing { at: At::First, lapsed: vec![1] });
        let key = Key::new("a").unwrap();
        let behind = At::Behind { key, number: 2, left: Duration::from_micros(7) };
        assert_eq!(at(&["a"], 3, &front), Standing { at: behind.clone(), lapsed: vec![1] });
        assert_eq!(at(&["a"], i64::MAX, &front).at, behind);
        assert_eq!(at(&["a"], i64::MAX, &front[..1]).at, At::First);
        assert_eq!(at(&["a"], 1, &front[..1]).at, At::First, "its own sign of life may be late");
    }

    #[test]
    fn a_place_that_is_not_there_is_gone() {
        assert_eq!(at(&["a"], 3, &[place("a", 1, -5)]).at, At::Gone);
        assert_eq!(at(&["a", "b"], 3, &[place("a", 3, 5)]).at, At::Gone);
    }

    #[test]
    fn one_queue_that_somebody_else_leads_is_enough() {
        let front = [place("a", 3, 5), place("b", 2, 5), place("b", 3, 5)];
        assert!(matches!(at(&["a", "b"], 3, &front).at, At::Behind { number: 2, .. }));
        assert_eq!(at(&["a"], 3, &front).at, At::First);
    }

    #[test]
    fn a_front_of_places_that_have_lapsed_hides_the_rest() {
        let front: Vec<Place> = (0..16).map(|number| place("a", number, -1)).collect();
        let Standing { at, lapsed } = at(&["a"], 99, &front);
        assert_eq!((at, lapsed.len()), (At::Unseen, 16));
    }
}
