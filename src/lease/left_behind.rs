//! Claims that may stand although no task holds them or ends them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use crate::{key::Holder, session::time::Instant, sync::lock};

/// The holders of claims that may stand, and when their leases have ended, as far as is known.
#[derive(Default)]
pub(crate) struct LeftBehind(Mutex<Claims>);

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

impl LeftBehind {
    pub fn add(&self, holder: Holder, until: Instant) {
        let mut claims = lock(&self.0);
        if claims.until.len() >= claims.most {
            claims.remove_ended();
        }
        let known = claims.until.entry(holder).or_insert(until);
        *known = until.max(*known);
    }

    /// Forgets a claim of which a later reply has told.
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
    /// they are left behind.
    pub fn sending(self: &Arc<Self>, holders: Vec<Holder>, lease: Duration) -> Sent {
        Sent { left_behind: self.clone(), holders, lease }
    }
}

/// Claims without a reply. If it is dropped, they are left behind.
pub(crate) struct Sent {
    left_behind: Arc<LeftBehind>,
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
            self.left_behind.add(holder, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_without_a_reply_is_left_behind_for_its_lease() {
        let (left_behind, holder) = (Arc::<LeftBehind>::default(), Holder::unique());
        let send = |lease| left_behind.sending(vec![holder], lease);
        send(Duration::from_secs(60)).settled();
        assert!(!left_behind.any());
        drop(send(Duration::ZERO));
        assert!(!left_behind.any(), "its lease has ended");
        drop(send(Duration::from_secs(60)));
        send(Duration::from_secs(60)).settled();
        assert!(left_behind.any(), "the earlier request may have been granted");
        left_behind.remove(holder);
        assert!(!left_behind.any());
    }

    #[test]
    fn claims_that_have_ended_take_no_memory() {
        let left_behind = Arc::<LeftBehind>::default();
        for _ in 0..10_000 {
            drop(left_behind.sending(vec![Holder::unique()], Duration::ZERO));
        }
        assert!(lock(&left_behind.0).until.len() <= 2 * LEAST);
    }
}
