//! Batched claims: one statement for the requests of many holders.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use tokio::{sync::OnceCell, time::Instant};

use crate::{
    batch::op::BatchOp,
    key::{Claim, Key, PreviousClaim},
    lease::{handle::LeaseHandle, renewer::Renewer},
    rules::{Row, Terms, Verdict, judge},
    schema::Table,
    store::{Change, ClaimReply, ClaimRequest, Database, Reply},
};

/// A granted claim request. All of its keys are granted.
pub(crate) struct Granted<DB: Database> {
    pub handle: LeaseHandle<DB>,
    pub priors: Vec<Option<PreviousClaim>>,
}

/// The outcome of a claim request.
pub(crate) enum Claimed<DB: Database> {
    Granted(Granted<DB>),
    /// The reply arrived after the lease had ended. The request is sent again and begins a new
    /// lease.
    Late,
    Not {
        answers: Vec<ClaimReply>,
        /// The replies apply to all requests for the same keys that arrived before this one was
        /// sent.
        for_all: bool,
    },
}

/// The batch operation that sends claims. A granted claim is held from here on, and ended if its
/// caller no longer waits for it.
pub(crate) struct Claims<DB: Database> {
    pub renewer: Arc<Renewer<DB>>,
    pub terms: Arc<Terms>,
    pub time_limit: Duration,
    pub table: Arc<OnceCell<Table>>,
}

/// The claim request of one holder.
pub(crate) struct ClaimSet {
    pub asks: Vec<ClaimRequest>,
    pub alone: bool,
}

impl<DB: Database> BatchOp<DB> for Claims<DB> {
    type Request = ClaimSet;
    type Answer = Claimed<DB>;

    fn key(wish: &ClaimSet) -> Option<&Key> {
        if let ([ask], false) = (&wish.asks[..], wish.alone) { Some(&ask.key) } else { None }
    }

    fn goes_with(_: &ClaimSet, _: &ClaimSet) -> bool {
        true
    }

    /// A refusal applies to all requests that arrived before it was sent.
    fn share(claimed: &Claimed<DB>) -> Option<Claimed<DB>> {
        match claimed {
            Claimed::Not { answers, for_all: true } => Some(Claimed::Not { answers: answers.clone(), for_all: true }),
            _ => None,
        }
    }

    async fn run(&self, conn: &mut DB::Connection, wishes: &[ClaimSet], sent: Instant) -> Reply<Vec<Claimed<DB>>> {
        let asks: Vec<ClaimRequest> = wishes.iter().flat_map(|wish| wish.asks.clone()).collect();
        let nowait = self.table.get().is_some_and(|table| table.nowait);
        let mut answers = DB::claim(conn, &asks, &self.terms, nowait).await?.into_iter();
        let mut claimed =
            |ClaimSet { asks, .. }: &ClaimSet| self.claimed(asks, answers.by_ref().take(asks.len()).collect(), sent);
        Ok(wishes.iter().map(&mut claimed).collect())
    }
}

impl<DB: Database> Claims<DB> {
    fn claimed(&self, asks: &[ClaimRequest], answers: Vec<ClaimReply>, sent: Instant) -> Claimed<DB> {
        let (mut claims, mut priors) = (Vec::with_capacity(asks.len()), Vec::with_capacity(asks.len()));
        for (ask, answer) in asks.iter().zip(&answers) {
            if let ClaimReply::Granted { token, prior } = answer {
                claims.push(Claim { key: ask.key.clone(), holder: ask.holder, token: *token });
                priors.push(prior.clone());
            }
        }
        if claims.len() < asks.len() {
            let terms = &self.terms;
            let needs_own_statement = |(ask, answer): (&ClaimRequest, &ClaimReply)| {
                let ClaimReply::Seen { row, now } = answer else { return false };
                needs_own_statement(judge(row.as_ref(), *now, ask.holder, terms), row.as_ref(), *now)
            };
            let for_all = !asks.iter().zip(&answers).any(needs_own_statement);
            return Claimed::Not { answers, for_all };
        }
        if sent.elapsed() >= self.renewer.counted() {
            return Claimed::Late;
        }
        // A claim that was taken over cannot be put back. It is abandoned, and the next claim takes
        // it over.
        let unheard = if priors.iter().any(Option::is_some) { Change::Abandon } else { Change::PutBack };
        let handle = LeaseHandle::begin(&self.renewer, claims, sent, self.time_limit, unheard);
        Claimed::Granted(Granted { handle, priors })
    }
}

/// Returns whether the rules grant the claim although a statement of many requests may not: the
/// claim has to be taken over, or its token is one that the clock has not passed.
pub(crate) fn needs_own_statement(verdict: Verdict, row: Option<&Row>, now: DateTime<Utc>) -> bool {
    let ahead = row.is_some_and(|row| row.token >= now.timestamp_micros());
    verdict == Verdict::TakeOver || (verdict == Verdict::Acquire && ahead)
}
