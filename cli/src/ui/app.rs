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
    },
};

/// Reads what a run of a job has printed, by its slot and attempt.
pub type Outputs = Box<
    dyn Fn(&str, DateTime<Utc>, u32) -> Pin<Box<dyn Future<Output = Result<Option<Vec<u8>>, Failure>> + Send>>
        + Send
        + Sync,
>;

/// How many pages of one look are kept. Each query is a page of its own.
const MOST: usize = 64;

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
        let rendered = Mutex::default();
        let streams = Arc::new(Semaphore::new(places() / 2));
        Self { looks, outputs, changer, changes, streams, place: place.to_owned(), rendered }
    }

    pub fn allows_changes(&self) -> bool {
        self.changer.is_some()
    }

    /// Returns what `render` returns. Pages with the same query share the work.
    pub fn rendered(&self, view: &View, page: &str, render: impl FnOnce() -> String) -> Arc<str> {
        self.rendered.lock().unwrap_or_else(PoisonError::into_inner).part(view.number, page, render)
    }
}

impl Rendered {
    fn part(&mut self, look: u64, page: &str, render: impl FnOnce() -> String) -> Arc<str> {
        let is_full = self.parts.len() >= MOST && !self.parts.contains_key(page);
        if self.look != look || is_full {
            *self = Self { look, parts: HashMap::new() };
        }
        self.parts.entry(page.to_owned()).or_insert_with(|| render().into()).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_look_are_shared_and_few_are_kept() {
        let mut rendered = Rendered::default();
        for number in 0..1_000 {
            let page = rendered.part(1, &number.to_string(), || format!("page {number}"));
            let same = rendered.part(1, &number.to_string(), || unreachable!("it is kept"));
            assert!(Arc::ptr_eq(&page, &same) && rendered.parts.len() <= MOST, "{number}");
        }
        assert_eq!(&*rendered.part(2, "999", || "of the next look".to_owned()), "of the next look");
    }
}
