//! Background work of a lock: one task is active, on one runtime, and the other tasks stand by.
//!
//! Each runtime that uses the lock has a task. A runtime may stop being driven without being
//! shut down (a current-thread runtime outside of `block_on`). Its task then does not poll at the
//! time that it announced, and a standby task takes over.

use std::{collections::HashSet, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    runtime::{Handle, Id, RuntimeFlavor},
    sync::watch,
    time::{Instant, sleep_until},
};
use tracing::Instrument as _;

use crate::error::Error;

type Statement = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What a task has in flight, at most one of each kind.
#[derive(Default)]
pub(crate) struct InFlight {
    /// A renewal, a heartbeat, or the connection that listens.
    pub keeping: Option<Statement>,
    pub ending: Option<Statement>,
}

impl InFlight {
    pub fn is_empty(&self) -> bool {
        self.keeping.is_none() && self.ending.is_none()
    }
}

/// Returns the runtime of the caller.
///
/// # Errors
/// [`Error::NoRuntime`] outside a runtime.
pub(crate) fn current_runtime() -> Result<Handle, Error> {
    Handle::try_current().map_err(|_| Error::NoRuntime)
}

/// Emits an event about a loss that was reported. A subscriber may block its thread, and the task
/// that the report has woken last may be bound to that thread, so the event has a task of its own.
pub(crate) fn emit_apart(event: impl FnOnce() + Send + 'static) {
    let event = EmitOnDrop(Some(event));
    match Handle::try_current() {
        Ok(runtime) if runtime.runtime_flavor() != RuntimeFlavor::CurrentThread => {
            runtime.spawn(async { drop(event) }.in_current_span());
        }
        _ => drop(event),
    }
}

/// An event that is emitted when it is dropped: also with its task, by a runtime that is shut down.
struct EmitOnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for EmitOnDrop<F> {
    fn drop(&mut self) {
        if let Some(emit) = self.0.take() {
            emit();
        }
    }
}

/// Work that is due at certain times.
pub(crate) trait Work: Send + Sync + 'static {
    /// Calls `act` with the duty, which decides which task is active.
    fn with_duty<T>(&self, act: impl FnOnce(&mut Duty) -> T) -> T;

    /// Returns the channel that wakes the tasks, which then poll the work again.
    fn woken(&self) -> &watch::Sender<()>;

    /// Does the work that falls to the task of this runtime, and returns when to poll again, or
    /// `None` if the task is to end. Another task may have taken over since `role` was read.
    fn poll(self: &Arc<Self>, runtime: Id, role: Role, in_flight: &mut InFlight) -> Option<Instant>;

    /// Records that the runtime was shut down, and its task with it.
    fn leave(&self, runtime: Id);
}

/// Starts the task of this runtime, if it has none. The caller holds no lock. Returns the runtime
/// if its task was started.
pub(crate) fn start<W: Work>(work: &Arc<W>) -> Option<Handle> {
    let runtime = Handle::try_current().ok()?;
    start_on(work, &runtime).then_some(runtime)
}

/// Starts the task of `runtime`, if it has none. Returns whether it was started.
pub(crate) fn start_on<W: Work>(work: &Arc<W>, runtime: &Handle) -> bool {
    let joined = work.with_duty(|duty| duty.join(runtime.id()));
    if joined {
        spawn_on(work, runtime);
    }
    joined
}

/// Spawns the task of a runtime that has just joined. The caller holds no lock.
pub(crate) fn spawn_on<W: Work>(work: &Arc<W>, runtime: &Handle) {
    // The guard is moved into the task, which may be dropped before its first poll, and at once if
    // the runtime is shut down.
    runtime.spawn(run(OnStop { work: work.clone(), runtime: runtime.id(), armed: true }));
}

async fn run<W: Work>(mut task: OnStop<W>) {
    let (mut in_flight, mut woken) = (InFlight::default(), task.work.woken().subscribe());
    loop {
        let role = task.work.with_duty(|duty| duty.role(task.runtime, Instant::now()));
        if role != Role::Work {
            // Statements from before a takeover are dropped. The task that took over sends them
            // again.
            in_flight = InFlight::default();
        }
        let Some(wakes_at) = task.work.poll(task.runtime, role, &mut in_flight) else { break };
        let InFlight { keeping, ending } = &mut in_flight;
        tokio::select! {
            // A task that was replaced while its runtime was not driven polls the work before it
            // sends anything else.
            biased;
            _ = woken.changed() => {}
            () = sleep_until(wakes_at) => {}
            () = finish(keeping) => *keeping = None,
            () = finish(ending) => *ending = None,
        }
    }
    task.armed = false;
}

