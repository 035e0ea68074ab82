//! Claims that may stand although no task holds them or ends them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use crate::{key::Holder, sync::lock};

/// The holders of claims that may stand, and when their leases end at the latest.
#[derive(Default)]
pub(crate) struct LeftBehind(Mutex<HashMap<Holder, Instant>>);

impl LeftBehind {
    pub fn add(&self, holder: Holder, until: Instant) {
        lock(&self.0).insert(holder, until);
    }

    /// Forgets a claim of which a later reply has told.
    pub fn remove(&self, holder: Holder) {
        lock(&self.0).remove(&holder);
    }

    /// Returns whether every claim that was left behind has ended with its lease.
    pub fn is_empty(&self) -> bool {
        let mut left = lock(&self.0);
        left.retain(|_, until| *until > Instant::now());
        left.is_empty()
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
        assert!(left_behind.is_empty());
        drop(send(Duration::ZERO));
        assert!(left_behind.is_empty(), "its lease has ended");
        drop(send(Duration::from_secs(60)));
        send(Duration::from_secs(60)).settled();
        assert!(!left_behind.is_empty(), "the earlier request may have been granted");
        left_behind.remove(holder);
        assert!(left_behind.is_empty());
    }
}
