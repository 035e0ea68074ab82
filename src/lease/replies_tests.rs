use chrono::TimeDelta;
use uuid::Uuid;

use super::*;
use crate::{key::Holder, rules::Rules};

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

fn terms() -> Terms {
    Terms {
        rules: Rules::Recover,
        min_interval: TimeDelta::zero(),
        lease: TimeDelta::seconds(30),
        retry_failed: false,
        article_clients: None,
        label: String::new(),
    }
}

fn free() -> Row {
    Row {
        locked: false,
        status: "S".to_owned(),
        begin_time: Some(at(900)),
        minutes: Some(60),
        client_ip: String::new(),
        holder: None,
        token: 1,
        expires_at: None,
        claimed_at: None,
        ended: false,
        awaited: false,
    }
}

/// A row of another holder, whose lease ends at this second. It is 1000 now.
fn held(until: i64, awaited: bool) -> Row {
    let (holder, claimed_at) = (Some(Uuid::from_u128(2)), Some(at(900)));
    Row { locked: true, holder, claimed_at, expires_at: Some(at(until)), awaited, ..free() }
}

fn seen(rows: Vec<Option<Row>>) -> (Vec<ClaimRequest>, Vec<ClaimReply>) {
    let holder = Holder::new(Uuid::from_u128(1));
    let request = |number| ClaimRequest { key: Key::new(&format!("k{number}")).unwrap(), holder, waited: false };
    let requests = (0..rows.len()).map(request).collect();
    (requests, rows.into_iter().map(|row| ClaimReply::Seen { row, now: at(1000) }).collect())
}

fn of_all(rows: Vec<Option<Row>>) -> Next {
    let (requests, replies) = seen(rows);
    next_of_all(&requests, replies, &terms())
}

#[test]
fn missing_rows_are_created_before_busy_ones_are_retried() {
    let Next::Create(keys) = of_all(vec![Some(free()), None, None]) else { panic!("rows are missing") };
    assert_eq!(keys.iter().map(Key::as_str).collect::<Vec<_>>(), ["k1", "k2"]);
    let Next::Busy { key, needs_own_statement, .. } = of_all(vec![Some(free()), Some(free())]) else {
        panic!("another transaction has a row")
    };
    assert_eq!((key.unwrap().as_str(), needs_own_statement), ("k0", false));
}

#[test]
fn one_takeover_needs_a_statement_of_its_own() {
    for rows in [[free(), held(999, false)], [held(999, false), free()]] {
        let next = of_all(rows.map(Some).into());
        assert!(matches!(next, Next::Busy { needs_own_statement: true, .. }));
    }
}

#[test]
fn any_of_several_is_awaited_only_if_each_is() {
    for (other, awaited) in [(true, true), (false, false)] {
        let (requests, replies) = seen(vec![Some(held(1010, true)), Some(held(1020, other))]);
        let Next::Refuse(refusal) = next_of_any(&requests, replies, &terms()) else { panic!("both are held") };
        assert_eq!((refusal.key.as_str(), refusal.awaited), ("k0", awaited));
    }
}
