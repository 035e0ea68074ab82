//! How long a lease lasts, and the state that its values (`LeaseHandle`) share with its renewer.

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use chrono::TimeDelta;
use tokio_util::sync::CancellationToken;

use crate::{
    key::Claim,
    metrics::{self, Held},
    pacing::{self, Backoff},
    queue::wakeups::Wakeups,
    rules::Terms,
    session::{
        clock::{Deadline, Watch, watch},
        fork::is_forked,
        threads,
        time::Instant,
    },
    store::Change,
    sync::lock,
};

/// Why a lease is lost: its local deadline has passed.
pub(crate) const NO_RENEWAL: &str = "no renewal came through before its lease ended";
/// Why a lease is lost: its work may be stuck.
pub(crate) const TOO_LONG: &str = "it was held for longer than its max_hold";
/// Why a lease is lost: a reply shows that the row has another claim, or none.
pub(crate) const SEEN_WITHOUT: &str = "its row was seen without the claim";

/// In place of the index of a lost claim.
const NOT_LOST: usize = usize::MAX;

/// How long leases last: in their rows, and for their holders. One statement renews the leases of
/// one span, because their holders rely on the same part of it.
///
/// The lease of a row is the lease of the handle and its lock-delay. The holder relies on the first
/// part alone. A release frees the key at once, and so do a forced release, an abandonment by a
/// caller whose work has stopped, and a transaction that failed. A lease that is dropped keeps the
/// key closed for the lock-delay, because its work may still run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    /// How long a holder may trust a lease. The row's lease is longer by the lock-delay.
    pub lease: Duration,
    pub lock_delay: TimeDelta,
}

impl Span {
    pub fn of(&Terms { lease, lock_delay, .. }: &Terms) -> Self {
        Self { lease: (lease - lock_delay).to_std().unwrap_or_default(), lock_delay }
    }

    pub fn renewal(self) -> Change {
        Change::Renew(TimeDelta::from_std(self.of_row()).unwrap_or(TimeDelta::MAX))
    }

    /// Returns the whole lease as the row keeps it.
    pub fn of_row(self) -> Duration {
        self.lease + self.lock_delay.to_std().unwrap_or_default()
    }

    /// Returns when a claim with `left` at `sent` counts as lost. The deadline is a little early,
    /// for clocks that diverge and timers that fire late.
    pub fn deadline(self, sent: Instant, left: Duration) -> Instant {
        sent + pacing::trusted(left, self.lease)
    }

    /// Returns how long a whole lease counts on the client's side.
    pub fn local(self) -> Duration {
        pacing::trusted(self.lease, self.lease)
    }

    /// Returns the pauses between attempts to end a claim.
    pub fn pauses(self) -> Backoff {
        Backoff::up_to(pacing::longest_retry_pause(self.lease))
    }
}

/// The claims of one lease, which are held and lost together.
pub(crate) struct LeaseState {
    /// In key order; never empty.
    pub claims: Vec<Claim>,
    pub span: Span,
    pub since: Instant,
    /// When the lease is over, whether or not it is renewed.
    last: Instant,
    pub lost: CancellationToken,
    /// Cancelled when the lease is lost, and when it ends in any other way.
    pub over: CancellationToken,
    deadline: Mutex<Instant>,
    /// When the lease in the row ends at the latest, whether or not a renewal got a reply.
    row_ends: Mutex<Instant>,
    /// Until when the server may carry out each renewal that has no reply.
    renewal_limits: Mutex<Vec<Instant>>,
    /// The number of `LeaseHandle`s. The last one ends the lease.
    handles: AtomicUsize,
    /// The index of the claim that was found to be lost, or [`NOT_LOST`].
    lost_at: AtomicUsize,
    /// What is kept until the lease is over: the turn or the place for which other waiters of
    /// this process wait, or the number of a reader.
    kept: Mutex<Option<Box<dyn Send>>>,
    wakeups: Arc<Wakeups>,
    /// Set unless it is a test's.
    watch: OnceLock<Watch>,
    held: Option<Held>,
}

impl Deadline for LeaseState {
    fn deadline(&self) -> Instant {
        *lock(&self.deadline)
    }

    fn pass(self: Arc<Self>) {
        self.mark_lost(0, if self.is_last() { TOO_LONG } else { NO_RENEWAL });
    }
}

impl LeaseState {
    /// Creates the state of a lease that a request sent at `sent` was granted. Its deadline is
    /// watched from now on.
    pub fn new(
        claims: Vec<Claim>,
        span: Span,
        (sent, max_hold): (Instant, Duration),
        wakeups: Arc<Wakeups>,
    ) -> Arc<Self> {
        let state = Self::unwatched(claims, span, (span.deadline(sent, span.lease), sent + max_hold), wakeups);
        let _ = state.watch.set(watch(&state));
        state
    }

    /// Creates a state that nothing watches.
    pub fn unwatched(
        claims: Vec<Claim>,
        span: Span,
        (deadline, last): (Instant, Instant),
        wakeups: Arc<Wakeups>,
    ) -> Arc<Self> {
        Arc::new(Self {
            claims,
            span,
            since: Instant::now(),
            lost: CancellationToken::new(),
            over: CancellationToken::new(),
            last,
            deadline: Mutex::new(deadline.min(last)),
            row_ends: Mutex::new(Instant::now() + span.of_row()),
            renewal_limits: Mutex::default(),
            handles: AtomicUsize::new(1),
            lost_at: AtomicUsize::new(NOT_LOST),
            kept: Mutex::default(),
            wakeups,
            watch: OnceLock::new(),
            held: Some(Held::begins()),
        })
    }

