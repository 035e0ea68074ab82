//! The wait for a key, and what a terminal shows of it.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use rowlock::{
    Database, LeaseLock,
    admin::{LockInfo, LockState},
};
use tokio::time::sleep;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::{
    keys::rows::by_and_since,
    out::{self, printable},
};

/// The pause before the first line, so that a short wait shows nothing.
const FIRST: Duration = Duration::from_millis(500);
/// The interval at which the line is written anew, with the time that has passed.
const EVERY: Duration = Duration::from_secs(1);
/// After how many lines the holder is read again.
const READ_EVERY: u32 = 3;

/// Waits for a request for keys, any of which may be the one that is waited for. If stderr is a
/// terminal, its last line tells what is waited for.
pub async fn show_during<DB: Database, T>(lock: &LeaseLock<DB>, keys: &[&str], request: impl Future<Output = T>) -> T {
    if !std::io::stderr().is_terminal() {
        return request.await;
    }
    let line = Line::default();
    tokio::select! {
        biased;
        reply = request => reply,
        never = tell(lock, keys, &line) => match never {},
    }
}

async fn tell<DB: Database>(lock: &LeaseLock<DB>, keys: &[&str], line: &Line) -> std::convert::Infallible {
    let (began, mut holder, mut lines) = (Instant::now(), None, 0);
    sleep(FIRST).await;
    loop {
        if lines % READ_EVERY == 0 {
            holder = first_held(lock, keys).await;
        }
        line.write(&text(keys.first().copied().unwrap_or_default(), holder.as_ref(), began.elapsed()));
        lines += 1;
        sleep(EVERY).await;
    }
}

/// Returns the first key that is held. A database that does not reply shows no holder.
async fn first_held<DB: Database>(lock: &LeaseLock<DB>, keys: &[&str]) -> Option<LockInfo> {
    for key in keys {
        let row = lock.inspect(key).await.ok().flatten();
        if let Some(row) = row.filter(|row| row.state != LockState::Free) {
            return Some(row);
        }
    }
    None
}

/// Describes a wait.
fn text(key: &str, holder: Option<&LockInfo>, waited: Duration) -> String {
    let waited = humantime::format_duration(Duration::from_secs(waited.as_secs()));
    let Some(row) = holder else { return format!("{key}: waiting for {waited}") };
    format!("{}: {}{}; waiting for {waited}", row.key, row.state, by_and_since(row))
}

/// The last line of the terminal, which is written over. On drop, it is blank.
#[derive(Default)]
struct Line {
    width: std::cell::Cell<usize>,
}

impl Line {
    fn write(&self, text: &str) {
        let text = cut(&format!("rowlock: {}", printable(text)), columns());
        // Blanks in place of an escape sequence, which not every terminal knows.
        let blanks = " ".repeat(self.width.get().saturating_sub(text.width()));
        self.width.set(text.width());
        out::STDERR.write(format!("\r{text}{blanks}").as_bytes());
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.width.get() > 0 {
            out::STDERR.write(format!("\r{}\r", " ".repeat(self.width.get())).as_bytes());
        }
    }
}

/// Returns the terminal's columns, less the last one, in which some terminals begin a new line.
fn columns() -> usize {
    let columns = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col);
    if columns == 0 { 79 } else { usize::from(columns - 1) }
}

/// Cuts a text off that is wider than this.
fn cut(text: &str, columns: usize) -> String {
    let mut width = 0;
    let fits = |c: &char| {
        width += c.width().unwrap_or_default();
        width <= columns
    };
    text.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn a_line_is_cut_at_the_terminals_width() {
        assert_eq!((cut("wartend", 4), cut("wartend", 9)), ("wart".to_owned(), "wartend".to_owned()));
        assert_eq!(cut("鍵鍵鍵", 5), "鍵鍵", "wide characters have two columns");
    }
}
