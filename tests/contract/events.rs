//! The crate's tracing events, kept for the tests that ask what was told.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use tracing_subscriber::{Layer as _, filter::Targets, layer::SubscriberExt as _};

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps every event of the crate's, from all tests of this process.
pub fn keep() {
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| Log);
    let only_ours = Targets::new().with_target("rowlock", tracing::Level::TRACE);
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(only_ours));
    tracing::subscriber::set_global_default(subscriber).unwrap();
}

/// The events that name this key.
pub fn about(key: &str) -> Vec<String> {
    with(&format!("key={key} "))
}

/// The events in which this text stands.
pub fn with(text: &str) -> Vec<String> {
    let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    String::from_utf8_lossy(&log).lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}
