//! Waiting in order, across processes: places in the table `t_resource_lock_queue`.
//!
//! A place is a number, drawn when its waiter arrives, and kept alive by the process. Whoever has the lowest number that
//! is alive may claim. A place that is not kept alive lapses after [`ALIVE_SECONDS`]; the others look past it.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use crate::{
    agenda::BATCH,
    fault::Fault,
    finish::{Background, Finish, Ongoing},
    held::lock,
    key::Key,
    retry::Backoff,
    settings::Settings,
    standing::{At, standing},
    store::{
        Database, Reply,
        borrowed::{Borrowed, Failure},
        connections::Connections,
        wait::ALIVE_SECONDS,
    },
};

/// How often the places are kept alive.
const SIGN_OF_LIFE: Duration = Duration::from_secs(ALIVE_SECONDS / 3);
/// Between two attempts at a statement that met contention, at most.
const PAUSE: Duration = Duration::from_millis(50);
/// How soon places are given up after an attempt that failed.
const SOON: Duration = Duration::from_millis(250);
/// How long a statement of the background may take.
const LIMIT: Duration = Duration::from_secs(ALIVE_SECONDS / 4);

/// The places of one lock object.
pub(crate) struct Line<DB: Database> {
    pool: Connections<DB>,
    /// Where the signs of life have their connection.
    renewals: Connections<DB>,
    state: Mutex<State>,
    work: Notify,
    background: Background,
}

struct State {
    running: bool,
    places: HashSet<i64>,
    leaving: Vec<Leaving>,
    /// When to give up what is to be given up.
    leave_at: Instant,
    /// When to give the next sign of life.
    stay_at: Instant,
}

/// A place that is to be given up, for as long as it would be alive.
struct Leaving {
    number: i64,
    since: Instant,
    _ongoing: Ongoing,
}

/// What is due, or when something will be.
enum Due {
    Work { leaving: Vec<Leaving>, places: Vec<i64> },
    Later(Instant),
}

/// A place; dropped, it is given up in the background.
pub(crate) struct Ticket<DB: Database> {
    line: Arc<Line<DB>>,
    pub number: i64,
    left: bool,
}

impl<DB: Database> Ticket<DB> {
    /// Gives the place up after it has served.
    pub async fn leave(mut self, limit: Instant) {
        let number = self.number;
        self.left = self.line.send(&self.line.pool, limit, async |conn| DB::leave(conn, &[number]).await).await.is_ok();
        if self.left {
            lock(&self.line.state).places.remove(&number);
        }
    }
}

impl<DB: Database> Drop for Ticket<DB> {
    fn drop(&mut self) {
        if !self.left {
            self.line.give_up(self.number);
        }
    }
}

impl<DB: Database> Line<DB> {
    pub fn new(settings: &Settings<DB>, background: Background) -> Arc<Self> {
        let now = Instant::now();
        let state = State { running: false, places: HashSet::new(), leaving: Vec::new(), leave_at: now, stay_at: now };
        let (pool, renewals) = (settings.pool.clone(), settings.renewals.clone());
        Arc::new(Self { pool, renewals, state: Mutex::new(state), work: Notify::new(), background })
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
                    pauses.pause(PAUSE).await;
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
        Ok(self.take(conn.settle(reply)?))
    }

    /// Keeps a place alive that was drawn.
    fn take(self: &Arc<Self>, number: i64) -> Ticket<DB> {
        let mut state = lock(&self.state);
        if state.places.is_empty() {
            state.stay_at = Instant::now() + SIGN_OF_LIFE;
        }
        state.places.insert(number);
        self.run(state);
        Ticket { line: self.clone(), number, left: false }
    }

