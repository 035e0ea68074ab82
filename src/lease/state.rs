//! The state that the values of a lease (`LeaseHandle`) share with its renewer.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    key::Claim,
    metrics::{self, Counted},
    queue::wakeups::Wakeups,
    sync::lock,
    task::emit_apart,
};

/// Why a lease is lost: its local deadline has passed.
pub(crate) const NO_RENEWAL: &str = "no renewal came through before its lease ended";
/// Why a lease is lost: a reply shows that the row has another claim, or none.
pub(crate) const SEEN_WITHOUT: &str = "its row was seen without the claim";

/// The claims of one lease, which are held and lost together.
pub(crate) struct LeaseState {
    /// In key order; never empty.
    pub claims: Vec<Claim>,
    pub since: Instant,
    pub lost: CancellationToken,
    /// Cancelled when the lease is lost, and when it ends in any other way.
    pub over: CancellationToken,
    deadline: Mutex<Instant>,
    /// When the lease in the row ends at the latest, whether or not a renewal got a reply.
    row_ends: Mutex<Instant>,
    /// The number of `LeaseHandle`s. The last one ends the lease.
    handles: AtomicUsize,
    /// The index of the claim that was found to be lost.
    lost_at: AtomicUsize,
    /// What is kept until the lease is over: the permit or the place for which other waiters of
    /// this process wait, or the number of a reader.
    kept: Mutex<Option<Box<dyn Send>>>,
    wakeups: Arc<Wakeups>,
    _counted: Counted,
}

impl LeaseState {
    pub fn new(claims: Vec<Claim>, deadline: Instant, row_ends: Instant, wakeups: Arc<Wakeups>) -> Self {
        Self {
            claims,
            since: Instant::now(),
            lost: CancellationToken::new(),
            over: CancellationToken::new(),
            deadline: Mutex::new(deadline),
            row_ends: Mutex::new(row_ends),
            handles: AtomicUsize::new(1),
            lost_at: AtomicUsize::new(0),
            kept: Mutex::default(),
            wakeups,
            _counted: Counted::lease(),
        }
    }

    /// Identifies this lease among all leases of the process while it exists.
    pub fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub fn deadline(&self) -> Instant {
        *lock(&self.deadline)
    }

    pub fn row_ends(&self) -> Instant {
        *lock(&self.row_ends)
    }

    /// Records that a renewal is sent, after which the lease in the row ends by then.
    pub fn row_lasts_until(&self, end: Instant) {
        let mut current = lock(&self.row_ends);
        *current = end.max(*current);
    }

    pub fn time_left(&self) -> Duration {
        if self.lost.is_cancelled() {
            return Duration::ZERO;
        }
        self.deadline().saturating_duration_since(Instant::now())
    }

    /// Returns whether the claims are known to stand at this moment. A loss that was reported is
    /// final.
    pub fn stands(&self) -> bool {
        !self.time_left().is_zero()
    }

    /// Moves the deadline forward. A late reply never moves it back.
    pub fn hold_until(&self, deadline: Instant) {
        let mut current = lock(&self.deadline);
        *current = deadline.max(*current);
    }

    /// Counts one more handle, made from an existing one.
    pub fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one handle less and returns whether it was the last.
    pub fn drop_handle(&self) -> bool {
        self.handles.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Keeps a value until the lease is over.
    pub fn keep(&self, kept: impl Send + 'static) {
        *lock(&self.kept) = Some(Box::new(kept));
        if self.lost.is_cancelled() {
            self.release_kept();
        }
    }

    /// Returns the claim that was lost, or the first.
    pub fn lost_claim(&self) -> &Claim {
        &self.claims[self.lost_at.load(Ordering::Acquire)]
    }

    /// Reports to the work that the claim at this index is lost, and then to recorders and
    /// subscribers, which may block. Returns whether this had not been known.
    pub fn mark_lost(&self, index: usize, why: &'static str) -> bool {
        // A claim that is being ended is not lost: a renewal in flight may see its row without it.
        if self.over.is_cancelled() {
            return false;
        }
        self.lost_at.store(index, Ordering::Release);
        self.over.cancel();
        self.lost.cancel();
        self.release_kept();
        let Claim { key, token, .. } = self.lost_claim().clone();
        metrics::lost(key.as_str());
        emit_apart(move || tracing::warn!(%key, %token, why, "lost"));
        true
    }

    pub fn trace_renewed(&self) {
        for Claim { key, token, .. } in &self.claims {
            tracing::trace!(%key, %token, "renewed");
        }
    }

    /// Wakes the next waiters of this process, because the claims are ended or lost.
    pub fn release_kept(&self) {
        let kept = lock(&self.kept).take();
        drop(kept);
        for claim in &self.claims {
            self.wakeups.notify(claim.key.as_str());
        }
    }
}

/// Runs when the state is no longer referenced, however the lease ended.
impl Drop for LeaseState {
    fn drop(&mut self) {
        self.release_kept();
    }
}
