//! Waiting for keys: in order within this process, across processes, and woken when a key is freed.

pub(crate) mod listener;
pub(crate) mod local;
pub(crate) mod position;
pub(crate) mod tickets;