    /// Identifies this lease among all leases of the process while it exists.
    pub fn id(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub fn row_ends(&self) -> Instant {
        *lock(&self.row_ends)
    }

    /// Records that a renewal is sent, after which the lease in the row ends by then.
    pub fn row_lasts_until(&self, end: Instant) {
        let mut current = lock(&self.row_ends);
        *current = end.max(*current);
    }

    /// Records that a renewal is sent, which the server may carry out until then.
    pub fn renewing_until(&self, limit: Instant) {
        let mut limits = lock(&self.renewal_limits);
        // Of those that are over, an abandonment that was sent before needs the last.
        let (now, last) = (Instant::now(), limits.iter().max().copied());
        limits.retain(|limit| *limit > now || Some(*limit) == last);
        limits.push(limit);
    }

    /// Records that a renewal with this limit has a reply.
    pub fn renewal_answered(&self, limit: Instant) {
        let mut limits = lock(&self.renewal_limits);
        if let Some(index) = limits.iter().position(|other| *other == limit) {
            limits.swap_remove(index);
        }
    }

    /// Returns until when a renewal may revive the claim after it was abandoned by a request that
    /// was sent at this time. The reply to the abandonment may come after that.
    pub fn may_be_renewed_after(&self, sent: Instant) -> Option<Instant> {
        lock(&self.renewal_limits).iter().max().copied().filter(|until| *until > sent)
    }

    pub fn time_left(&self) -> Duration {
        // The process that this one was forked from holds the lease.
        if self.lost.is_cancelled() || is_forked() {
            return Duration::ZERO;
        }
        // Read before the deadline: a lease that is found to be over is not extended after that.
        let now = Instant::now();
        self.deadline() - now
    }

    /// Returns whether the claims are known to stand at this moment. A loss that was reported is
    /// final.
    pub fn stands(&self) -> bool {
        !self.time_left().is_zero()
    }

    /// Returns whether no renewal is of use any more.
    pub fn is_last(&self) -> bool {
        *lock(&self.deadline) >= self.last
    }

    /// Moves the deadline forward. A late reply never moves it back, and one that comes after the
    /// deadline changes nothing: the lease may have been seen to be lost.
    pub fn hold_until(&self, deadline: Instant) {
        let mut current = lock(&self.deadline);
        if *current > Instant::now() {
            *current = deadline.max(*current).min(self.last);
        }
    }

    /// Counts one more handle, made from an existing one.
    pub fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one handle less and returns whether it was the last.
    pub fn drop_handle(&self) -> bool {
        self.handles.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Keeps a value until the lease is over, such as the turn in which it was acquired.
    pub fn keep(&self, kept: impl Send + 'static) {
        *lock(&self.kept) = Some(Box::new(kept));
        if self.lost.is_cancelled() {
            self.release_kept();
        }
    }

    /// Returns the claim that was lost, or the first.
    pub fn lost_claim(&self) -> &Claim {
        self.claims.get(self.lost_at.load(Ordering::Acquire)).unwrap_or(&self.claims[0])
    }

    /// Reports to the work that the claim at this index is lost, and in the background to recorders
    /// and subscribers, unless this is known.
    pub fn mark_lost(&self, index: usize, why: &'static str) {
        // A claim that is being ended is not lost: a renewal in flight may see its row without it.
        if self.over.is_cancelled() {
            return;
        }
        // The clock and a reply may tell of the loss at the same moment.
        if self.lost_at.compare_exchange(NOT_LOST, index, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let Claim { key, token, .. } = self.lost_claim().clone();
        let count = metrics::lost(key.as_str());
        self.over.cancel();
        self.lost.cancel();
        self.release_kept();
        threads::emit_always(move || {
            count();
            tracing::warn!(%key, %token, why, "lost");
        });
    }

    /// Emits an event for each claim in the background.
    pub fn emit(&self, event: impl Fn(&Claim) + Send + 'static) {
        let claims = self.claims.clone();
        threads::emit(move || claims.iter().for_each(event));
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
        let held = self.held.take();
        if cfg!(feature = "metrics") {
            // A recorder may block.
            threads::emit_always(move || drop(held));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_without_a_reply_may_revive_what_was_abandoned_before_its_limit() {
        let (second, now) = (Duration::from_secs(1), Instant::now());
        let span = Span { lease: 9 * second, lock_delay: TimeDelta::zero() };
        let end = now + span.lease;
        let held = LeaseState::unwatched(Vec::new(), span, (end, end), Arc::default());
        assert_eq!(held.may_be_renewed_after(now), None);
        held.renewing_until(now + second);
        held.renewal_answered(now + second);
        assert_eq!(held.may_be_renewed_after(now), None, "it has a reply");
        held.renewing_until(now + 4 * second);
        held.renewing_until(now + 3 * second);
        held.renewal_answered(now + 4 * second);
        assert_eq!(held.may_be_renewed_after(now), Some(now + 3 * second), "the other one has none");
        assert_eq!(held.may_be_renewed_after(now + 2 * second), Some(now + 3 * second), "whenever its reply comes");
        assert_eq!(held.may_be_renewed_after(now + 3 * second), None, "it was abandoned after the limit");
    }
}
