//! Claims that may stand although no reply has told of them: those of one call, and those of a
//! lock that no task holds or ends.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::{key::Holder, session::time::Instant, sync::lock};

/// What is known of the claim requests of one call, also after the call's future was dropped.
#[derive(Clone, Default)]
pub(crate) struct Pending(Arc<Flags>);

#[derive(Default)]
struct Flags {
    in_flight: AtomicBool,
    unanswered: AtomicBool,
}

impl Pending {
    /// Records whether a claim request is in flight. If its call ends, it is finished, and put back
    /// if it is granted.
    pub fn set_in_flight(&self, in_flight: bool) {
        self.0.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// Records whether a claim request has no reply although its call waited for one.
    pub fn set_unanswered(&self, unanswered: bool) {
        self.0.unanswered.store(unanswered, Ordering::Relaxed);
    }

    /// Returns whether a claim request has no reply, so that no refusal may be reported.
    pub fn is_unanswered(&self) -> bool {
        self.0.unanswered.load(Ordering::Relaxed)
    }

    /// Returns whether a claim may stand at this moment.
    pub fn may_stand(&self) -> bool {
        self.is_unanswered() || self.0.in_flight.load(Ordering::Relaxed)
    }
}

/// The holders of a lock's claims that may stand although no task holds them or ends them, and when
/// their leases have ended, as far as is known.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<Claims>);

#[derive(Default)]
struct Claims {
    until: HashMap<Holder, Instant>,
    /// The number of claims at which those that have ended are removed.
    most: usize,
}

impl Claims {
    fn remove_ended(&mut self) {
        let now = Instant::now();
        self.until.retain(|_, until| *until > now);
        self.most = 2 * self.until.len().max(LEAST);
    }
}

/// The least number of claims at which those that have ended are removed.
const LEAST: usize = 64;

impl Ledger {
    pub fn add(&self, holder: Holder, until: Instant) {
        let mut claims = lock(&self.0);
        if claims.until.len() >= claims.most {
            claims.remove_ended();
        }
        let known = claims.until.entry(holder).or_insert(until);
        *known = until.max(*known);
    }

    /// Removes a claim of which a later reply has told.
    pub fn remove(&self, holder: Holder) {
        lock(&self.0).until.remove(&holder);
    }

    /// Returns whether a claim may stand.
    pub fn any(&self) -> bool {
        let mut claims = lock(&self.0);
        claims.remove_ended();
        !claims.until.is_empty()
    }

    /// Records that the claims of these holders are sent with this lease. Unless there is a reply,
    /// they are added.
    pub fn sending(self: &Arc<Self>, holders: Vec<Holder>, lease: Duration) -> Sent {
        Sent { ledger: self.clone(), holders, lease }
    }
}

/// Claims without a reply. If it is dropped, they are added to the ledger.
pub(crate) struct Sent {
    ledger: Arc<Ledger>,
    holders: Vec<Holder>,
    lease: Duration,
}

impl Sent {
    /// The statement has a reply, or was undone.
    pub fn settled(mut self) {
        self.holders.clear();
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let until = Instant::now() + self.lease;
        for holder in self.holders.drain(..) {
            self.ledger.add(holder, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_without_a_reply_may_stand_for_its_lease() {
        let (ledger, holder) = (Arc::<Ledger>::default(), Holder::unique());
        let send = |lease| ledger.sending(vec![holder], lease);
        send(Duration::from_secs(60)).settled();
        assert!(!ledger.any());
        drop(send(Duration::ZERO));
        assert!(!ledger.any(), "its lease has ended");
        drop(send(Duration::from_secs(60)));
        send(Duration::from_secs(60)).settled();
        assert!(ledger.any(), "the earlier request may have been granted");
        ledger.remove(holder);
        assert!(!ledger.any());
    }

    #[test]
    fn claims_that_have_ended_take_no_memory() {
        let ledger = Arc::<Ledger>::default();
        for _ in 0..10_000 {
            drop(ledger.sending(vec![Holder::unique()], Duration::ZERO));
        }
        assert!(lock(&ledger.0).until.len() <= 2 * LEAST);
    }
}
