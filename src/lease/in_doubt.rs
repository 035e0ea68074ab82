//! Claim requests whose outcome is not known.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{key::Holder, queue::local::Place};

/// A claim request that may have been granted although no reply arrived.
pub(crate) struct Unanswered {
    pub holder: Holder,
    /// The key that was claimed, of those of which one is enough.
    pub chosen: Option<Place>,
}

/// Whether a claim of a call may stand without the call's knowledge, also if the call is cut short.
#[derive(Clone, Default)]
pub(crate) struct InDoubt {
    /// A claim request is in flight. After the call it is finished, and put back if it is granted.
    pub in_flight: Arc<AtomicBool>,
    /// A claim request has no reply.
    unanswered: Arc<AtomicBool>,
}

impl InDoubt {
    pub fn set_unanswered(&self, unanswered: bool) {
        self.unanswered.store(unanswered, Ordering::Relaxed);
    }

    /// Returns whether a claim request has no reply, so that no refusal may be reported.
    pub fn is_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Returns whether a claim may stand at this moment.
    pub fn may_stand(&self) -> bool {
        self.is_unanswered() || self.in_flight.load(Ordering::Relaxed)
    }
}
