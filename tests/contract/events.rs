//! The crate's tracing events, recorded for the tests that check them.

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

/// Records every event of the crate, from all tests of this process.
pub fn keep() {
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(|| Log);
    let only_ours = Targets::new().with_target("rowlock", tracing::Level::TRACE);
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(only_ours));
    tracing::subscriber::set_global_default(subscriber).unwrap();
}

/// Returns the events that name this key.
pub fn about(key: &str) -> Vec<String> {
    with(&format!("key={key} "))
}

/// Returns the events that contain this text.
pub fn with(text: &str) -> Vec<String> {
    let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    String::from_utf8_lossy(&log).lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}
