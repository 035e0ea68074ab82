//! The rules table, by hand: each condition decides at least one of these cells.
//!
//! The tests stand apart from `rules.rs`, which other packages include with keys of their own.

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use crate::{
    key::{Holder, Key},
    rules::{LockState, Reason, Refusal, Row, Rules, Status, Terms, Verdict, judge, state},
};

pub(crate) const NOW: i64 = 1_000;

pub(crate) fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

fn holder(number: u128) -> Holder {
    Holder::new(Uuid::from_u128(number))
}

pub(crate) fn terms() -> Terms {
    Terms::default()
}

pub(crate) fn free(status: &str, began: Option<i64>) -> Row {
    Row {
        locked: false,
        status: status.to_owned(),
        begin_time: began.map(at),
        minutes: Some(10),
        client_ip: String::new(),
        holder: None,
        token: 1,
        expires_at: None,
        claimed_at: None,
        ended: false,
        awaited: false,
    }
}

pub(crate) fn held(by: u128, expires: Option<i64>) -> Row {
    let holder = Some(Uuid::from_u128(by));
    Row { locked: true, holder, claimed_at: Some(at(900)), expires_at: expires.map(at), ..free("P", Some(900)) }
}

fn by_another_program(began: i64) -> Row {
    Row { locked: true, ..free("P", Some(began)) }
}

fn judged(row: &Row, terms: &Terms) -> Verdict {
    judge(Some(row), at(NOW), holder(1), terms)
}

#[test]
fn a_claim_of_a_lock_ends_with_its_lease() {
    let article = Terms { rules: Rules::Article, ..terms() };
    assert_eq!(judge(None, at(NOW), holder(1), &terms()), Verdict::Create);
    assert_eq!(judged(&held(1, Some(NOW + 1)), &terms()), Verdict::Same);
    assert_eq!(judged(&held(1, Some(NOW - 1)), &article), Verdict::Same);
    for (expires, under_recover, under_article) in [
        (Some(NOW + 1), Verdict::Refuse(Reason::Held, Some(at(NOW + 1))), Reason::Held),
        (Some(NOW), Verdict::TakeOver, Reason::TimedOutUnfinished),
        (Some(NOW - 1), Verdict::TakeOver, Reason::TimedOutUnfinished),
        (None, Verdict::Refuse(Reason::Held, None), Reason::Held),
    ] {
        assert_eq!(judged(&held(2, expires), &terms()), under_recover, "{expires:?}");
        let refused = judged(&held(2, expires), &article);
        assert!(matches!(refused, Verdict::Refuse(reason, _) if reason == under_article), "{refused:?}");
    }
}

#[test]
fn a_claim_that_another_program_has_touched_is_that_programs() {
    assert!(held(1, None).is_rowlocks());
    for row in [
        Row { locked: false, ..held(1, None) },
        Row { holder: None, ..held(1, None) },
        Row { claimed_at: None, begin_time: None, ..held(1, None) },
        Row { begin_time: Some(at(901)), ..held(1, None) },
        Row { ended: true, ..held(1, None) },
    ] {
        assert!(!row.is_rowlocks(), "{row:?}");
        if row.locked {
            assert_eq!(judged(&row, &terms()), Verdict::Refuse(Reason::HeldByAnotherProgram, None), "{row:?}");
        }
    }
}

#[test]
fn a_lock_of_another_program_ends_where_its_minutes_are_known_to_count() {
    let clients = Terms { article_clients: Some(TimeDelta::zero()), ..terms() };
    let refused = |until| Verdict::Refuse(Reason::HeldByAnotherProgram, until);
    assert_eq!(judged(&by_another_program(NOW - 600), &clients), Verdict::TakeOver);
    assert_eq!(judged(&by_another_program(NOW - 599), &clients), refused(Some(at(NOW + 1))));
    assert_eq!(judged(&by_another_program(NOW - 600), &terms()), refused(None));
    let article = Terms { rules: Rules::Article, ..clients.clone() };
    assert_eq!(judged(&by_another_program(NOW - 600), &article), refused(None));
    let endless = Row { minutes: None, ..by_another_program(0) };
    assert_eq!(judged(&endless, &clients), refused(None));
    let overflowing = Row { minutes: Some(i64::MAX), ..by_another_program(0) };
    assert_eq!(judged(&overflowing, &clients), refused(Some(DateTime::<Utc>::MAX_UTC)));
}

