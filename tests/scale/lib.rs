//! Instances of rowlock in simulated time: a thousand of them, their connections, and one database,
//! with latencies and failures that are drawn with a seed. `docs/scale.md` has the results.
//!
//! What the instances decide is the code's own: when a key may be claimed (`src/rules.rs`), all
//! pauses (`src/pacing.rs`), and who is next in a queue (`src/queue/position.rs`). What sends and
//! waits is repeated here.

#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]
// The unit tests of the included files are not compiled here.
#![cfg(not(test))]

pub mod assumptions;
mod claims;
mod code;
mod events;
pub mod figures;
mod leases;
mod locks;
mod net;
mod notifications;
mod rows;
pub mod run;
mod server;
mod statements;
mod tickets;

pub use events::{MILLISECOND, SECOND, Time};

/// What the included files use of their crate.
mod key {
    use std::{fmt, sync::Arc};

    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Key(Arc<str>);

    impl Key {
        pub fn of(text: &str) -> Self {
            Self(text.into())
        }

        pub fn as_str(&self) -> &str {
            &self.0
        }
    }

    impl fmt::Display for Key {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&self.0)
        }
    }

    /// A holder of this simulation: a number, each used once.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Holder(uuid::Uuid);

    impl Holder {
        pub fn of(number: u64) -> Self {
            Self(uuid::Uuid::from_u128(number.into()))
        }

        pub fn as_uuid(&self) -> &uuid::Uuid {
            &self.0
        }
    }
}
/// The same of the store.
mod store {
    pub mod queue {
        /// As in `src/store/queue.rs`.
        pub const FRONT: u64 = 16;

        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct QueueEntry {
            pub key: String,
            pub number: i64,
            pub left_micros: i64,
        }
    }
}
#[path = "../../src/pacing.rs"]
#[allow(dead_code)]
mod pacing;
#[path = "../../src/queue/position.rs"]
mod position;
#[path = "../../src/rules.rs"]
#[allow(dead_code)]
mod rules;
