//! What the handlers of requests share.

use std::{pin::Pin, sync::Arc};

use chrono::{DateTime, Utc};
use tokio::sync::{Semaphore, mpsc};

use crate::{
    exit::Failure,
    ui::{change::Changer, looks::Looks},
};

/// Reads what a run of a job has printed, by its slot and attempt.
pub type Outputs = Box<
    dyn Fn(&str, DateTime<Utc>, u32) -> Pin<Box<dyn Future<Output = Result<Option<Vec<u8>>, Failure>> + Send>>
        + Send
        + Sync,
>;

pub struct App {
    pub looks: Looks,
    pub outputs: Outputs,
    /// Makes changes, if they are allowed.
    pub changer: Option<Changer>,
    /// Each change that is under way holds a sender, so that the channel closes after the last one.
    pub changes: mpsc::WeakSender<()>,
    /// The pages that stay up to date, each of which keeps a connection.
    pub streams: Arc<Semaphore>,
    /// The database, for people.
    pub place: String,
}

impl App {
    pub fn allows_changes(&self) -> bool {
        self.changer.is_some()
    }
}
