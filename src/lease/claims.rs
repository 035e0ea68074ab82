//! Requests about claims that are sent in batches: the claims of many holders, the creation of the
//! rows of keys that come for the first time, and reads that show which claims were made.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};

use crate::{
    key::{Claim, Key},
    lease::{handle::LeaseHandle, ledger::Pending, terms::KeyTerms},
    rules::{Row, Verdict, judge},
    session::{
        exchange::{Answer, Exchange, Request, exchange_on},
        loan::Loan,
        queue::Batched,
        sessions::Sessions,
        time::Instant,
        timers::timeout_at,
    },
    store::{
        ClaimReply, ClaimRequest, Database, Form, Reply, TooLate,
        admin::{KeyRange, Listed},
        failure::Failure,
    },
};

/// How long a statement of several requests waits for another transaction's uncommitted insert of
/// one of their keys. After that, each of them is sent by itself.
const SHARED_LOCK_TIMEOUT: Duration = Duration::from_millis(50);

/// The outcome of a claim request.
pub(crate) enum Claimed<DB: Database> {
    /// All of its keys are granted.
    Granted(LeaseHandle<DB>),
    Not {
        replies: Vec<ClaimReply>,
        /// The replies apply to all requests for the same keys that arrived before this one was
        /// sent.
        for_all: bool,
        /// The request was sent twice, and one of the two has no reply; or the reply arrived after
        /// the lease had ended. The request that follows begins a new lease.
        unanswered: bool,
    },
}

/// The claim request of one holder. A granted claim is held from its reply on, and ended if its
/// caller no longer waits for it.
pub(crate) struct ClaimSet<DB: Database> {
    pub requests: Vec<ClaimRequest>,
    pub key_terms: Arc<KeyTerms<DB>>,
    /// The rows are only read: one of the keys is enough, and none has been chosen.
    pub look: bool,
    /// Told when the claim is sent.
    pub pending: Pending,
}

impl<DB: Database> Batched<DB> for ClaimSet<DB> {
    type Output = Claimed<DB>;

    fn key(&self) -> Option<&Key> {
        if let [request] = &self.requests[..] { Some(&request.key) } else { None }
    }

    /// A claim statement applies one set of terms. Handles on equal terms share them.
    fn can_share_statement(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.key_terms, &other.key_terms)
    }

    /// A refusal applies to all requests that arrived before it was sent.
    fn share(claimed: &Claimed<DB>) -> Option<Claimed<DB>> {
        match claimed {
            Claimed::Not { replies, for_all: true, .. } => {
                Some(Claimed::Not { replies: replies.clone(), for_all: true, unanswered: false })
            }
            _ => None,
        }
    }

    async fn run(
        &self,
        sets: &[Self],
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<Claimed<DB>>, Failure> {
        let Self { key_terms, look, .. } = self;
        sets.iter().for_each(|set| set.pending.set_in_flight(!look));
        let requests: Vec<ClaimRequest> = sets.iter().flat_map(|set| set.requests.clone()).collect();
        let lease = key_terms.terms.lease.to_std().unwrap_or_default();
        let statement = Claiming { requests: &requests, key_terms, form, look: *look };
        let asked = requests.iter().filter(|_| !look).map(|request| (request.key.clone(), request.holder));
        let in_flight = key_terms.renewer.ledger.sending(asked.collect(), limit, lease);
        let Exchange { reply, unanswered } = exchange_on(session, sessions, limit, &statement).await;
        if !unanswered {
            in_flight.settled();
        }
        let Answer { sent, reply: replies } = reply?;
        let mut replies = replies.into_iter();
        let claimed = |set: &ClaimSet<DB>| {
            let replies = replies.by_ref().take(set.requests.len()).collect();
            set.claimed(replies, sent, unanswered)
        };
        Ok(sets.iter().map(claimed).collect())
    }
}

/// One statement that claims for several requests on equal terms, or reads their rows.
struct Claiming<'a, DB: Database> {
    requests: &'a [ClaimRequest],
    key_terms: &'a KeyTerms<DB>,
    form: Form,
    look: bool,
}

impl<DB: Database> Request<DB> for Claiming<'_, DB> {
    type Reply = Vec<ClaimReply>;

    async fn send(&self, conn: &mut DB::Connection, not_after: Option<DateTime<Utc>>) -> Reply<Vec<ClaimReply>> {
        let terms = &self.key_terms.terms;
        if self.look {
            return DB::look(conn, self.requests, terms).await;
        }
        DB::claim(conn, self.requests, terms, not_after, self.form).await
    }

    fn too_late(&self, replies: &Vec<ClaimReply>, not_after: Option<DateTime<Utc>>) -> Option<TooLate> {
        // What was granted is not asked for again.
        let is_granted = replies.iter().any(|reply| matches!(reply, ClaimReply::Granted { .. }));
        let not_after = not_after.filter(|_| !self.look && !is_granted)?;
        let late = self.requests.iter().zip(replies).find_map(|(request, reply)| match reply {
            ClaimReply::Seen { row: Some(row), now } if *now > not_after => {
                let verdict = judge(Some(row), *now, request.holder, &self.key_terms.terms);
                (!matches!(verdict, Verdict::Refuse(..))).then_some(*now)
            }
            _ => None,
        });
        late.map(|now| TooLate { now })
    }

    /// A row that could be granted may be locked by the other request of the same holder.
    fn is_settled(&self, replies: &Vec<ClaimReply>) -> bool {
        self.look
            || self.requests.iter().zip(replies).all(|(request, reply)| match reply {
                ClaimReply::Granted { .. } => true,
                ClaimReply::Seen { row, now } => {
                    let verdict = judge(row.as_ref(), *now, request.holder, &self.key_terms.terms);
                    matches!(verdict, Verdict::Refuse(..) | Verdict::Create)
                }
                ClaimReply::Withheld => true,
            })
    }

    fn combined(&self, earlier: Vec<ClaimReply>, later: Vec<ClaimReply>) -> Vec<ClaimReply> {
        let granted = |(earlier, later)| if matches!(earlier, ClaimReply::Granted { .. }) { earlier } else { later };
        earlier.into_iter().zip(later).map(granted).collect()
    }
}

