//! What a change of a row is computed from.

use crate::{session::loan::IdleLoan, store::Database, version::update::Versioned};

/// What a change leaves to the next change of the same row in this process: the row that it wrote,
/// and the connection over which it was answered. That connection worked a moment ago, so that no
/// write is lost on a connection that was closed unnoticed.
pub(crate) struct Known<DB: Database, V> {
    pub row: Versioned<V>,
    pub conn: IdleLoan<DB>,
    /// The number of changes since the row was read.
    pub age: u32,
}

/// What a change is computed from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Basis {
    Read,
    /// The row that the preceding change left, where it is known. Only for guarded writes: a program
    /// that does not raise the version may have altered the value.
    Known,
}
