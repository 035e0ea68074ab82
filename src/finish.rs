//! Statements that are completed in the background after their caller's future is dropped.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, time::timeout};

/// How long a statement may run without a caller. Its connection is needed for other requests.
const GRACE: Duration = Duration::from_secs(1);

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The number of operations (statements, endings of leases) that run in the background without a
/// caller. A shutdown waits for them.
#[derive(Clone)]
pub(crate) struct Background(watch::Sender<usize>);

impl Default for Background {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Background {
    /// Counts an operation that has started, until the returned guard is dropped, possibly by a
    /// runtime that is shut down.
    pub fn begin(&self) -> Ongoing {
        self.0.send_modify(|count| *count += 1);
        Ongoing(self.0.clone())
    }

    /// Waits until no operation is running.
    pub async fn over(&self) {
        // The sender is owned by `self`, so that the wait cannot fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

pub(crate) struct Ongoing(watch::Sender<usize>);

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// A statement under way. If it is dropped, the statement continues in the background, and its
/// result is dropped there: a lease is abandoned, a ticket is removed from its queue, and the
/// connection is returned to its pool. After one second without a reply the connection is closed.
pub(crate) struct Finish<T: Send + 'static> {
    work: Option<Work<T>>,
    runtime: Handle,
    background: Background,
}

impl<T: Send + 'static> Finish<T> {
    pub fn new(runtime: Handle, background: &Background, work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime, background: background.clone() }
    }
}

impl<T: Send + 'static> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.work else { return Poll::Pending };
        let result = ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(result)
    }
}

impl<T: Send + 'static> Drop for Finish<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            let ongoing = self.background.begin();
            self.runtime.spawn(async move {
                // The drop of the result has already started the work that follows from it.
                drop(timeout(GRACE, work).await);
                drop(ongoing);
            });
        }
    }
}
