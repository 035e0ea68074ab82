//! Changes of claims that stand: renewals and endings in the background, and batched releases. A
//! session that stops replying, or a row that the server refuses to change, does not affect the
//! other claims.

use chrono::{DateTime, Utc};

use crate::{
    key::{Claim, Key},
    lease::state::Span,
    pacing,
    session::{
        exchange::{Answer, Exchange, Request, exchange, exchange_on},
        loan::Loan,
        queue::Batched,
        sessions::Sessions,
        time::Instant,
    },
    store::{
        Change, Database, Form, Outcome, Reply, TooLate,
        failure::{Failure, Remedy, remedy},
        late_among, skipped_among,
    },
};

/// How many statements in a row may fail before the rest waits for the next time. So many failures
/// are unlikely to be caused by single rows.
const FAILURES: usize = 64;

/// One change of several claims.
struct ChangeRequest<'a> {
    claims: &'a [Claim],
    change: Change,
    form: Form,
}

impl<DB: Database> Request<DB> for ChangeRequest<'_> {
    type Reply = Vec<Outcome>;

    fn send(
        &self,
        conn: &mut DB::Connection,
        not_after: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Vec<Outcome>>> + Send {
        DB::change(conn, self.claims, self.change, not_after, self.form)
    }

    fn too_late(&self, outcomes: &Vec<Outcome>, _: Option<DateTime<Utc>>) -> Option<TooLate> {
        late_among(outcomes)
    }

    fn is_settled(&self, outcomes: &Vec<Outcome>) -> bool {
        skipped_among(outcomes).is_none()
    }

    /// The request that came second finds a claim gone that the first one has ended. A claim that
    /// was renewed and is gone is lost.
    fn combined(&self, earlier: Vec<Outcome>, later: Vec<Outcome>) -> Vec<Outcome> {
        let tells_most = match self.change {
            Change::Renew(_) => [Outcome::Lost, Outcome::Done],
            _ => [Outcome::Done, Outcome::Lost],
        };
        let both = earlier.into_iter().zip(later);
        let told = |(one, other)| tells_most.into_iter().find(|told| [one, other].contains(told)).unwrap_or(other);
        both.map(told).collect()
    }
}

/// The outcomes of a change, one per claim, and when the request that was answered was sent.
pub(crate) type ChangeReply = Answer<Vec<Outcome>>;

/// The result of a request for one of several groups.
pub(crate) type GroupReply = Exchange<ChangeReply, Remedy>;

/// Sends one change for all of these claims, which are of this span.
pub(crate) async fn send<DB: Database>(
    sessions: &Sessions<DB>,
    span: Span,
    claims: &[Claim],
    change: Change,
    limit: Instant,
) -> Exchange<ChangeReply> {
    let silence = pacing::hedge_delay(span.lease);
    exchange(None, sessions, silence, limit, &ChangeRequest { claims, change, form: Form::Common }).await
}

/// Sends one change for the claims of several groups, in one statement if possible. A statement
/// that the server refuses is split in halves and sent again, so that only the groups that cause
/// the refusal are refused.
pub(crate) async fn send_apart<DB: Database>(
    sessions: &Sessions<DB>,
    span: Span,
    groups: &[Vec<Claim>],
    change: Change,
    limit: Instant,
) -> Vec<GroupReply> {
    let mut replies: Vec<GroupReply> = Vec::with_capacity(groups.len());
    // In the order of the groups, the next ones last.
    let mut left = vec![groups];
    let mut failures = 0;
    while let Some(all) = left.pop() {
        if failures >= FAILURES || Instant::now() >= limit {
            replies.extend(all.iter().map(|_| GroupReply { reply: Err(Remedy::Apart), unanswered: false }));
            continue;
        }
        let Exchange { reply, unanswered } = send(sessions, span, &all.concat(), change, limit).await;
        failures = if reply.is_ok() { 0 } else { failures + 1 };
        match reply {
            Ok(Answer { sent, reply: outcomes }) => {
                let mut rest = outcomes.into_iter();
                replies.extend(all.iter().map(|claims| {
                    let outcomes = rest.by_ref().take(claims.len()).collect();
                    GroupReply { reply: Ok(Answer { sent, reply: outcomes }), unanswered }
                }));
            }
            Err(failure) => {
                let remedy = remedy(&failure, all.len());
                let halves = remedy == Remedy::Apart && all.len() > 1 && !unanswered;
                if halves {
                    let (next, others) = all.split_at(all.len() / 2);
                    left.extend([others, next]);
                } else {
                    replies.extend(all.iter().map(|_| GroupReply { reply: Err(remedy), unanswered }));
                }
            }
        }
    }
    replies
}

/// A release of one lease or of a set, which is sent in a batch.
pub(crate) struct Release {
    pub claims: Vec<Claim>,
    pub change: Change,
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
        if let [claim] = &self.claims[..] { Some(&claim.key) } else { None }
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

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    #[test]
    fn two_replies_tell_together_what_was_done() {
        let skipped = Outcome::Skipped { left: TimeDelta::zero() };
        let combined = |change, one: &[Outcome], other: &[Outcome]| {
            let request = ChangeRequest { claims: &[], change, form: Form::Common };
            Request::<sqlx::Sqlite>::combined(&request, one.to_vec(), other.to_vec())
        };
        let (done, lost) = (Outcome::Done, Outcome::Lost);
        let (ending, renewal) = (Change::PutBack, Change::Renew(TimeDelta::zero()));
        assert_eq!(combined(ending, &[done, skipped], &[lost, done]), [done, done], "the first request ended both");
        assert_eq!(combined(ending, &[lost, skipped], &[done, skipped]), [done, skipped], "in whichever order");
        assert_eq!(combined(renewal, &[done, skipped], &[lost, skipped]), [lost, skipped], "it was lost since");
        assert_eq!(combined(renewal, &[skipped, skipped], &[skipped, done]), [skipped, done]);
    }
}
