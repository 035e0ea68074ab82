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

use crate::{
    key::{Holder, Key},
    session::time::Instant,
    sync::lock,
};

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

/// A lock's claims that may stand although no task holds them or ends them.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<HashMap<Claimed, Entry>>);

/// A holder may claim one key after the other, of those of which one is enough.
type Claimed = (Key, Holder);

/// A claim that may stand.
struct Entry {
    /// When the server carries out no request of it any more.
    void_at: Instant,
    /// When its lease has ended, as far as is known.
    until: Instant,
}

fn remove_ended(claims: &mut HashMap<Claimed, Entry>) {
    let now = Instant::now();
    claims.retain(|_, entry| entry.until > now);
}

impl Ledger {
    pub fn add(&self, claimed: Claimed, void_at: Instant, until: Instant) {
        let mut claims = lock(&self.0);
        if claims.len() == claims.capacity() {
            remove_ended(&mut claims);
            // As many are added at least before the next time.
            let left = claims.len();
            claims.reserve(left);
        }
        let entry = claims.entry(claimed).or_insert(Entry { void_at, until });
        (entry.void_at, entry.until) = (entry.void_at.max(void_at), entry.until.max(until));
    }

    /// Removes a claim of which the reply to a request has told that was sent at this time, unless
    /// the server may still carry out an earlier request.
    pub fn remove(&self, claimed: &Claimed, sent: Instant) {
        let mut claims = lock(&self.0);
        if claims.get(claimed).is_some_and(|entry| entry.void_at <= sent) {
            claims.remove(claimed);
        }
    }

    /// Returns whether a claim may stand.
    pub fn any(&self) -> bool {
        let mut claims = lock(&self.0);
        remove_ended(&mut claims);
        !claims.is_empty()
    }

    /// Records that these claims are sent with this lease, and are void after this limit. Unless
    /// there is a reply, they are added.
    pub fn sending(self: &Arc<Self>, claims: Vec<Claimed>, limit: Instant, lease: Duration) -> Sent {
        Sent { ledger: self.clone(), claims, limit, lease }
    }
}

/// Claims without a reply. If it is dropped, they are added to the ledger.
pub(crate) struct Sent {
    ledger: Arc<Ledger>,
    claims: Vec<Claimed>,
    limit: Instant,
    lease: Duration,
}

impl Sent {
    /// The statement has a reply, or was undone.
    pub fn settled(mut self) {
        self.claims.clear();
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let void_at = self.limit.max(Instant::now());
        for claimed in self.claims.drain(..) {
            self.ledger.add(claimed, void_at, void_at + self.lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn claimed(key: &str) -> Claimed {
        (Key::new(key).unwrap(), Holder::unique())
    }

    #[test]
    fn a_claim_without_a_reply_may_stand_for_its_lease() {
        let (ledger, claim, now) = (Arc::<Ledger>::default(), claimed("k"), Instant::now());
        let send = |limit, lease| ledger.sending(vec![claim.clone()], limit, lease);
        send(now, MINUTE).settled();
        assert!(!ledger.any());
        drop(send(now, Duration::ZERO));
        assert!(!ledger.any(), "its lease has ended");
        drop(send(now, MINUTE));
        send(now, MINUTE).settled();
        assert!(ledger.any(), "the earlier request may have been granted");
        ledger.remove(&claim, Instant::now());
        assert!(!ledger.any());
    }

    #[test]
    fn a_claim_may_stand_until_each_of_its_requests_is_void() {
        let (ledger, claim, now) = (Arc::<Ledger>::default(), claimed("k"), Instant::now());
        drop(ledger.sending(vec![claim.clone()], now + MINUTE, Duration::ZERO));
        assert!(ledger.any(), "it may be carried out until its limit");
        ledger.remove(&claim, now + MINUTE / 2);
        assert!(ledger.any(), "it may be carried out after the request that has a reply");
        ledger.remove(&(Key::new("another").unwrap(), claim.1), now + 2 * MINUTE);
        assert!(ledger.any(), "the holder ended its claim on another key");
        ledger.remove(&claim, now + 2 * MINUTE);
        assert!(!ledger.any());
    }

    #[test]
    fn claims_that_have_ended_take_no_memory() {
        let (ledger, now) = (Arc::<Ledger>::default(), Instant::now());
        for _ in 0..10_000 {
            drop(ledger.sending(vec![claimed("k")], now, Duration::ZERO));
        }
        assert!(lock(&ledger.0).len() < 100);
    }
}
