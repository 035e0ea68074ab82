//! What a batch requires of its requests.

use std::future::Future;

use tokio::time::Instant;

use crate::{
    key::Key,
    store::{Database, Reply},
};

/// A kind of request.
pub(crate) trait BatchOp<DB: Database>: Send + Sync + 'static {
    type Request: Send + Sync + 'static;
    type Output: Send + 'static;

    /// Whether the requests of a statement that the server refused are sent again by their callers,
    /// each by itself and side by side, as after contention. The batch sends others one after the
    /// other.
    const APART_BY_CALLER: bool = false;

    /// Returns the key of the request. One statement never carries two requests for the same key. A
    /// request without a key is sent by itself.
    fn key(request: &Self::Request) -> Option<&Key>;

    /// Returns whether one statement can carry both requests.
    fn can_share_statement(request: &Self::Request, other: &Self::Request) -> bool;

    /// Returns a copy of the output, if it is valid for every request for the same key that was
    /// queued before the statement was sent.
    fn share(output: &Self::Output) -> Option<Self::Output>;

    /// Sends all requests. Returns one output per request, in order.
    fn run(
        &self,
        conn: &mut DB::Connection,
        requests: &[Self::Request],
        sent: Instant,
    ) -> impl Future<Output = Reply<Vec<Self::Output>>> + Send;
}

/// The deadlines of a request.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// When the caller stops waiting.
    pub caller: Instant,
    /// When the statement is given up.
    pub statement: Instant,
}
