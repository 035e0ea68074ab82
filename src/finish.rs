//! What is begun is brought to its end, even if whoever waits for it goes away.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, time::timeout};

/// How long a statement may go on for nobody: its connection is wanted.
const GRACE: Duration = Duration::from_secs(1);

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What goes on in the background for nobody, and is waited for before the program ends.
#[derive(Clone)]
pub(crate) struct Background(watch::Sender<usize>);

impl Default for Background {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Background {
    /// Something begins, and goes on until this is dropped, be it with its runtime.
    pub fn begin(&self) -> Ongoing {
        self.0.send_modify(|count| *count += 1);
        Ongoing(self.0.clone())
    }

    /// Waits until nothing goes on.
    pub async fn over(&self) {
        // The sender lives in `self`, so that waiting does not fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

pub(crate) struct Ongoing(watch::Sender<usize>);

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// A statement under way. Dropped, it goes on in the background, and its result is dropped there: a lease is abandoned,
/// a place in a queue is left, and the connection goes back to its pool. After a second without an answer it is closed.
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
                // What its result leaves to be done has begun before this is over.
                drop(timeout(GRACE, work).await);
                drop(ongoing);
            });
        }
    }
}
