//! One caller reads what all callers need.
//!
//! The future of a caller may not be polled, so no caller waits long for another: each further one
//! begins a moment after the last. However slow the server is, few of many callers read.

use std::{sync::Mutex, time::Duration};

use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::sync::lock;

/// How long the second reader waits for the first. The third waits twice as long for the second,
/// and so on.
const WAIT: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct OneReader {
    state: Mutex<State>,
    /// Notified when a reader ends.
    ended: Notify,
}

#[derive(Default)]
struct State {
    readers: u32,
    /// When the next reader begins, if none has ended by then.
    next: Option<Instant>,
}

impl State {
    /// Counts the caller as a reader, or returns until when it waits for the others.
    fn begin(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(next) = self.next.filter(|next| self.readers > 0 && now < *next) {
            return Err(next);
        }
        self.readers += 1;
        self.next = Some(now + WAIT * self.readers);
        Ok(())
    }
}

/// A reader, until it is dropped.
pub(crate) struct Reader<'a>(&'a OneReader);

impl OneReader {
    /// Waits until the caller is to read. Returns `None` once a reader `is_done`, or at the limit.
    pub async fn turn(&self, limit: Instant, is_done: impl Fn() -> bool) -> Option<Reader<'_>> {
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            // From here on, no end is missed.
            ended.as_mut().enable();
            let now = Instant::now();
            if is_done() || now >= limit {
                return None;
            }
            let begun = lock(&self.state).begin(now);
            let Err(next) = begun else { return Some(Reader(self)) };
            // The end of a reader, or this time, whichever comes first.
            let _ = timeout_at(next.min(limit), ended).await;
        }
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).readers -= 1;
        self.0.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_of_many_callers_read_however_slow_the_server_is() {
        let (mut state, start) = (State::default(), Instant::now());
        // A caller asks at each moment, and no reader ends.
        let begins = |at: &u32| state.begin(start + WAIT / 10 * *at).is_ok();
        let begun: Vec<u32> = (0..200).filter(begins).collect();
        assert_eq!(begun, [0, 10, 30, 60, 100, 150], "in tenths of the wait");
    }

    #[tokio::test]
    async fn a_reader_that_fails_is_followed_at_once_and_one_that_succeeds_by_none() {
        let (one, limit) = (OneReader::default(), Instant::now() + Duration::from_secs(60));
        let first = one.turn(limit, || false).await;
        lock(&one.state).next = Some(limit);
        let (second, ()) = tokio::join!(one.turn(limit, || false), async { drop(first) });
        assert!(second.is_some() && Instant::now() < limit);
        assert!(one.turn(limit, || true).await.is_none());
    }
}
