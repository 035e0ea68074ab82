//! The thread that reports what is over by the clock: the losses of leases.
//!
//! It does no I/O, waits for no statement and calls no code of the application but the wakers of
//! what waits, so that a loss is reported whatever holds up the other threads.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    task::{Poll, Waker},
    time::Duration,
};

use crate::{
    session::{fork::is_forked, time::Instant},
    sync::lock,
};

/// How long the thread waits at most: the machine may sleep, and a wait does not count that.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Something that is over at a certain time.
pub(crate) trait Deadline: Send + Sync + 'static {
    /// Returns when it is over. The time may move forward.
    fn deadline(&self) -> Instant;

    /// Reports that it is over. It must not block.
    fn pass(self: Arc<Self>);
}

static WATCHED: Mutex<Watched> = Mutex::new(Watched::new());
static CHANGED: Condvar = Condvar::new();

struct Watched {
    order: BTreeMap<(Instant, u64), Weak<dyn Deadline>>,
    /// Where those are in the order whose time has moved forward.
    moved: BTreeMap<u64, Instant>,
    last: u64,
    /// When the thread reads the clock again by itself. If unset, it waits for a target.
    looks_at: Option<Instant>,
}

impl Watched {
    const fn new() -> Self {
        Self { order: BTreeMap::new(), moved: BTreeMap::new(), last: 0, looks_at: None }
    }

    fn remove(&mut self, &Watch { number, at }: &Watch) -> Option<Weak<dyn Deadline>> {
        let at = self.moved.remove(&number).unwrap_or(at);
        self.order.remove(&(at, number))
    }

    /// Removes and returns a target whose time is up, or returns how long to wait for one.
    fn take_due(&mut self) -> Result<Option<Arc<dyn Deadline>>, Option<Duration>> {
        let Some(first) = self.order.first_entry() else { return Err(None) };
        let (now, (at, number)) = (Instant::now(), *first.key());
        if at > now {
            return Err(Some(at - now));
        }
        let weak = first.remove();
        let target = weak.upgrade();
        // The time may have moved forward.
        match target.as_ref().map(|target| target.deadline()) {
            Some(later) if later > now => {
                self.order.insert((later, number), weak);
                self.moved.insert(number, later);
            }
            _ => drop(self.moved.remove(&number)),
        }
        Ok(target)
    }
}

/// Watches a deadline until what is returned is dropped.
pub(crate) fn watch(target: &Arc<impl Deadline>) -> Watch {
    let at = target.deadline();
    let target = Arc::downgrade(target);
    let mut watched = lock(&WATCHED);
    watched.last += 1;
    let number = watched.last;
    watched.order.insert((at, number), target);
    // Waking a thread takes as long as a short request.
    if watched.looks_at.is_none_or(|looks_at| at < looks_at) {
        CHANGED.notify_one();
    }
    Watch { number, at }
}

/// A deadline that is watched.
pub(crate) struct Watch {
    number: u64,
    /// When it would have been over as it began.
    at: Instant,
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A process that was forked has a copy of the lock, which its parent may have held.
        if is_forked() {
            return;
        }
        let removed = lock(&WATCHED).remove(self);
        drop(removed); // not under the lock
    }
}

/// A pause of a caller whose executor may have no timers.
struct Pause {
    until: Instant,
    waker: Mutex<Option<Waker>>,
}

impl Deadline for Pause {
    fn deadline(&self) -> Instant {
        self.until
    }

    fn pass(self: Arc<Self>) {
        let waker = lock(&self.waker).take();
        waker.into_iter().for_each(Waker::wake);
    }
}

/// Waits until this moment, on any executor.
pub(crate) async fn sleep_until(at: Instant) {
    if Instant::now() >= at {
        return;
    }
    let pause = Arc::new(Pause { until: at, waker: Mutex::default() });
    let _watch = watch(&pause);
    poll_fn(|context| {
        // Before the clock is read, so that the end is not missed.
        *lock(&pause.waker) = Some(context.waker().clone());
        if Instant::now() >= at { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Reports what is over, for as long as the process lives. While something is watched, `look` is
/// called each time the clock is read.
pub(crate) fn run(mut look: impl FnMut()) {
    loop {
        let mut watched = lock(&WATCHED);
        let due = watched.take_due();
        watched.looks_at = due.as_ref().err().copied().flatten().map(|wait| Instant::now() + wait.min(LOOK_AGAIN));
        match due {
            Ok(target) => {
                // Dropping the last reference to a target ends its watch.
                drop(watched);
                // A waker of the application's may panic, also while the target is dropped.
                let passed = catch_unwind(AssertUnwindSafe(|| {
                    if let Some(target) = target.filter(|target| target.deadline() <= Instant::now()) {
                        target.pass();
                    }
                }));
                drop(passed);
            }
            Err(None) => drop(CHANGED.wait(watched).unwrap_or_else(PoisonError::into_inner)),
            Err(Some(wait)) => {
                drop(CHANGED.wait_timeout(watched, wait.min(LOOK_AGAIN)).unwrap_or_else(PoisonError::into_inner));
                look();
            }
        }
    }
}
