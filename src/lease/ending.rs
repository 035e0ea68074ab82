//! Claims that are to be ended, and the outcome.

use std::sync::Arc;

use tokio::{sync::oneshot, time::Instant};
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::{
    error::Certainty,
    key::Claim,
    lease::{
        changes::{ChangeReply, PartReply},
        state::LeaseState,
    },
    retry::Backoff,
    store::{Change, Outcome, failure::Remedy},
};

/// The outcome of an ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Done,
    Lost,
    /// The ending did not succeed while the lease lasted, as far as is known.
    GivenUp(Certainty),
}

/// Claims to end. The ending is retried until their lease is over.
pub(crate) struct Ending {
    pub held: Arc<LeaseState>,
    pub change: Change,
    /// The claims that are not settled yet.
    pub left: Vec<Claim>,
    /// When the ending is sent next.
    pub at: Instant,
    /// A request is in flight.
    pub under_way: bool,
    /// The server refused the ending, alone or in a batch.
    pub suspect: bool,
    /// A request was sent whose outcome is unknown.
    unanswered: bool,
    lost: bool,
    pauses: Backoff,
    outcome: oneshot::Sender<Ended>,
    _token: TaskTrackerToken,
}

impl Ending {
    pub fn new(
        held: Arc<LeaseState>,
        change: Change,
        pauses: Backoff,
        token: TaskTrackerToken,
    ) -> (Self, oneshot::Receiver<Ended>) {
        let (outcome, receiver) = oneshot::channel();
        let ending = Self {
            left: held.claims.clone(),
            held,
            change,
            at: Instant::now(),
            under_way: false,
            suspect: false,
            unanswered: false,
            lost: false,
            pauses,
            outcome,
            _token: token,
        };
        (ending, receiver)
    }

    /// Counts the request in flight as unanswered, because the task that sent it may never receive
    /// the reply.
    pub fn forget_request(&mut self) {
        self.unanswered |= std::mem::take(&mut self.under_way);
    }

    /// Applies the replies for these claims. Returns `None` if the ending is to be sent again. A
    /// task that was replaced may receive replies late, for claims that are settled by then.
    pub fn hear<'a>(&mut self, shares: impl Iterator<Item = (&'a Claim, &'a PartReply)>) -> Option<Ended> {
        (self.under_way, self.suspect) = (false, false);
        let mut hopeless = true;
        for (claim, PartReply { reply, unanswered }) in shares {
            self.unanswered |= unanswered;
            let Some(place) = self.left.iter().position(|left| left == claim) else { continue };
            match reply {
                Ok(ChangeReply { outcomes, .. }) => match outcomes.first() {
                    Some(Outcome::Done) => drop(self.left.remove(place)),
                    Some(Outcome::Lost) => {
                        self.lost = true;
                        self.left.remove(place);
                    }
                    Some(Outcome::Skipped { .. }) | None => hopeless = false,
                },
                Err(remedy) => {
                    self.suspect |= *remedy != Remedy::Again;
                    hopeless &= *remedy == Remedy::Nothing;
                }
            }
        }
        let now = Instant::now();
        if !self.left.is_empty() && !hopeless && now < self.held.deadline() {
            self.at = now + self.pauses.next();
            return None;
        }
        Some(self.ended())
    }

    fn ended(&self) -> Ended {
        let some_done = self.left.len() < self.held.claims.len();
        match (self.left.is_empty(), self.lost) {
            (true, false) => Ended::Done,
            (true, true) if !self.unanswered => Ended::Lost,
            // An unanswered request may have ended the claim before another holder took the key.
            _ if self.unanswered || some_done => Ended::GivenUp(Certainty::Unknown),
            _ => Ended::GivenUp(Certainty::NothingChanged),
        }
    }

    /// Reports the outcome to the waiting caller, and wakes the next waiters of this process.
    pub fn tell(self, ended: Ended) {
        self.held.pass_on();
        for Claim { key, token, .. } in &self.held.claims {
            tracing::info!(%key, %token, ?ended, "abandoned");
        }
        // A dropped lease has no receiver.
        let _ = self.outcome.send(ended);
    }
}
