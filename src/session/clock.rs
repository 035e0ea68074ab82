//! The thread that reports what is over by the clock: the losses of leases.
//!
//! It does no I/O, waits for no statement and calls no code of the application but the wakers of
//! what waits, so that a loss is reported whatever holds up the other threads.

use std::{
    collections::{BTreeSet, HashMap},
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

static WATCHED: Mutex<Option<Watched>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

#[derive(Default)]
struct Watched {
    order: BTreeSet<(Instant, u64)>,
    targets: HashMap<u64, (Instant, Weak<dyn Deadline>)>,
    last: u64,
    /// When the thread reads the clock again by itself. If unset, it waits for a target.
    looks_at: Option<Instant>,
}

impl Watched {
    fn insert(&mut self, number: u64, at: Instant, target: Weak<dyn Deadline>) {
        self.order.insert((at, number));
        self.targets.insert(number, (at, target));
    }

    fn remove(&mut self, number: u64) -> Option<Weak<dyn Deadline>> {
        let (at, target) = self.targets.remove(&number)?;
        self.order.remove(&(at, number));
        Some(target)
    }

    /// Removes and returns a target whose time is up, or returns how long to wait for one.
    fn take_due(&mut self) -> Result<Option<Arc<dyn Deadline>>, Option<Duration>> {
        let Some((at, number)) = self.order.first().copied() else { return Err(None) };
        let now = Instant::now();
        if at > now {
            return Err(Some(at - now));
        }
        let target = self.targets.get(&number).and_then(|(_, target)| target.upgrade());
        // The time may have moved forward.
        let later = target.as_ref().map(|target| target.deadline()).filter(|later| *later > now);
        let weak = self.remove(number);
        if let (Some(later), Some(weak)) = (later, weak) {
            self.insert(number, later, weak);
        }
        Ok(target)
    }
}

/// Watches a deadline until what is returned is dropped.
pub(crate) fn watch(target: &Arc<impl Deadline>) -> Watch {
    if is_forked() {
        return Watch(0);
    }
    let target = Arc::downgrade(target);
    let at = target.upgrade().map_or_else(Instant::now, |target| target.deadline());
    let mut watched = lock(&WATCHED);
    let watched = watched.get_or_insert_default();
    watched.last += 1;
    let number = watched.last;
    watched.insert(number, at, target);
    // Waking a thread takes as long as a short request.
    if watched.looks_at.is_none_or(|looks_at| at < looks_at) {
        CHANGED.notify_one();
    }
    Watch(number)
}

/// A deadline that is watched.
pub(crate) struct Watch(u64);

impl Drop for Watch {
    fn drop(&mut self) {
        if is_forked() {
            return;
        }
        let removed = lock(&WATCHED).as_mut().and_then(|watched| watched.remove(self.0));
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
        let all = watched.get_or_insert_default();
        let due = all.take_due();
        all.looks_at = due.as_ref().err().copied().flatten().map(|wait| Instant::now() + wait.min(LOOK_AGAIN));
        match due {
            Ok(target) => {
                // Dropping the last reference to a target ends its watch.
                drop(watched);
                if let Some(target) = target.filter(|target| target.deadline() <= Instant::now()) {
                    // A waker of the application's may panic.
                    let passed = catch_unwind(AssertUnwindSafe(|| target.pass()));
                    drop(passed);
                }
            }
            Err(None) => drop(CHANGED.wait(watched).unwrap_or_else(PoisonError::into_inner)),
            Err(Some(wait)) => {
                drop(CHANGED.wait_timeout(watched, wait.min(LOOK_AGAIN)).unwrap_or_else(PoisonError::into_inner));
                look();
            }
        }
    }
}