#[test]
fn a_free_row_is_acquired_unless_its_status_or_its_min_interval_forbids_it() {
    let article = Terms { rules: Rules::Article, ..terms() };
    for (status, under_article) in [
        ("S", Verdict::Acquire),
        ("F", Verdict::Refuse(Reason::LastRunFailed, None)),
        ("P", Verdict::Refuse(Reason::NotSucceeded, None)),
    ] {
        assert_eq!(judged(&free(status, Some(0)), &terms()), Verdict::Acquire, "{status}");
        assert_eq!(judged(&free(status, Some(0)), &article), under_article, "{status}");
    }
    assert_eq!(judged(&free("S", Some(2 * NOW)), &terms()), Verdict::Acquire, "there is no minimum interval");
    let interval = Terms { min_interval: TimeDelta::seconds(100), ..terms() };
    let retries = Terms { retry_failed: true, ..interval.clone() };
    let within = Verdict::Refuse(Reason::WithinMinInterval, Some(at(NOW + 1)));
    assert_eq!(judged(&free("S", Some(NOW - 100)), &interval), Verdict::Acquire);
    assert_eq!(judged(&free("S", None), &interval), Verdict::Acquire);
    assert_eq!(judged(&free("S", Some(NOW - 99)), &interval), within);
    assert_eq!(judged(&free("F", Some(NOW - 99)), &interval), within);
    assert_eq!(judged(&free("S", Some(NOW - 99)), &retries), within);
    assert_eq!(judged(&free("F", Some(NOW - 99)), &retries), Verdict::Acquire);
}

#[test]
fn the_state_of_a_row_is_told() {
    let interval = Terms { min_interval: TimeDelta::seconds(100), ..terms() };
    for (row, expected) in [
        (held(2, Some(NOW + 1)), (LockState::Held, Some(at(NOW + 1)))),
        (held(2, Some(NOW)), (LockState::Expired, Some(at(NOW)))),
        (held(2, None), (LockState::Held, None)),
        (by_another_program(0), (LockState::HeldByAnotherProgram, None)),
        (free("S", Some(NOW - 99)), (LockState::WithinMinInterval, Some(at(NOW + 1)))),
        (free("S", Some(NOW - 100)), (LockState::Free, None)),
        (free("S", None), (LockState::Free, None)),
        (free("F", Some(NOW - 99)), (LockState::Failed, Some(at(NOW + 1)))),
        (free("F", Some(NOW - 100)), (LockState::Failed, None)),
    ] {
        assert_eq!(state(&row, at(NOW), &interval), expected, "{row:?}");
    }
}

/// Programs compare the names.
#[test]
fn the_names_never_change() {
    let reasons = [
        (Reason::Held, "held", "held"),
        (Reason::HeldByAnotherProgram, "held_by_another_program", "held by another program"),
        (Reason::TimedOutUnfinished, "timed_out_unfinished", "timed out unfinished"),
        (Reason::WithinMinInterval, "within_min_interval", "within its min interval"),
        (Reason::LastRunFailed, "last_run_failed", "the last run failed"),
        (Reason::NotSucceeded, "not_succeeded", "the last run did not succeed"),
        (Reason::Queued, "queued", "other waiters precede it"),
        (Reason::Busy, "busy", "busy"),
    ];
    for (reason, name, text) in reasons {
        assert_eq!((reason.name(), reason.to_string().as_str()), (name, text));
    }
    let states = [
        (LockState::Held, "held", "held"),
        (LockState::Expired, "expired", "expired"),
        (LockState::HeldByAnotherProgram, "held_by_another_program", "held by another program"),
        (LockState::WithinMinInterval, "within_min_interval", "within its min interval"),
        (LockState::Failed, "failed", "failed"),
        (LockState::Free, "free", "free"),
    ];
    for (state, name, text) in states {
        assert_eq!((state.name(), state.to_string().as_str()), (name, text));
    }
    assert_eq!((Status::Succeeded.letter(), Status::Failed.letter()), ("S", "F"));
}

#[test]
fn other_programs_are_told_an_hour_at_least_and_whole_minutes() {
    let minutes = |min_interval| Terms { min_interval, ..terms() }.minutes();
    assert_eq!(minutes(TimeDelta::zero()), 60);
    assert_eq!(minutes(TimeDelta::minutes(61)), 61);
    assert_eq!(minutes(TimeDelta::minutes(61) + TimeDelta::microseconds(1)), 62);
    let ahead = Terms { article_clients: Some(TimeDelta::hours(9)), ..terms() };
    assert_eq!((terms().offset(), ahead.offset()), (TimeDelta::zero(), TimeDelta::hours(9)));
}

#[test]
fn a_refusal_says_what_is_known() {
    let key = || Key::new("report").unwrap();
    let row = Row { client_ip: "one".to_owned(), ..held(2, Some(NOW + 60)) };
    let refusal = Refusal::new(key(), Reason::Held, row.expires_at, &row, at(NOW));
    assert_eq!(refusal.retry_after, Some(std::time::Duration::from_secs(60)));
    let said = "report: held, by one, since 1970-01-01 00:15:00 UTC, until 1970-01-01 00:17:40 UTC";
    assert_eq!(refusal.to_string(), said);
    let unknown = Refusal::new(key(), Reason::Busy, None, &free("S", None), at(NOW));
    assert_eq!(unknown.to_string(), "report: busy");
}
