//! Background work of a lock object: one task is active, on one runtime, and the other tasks stand
//! by.
//!
//! Each runtime that uses the lock object has a task. A runtime may stop being driven without being
//! shut down (a current-thread runtime outside of `block_on`). Its task then does not poll at the
//! time that it announced, and a standby task takes over.

use std::{collections::HashSet, pin::Pin, sync::Arc, time::Duration};

use tokio::{
    runtime::{Handle, Id},
    sync::watch,
    time::{Instant, sleep_until},
};

type Statement = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The statements of a task, at most one of each kind.
#[derive(Default)]
pub(crate) struct UnderWay {
    pub renewal: Option<Statement>,
    pub ending: Option<Statement>,
}

/// Work that is due at certain times.
pub(crate) trait Work: Send + Sync + 'static {
    /// [`Duty::join`].
    fn join(&self, runtime: Id) -> bool;

    /// Returns the channel that wakes the tasks, which then poll the work again.
    fn woken(&self) -> &watch::Sender<()>;

    /// Does the work that falls to the task of this runtime, and returns when to poll again, or
    /// `None` if the task is to end.
    fn look(self: &Arc<Self>, runtime: Id, under_way: &mut UnderWay) -> Option<Instant>;

    /// Records that the runtime was shut down, and its task with it.
    fn leave(&self, runtime: Id);
}

/// Starts the task of this runtime, if it has none. The caller holds no lock.
pub(crate) fn start<W: Work>(work: &Arc<W>) {
    let Ok(runtime) = Handle::try_current() else { return };
    if work.join(runtime.id()) {
        // The guard is moved into the task, which may be dropped before its first poll.
        runtime.spawn(run(OnStop { work: work.clone(), runtime: runtime.id(), armed: true }));
    }
}

async fn run<W: Work>(mut task: OnStop<W>) {
    let (mut under_way, mut woken) = (UnderWay::default(), task.work.woken().subscribe());
    while let Some(wakes_at) = task.work.look(task.runtime, &mut under_way) {
        let UnderWay { renewal, ending } = &mut under_way;
        tokio::select! {
            // A task that was replaced while its runtime was not driven polls the work before it
            // sends anything else.
            biased;
            _ = woken.changed() => {}
            () = sleep_until(wakes_at) => {}
            () = finish(renewal) => *renewal = None,
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

impl Role {
    /// Returns whether a task whose role was `before` has to do something else now.
    pub fn is_other_than(self, before: Self) -> bool {
        match before {
            Self::Work | Self::TakeOver => self != Self::Work,
            Self::StandBy(_) => !matches!(self, Self::StandBy(_)),
        }
    }
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
    /// Creates a duty for work that can be delayed by `patience`.
    pub fn new(patience: Duration) -> Self {
        Self { tasks: HashSet::new(), active: None, wakes_at: Instant::now(), late: patience.min(LATE) }
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
        assert!(duty.expect(now + LATE), "there is no task that looks");
        duty.role(one, now);
        duty.wakes_at(now + 9 * LATE);
        assert!(duty.expect(now + 8 * LATE) && !duty.expect(now + 9 * LATE));
    }
}
