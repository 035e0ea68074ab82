//! Statements that are completed in the background after their caller's future is dropped.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{runtime::Handle, time::timeout};
use tokio_util::task::TaskTracker;

/// How long a statement may run without a caller. Its connection is needed for other requests.
const GRACE: Duration = Duration::from_secs(1);

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A tracker of the operations that run in the background without a caller. Shutdown waits for
/// them.
///
/// It is closed from the start, so that `wait` returns whenever none is left.
pub(crate) fn tracker() -> TaskTracker {
    let tracker = TaskTracker::new();
    tracker.close();
    tracker
}

/// A statement in flight. If it is dropped, the statement continues in the background, and its
/// result is dropped there: a lease is abandoned, a ticket is removed from its queue, and the
/// connection is returned to its pool. After one second without a reply the connection is closed.
pub(crate) struct DetachOnDrop<T: Send + 'static> {
    work: Option<Work<T>>,
    runtime: Handle,
    tracker: TaskTracker,
}

impl<T: Send + 'static> DetachOnDrop<T> {
    pub fn new(runtime: Handle, tracker: &TaskTracker, work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime, tracker: tracker.clone() }
    }
}

impl<T: Send + 'static> Future for DetachOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.work else { return Poll::Pending };
        let result = ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(result)
    }
}

impl<T: Send + 'static> Drop for DetachOnDrop<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            // The drop of the result starts the work that follows from it before the task ends.
            self.tracker.spawn_on(async { drop(timeout(GRACE, work).await) }, &self.runtime);
        }
    }
}
