//! A worker that is elected, and leads.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use harness::TestDatabase;
use rowlock::Election;
use tokio::time::sleep;

use crate::{
    record::{How, Kind, Outcome, Step, now},
    worker::{Orders, outcome, tell, tell_grant, tell_of},
};

/// Leads until the work is done, in one term or in several. Each term is an operation, from this
/// number on; returns the last. The leader does not check its lease: it works until its work is
/// dropped.
pub async fn lead<DB: TestDatabase>(
    election: &Election<DB>,
    orders: &Orders,
    number: usize,
    first: u64,
    work: Duration,
) -> u64 {
    let op = &AtomicU64::new(first);
    let led = election.lead(async |leadership| {
        let term = Term { number, name: election.name().as_str(), op, ended: AtomicBool::new(false) };
        let op = op.load(SeqCst);
        tell_grant(leadership.claim(), leadership.time_left(), leadership.taken_over_from(), number, op);
        let until = now() + orders.hold(Kind::Lease, number, op).unwrap_or(work);
        while now() < until {
            sleep(Duration::from_millis(25)).await;
            let (at, left) = (now(), leadership.time_left());
            if !left.is_zero() {
                tell_of(at, number, op, Step::Sure { left });
            }
        }
        orders.pause("release", number, op).await;
        tell(number, op, Step::End(How::Release));
        term.ended.store(true, SeqCst);
    });
    let led = led.await;
    let last = op.load(SeqCst);
    // `lead` does not tell whether the key was freed.
    tell(number, last, Step::Done(led.map_or_else(|error| outcome(&error), |()| Outcome::Unknown)));
    last
}

/// Tells, when it is dropped before its end, that the leader had to stop, and that it campaigns
/// again.
struct Term<'a> {
    number: usize,
    name: &'a str,
    op: &'a AtomicU64,
    ended: AtomicBool,
}

impl Drop for Term<'_> {
    fn drop(&mut self) {
        if self.ended.load(SeqCst) {
            return;
        }
        tell(self.number, self.op.load(SeqCst), Step::Lost);
        let next = self.op.fetch_add(1, SeqCst) + 1;
        tell(self.number, next, Step::Ask { key: self.name.to_owned(), kind: Kind::Lease });
    }
}
