//! The library's own threads. What a lease rests on runs there, and on no runtime of the
//! application, which may be blocked, paused, driven by turns or shut down.
//!
//! `rowlock` sends requests. `rowlock-events` emits the events of the background: a subscriber may
//! block, which holds up nothing else. `rowlock-renew` renews leases and ends claims: no
//! code of the application runs there but the hooks of its pool, which may block one of its two
//! workers. `rowlock-clock` (`clock.rs`) reports losses, and waits for no statement.

use std::{
    cell::Cell,
    convert::Infallible,
    future::poll_fn,
    io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::{Pin, pin},
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Sender},
    },
    task::{Context, Poll},
    thread,
};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
    task::{JoinError, JoinHandle},
};
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, instrument::WithSubscriber as _};

use crate::{
    causes::Setup,
    error::Error,
    metrics,
    session::{
        clock,
        fork::{Own, has_threads, is_forked},
        pulse::{Pulse, Seen},
    },
    sync::lock,
};

/// The target of events that tell the end of a failure which was reported before.
pub const RECOVERED: &str = "rowlock::recovered";

/// The most events that wait while a subscriber blocks. Further ones are dropped.
const EVENTS: usize = 10_000;

/// The threads of this process, once all are started. They never end.
static THREADS: OnceLock<Threads> = OnceLock::new();
/// Held while they are started.
static STARTING: Mutex<()> = Mutex::new(());
static WAITING_EVENTS: AtomicUsize = AtomicUsize::new(0);
static DROPPED_EVENTS: AtomicUsize = AtomicUsize::new(0);

struct Threads {
    requests: Handle,
    renewals: Runtime,
    events: Sender<Event>,
    /// The thread `rowlock` ends if another one could not be started.
    _lives: oneshot::Sender<Infallible>,
}

type Event = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The work that was polled last waits for the reply to its request.
    static AWAITS_REPLY: Cell<bool> = const { Cell::new(false) };
    /// The work that is being polled has had a reply.
    static HAS_REPLY: Cell<bool> = const { Cell::new(false) };
}

impl Threads {
    fn start() -> io::Result<Self> {
        let (events, waiting) = mpsc::channel::<Event>();
        let emit = move || waiting.into_iter().for_each(emit_one);
        thread::Builder::new().name("rowlock-events".to_owned()).spawn(emit)?;
        let requests = Builder::new_current_thread().enable_all().build()?;
        let handle = requests.handle().clone();
        let (lives, ended) = oneshot::channel::<Infallible>();
        let run = move || {
            Own::Requests.begins();
            drop(requests.block_on(ended));
        };
        thread::Builder::new().name("rowlock".to_owned()).spawn(run)?;
        let mut renewals = Builder::new_multi_thread();
        renewals.worker_threads(2).thread_name("rowlock-renew").on_thread_start(|| Own::Renewals.begins());
        // It panics if it can start no worker.
        let renewals = catch_unwind(AssertUnwindSafe(|| renewals.enable_all().build()));
        let renewals = renewals.unwrap_or_else(|_| Err(io::Error::other("no worker could be started")))?;
        // A worker that a hook of a pool blocks may be the one that waits for replies. The task of
        // a pulse wakes the other one.
        let mut pulses = [Pulse::of("rowlock-renew", renewals.handle().clone()), Pulse::of("rowlock", handle.clone())];
        let look = move || pulses.iter_mut().for_each(look_at);
        if let Err(error) = thread::Builder::new().name("rowlock-clock".to_owned()).spawn(move || clock::run(look)) {
            // Its drop would block the caller's runtime.
            renewals.shutdown_background();
            return Err(error);
        }
        Ok(Self { requests: handle, renewals, events, _lives: lives })
    }
}

/// Returns the threads, which the first call starts.
fn threads() -> Result<&'static Threads, Error> {
    if is_forked() {
        return Err(Setup::Forked.into());
    }
    if let Some(threads) = THREADS.get() {
        return Ok(threads);
    }
    // Before the lock, of which a process that is forked from now on has a copy that nothing frees.
    has_threads();
    let _starting = lock(&STARTING);
    if let Some(threads) = THREADS.get() {
        return Ok(threads);
    }
    let threads = Threads::start().map_err(|source| Error::Setup(Setup::NoThreads { source }))?;
    Ok(THREADS.get_or_init(|| threads))
}

