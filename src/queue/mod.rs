//! Waiting for keys: in order within this process, across processes, and woken when a key is freed.

pub(crate) mod listener;
pub(crate) mod local;
pub(crate) mod position;
pub(crate) mod tickets;

use std::sync::Arc;

use crate::{
    finish::Background,
    queue::{
        listener::Listener,
        local::{Bells, Turns},
        tickets::Line,
    },
    store::{Database, pools::Connections},
};

/// What the waiting tasks of one lock object share.
pub(crate) struct Waiting<DB: Database> {
    pub turns: Arc<Turns>,
    pub bells: Arc<Bells>,
    pub line: Arc<Line<DB>>,
    pub listener: Arc<Listener<DB>>,
}

impl<DB: Database> Waiting<DB> {
    pub fn new(requests: &Connections<DB>, renewals: &Connections<DB>, background: Background) -> Self {
        let bells = Arc::<Bells>::default();
        let listener = Listener::new(requests.application().clone(), bells.clone());
        Self { turns: Arc::default(), line: Line::new(requests, renewals, background), listener, bells }
    }
}