    /// Where somebody stands in the queues of these keys; `i64::MAX` is for one who has no place.
    pub async fn stand(&self, keys: &[Key], number: i64, limit: Instant) -> Result<At, Failure> {
        let mut pauses = Backoff::up_to(PAUSE);
        loop {
            match self.send(&self.pool, limit, async |conn| DB::front(conn, keys, number).await).await {
                Ok(front) => {
                    let standing = standing(keys, number, &front);
                    if !standing.lapsed.is_empty() && matches!(standing.at, At::First | At::Unseen) {
                        self.send(&self.pool, limit, async |conn| DB::clear(conn, &standing.lapsed).await).await?;
                    }
                    if standing.at != At::Unseen {
                        return Ok(standing.at);
                    }
                }
                Err(failure) if failure.fault().is_transient() && Instant::now() < limit => {
                    pauses.pause(PAUSE).await;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Gives a place up in the background.
    fn give_up(self: &Arc<Self>, number: i64) {
        let mut state = lock(&self.state);
        let now = Instant::now();
        state.places.remove(&number);
        state.leaving.push(Leaving { number, since: now, _ongoing: self.background.begin() });
        state.leave_at = now;
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
        while let Some(due) = self.due() {
            match due {
                Due::Later(at) => tokio::select! {
                    () = self.work.notified() => {}
                    () = sleep_until(at) => {}
                },
                Due::Work { leaving, places } => {
                    if !places.is_empty() {
                        self.stay(&places).await;
                    }
                    if !leaving.is_empty() {
                        self.clear(leaving).await;
                    }
                }
            }
        }
        on_stop.armed = false;
    }

    /// What is to be done; nothing any more, if there are no places.
    fn due(&self) -> Option<Due> {
        let mut state = lock(&self.state);
        let now = Instant::now();
        if state.leaving.is_empty() && state.places.is_empty() {
            state.running = false;
            return None;
        }
        let leaves = !state.leaving.is_empty() && state.leave_at <= now;
        let stay = !state.places.is_empty() && state.stay_at <= now;
        if !(leaves || stay) {
            let leave_at = (!state.leaving.is_empty()).then_some(state.leave_at);
            let stay_at = (!state.places.is_empty()).then_some(state.stay_at);
            return leave_at.into_iter().chain(stay_at).min().map(Due::Later);
        }
        // From now on they are only put earlier.
        if stay {
            state.stay_at = now + SIGN_OF_LIFE;
        }
        let count = if leaves { state.leaving.len().min(BATCH) } else { 0 };
        let leaving = state.leaving.drain(..count).collect();
        let places = if stay { state.places.iter().copied().collect() } else { Vec::new() };
        Some(Due::Work { leaving, places })
    }

    async fn clear(&self, leaving: Vec<Leaving>) {
        let numbers: Vec<i64> = leaving.iter().map(|leaving| leaving.number).collect();
        let limit = Instant::now() + LIMIT;
        let left = self.send(&self.renewals, limit, async |conn| DB::leave(conn, &numbers).await).await;
        if let Err(failure) = left {
            tracing::debug!(?failure, "places in queues were not given up, trying again until they lapse");
            let mut state = lock(&self.state);
            state.leave_at = Instant::now() + SOON;
            let alive = Duration::from_secs(ALIVE_SECONDS);
            state.leaving.extend(leaving.into_iter().filter(|leaving| leaving.since.elapsed() < alive));
        }
    }

    /// A sign of life for these places.
    async fn stay(&self, places: &[i64]) {
        for numbers in places.chunks(BATCH) {
            let limit = Instant::now() + LIMIT;
            let stayed = self.send(&self.renewals, limit, async |conn| DB::stay(conn, numbers).await).await;
            if let Err(failure) = stayed {
                tracing::warn!(places = numbers.len(), ?failure, "places in queues were not kept alive, trying again");
                let soon = Instant::now() + SIGN_OF_LIFE / 4;
                let mut state = lock(&self.state);
                state.stay_at = state.stay_at.min(soon);
                return;
            }
        }
    }

    async fn send<T>(
        &self,
        pool: &Connections<DB>,
        limit: Instant,
        statement: impl AsyncFnOnce(&mut DB::Connection) -> Reply<T>,
    ) -> Result<T, Failure> {
        let mut conn = Borrowed::checkout(pool, limit).await?;
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
