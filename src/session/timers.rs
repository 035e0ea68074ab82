//! Pauses and limits, on any executor. The timers run on the library's own threads: a runtime of
//! the application may be paused, blocked or driven by turns.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use crate::session::{clock, fork::is_own, threads, time::Instant};

/// How long a timer waits at most before the clock is read again. A timer stands still while the
/// machine sleeps.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A limit was reached.
#[derive(Debug)]
pub(crate) struct Elapsed;

/// Waits for this long, on any executor.
pub(crate) async fn sleep(duration: Duration) {
    sleep_until(Instant::now() + duration).await;
}

/// Waits until this moment, on any executor.
pub(crate) async fn sleep_until(at: Instant) {
    if is_own() {
        wait_until(at).await;
    } else if threads::start().is_ok() {
        clock::sleep_until(at).await;
    }
    // Without the threads there is nothing to wait for: each request fails.
}

async fn wait_until(at: Instant) {
    loop {
        let left = at - Instant::now();
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LOOK_AGAIN)).await;
    }
}

/// Waits for the future, up to this limit.
pub(crate) async fn timeout_at<F: Future>(limit: Instant, future: F) -> Result<F::Output, Elapsed> {
    tokio::select! {
        biased;
        output = future => Ok(output),
        () = sleep_until(limit) => Err(Elapsed),
    }
}

/// Waits for the future, up to this limit. The requests that it sends have no later limit: while it
/// waits for the reply to one, it needs no timer of its own.
pub(crate) async fn timeout_of_requests<F: Future>(limit: Instant, future: F) -> Result<F::Output, Elapsed> {
    let (mut future, mut over) = (pin!(future), pin!(sleep_until(limit)));
    poll_fn(|context| match threads::poll_for_reply(future.as_mut(), context) {
        (Poll::Ready(output), _) => Poll::Ready(Ok(output)),
        (Poll::Pending, true) => Poll::Pending,
        (Poll::Pending, false) => over.as_mut().poll(context).map(|()| Err(Elapsed)),
    })
    .await
}

/// Waits for the future for at most this long.
pub(crate) async fn timeout<F: Future>(limit: Duration, future: F) -> Result<F::Output, Elapsed> {
    timeout_at(Instant::now() + limit, future).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_without_a_runtime_of_the_caller() {
        let waited = std::thread::spawn(|| {
            let (began, mut sleeping) = (Instant::now(), Box::pin(sleep(Duration::from_millis(20))));
            let parked = std::thread::current();
            let waker = std::task::Waker::from(std::sync::Arc::new(Unpark(parked)));
            let mut context = std::task::Context::from_waker(&waker);
            while sleeping.as_mut().poll(&mut context).is_pending() {
                std::thread::park();
            }
            began.elapsed()
        });
        assert!(waited.join().unwrap() >= Duration::from_millis(20));
    }

    struct Unpark(std::thread::Thread);

    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
}
