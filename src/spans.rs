//! Spans of `tracing`, around what takes time: `docs/operating.md` lists them with their fields.
//!
//! All of them have this module's name as their target. A field whose value is not known when the
//! span begins is recorded later. Each future is instrumented with its span, so that no span is
//! entered across an await.

use std::fmt::Display;

use tracing::{
    Span,
    field::{Empty, display},
    info_span,
};

use crate::{
    key::{Claim, Key},
    rules::Refusal,
    transaction::error::RunError,
};

/// A request for keys. If any one of them is enough, its key is recorded when it is known.
pub fn acquire(keys: &[Key], any: bool) -> Span {
    let key = keys.first().filter(|_| !any).map(display);
    let keys = keys.len();
    info_span!("acquire", key, keys, token = Empty, holder = Empty, outcome = Empty, reason = Empty, error = Empty)
}

pub fn acquired(span: &Span, claim: &Claim, any: bool) {
    if any {
        span.record("key", display(&claim.key));
    }
    span.record("token", display(claim.token)).record("holder", display(claim.holder)).record("outcome", "acquired");
}

pub fn refused(span: &Span, refusal: &Refusal, any: bool) {
    if any {
        span.record("key", display(&refusal.key));
    }
    span.record("reason", refusal.reason.name()).record("outcome", "refused");
}

/// Work under a key: the request, the work, and the end of the claim.
pub fn run(key: &str) -> Span {
    info_span!("run", key, token = Empty, outcome = Empty, reason = Empty, error = Empty)
}

/// A transaction that depends on a claim, with all its attempts.
pub fn transaction(key: &str) -> Span {
    info_span!("transaction", key, token = Empty, attempts = Empty, outcome = Empty, reason = Empty, error = Empty)
}

/// A run of a schedule.
#[cfg(feature = "schedule")]
pub fn tick(claim: &Claim, slot: chrono::DateTime<chrono::Utc>, attempt: u32) -> Span {
    let (schedule, token) = (&claim.key, claim.token);
    info_span!("run", %schedule, %slot, attempt, %token, outcome = Empty, error = Empty)
}

/// Records the error of a request that has no other outcome.
pub fn failed(span: &Span, error: &dyn Display) {
    span.record("error", display(error)).record("outcome", "error");
}

/// Records the result of work under a key.
pub fn ended<T, E>(span: &Span, result: &Result<T, RunError<E>>, done: &'static str) {
    let outcome = match result {
        Ok(_) => done,
        Err(RunError::Work(_)) => "failed",
        Err(RunError::Lost { .. }) => "lost",
        Err(RunError::Refused(refusal)) => {
            span.record("reason", refusal.reason.name());
            "refused"
        }
        Err(RunError::Other(error)) => return failed(span, error),
    };
    span.record("outcome", outcome);
}
