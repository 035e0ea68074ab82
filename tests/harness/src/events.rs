//! The crate's tracing events and spans, recorded for the tests that check them.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use tracing_subscriber::{
    Layer as _,
    filter::{FilterExt as _, Targets, filter_fn},
    fmt::{format::FmtSpan, layer},
    layer::SubscriberExt as _,
};

/// The target of the events that a test's own work emits.
pub const WORK: &str = "work";

static EVENTS: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static SPANS: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log(&'static Mutex<Vec<u8>>);

impl Log {
    fn lines_with(&self, text: &str) -> Vec<String> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&log).lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Records every event and span of the crate, from all tests of this process.
pub fn keep() {
    let events = Targets::new().with_target("rowlock", tracing::Level::TRACE);
    let events = events.and(filter_fn(|metadata| metadata.is_event()));
    let spans = Targets::new().with_targets(["rowlock", WORK].map(|target| (target, tracing::Level::INFO)));
    let subscriber = tracing_subscriber::registry()
        .with(layer().with_ansi(false).with_writer(|| Log(&EVENTS)).with_filter(events))
        .with(layer().with_ansi(false).with_span_events(FmtSpan::CLOSE).with_writer(|| Log(&SPANS)).with_filter(spans));
    tracing::subscriber::set_global_default(subscriber).unwrap();
}

/// Returns the events that name this key.
pub fn about(key: &str) -> Vec<String> {
    with(&format!("key={key} "))
}

/// Returns the events that contain this text.
pub fn with(text: &str) -> Vec<String> {
    Log(&EVENTS).lines_with(text)
}

/// Returns the events of the level `INFO` and above, each after the spans that it is in, and the
/// ends of spans, if they contain this text. A span has the fields that were recorded by then.
pub fn in_spans(text: &str) -> Vec<String> {
    Log(&SPANS).lines_with(text)
}
