//! The renewer: renews the leases of one lock, and ends claims, in the background.
//!
//! A lease is *held* while its deadline lies ahead. It is *unknown* when a renewal brought no
//! reply: the deadline stands, and the renewal is retried sooner. It is *lost* when its deadline
//! has passed or the row was seen without the claim. The deadline is on this machine's clock,
//! counted from before the request was sent, so it comes before the server could grant the key to
//! another holder. The thread `rowlock-clock` watches it.
//!
//! One task is active while there are leases or endings, on the threads for renewals. Renewals of
//! each span, and endings, have a statement in flight each. An ending waits for the renewals of its
//! span, one of which might revive the claim. A renewal that hangs delays no other span. An ending
//! that hangs delays other endings. Neither delays the report of a loss.
//!
//! A renewal that was given up may still be carried out after an ending, until its limit on the
//! server's clock. After a release it finds no claim. An abandonment is sent once more after that
//! limit, because the renewal may have extended the row that the abandonment had ended.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::sync::{Notify, oneshot};
use tokio_util::task::TaskTracker;
use tracing::level_filters::LevelFilter;

use crate::{
    key::Claim,
    lease::{
        agenda::Agenda,
        changes::{self, ChangeReply, GroupReply},
        ending::{EndOutcome, Ending},
        ledger::Ledger,
        state::{LeaseState, SEEN_WITHOUT, Span},
    },
    metrics, pacing,
    queue::wakeups::Wakeups,
    session::{
        exchange::{Answer, Exchange},
        sessions::Sessions,
        threads,
        time::Instant,
        timers::sleep_until,
    },
    store::{Change, Database, Outcome, late_among, lost_among, skipped_among},
    sync::{OnDrop, lock},
};

/// How long the task waits at most, and lives after the last lease.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub(crate) struct Renewer<DB: Database> {
    sessions: Sessions<DB>,
    wakeups: Arc<Wakeups>,
    pub tracker: TaskTracker,
    pub ledger: Arc<Ledger>,
    agenda: Mutex<Agenda>,
    /// Wakes the task.
    changed: Notify,
}

impl<DB: Database> Renewer<DB> {
    pub fn new(sessions: Sessions<DB>, wakeups: Arc<Wakeups>, tracker: TaskTracker) -> Arc<Self> {
        let (ledger, agenda, changed) = (Arc::default(), Mutex::default(), Notify::new());
        Arc::new(Self { sessions, wakeups, tracker, ledger, agenda, changed })
    }

    /// Starts renewing claims that were granted to a request sent at `sent`.
    pub fn hold(
        self: &Arc<Self>,
        span: Span,
        max_hold: Duration,
        claims: Vec<Claim>,
        sent: Instant,
    ) -> Arc<LeaseState> {
        let held = LeaseState::new(claims, span, (sent, max_hold), self.wakeups.clone());
        if !held.is_last() {
            let renew_at = sent + pacing::renewal_interval(span.lease);
            let mut agenda = lock(&self.agenda);
            agenda.add(held.clone(), renew_at);
            self.ensure_task(agenda, renew_at);
        }
        held
    }

    /// Stops renewing a lease.
    pub fn stop_renewing(&self, held: &LeaseState) {
        lock(&self.agenda).remove(held.id());
    }

    /// Ends claims in the background with `change`. The receiver gets the outcome.
    pub fn end(self: &Arc<Self>, held: Arc<LeaseState>, change: Change) -> oneshot::Receiver<EndOutcome> {
        self.end_at(held, change, Instant::now())
    }

    /// Ends claims at this time, as [`end`](Self::end) does.
    fn end_at(self: &Arc<Self>, held: Arc<LeaseState>, change: Change, at: Instant) -> oneshot::Receiver<EndOutcome> {
        let (ending, receiver) = Ending::new(held, change, at, self.tracker.token());
        let mut agenda = lock(&self.agenda);
        agenda.end(ending);
        self.ensure_task(agenda, at);
        receiver
    }