/// Starts the threads, unless they are.
///
/// # Errors
/// As [`run`].
pub(crate) fn start() -> Result<(), Error> {
    threads().map(drop)
}

/// The work of a call, boxed: the caller's future stays small.
type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Does the work, and returns its output. While it waits for the reply to its first request, it
/// stays with its caller: a thread in between takes as long as a short request. Whatever else it
/// waits for, it waits for on the thread `rowlock`, whether its caller goes on or not. If the
/// future is dropped, the work is dropped where it is, and counts for the tracker until it is. A
/// panic of the work is the caller's.
///
/// # Errors
/// [`Error::Setup`].
pub(crate) async fn run<T: Send + 'static>(tracker: TaskTracker, mut work: Work<T>) -> Result<T, Error> {
    let threads = threads()?;
    let mut has_reply = false;
    let is_over = poll_fn(|context| {
        let outer = HAS_REPLY.replace(has_reply);
        let (polled, awaits_reply) = poll_for_reply(work.as_mut(), context);
        has_reply = HAS_REPLY.replace(outer || HAS_REPLY.get());
        match polled {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if Own::current() == Own::Requests => Poll::Pending,
            Poll::Pending if awaits_reply && !has_reply => Poll::Pending,
            Poll::Pending => Poll::Ready(None),
        }
    });
    if let Some(output) = is_over.await {
        return Ok(output);
    }
    let mut on_thread = DropOnThread { task: None, tracker };
    let task = threads.requests.spawn(work.in_current_span().with_current_subscriber());
    let ended = on_thread.task.insert(task).await;
    on_thread.task = None;
    output_of(ended)
}

/// Returns the output of a task. A panic of the task is the caller's.
fn output_of<T>(ended: Result<T, JoinError>) -> Result<T, Error> {
    ended.map_err(|ended| match ended.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        // The runtime is never shut down, and only the caller aborts the task.
        Err(_) => Setup::Forked.into(),
    })
}

/// Polls the work, and returns whether it waits for the reply to a request.
pub(crate) fn poll_for_reply<F: Future + ?Sized>(
    work: Pin<&mut F>,
    context: &mut Context<'_>,
) -> (Poll<F::Output>, bool) {
    // Other work that this thread has polled may wait for one.
    AWAITS_REPLY.set(false);
    (work.poll(context), AWAITS_REPLY.get())
}

/// Waits for the reply to a request, which the thread `rowlock` has.
pub(crate) async fn reply<T>(reply: impl Future<Output = T>) -> T {
    let mut reply = pin!(reply);
    poll_fn(|context| {
        let polled = reply.as_mut().poll(context);
        AWAITS_REPLY.set(polled.is_pending());
        HAS_REPLY.set(HAS_REPLY.get() || polled.is_ready());
        polled
    })
    .await
}

/// A task of a caller. If it is dropped before its end, the task is dropped on its own thread.
struct DropOnThread<T: Send + 'static> {
    task: Option<JoinHandle<T>>,
    tracker: TaskTracker,
}

impl<T: Send + 'static> Drop for DropOnThread<T> {
    fn drop(&mut self) {
        let Some(task) = self.task.take() else { return };
        if is_forked() {
            return; // another thread may have had the runtime's locks at the fork
        }
        task.abort();
        // An output that is not taken is dropped as the work is.
        spawn(self.tracker.track_future(async move { drop(task.await) }));
    }
}

/// Does the work on the thread `rowlock`, or on those for renewals if it is for one, to its end:
/// also if the future is dropped.
///
/// # Errors
/// As [`run`].
pub(crate) async fn run_to_end<T: Send + 'static>(work: Work<T>) -> Result<T, Error> {
    let threads = threads()?;
    let runtime = if Own::current() == Own::Renewals { threads.renewals.handle() } else { &threads.requests };
    output_of(runtime.spawn(work.in_current_span().with_current_subscriber()).await)
}

