//! A model of schedules, checked exhaustively for small sizes: instances that look, claim, renew
//! and end, the schedule's row and its history, the database's clock, pauses, delayed and lost
//! statements and replies, crashes, triggers.
//!
//! What a claimed row is for is the code's own decision (`src/schedule/plan.rs`). A look and a
//! claim are two statements, as on MySQL and SQLite; where they are one, fewer things can happen.

mod checks;
mod client;
mod design;
mod protocol;
mod server;
mod state;

pub use checks::trials;