async fn finish(statement: &mut Option<Statement>) {
    match statement {
        Some(statement) => statement.await,
        None => std::future::pending().await,
    }
}

/// A guard for a runtime that is shut down while the task runs.
struct OnStop<W: Work> {
    work: Arc<W>,
    runtime: Id,
    armed: bool,
}

impl<W: Work> Drop for OnStop<W> {
    fn drop(&mut self) {
        if self.armed {
            self.work.leave(self.runtime);
        }
    }
}

/// The maximum delay of the active task before another task takes over.
const LATE: Duration = Duration::from_secs(1);

/// The role of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The task is active.
    Work,
    /// The task is active from now on. The statements of the preceding task may never be completed.
    TakeOver,
    /// The task stands by, and polls again at this time.
    StandBy(Instant),
}

pub(crate) struct Duty {
    /// The runtimes that have a task.
    tasks: HashSet<Id>,
    /// The runtime of the active task.
    active: Option<Id>,
    /// When the active task polls next, at its own time or because it was woken.
    wakes_at: Instant,
    late: Duration,
}

impl Duty {
    /// Creates a duty for work that can be delayed by `max_delay`.
    pub fn new(max_delay: Duration) -> Self {
        Self { tasks: HashSet::new(), active: None, wakes_at: Instant::now(), late: max_delay.min(LATE) }
    }

    /// Returns whether a task has to be started on this runtime.
    pub fn join(&mut self, runtime: Id) -> bool {
        self.tasks.insert(runtime)
    }

    /// Returns the current role of the task of this runtime.
    pub fn role(&mut self, runtime: Id, now: Instant) -> Role {
        let overdue = self.wakes_at + self.late;
        match self.active {
            Some(active) if active == runtime => Role::Work,
            Some(_) if now < overdue => Role::StandBy(overdue),
            _ => {
                self.active = Some(runtime);
                Role::TakeOver
            }
        }
    }

    /// Returns whether the task of this runtime had the role `before` and was replaced since.
    pub fn was_replaced(&self, runtime: Id, before: Role) -> bool {
        !matches!(before, Role::StandBy(_)) && !self.is_active(runtime)
    }

    /// Records when the active task polls next.
    pub fn wakes_at(&mut self, at: Instant) {
        self.wakes_at = at;
    }

    /// Records that work is due at this time, and returns whether the tasks have to be woken for
    /// it.
    pub fn expect(&mut self, at: Instant) -> bool {
        let sooner = self.active.is_none() || at < self.wakes_at;
        if sooner {
            self.wakes_at = at.max(Instant::now());
        }
        sooner
    }

    /// Returns whether the task of this runtime is the active one.
    pub fn is_active(&self, runtime: Id) -> bool {
        self.active == Some(runtime)
    }

    /// Records that the task of this runtime ends, and returns whether there is another one.
    pub fn leave(&mut self, runtime: Id) -> bool {
        self.tasks.remove(&runtime);
        if self.active == Some(runtime) {
            self.active = None;
        }
        !self.tasks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> Id {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // The runtime is leaked, so that the next one has another id.
        std::mem::ManuallyDrop::new(runtime).handle().id()
    }

    #[test]
    fn a_task_that_is_overdue_is_replaced_and_stands_by() {
        let (one, two, late) = (runtime(), runtime(), Duration::from_millis(100));
        let mut duty = Duty::new(late);
        assert!(duty.join(one) && duty.join(two) && !duty.join(one));
        let now = Instant::now();
        assert_eq!(duty.role(one, now), Role::TakeOver);
        duty.wakes_at(now + late);
        assert_eq!((duty.role(one, now), duty.role(two, now)), (Role::Work, Role::StandBy(now + 2 * late)));
        assert_eq!(duty.role(two, now + 2 * late), Role::TakeOver);
        duty.wakes_at(now + 3 * late);
        assert_eq!(duty.role(one, now + 2 * late), Role::StandBy(now + 4 * late));
        assert!(duty.leave(two), "there is another one");
        assert_eq!(duty.role(one, now + 2 * late), Role::TakeOver);
        assert!(!duty.leave(one));
    }

    #[test]
    fn work_that_is_due_sooner_wakes_the_tasks() {
        let (one, now) = (runtime(), Instant::now());
        let mut duty = Duty::new(Duration::from_secs(1));
        assert!(duty.expect(now + LATE), "there is no task that polls");
        duty.role(one, now);
        duty.wakes_at(now + 9 * LATE);
        assert!(duty.expect(now + 8 * LATE) && !duty.expect(now + 9 * LATE));
    }
}