/// Acts with the runtime of the thread `rowlock`, for code of the drivers that spawns.
pub(crate) fn within<T>(act: impl FnOnce() -> T) -> T {
    let _runtime = threads().ok().map(|threads| threads.requests.enter());
    act()
}

/// Does work in the background, on the thread `rowlock`.
pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    spawn_on(Own::Requests, Box::pin(work));
}

/// Does work in the background, on the threads `rowlock-renew`.
pub(crate) fn spawn_renewal(work: impl Future<Output = ()> + Send + 'static) {
    spawn_on(Own::Renewals, Box::pin(work));
}

/// All work has one type of task. A type for each would take a sixth of the time in which a small
/// program that uses the library is built.
fn spawn_on(own: Own, work: Work<()>) {
    let Ok(threads) = threads() else { return };
    match own {
        Own::Renewals => threads.renewals.spawn(work),
        _ => threads.requests.spawn(work),
    };
}

/// Reports that a thread stands still, and that it goes on.
fn look_at(pulse: &mut Pulse) {
    let (thread, seen) = (pulse.thread, pulse.look());
    match seen {
        Seen::Moves => {}
        Seen::StandsStill => emit_always(move || {
            metrics::stands_still(thread);
            tracing::warn!(thread, "a thread of the library is blocked by a hook of the pool or a subscriber");
        }),
        Seen::GoesOn(after) => emit_always(move || tracing::info!(thread, ?after, "the thread is no longer blocked")),
    }
}

/// Emits an event of the background, in the order of the calls. While a subscriber or a recorder
/// blocks, at most [`EVENTS`] wait.
pub(crate) fn emit(event: impl FnOnce() + Send + 'static) {
    if WAITING_EVENTS.load(Ordering::Relaxed) < EVENTS {
        emit_always(event);
    } else {
        DROPPED_EVENTS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Records a metric in the background, if there are any.
pub(crate) fn record(event: impl FnOnce() + Send + 'static) {
    if cfg!(feature = "metrics") {
        emit(event);
    }
}

/// Emits an event that is never dropped: a loss.
pub(crate) fn emit_always(event: impl FnOnce() + Send + 'static) {
    if let Ok(threads) = threads() {
        WAITING_EVENTS.fetch_add(1, Ordering::Relaxed);
        // The thread never ends.
        let _ = threads.events.send(Box::new(event));
    }
}

fn emit_one(event: Event) {
    WAITING_EVENTS.fetch_sub(1, Ordering::Relaxed);
    let emitted = catch_unwind(AssertUnwindSafe(|| {
        event();
        let dropped = DROPPED_EVENTS.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            metrics::events_dropped(dropped);
            tracing::warn!(dropped, "events were dropped, because a subscriber or a recorder blocked");
        }
    }));
    drop(emitted); // a panic of the subscriber is its own
}

/// A subscriber that was current where something began, for its events in the background. It is not
/// kept alive.
#[cfg(feature = "schedule")]
#[derive(Clone)]
pub(crate) struct Subscriber(tracing::dispatcher::WeakDispatch);

#[cfg(feature = "schedule")]
impl Subscriber {
    pub fn current() -> Self {
        Self(tracing::dispatcher::get_default(tracing::Dispatch::downgrade))
    }

    /// Emits an event in the background.
    pub fn emit(&self, event: impl FnOnce() + Send + 'static) {
        emit(self.of(event));
    }

    /// Emits the event of a loss in the background.
    pub fn emit_loss(&self, event: impl FnOnce() + Send + 'static) {
        emit_always(self.of(event));
    }

    fn of(&self, event: impl FnOnce() + Send + 'static) -> impl FnOnce() + Send + 'static {
        let subscriber = self.0.clone();
        move || match subscriber.upgrade() {
            Some(subscriber) => tracing::dispatcher::with_default(&subscriber, event),
            None => event(),
        }
    }
}
