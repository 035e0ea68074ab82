//! Claims in batches: one statement for the requests of many holders.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use tokio::{sync::OnceCell, time::Instant};

use crate::{
    batch::op::Errand,
    key::{Claim, Key, Prior},
    lease::{handle::Tenure, renewer::Keeper},
    rules::{Row, Terms, Verdict, judge},
    schema::Table,
    store::{Answer, Ask, Change, Database, Reply},
};

/// What was granted: all that was asked for.
pub(crate) struct Granted<DB: Database> {
    pub tenure: Tenure<DB>,
    pub priors: Vec<Option<Prior>>,
}

/// What a claim came back with.
pub(crate) enum Claimed<DB: Database> {
    Granted(Granted<DB>),
    /// The answer came so late that its lease is over; asked again, it begins anew.
    Late,
    Not {
        answers: Vec<Answer>,
        /// They are the answers to whoever had come for the same keys.
        for_all: bool,
    },
}

/// Claims, sent for those who try. What is granted is held from here on, and abandoned if nobody waits for it any more.
pub(crate) struct Claims<DB: Database> {
    pub keeper: Arc<Keeper<DB>>,
    pub terms: Arc<Terms>,
    pub time_limit: Duration,
    pub table: Arc<OnceCell<Table>>,
}

/// What one holder asks for.
pub(crate) struct Wish {
    pub asks: Vec<Ask>,
    pub alone: bool,
}

impl<DB: Database> Errand<DB> for Claims<DB> {
    type Request = Wish;
    type Answer = Claimed<DB>;

    fn key(wish: &Wish) -> Option<&Key> {
        if let ([ask], false) = (&wish.asks[..], wish.alone) { Some(&ask.key) } else { None }
    }

    fn goes_with(_: &Wish, _: &Wish) -> bool {
        true
    }

    /// A refusal is one for all who had come before it was sent.
    fn share(claimed: &Claimed<DB>) -> Option<Claimed<DB>> {
        match claimed {
            Claimed::Not { answers, for_all: true } => Some(Claimed::Not { answers: answers.clone(), for_all: true }),
            _ => None,
        }
    }

    async fn run(&self, conn: &mut DB::Connection, wishes: &[Wish], sent: Instant) -> Reply<Vec<Claimed<DB>>> {
        let asks: Vec<Ask> = wishes.iter().flat_map(|wish| wish.asks.clone()).collect();
        let nowait = self.table.get().is_some_and(|table| table.nowait);
        let mut answers = DB::claim(conn, &asks, &self.terms, nowait).await?.into_iter();
        let mut claimed =
            |Wish { asks, .. }: &Wish| self.claimed(asks, answers.by_ref().take(asks.len()).collect(), sent);
        Ok(wishes.iter().map(&mut claimed).collect())
    }
}

impl<DB: Database> Claims<DB> {
    fn claimed(&self, asks: &[Ask], answers: Vec<Answer>, sent: Instant) -> Claimed<DB> {
        let (mut claims, mut priors) = (Vec::with_capacity(asks.len()), Vec::with_capacity(asks.len()));
        for (ask, answer) in asks.iter().zip(&answers) {
            if let Answer::Granted { token, prior } = answer {
                claims.push(Claim { key: ask.key.clone(), holder: ask.holder, token: *token });
                priors.push(prior.clone());
            }
        }
        if claims.len() < asks.len() {
            let terms = &self.terms;
            let is_lone = |(ask, answer): (&Ask, &Answer)| {
                let Answer::Seen { row, now } = answer else { return false };
                is_lone(judge(row.as_ref(), *now, ask.holder, terms), row.as_ref(), *now)
            };
            let for_all = !asks.iter().zip(&answers).any(is_lone);
            return Claimed::Not { answers, for_all };
        }
        if sent.elapsed() >= self.keeper.counted() {
            return Claimed::Late;
        }
        // What was taken over cannot be put back; the next one takes it over in its turn.
        let unheard = if priors.iter().any(Option::is_some) { Change::Abandon } else { Change::PutBack };
        let tenure = Tenure::begin(&self.keeper, claims, sent, self.time_limit, unheard);
        Claimed::Granted(Granted { tenure, priors })
    }
}

/// Whether the rules grant it, and a statement of many may not: to be taken over, or with a token that the clock has not passed.
pub(crate) fn is_lone(verdict: Verdict, row: Option<&Row>, now: DateTime<Utc>) -> bool {
    let ahead = row.is_some_and(|row| row.token >= now.timestamp_micros());
    verdict == Verdict::TakeOver || (verdict == Verdict::Acquire && ahead)
}
