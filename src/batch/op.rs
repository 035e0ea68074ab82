//! What a batch needs to know of its requests.

use std::future::Future;

use tokio::time::Instant;

use crate::{
    key::Key,
    store::{Database, Reply},
};

/// A kind of request.
pub(crate) trait BatchOp<DB: Database>: Send + Sync + 'static {
    type Request: Send + Sync + 'static;
    type Answer: Send + 'static;

    /// What it is about: two for the same key never travel in one statement. Without one it goes alone.
    fn key(request: &Self::Request) -> Option<&Key>;

    /// Whether one statement can do both.
    fn goes_with(request: &Self::Request, other: &Self::Request) -> bool;

    /// The same answer once more, if it is one for all who had come for the same key before it was asked for.
    fn share(answer: &Self::Answer) -> Option<Self::Answer>;

    /// Sends all of them; one answer each, in order.
    fn run(
        &self,
        conn: &mut DB::Connection,
        requests: &[Self::Request],
        sent: Instant,
    ) -> impl Future<Output = Reply<Vec<Self::Answer>>> + Send;
}

/// When a request is given up.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// By whoever waits for it.
    pub caller: Instant,
    /// By the statement.
    pub statement: Instant,
}
