//! The commands for keys: they claim, show and release them.

pub mod changes;
pub mod claiming;
pub mod claims;
pub mod forced;
pub mod hold;
pub mod lead;
pub mod list;
pub mod names;
pub mod queues;
pub mod rows;
pub mod run;
pub mod show;
pub mod waiting;
