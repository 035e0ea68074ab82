//! What the handlers of requests share.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
};

use chrono::{DateTime, Utc};
use tokio::sync::{Semaphore, mpsc};

use crate::{
    exit::Failure,
    ui::{
        change::Changer,
        connections::places,
        looks::{Looks, View},
        sessions::Sessions,
    },
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
    pub sessions: Sessions,
    /// The pages that stay up to date, each of which keeps a connection.
    pub streams: Arc<Semaphore>,
    /// The database, for people.
    pub place: String,
    rendered: Mutex<Rendered>,
}

/// What open pages show of one look, by the page and its query.
#[derive(Default)]
struct Rendered {
    look: u64,
    parts: HashMap<String, Arc<str>>,
}

impl App {
    pub fn new(
        looks: Looks,
        outputs: Outputs,
        changer: Option<Changer>,
        changes: mpsc::WeakSender<()>,
        place: &str,
    ) -> Self {
        let (sessions, rendered) = (Sessions::default(), Mutex::default());
        let streams = Arc::new(Semaphore::new(places() / 2));
        Self { looks, outputs, changer, changes, sessions, streams, place: place.to_owned(), rendered }
    }

    pub fn allows_changes(&self) -> bool {
        self.changer.is_some()
    }

    /// Returns what `render` returns. Pages with the same query share the work.
    pub fn rendered(&self, view: &View, page: &str, render: impl FnOnce() -> String) -> Arc<str> {
        let mut rendered = self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if rendered.look != view.number {
            *rendered = Rendered { look: view.number, parts: HashMap::new() };
        }
        rendered.parts.entry(page.to_owned()).or_insert_with(|| render().into()).clone()
    }
}
