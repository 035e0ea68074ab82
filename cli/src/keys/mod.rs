//! The commands for keys: they claim, show and release them.

pub mod claiming;
pub mod claims;
pub mod forced;
pub mod hold;
pub mod lead;
pub mod names;
pub mod rows;
pub mod run;
pub mod show;
pub mod waiting;
