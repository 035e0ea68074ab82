//! Changes of claims that stand: renewals and endings. A connection that stops replying, or a row
//! that the server refuses to change, does not affect the other claims.

use std::ops::Range;

use tokio::time::Instant;

use crate::{
    hedge::{Answer, Exchange, Hedge, Request},
    key::Claim,
    store::{
        Change, Database, Form, Outcome, Reply,
        failure::{Remedy, remedy},
        skipped_among,
    },
};

/// How many statements in a row may fail before the rest waits for the next time. So many failures
/// are unlikely to be caused by single rows.
const FAILURES: usize = 64;

pub(crate) struct Changes<DB: Database> {
    pub hedge: Hedge<DB>,
}

/// One change of several claims.
struct ChangeRequest<'a> {
    claims: &'a [Claim],
    change: Change,
}

impl<DB: Database> Request<DB> for ChangeRequest<'_> {
    type Reply = Vec<Outcome>;

    fn send(&self, conn: &mut DB::Connection) -> impl Future<Output = Reply<Vec<Outcome>>> + Send {
        DB::change(conn, self.claims, self.change, None, Form::Common)
    }

    fn is_settled(outcomes: &Vec<Outcome>) -> bool {
        skipped_among(outcomes).is_none()
    }
}

pub(crate) struct ChangeReply {
    /// When the request that was answered was sent.
    pub sent: Instant,
    /// One per claim, in order.
    pub outcomes: Vec<Outcome>,
}

/// The result of a request for one of several groups.
pub(crate) struct GroupReply {
    pub reply: Result<ChangeReply, Remedy>,
    pub unanswered: bool,
}

impl<DB: Database> Changes<DB> {
    /// Sends one change for all of these claims, on a second connection too if the first does not
    /// answer.
    pub async fn send(&self, claims: &[Claim], change: Change, limit: Instant) -> Exchange<ChangeReply> {
        let Exchange { reply, unanswered } = self.hedge.send(&ChangeRequest { claims, change }, limit).await;
        let reply = reply.map(|Answer { sent, reply: outcomes }| ChangeReply { sent, outcomes });
        Exchange { reply, unanswered }
    }

    /// Sends one change for the claims of several groups, in one statement if possible. A
    /// statement that the server refuses is split in halves and sent again, so that only the
    /// groups that cause the refusal are refused.
    ///
    /// The groups from index `refused_from` on were refused before. They are sent apart from the
    /// others.
    pub async fn send_apart(
        &self,
        groups: &[Vec<Claim>],
        refused_from: usize,
        change: Change,
        limit: Instant,
    ) -> Vec<GroupReply> {
        let mut replies: Vec<GroupReply> = Vec::with_capacity(groups.len());
        // In the order of the groups, the next range last.
        let mut left: Vec<Range<usize>> = vec![refused_from..groups.len(), 0..refused_from];
        let mut failures = 0;
        while let Some(range) = left.pop() {
            let (many, all) = (range.len(), &groups[range.clone()]);
            if many == 0 {
                continue;
            }
            if failures >= FAILURES || Instant::now() >= limit {
                replies.extend(all.iter().map(|_| GroupReply { reply: Err(Remedy::Apart), unanswered: false }));
                continue;
            }
            let Exchange { reply, unanswered } = self.send(&all.concat(), change, limit).await;
            failures = if reply.is_ok() { 0 } else { failures + 1 };
            match reply {
                Ok(ChangeReply { sent, outcomes }) => {
                    let mut rest = outcomes.into_iter();
                    replies.extend(all.iter().map(|claims| {
                        let outcomes = rest.by_ref().take(claims.len()).collect();
                        GroupReply { reply: Ok(ChangeReply { sent, outcomes }), unanswered }
                    }));
                }
                Err(failure) => {
                    let remedy = remedy(&failure, many);
                    let halves = remedy == Remedy::Apart && many > 1 && !unanswered;
                    if halves {
                        tracing::debug!(?change, groups = many, %failure, "refused, and sent again by halves");
                        let middle = range.start + many / 2;
                        left.extend([middle..range.end, range.start..middle]);
                    } else {
                        tracing::debug!(?change, groups = many, %failure, "not answered, or refused");
                        replies.extend(all.iter().map(|_| GroupReply { reply: Err(remedy), unanswered }));
                    }
                }
            }
        }
        replies
    }
}
