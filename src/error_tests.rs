use std::{error::Error as _, time::Duration};

use super::*;

const ACTIONS: [Action; 14] = [
    Action::Connect,
    Action::Acquire,
    Action::Renew,
    Action::Release,
    Action::Abandon,
    Action::Migrate,
    Action::Inspect,
    Action::ForceRelease,
    Action::Forget,
    Action::Begin,
    Action::Confirm,
    Action::Commit,
    Action::Read,
    Action::Update,
];

fn refused() -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other("the server hung up"))
}

fn failed(action: Action, outcome: Certainty) -> Error {
    Error::Database(DatabaseFault::Failed { action, subject: "\"k\"".into(), outcome, source: refused() })
}

fn read_only(action: Action, outcome: Certainty) -> Error {
    Error::Database(DatabaseFault::ReadOnly { action, subject: "\"k\"".into(), outcome, source: refused() })
}

#[test]
fn a_lease_is_spoken_of_where_there_is_one() {
    for action in ACTIONS {
        let (subject, limit) = ("\"k\"".to_owned(), Duration::from_secs(5));
        for outcome in [Certainty::Unknown, Certainty::NothingChanged] {
            let of_a_claim = matches!(action, Action::Acquire | Action::Renew | Action::Release | Action::Abandon);
            let errors = [
                failed(action, outcome),
                read_only(action, outcome),
                Error::Database(DatabaseFault::TimedOut { action, subject: subject.clone(), limit, outcome }),
                Error::Database(DatabaseFault::NoConnection {
                    action,
                    subject: subject.clone(),
                    limit,
                    outcome,
                    source: sqlx::Error::PoolTimedOut,
                }),
            ];
            for text in errors.map(|error| error.to_string()) {
                assert_eq!(text.contains("lease"), of_a_claim && outcome == Certainty::Unknown, "{text}");
                assert_eq!(text.contains("may have been"), outcome == Certainty::Unknown, "{text}");
                assert_eq!(text.contains("nothing was changed"), outcome == Certainty::NothingChanged, "{text}");
            }
        }
    }
}

/// A second release would free a claim that was made since.
#[test]
fn what_may_have_been_changed_by_value_or_force_is_not_repeated() {
    let limit = Duration::from_secs(5);
    for action in ACTIONS {
        for outcome in [Certainty::Unknown, Certainty::NothingChanged] {
            let timed_out = DatabaseFault::TimedOut { action, subject: "\"k\"".into(), limit, outcome };
            let is_in_doubt = matches!(action, Action::Update | Action::Commit | Action::ForceRelease);
            let expected = outcome == Certainty::NothingChanged || !is_in_doubt;
            assert_eq!(Error::from(timed_out).is_retryable(), expected, "{action:?} {outcome:?}");
            assert_eq!(failed(action, outcome).is_retryable(), expected, "{action:?} {outcome:?}");
        }
    }
}

#[test]
fn the_cause_is_told_once_by_what_prints_the_chain() {
    let key = Key::new("k").unwrap();
    let errors = [
        failed(Action::Acquire, Certainty::NothingChanged),
        read_only(Action::Acquire, Certainty::NothingChanged),
        Error::Transaction(TransactionFault::Over {
            key: key.clone(),
            outcome: Certainty::Unknown,
            work: Some("no".into()),
            source: Some(refused()),
        }),
        Error::Transaction(TransactionFault::CommitUnknown { key, source: Some(refused()) }),
    ];
    for error in errors {
        assert!(!error.to_string().contains("hung up"), "{error}");
        assert!(error.source().is_some_and(|source| source.to_string().contains("hung up")), "{error}");
        assert_eq!(format!("{error:?}").matches("hung up").count(), 1, "{error:?}");
    }
}

/// `fn main() -> Result<(), Box<dyn Error>>` prints this text.
#[test]
fn what_a_main_prints_says_what_to_do() {
    let error: Box<dyn std::error::Error> = Error::Setup(Setup::TableMissing).into();
    assert!(format!("{error:?}").contains("call rowlock::migrate(&pool) once"), "{error:?}");
    assert_eq!(format!("{:?}", Invalid::new("no")), "no");
}

/// What stands for a session that was not had in time is no pool of the application's.
#[test]
fn a_cause_that_the_text_has_already_is_not_repeated() {
    let (action, subject, limit) = (Action::Abandon, "schedules".to_owned(), Duration::from_secs(5));
    let (outcome, source) = (Certainty::NothingChanged, sqlx::Error::PoolTimedOut);
    let text =
        format!("{:?}", Error::Database(DatabaseFault::NoConnection { action, subject, limit, outcome, source }));
    assert_eq!(text.matches("does not answer").count(), 1, "{text}");
    assert!(!text.contains("pool"), "{text}");
}
