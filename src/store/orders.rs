//! The orders of operators that instances obey.

use chrono::{DateTime, Utc};

use crate::store::{Reply, stored_row::StoredRow};

/// What is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The tick of this slot ends as failed.
    Stop,
    /// Ticks up to this slot are skipped.
    Skip,
    /// The pause ends at this time.
    Pause,
    /// The instance of this id ends.
    Drain,
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Skip => "skip",
            Self::Pause => "pause",
            Self::Drain => "drain",
        }
    }
}

/// An order. A later one takes its place.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    pub what: What,
    pub name: &'a str,
    /// The first slot to skip. Of other orders, the same as `until`.
    pub since: DateTime<Utc>,
    pub until: DateTime<Utc>,
    pub who: &'a str,
}

/// An order that was given.
#[derive(Clone, Debug)]
pub struct Given {
    pub since: DateTime<Utc>,
    pub until: DateTime<Utc>,
    pub who: String,
}

/// Reads an order.
pub fn given(row: &impl StoredRow) -> Reply<Given> {
    Ok(Given { since: row.time("since")?, until: row.time("until")?, who: row.text("who")? })
}

/// The orders that concern a schedule.
pub const OF_SCHEDULES: [What; 3] = [What::Stop, What::Skip, What::Pause];