    /// Renews one lease now.
    pub async fn renew(self: &Arc<Self>, held: &Arc<LeaseState>, limit: Instant) -> Exchange<Outcome> {
        held.row_lasts_until(limit + held.span.of_row());
        held.renewing_until(limit);
        let Exchange { reply, unanswered } =
            changes::send(&self.sessions, held.span, &held.claims, held.span.renewal(), limit).await;
        if !unanswered {
            held.renewal_answered(limit);
        }
        let next = pacing::renewal_interval(held.span.lease);
        Exchange { reply: reply.map(|answer| self.renewed(held, &answer, next)), unanswered }
    }

    /// Applies the reply to a renewal, which is followed by the next one after `next`.
    fn renewed(&self, held: &LeaseState, Answer { sent, reply: outcomes }: &ChangeReply, next: Duration) -> Outcome {
        if let Some(index) = lost_among(outcomes) {
            held.mark_lost(index, SEEN_WITHOUT);
            self.stop_renewing(held);
            return Outcome::Lost;
        }
        if let Some(left) = skipped_among(outcomes) {
            return Outcome::Skipped { left };
        }
        if let Some(late) = late_among(outcomes) {
            return Outcome::TooLate(late);
        }
        held.hold_until(held.span.deadline(*sent, held.span.lease));
        if LevelFilter::current() >= LevelFilter::TRACE {
            held.emit(|claim| tracing::trace!(key = %claim.key, token = %claim.token, "renewed"));
        }
        if held.is_last() {
            self.stop_renewing(held);
        } else {
            lock(&self.agenda).reschedule(held.id(), *sent + next);
        }
        Outcome::Done
    }

    /// Records that the reply to a request that was sent at this time has told that claims are
    /// ended.
    pub fn ended(&self, claims: &[Claim], sent: Instant) {
        claims.iter().for_each(|claim| self.ledger.remove(&(claim.key.clone(), claim.holder), sent));
    }

    /// Records which of these claims may stand, because they are not ended any more.
    fn leave_behind(&self, ending: &Ending, sent: Instant) {
        let Ending { held, left, .. } = ending;
        self.ended(&held.claims, sent);
        let now = Instant::now();
        left.iter().for_each(|claim| self.ledger.add((claim.key.clone(), claim.holder), now, held.row_ends()));
    }

    /// Ensures that a task does what was added to the agenda, and looks at it at this time.
    fn ensure_task(self: &Arc<Self>, mut agenda: MutexGuard<'_, Agenda>, at: Instant) {
        match agenda.looks_at {
            None => {
                agenda.looks_at = Some(at);
                drop(agenda);
                threads::spawn_renewal(self.clone().work());
            }
            // Waking a thread takes as long as a short request.
            Some(looks_at) if at >= looks_at => {}
            Some(_) => {
                drop(agenda);
                self.changed.notify_one();
            }
        }
    }

