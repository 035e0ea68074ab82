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
    let Next::Busy { key, needs_own_statement, .. } = of_all(vec![Some(free("S", None)), Some(free("S", None))]) else {
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
        let Next::Refuse(refusal) = next_of_any(&requests, replies, &terms()) else { panic!("both are held") };
        assert_eq!((refusal.key.as_str(), refusal.awaited), ("k0", awaited));
    }
}
