//! Claims that are to be ended, and the outcome.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::{
    action::Certainty,
    key::{Claim, Key, Token},
    lease::{
        changes::{ChangeReply, GroupReply},
        state::LeaseState,
    },
    pacing::Backoff,
    session::time::Instant,
    store::{Change, Outcome, failure::Remedy},
};

/// The outcome of an ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EndOutcome {
    Done,
    /// The row of this key was seen without the claim.
    Lost {
        key: Key,
        token: Token,
    },
    /// The ending did not succeed while the lease lasted, as far as is known.
    GivenUp(Certainty),
}

/// Claims to end. The ending is retried until their lease in the row is over.
pub(crate) struct Ending {
    pub held: Arc<LeaseState>,
    pub change: Change,
    /// The claims that are not settled yet.
    pub left: Vec<Claim>,
    /// When the ending is sent next. One that is sent earlier might be undone by a renewal that is
    /// carried out late.
    pub at: Instant,
    /// When the ending was sent first. A set may be ended in several rounds.
    pub first_sent: Option<Instant>,
    /// A request was sent whose outcome is unknown.
    unanswered: bool,
    /// The first claim that is lost.
    lost: Option<Claim>,
    pauses: Backoff,
    outcome: oneshot::Sender<EndOutcome>,
    _token: TaskTrackerToken,
}

impl Ending {
    pub fn new(
        held: Arc<LeaseState>,
        change: Change,
        at: Instant,
        token: TaskTrackerToken,
    ) -> (Self, oneshot::Receiver<EndOutcome>) {
        let (outcome, receiver) = oneshot::channel();
        let ending = Self {
            left: held.claims.clone(),
            change,
            at,
            first_sent: None,
            unanswered: false,
            lost: None,
            pauses: held.span.pauses(),
            held,
            outcome,
            _token: token,
        };
        (ending, receiver)
    }

    /// Records that a request is sent. Without a reply, as after a panic of the driver, another one
    /// follows after a pause.
    pub fn sending(&mut self) {
        let now = Instant::now();
        self.first_sent.get_or_insert(now);
        self.at = now + self.pauses.next();
    }

    /// Applies the replies for these claims. Returns `None` if the ending is to be sent again.
    pub fn apply_replies<'a>(
        &mut self,
        replies: impl Iterator<Item = (&'a Claim, &'a GroupReply)>,
    ) -> Option<EndOutcome> {
        let mut permanent = true;
        for (claim, GroupReply { reply, unanswered }) in replies {
            self.unanswered |= unanswered;
            let Some(index) = self.left.iter().position(|left| left == claim) else { continue };
            match reply {
                Ok(ChangeReply { reply: outcomes, .. }) => match outcomes.first() {
                    Some(Outcome::Done) => drop(self.left.remove(index)),
                    Some(Outcome::Lost) => {
                        let claim = self.left.remove(index);
                        self.lost.get_or_insert(claim);
                    }
                    Some(Outcome::Skipped { .. } | Outcome::TooLate(_)) | None => permanent = false,
                },
                Err(remedy) => permanent &= *remedy == Remedy::Nothing,
            }
        }
        let now = Instant::now();
        if !self.left.is_empty() && !permanent && now < self.held.row_ends() {
            self.sending();
            return None;
        }
        Some(self.ended())
    }

    fn ended(&self) -> EndOutcome {
        let some_done = self.left.len() < self.held.claims.len();
        match (self.left.is_empty(), &self.lost) {
            (true, None) => EndOutcome::Done,
            (true, Some(claim)) if !self.unanswered => EndOutcome::Lost { key: claim.key.clone(), token: claim.token },
            // An unanswered request may have ended the claim before another holder took the key.
            _ if self.unanswered || some_done => EndOutcome::GivenUp(Certainty::Unknown),
            _ => EndOutcome::GivenUp(Certainty::NothingChanged),
        }
    }

    /// Reports the outcome to the waiting caller, and wakes the next waiters of this process.
    pub fn complete(self, ended: EndOutcome) {
        self.held.release_kept();
        let (held, outcome) = (self.held, ended.clone());
        held.emit(move |claim| tracing::info!(key = %claim.key, token = %claim.token, ?ended, "the claim was ended in the background"));
        // A dropped lease has no receiver.
        let _ = self.outcome.send(outcome);
    }
}
