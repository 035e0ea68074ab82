//! Claims that are to be ended, and what became of that.

use std::sync::Arc;

use tokio::{sync::oneshot, time::Instant};

use crate::{
    error::Certainty,
    finish::Ongoing,
    key::Claim,
    lease::{
        changes::{ChangeReply, PartReply},
        state::LeaseState,
    },
    retry::Backoff,
    store::{Change, Outcome, failure::Remedy},
};

/// How an ending came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Done,
    Lost,
    /// It did not come through while the lease lasted, as far as is known.
    GivenUp(Certainty),
}

/// Claims to end, tried until their lease is over.
pub(crate) struct Ending {
    pub held: Arc<LeaseState>,
    pub change: Change,
    /// What is not settled yet.
    pub left: Vec<Claim>,
    /// When it is sent next.
    pub at: Instant,
    /// It is being sent.
    pub under_way: bool,
    /// The server refused it, by itself or among others.
    pub suspect: bool,
    /// A request was sent whose outcome is not known.
    unanswered: bool,
    lost: bool,
    pauses: Backoff,
    outcome: oneshot::Sender<Ended>,
    _ongoing: Ongoing,
}

impl Ending {
    pub fn new(
        held: Arc<LeaseState>,
        change: Change,
        pauses: Backoff,
        ongoing: Ongoing,
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
            _ongoing: ongoing,
        };
        (ending, receiver)
    }

    /// The task that sent it may never hear of the outcome.
    pub fn forget_request(&mut self) {
        self.unanswered |= std::mem::take(&mut self.under_way);
    }

    /// What a request came to for each of these claims; `None` if it is to be sent again. A task that was replaced may hear
    /// late, of claims that are settled by now.
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
            // A request that went unanswered may have ended it before another took the key.
            _ if self.unanswered || some_done => Ended::GivenUp(Certainty::Unknown),
            _ => Ended::GivenUp(Certainty::NothingChanged),
        }
    }

    /// Tells the caller that waits, and lets the next ones of this process ask.
    pub fn tell(self, ended: Ended) {
        self.held.pass_on();
        for Claim { key, token, .. } in &self.held.claims {
            tracing::info!(%key, %token, ?ended, "abandoned");
        }
        // A lease that was dropped has no one who listens.
        let _ = self.outcome.send(ended);
    }
}
