//! The service manager, where one waits for word: systemd with `Type=notify`. Elsewhere nothing is
//! sent.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sd_notify::NotifyState;
use tokio::time::sleep;

/// The variables that let a process speak for the service.
pub const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];
/// The pause between two words, unless the watchdog of the service wants them more often.
const PAUSE: Duration = Duration::from_secs(10);
/// How much longer than a pause the end of the program may take after each word, in microseconds.
const MORE: u32 = 30_000_000;

static ENDS: AtomicBool = AtomicBool::new(false);

/// Says that the program has begun.
pub fn begins(status: &str) {
    say(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Says what the program does.
pub fn does(status: &str) {
    say(&[NotifyState::Status(status)]);
}

/// Says that the program ends. From now on, each word asks for more time.
pub fn ends(status: &str) {
    ENDS.store(true, Ordering::Relaxed);
    say(&[NotifyState::Stopping, NotifyState::Status(status), NotifyState::ExtendTimeoutUsec(MORE)]);
}

/// Says again and again that the program goes on. It has no end.
pub async fn go_on() {
    let pause = sd_notify::watchdog_enabled().map_or(PAUSE, |limit| PAUSE.min(limit / 3));
    loop {
        sleep(pause).await;
        say(&[NotifyState::Watchdog]);
        if ENDS.load(Ordering::Relaxed) {
            say(&[NotifyState::ExtendTimeoutUsec(MORE)]);
        }
    }
}

fn say(words: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(words) {
        tracing::debug!(%error, "the service manager was not reached");
    }
}