impl<DB: Database> ClaimSet<DB> {
    fn claimed(&self, replies: Vec<ClaimReply>, sent: Instant, unanswered: bool) -> Claimed<DB> {
        let Self { requests, key_terms, .. } = self;
        let (mut claims, mut priors) = (Vec::with_capacity(requests.len()), Vec::with_capacity(requests.len()));
        for (request, reply) in requests.iter().zip(&replies) {
            if let ClaimReply::Granted { token, prior } = reply {
                claims.push(Claim { key: request.key.clone(), holder: request.holder, token: *token });
                priors.push(prior.clone());
            }
        }
        if claims.len() < requests.len() {
            let needs_own_statement = |(request, reply): (&ClaimRequest, &ClaimReply)| {
                let ClaimReply::Seen { row, now } = reply else { return false };
                needs_own_statement(judge(row.as_ref(), *now, request.holder, &key_terms.terms), row.as_ref(), *now)
            };
            let for_all = !requests.iter().zip(&replies).any(needs_own_statement);
            return Claimed::Not { replies, for_all, unanswered };
        }
        if sent.elapsed() >= key_terms.span().local() {
            let now = Instant::now();
            for Claim { key, holder, .. } in claims {
                key_terms.renewer.ledger.add((key, holder), now, now + key_terms.span().of_row());
            }
            return Claimed::Not { replies: Vec::new(), for_all: false, unanswered: true };
        }
        Claimed::Granted(LeaseHandle::begin(key_terms, claims, priors, sent))
    }
}

/// Returns whether the rules grant the claim although a statement of many requests may not: the
/// claim has to be taken over, or its token is one that the clock has not passed.
pub(crate) fn needs_own_statement(verdict: Verdict, row: Option<&Row>, now: DateTime<Utc>) -> bool {
    let ahead = row.is_some_and(|row| row.token >= now.timestamp_micros());
    verdict == Verdict::TakeOver || (verdict == Verdict::Acquire && ahead)
}

/// The creation of rows. Its statement is sent without a wait for the disk where that is possible:
/// a row that is lost is created again, and the claim that follows waits.
pub(crate) struct Creation {
    /// Several keys of one holder are created together.
    pub keys: Vec<Key>,
    pub minutes: i32,
}

impl<DB: Database> Batched<DB> for Creation {
    type Output = ();

    /// One of them may wait for a row.
    const APART_BY_CALLER: bool = true;

    fn key(&self) -> Option<&Key> {
        if let [key] = &self.keys[..] { Some(key) } else { None }
    }

    fn can_share_statement(&self, other: &Self) -> bool {
        self.minutes == other.minutes
    }

    /// The row exists for all.
    fn share((): &()) -> Option<()> {
        Some(())
    }

    async fn run(
        &self,
        creations: &[Self],
        mut session: Loan<DB>,
        _: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<()>, Failure> {
        // The server gives up slightly earlier than the client, so that no backend continues to
        // wait there.
        let left = (limit - Instant::now()).mul_f64(0.9);
        let lock_timeout = if creations.len() == 1 { left } else { SHARED_LOCK_TIMEOUT };
        let mut keys: Vec<Key> = creations.iter().flat_map(|creation| creation.keys.clone()).collect();
        keys.sort(); // instances that insert the same keys do not deadlock
        let creating = DB::create(session.get(), &keys, self.minutes, lock_timeout, form);
        let reply = timeout_at(limit, creating).await;
        session.settle(reply)?;
        Ok(vec![(); creations.len()])
    }
}

/// One read of a range of keys, which shows every claim that was committed before it. Concurrent
/// readers of one key share a read that begins after all of them have asked for it.
pub(crate) struct RangeRead<DB: Database> {
    pub keys: KeyRange,
    pub key_terms: Arc<KeyTerms<DB>>,
}

impl<DB: Database> Batched<DB> for RangeRead<DB> {
    type Output = Vec<Listed>;

    /// A read of several keys is sent by itself.
    fn key(&self) -> Option<&Key> {
        self.keys.is_one().then_some(&self.keys.first)
    }

    /// One statement serves the requests for one key.
    fn can_share_statement(&self, other: &Self) -> bool {
        self.keys.first == other.keys.first && Arc::ptr_eq(&self.key_terms, &other.key_terms)
    }

    /// The rows are as they were after each of these requests was made.
    fn share(rows: &Vec<Listed>) -> Option<Vec<Listed>> {
        Some(rows.clone())
    }

    async fn run(
        &self,
        _one: &[Self],
        session: Loan<DB>,
        sessions: &Sessions<DB>,
        form: Form,
        limit: Instant,
    ) -> Result<Vec<Vec<Listed>>, Failure> {
        // A statement has one read: no two keys share one.
        let answer = exchange_on(session, sessions, limit, &Fresh { read: self, form }).await;
        Ok(vec![answer.reply?.reply])
    }
}

/// A read that shows what was committed before it.
struct Fresh<'a, DB: Database> {
    read: &'a RangeRead<DB>,
    form: Form,
}

impl<DB: Database> Request<DB> for Fresh<'_, DB> {
    type Reply = Vec<Listed>;

    fn send(
        &self,
        conn: &mut DB::Connection,
        _: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Vec<Listed>>> + Send {
        DB::read_range(conn, &self.read.keys, &self.read.key_terms.terms, self.form)
    }
}
