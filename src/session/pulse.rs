//! Notices that a thread of the library takes no turn, as when a hook of a pool or a subscriber
//! blocks it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::runtime::Handle;

use crate::session::time::Instant;

/// After how long without a turn a thread stands still.
const STILL: Duration = Duration::from_secs(1);

/// What a look at a thread shows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Moves,
    /// It stands still since the look before.
    StandsStill,
    /// It took no turn for this time, and goes on.
    GoesOn(Duration),
}

/// The turns of the threads of one runtime.
pub(crate) struct Pulse {
    pub thread: &'static str,
    runtime: Handle,
    asked: Instant,
    answered: Arc<AtomicBool>,
    looked: Instant,
    stands_still: bool,
}

impl Pulse {
    pub fn of(thread: &'static str, runtime: Handle) -> Self {
        let (answered, now) = (Arc::new(AtomicBool::new(true)), Instant::now());
        Self { thread, runtime, asked: now, answered, looked: now, stands_still: false }
    }

    /// Looks whether a task has had its turn since it was spawned, and spawns the next one.
    pub fn look(&mut self) -> Seen {
        let (now, before) = (Instant::now(), self.asked);
        // The whole process stood still, or the machine slept.
        if now - std::mem::replace(&mut self.looked, now) >= STILL {
            self.asked = now;
        }
        if self.answered.swap(false, Ordering::Relaxed) {
            let (answered, stood_still) = (self.answered.clone(), std::mem::take(&mut self.stands_still));
            self.asked = now;
            self.runtime.spawn(async move { answered.store(true, Ordering::Relaxed) });
            return if stood_still { Seen::GoesOn(now - before) } else { Seen::Moves };
        }
        if !self.stands_still && now - self.asked >= STILL {
            self.stands_still = true;
            return Seen::StandsStill;
        }
        Seen::Moves
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread::sleep};

    use super::*;

    #[test]
    fn a_thread_that_is_blocked_stands_still_until_it_goes_on() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let mut pulse = Pulse::of("one", runtime.handle().clone());
        let mut look_until = |wanted: fn(&Seen) -> bool| {
            let began = Instant::now();
            loop {
                let seen = pulse.look();
                assert!(seen == Seen::Moves || wanted(&seen), "{seen:?}");
                if wanted(&seen) {
                    return began.elapsed();
                }
                assert!(began.elapsed() < STILL * 30);
                sleep(STILL / 20);
            }
        };
        look_until(|seen| *seen == Seen::Moves);
        let (end, ended) = mpsc::channel::<()>();
        runtime.spawn(async move { ended.recv().is_err() });
        assert!(look_until(|seen| *seen == Seen::StandsStill) >= STILL);
        drop(end);
        look_until(|seen| matches!(seen, Seen::GoesOn(time) if *time >= STILL));
    }
}