    /// Does what is due, until nothing is held and nothing is ending.
    async fn work(self: Arc<Self>) {
        while let Some(next) = self.start_what_is_due() {
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// Returns when something is due next, or `None` if the task is to end.
    fn start_what_is_due(self: &Arc<Self>) -> Option<Instant> {
        let mut agenda = lock(&self.agenda);
        if agenda.is_empty() {
            agenda.looks_at = None;
            return None;
        }
        let (endings, renewals) = agenda.due();
        for (span, batch) in renewals {
            let (renewer, over) = (self.clone(), self.at_the_end(move |agenda| agenda.renewed(span)));
            threads::spawn_renewal(async move {
                renewer.renew_batch(span, batch).await;
                drop(over);
            });
        }
        if let Some((span, change, batch)) = endings {
            let (renewer, over) = (self.clone(), self.at_the_end(Agenda::ended));
            threads::spawn_renewal(async move {
                renewer.end_batch(span, batch, change).await;
                drop(over);
            });
        }
        let latest = Instant::now() + LOOK_AGAIN;
        agenda.looks_at = Some(agenda.next().map_or(latest, |next| next.min(latest)));
        agenda.looks_at
    }

    /// Records the end of a statement in flight, also after a panic. What waits for it may be due.
    fn at_the_end(self: &Arc<Self>, record: impl Fn(&mut Agenda) + Send + 'static) -> OnDrop<Box<dyn FnMut() + Send>> {
        let renewer = self.clone();
        OnDrop(Box::new(move || {
            record(&mut lock(&renewer.agenda));
            renewer.changed.notify_one();
        }))
    }

    async fn renew_batch(self: &Arc<Self>, span: Span, batch: Vec<Arc<LeaseState>>) {
        if batch.is_empty() {
            return;
        }
        let (sent, pause) = (Instant::now(), pacing::renewal_retry(span.lease));
        let limit = sent + pacing::attempt(span.lease);
        batch.iter().for_each(|held| held.row_lasts_until(limit + span.of_row()));
        let groups: Vec<Vec<Claim>> = batch.iter().map(|held| held.claims.clone()).collect();
        let again = |held: &LeaseState| lock(&self.agenda).reschedule(held.id(), Instant::now() + pause);
        // A panic of the driver delays the next attempt too.
        let later = OnDrop(|| batch.iter().for_each(|held| again(held)));
        let replies = changes::send_apart(&self.sessions, span, &groups, span.renewal(), limit).await;
        std::mem::forget(later);
        let failed = replies.iter().filter(|reply| reply.reply.is_err()).count();
        threads::emit(move || {
            metrics::renewed(sent.elapsed());
            if failed > 0 {
                metrics::renewals_failed(failed);
                tracing::warn!(
                    leases = failed,
                    "a renewal received no reply; the leases are valid until their deadlines, trying again"
                );
            }
        });
        // Leases that were renewed together stay together.
        let next = pacing::renewal_interval(span.lease);
        for (held, GroupReply { reply, unanswered }) in batch.iter().zip(replies) {
            if unanswered {
                held.renewing_until(limit);
            }
            match reply.map(|answer| (answer.sent, self.renewed(held, &answer, next))) {
                Ok((_, Outcome::Done | Outcome::Lost)) => {}
                Ok((sent, Outcome::Skipped { left })) => {
                    let left = (left - span.lock_delay).to_std().unwrap_or_default();
                    held.hold_until(span.deadline(sent, left));
                    let renew_at = sent + left.saturating_sub(span.lease * 2 / 3);
                    lock(&self.agenda).reschedule(held.id(), renew_at.max(Instant::now() + pause));
                }
                Ok((_, Outcome::TooLate(_))) | Err(_) => again(held),
            }
        }
    }

    async fn end_batch(self: &Arc<Self>, span: Span, batch: Vec<(u64, Claim)>, change: Change) {
        let sent = Instant::now();
        let limit = sent + pacing::attempt(span.lease);
        let groups: Vec<Vec<Claim>> = batch.iter().map(|(_, claim)| vec![claim.clone()]).collect();
        let replies = changes::send_apart(&self.sessions, span, &groups, change, limit).await;
        let mut rest = replies.as_slice();
        for claims in batch.chunk_by(|one, next| one.0 == next.0) {
            let (replies, others) = rest.split_at(claims.len().min(rest.len()));
            rest = others;
            let number = claims[0].0;
            let mut agenda = lock(&self.agenda);
            let ended = agenda.apply_replies(number, claims.iter().map(|(_, claim)| claim).zip(replies));
            drop(agenda);
            if let Some((ended, ending)) = ended {
                let sent = ending.first_sent.unwrap_or(sent);
                self.leave_behind(&ending, sent);
                let (held, revived) = (ending.held.clone(), ending.held.may_be_renewed_after(sent));
                // A renewal without a reply may still extend the row that was abandoned. Shutdown
                // waits for the second abandonment, so it begins before this one is complete.
                if let (Some(until), Change::Abandon(_)) = (revived, change) {
                    drop(self.end_at(held, change, until));
                }
                ending.complete(ended);
            }
        }
    }
}
