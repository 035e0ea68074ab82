//! Batched releases, each of one lease or of a set.

use crate::{
    key::{Claim, Key},
    lease::changes::ChangeRequest,
    session::{
        exchange::{Exchange, exchange_on},
        loan::Loan,
        queue::Batched,
        sessions::Sessions,
        time::Instant,
    },
    store::{Change, Database, Form, Outcome, failure::Failure},
};

pub(crate) struct Release {
    pub claims: Vec<Claim>,
    pub change: Change,
    /// It was sent before and not settled, so it is sent alone.
    pub alone: bool,
}

/// The reply to a release.
pub(crate) struct Released {
    /// One per claim, in order.
    pub outcomes: Vec<Outcome>,
    /// It was sent twice, and one of the two requests has no reply.
    pub unanswered: bool,
}

impl<DB: Database> Batched<DB> for Release {
    type Output = Released;

    fn key(&self) -> Option<&Key> {
        if let ([claim], false) = (&self.claims[..], self.alone) { Some(&claim.key) } else { None }
    }

    fn can_share_statement(&self, other: &Self) -> bool {
        self.change == other.change
    }

    async fn run(
        &self,
        requests: &[Self],
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<Released>, Failure> {
        let claims: Vec<Claim> = requests.iter().flat_map(|release| release.claims.clone()).collect();
        let request = ChangeRequest { claims: &claims, change: self.change, form };
        let Exchange { reply, unanswered } = exchange_on(session, sessions, limit, &request).await;
        let mut outcomes = reply?.reply.into_iter();
        let released = requests.iter().map(|release| {
            let outcomes = outcomes.by_ref().take(release.claims.len()).collect();
            Released { outcomes, unanswered }
        });
        Ok(released.collect())
    }
}
