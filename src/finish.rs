//! What is begun is brought to its end, even if whoever waits for it goes away.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{runtime::Handle, time::timeout};

/// How long a statement may go on for nobody: its connection is wanted.
const GRACE: Duration = Duration::from_secs(1);

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A statement under way. Dropped, it goes on in the background, and its result is dropped there: a lease is abandoned,
/// a place in a queue is left, and the connection goes back to its pool. After a second without an answer it is closed.
pub(crate) struct Finish<T: Send + 'static> {
    work: Option<Work<T>>,
    runtime: Handle,
}

impl<T: Send + 'static> Finish<T> {
    pub fn new(runtime: Handle, work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime }
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
            self.runtime.spawn(async move { drop(timeout(GRACE, work).await) });
        }
    }
}
