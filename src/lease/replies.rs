//! What the replies to a claim request that was not granted call for: pure functions.

use std::{ops::ControlFlow, time::Duration};

use chrono::{DateTime, Utc};

use crate::{
    key::Key,
    lease::{
        claims::needs_own_statement,
        wanted::{Choice, choose},
    },
    rules::{Reason, Refusal, Row, Terms, Verdict, judge},
    store::{ClaimReply, ClaimRequest},
};

/// What the claim replies call for.
pub(crate) enum Next {
    Refuse(Refusal),
    Create(Vec<Key>),
    /// Send the request again.
    Retry,
    /// Another transaction has the row of this key locked, which was seen like this; or the claim
    /// needs a statement of its own.
    Busy {
        key: Option<Key>,
        row: Option<Row>,
        needs_own_statement: bool,
    },
}

/// Every key is needed. The first refusal decides, before any row is created. Missing rows are
/// created before busy rows are retried, of which the first is told.
pub(crate) fn next_of_all(requests: &[ClaimRequest], replies: Vec<ClaimReply>, terms: &Terms) -> Next {
    let (mut create, mut busy, mut own_statement) = (Vec::new(), None, false);
    for (request, reply) in requests.iter().zip(replies) {
        let ClaimReply::Seen { row, now } = reply else { continue };
        match (judge(row.as_ref(), now, request.holder, terms), row) {
            (Verdict::Refuse(reason, until), Some(row)) => {
                return Next::Refuse(Refusal::new(request.key.clone(), reason, until, &row, now));
            }
            (Verdict::Create, _) => create.push(request.key.clone()),
            (verdict, row) => {
                own_statement |= needs_own_statement(verdict, row.as_ref(), now);
                busy.get_or_insert_with(|| (request.key.clone(), row));
            }
        }
    }
    if !create.is_empty() {
        return Next::Create(create);
    }
    let (key, row) = busy.map_or((None, None), |(key, row)| (Some(key), row));
    Next::Busy { key, row, needs_own_statement: own_statement }
}

/// One key is enough. Goes on with the index of the key to claim, if one may be. The refusal is
/// that of the key that may be free first, and all of its rows are awaited only if each of them is.
pub(crate) fn next_of_any(
    requests: &[ClaimRequest],
    replies: Vec<ClaimReply>,
    terms: &Terms,
) -> ControlFlow<Next, usize> {
    let seen = |reply| match reply {
        ClaimReply::Seen { row, now } => (row, now),
        ClaimReply::Granted { .. } | ClaimReply::Withheld => (None, DateTime::UNIX_EPOCH),
    };
    let mut rows: Vec<(Option<Row>, DateTime<Utc>)> = replies.into_iter().map(seen).collect();
    let judged = requests.iter().zip(&rows);
    let verdicts: Vec<Verdict> =
        judged.map(|(request, (row, now))| judge(row.as_ref(), *now, request.holder, terms)).collect();
    match choose(&verdicts, fastrand::usize(..)) {
        Choice::Claim(index) => ControlFlow::Continue(index),
        Choice::Refuse(index) => {
            let awaited = rows.iter().all(|(row, _)| row.as_ref().is_some_and(|row| row.awaited));
            let (row, now) = rows.swap_remove(index);
            match (verdicts.get(index), row) {
                (Some(Verdict::Refuse(reason, until)), Some(row)) => {
                    let key = requests[index].key.clone();
                    ControlFlow::Break(Next::Refuse(Refusal {
                        awaited,
                        ..Refusal::new(key, *reason, *until, &row, now)
                    }))
                }
                (_, row) => {
                    let key = requests.get(index).map(|request| request.key.clone());
                    ControlFlow::Break(Next::Busy { key, row, needs_own_statement: false })
                }
            }
        }
    }
}

/// The refusal of a request that other waiters precede.
pub(crate) fn queued(key: Key, left: Duration) -> Refusal {
    Refusal { retry_after: Some(left), awaited: true, ..Refusal::bare(key, Reason::Queued) }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::{
        key::Holder,
        rules_tests::{NOW, at, free, held, terms},
    };

    fn seen(rows: Vec<Option<Row>>) -> (Vec<ClaimRequest>, Vec<ClaimReply>) {
        let holder = Holder::new(Uuid::from_u128(1));
        let request = |number| ClaimRequest { key: Key::new(&format!("k{number}")).unwrap(), holder, waited: false };
        let requests = (0..rows.len()).map(request).collect();
        (requests, rows.into_iter().map(|row| ClaimReply::Seen { row, now: at(NOW) }).collect())
    }

    fn of_all(rows: Vec<Option<Row>>) -> Next {
        let (requests, replies) = seen(rows);
        next_of_all(&requests, replies, &terms())
    }

    #[test]
    fn missing_rows_are_created_before_busy_ones_are_retried() {
        let Next::Create(keys) = of_all(vec![Some(free("S", None)), None, None]) else { panic!("rows are missing") };
        assert_eq!(keys.iter().map(Key::as_str).collect::<Vec<_>>(), ["k1", "k2"]);
        let Next::Busy { key, needs_own_statement, .. } = of_all(vec![Some(free("S", None)), Some(free("S", None))])
        else {
            panic!("another transaction has a row")
        };
        assert_eq!((key.unwrap().as_str(), needs_own_statement), ("k0", false));
    }

    #[test]
    fn one_takeover_needs_a_statement_of_its_own() {
        for rows in [[free("S", None), held(2, Some(NOW - 1))], [held(2, Some(NOW - 1)), free("S", None)]] {
            let next = of_all(rows.map(Some).into());
            assert!(matches!(next, Next::Busy { needs_own_statement: true, .. }));
        }
    }

    #[test]
    fn any_of_several_is_awaited_only_if_each_is() {
        for (other, awaited) in [(true, true), (false, false)] {
            let (requests, replies) = seen(vec![
                Some(Row { awaited: true, ..held(2, Some(NOW + 10)) }),
                Some(Row { awaited: other, ..held(2, Some(NOW + 20)) }),
            ]);
            let ControlFlow::Break(Next::Refuse(refusal)) = next_of_any(&requests, replies, &terms()) else {
                panic!("both are held")
            };
            assert_eq!((refusal.key.as_str(), refusal.awaited), ("k0", awaited));
        }
    }
}
