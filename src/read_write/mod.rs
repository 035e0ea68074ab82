//! Shared and exclusive access to a name: many readers, or one writer.
//!
//! A writer's claim is the plain claim on the name. A reader's claim is the plain claim on one of
//! the keys `NAME#r1` to `NAME#r1024`. Each side claims first and looks at the other's rows
//! afterwards, with a statement that begins after the reply to its claim. The claim that is
//! committed later is therefore followed by a read that sees the other one: a reader and a writer
//! are never both let in.
//!
//! `read.rs` lets a reader in, and `drain.rs` a writer, which waits for the readers that its first
//! look showed. One look serves all readers of a process that asked for it before it was sent
//! (`lease/claims.rs`). The readers of a process that wait for the name enter together, under the
//! claim of the first one (`lease/readers.rs`).

pub(crate) mod call;
pub(crate) mod drain;
pub(crate) mod lock;
pub(crate) mod names;
pub(crate) mod read;
