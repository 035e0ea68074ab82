//! The wait for a key, and what a terminal shows of it.

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use rowlock::{
    Database, Error, LeaseLock,
    admin::{LockInfo, LockState},
};
use tokio::time::sleep;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::{
    exit::{self, Failure},
    format::clock,
    out::{self, printable},
    process::signals::{StopSignals, number},
};

/// The pause before the first line, so that a short wait shows nothing.
const FIRST: Duration = Duration::from_millis(500);
/// The interval at which the line is written anew, with the time that has passed.
const EVERY: Duration = Duration::from_secs(1);
/// After how many lines the holder is read again.
const READ_EVERY: u32 = 3;

/// How a wait ended.
pub enum Waited<G> {
    Granted(G),
    /// Nothing was taken. The program ends with this exit code.
    Over(u8),
}

/// A wait for keys, as messages describe it.
pub struct Wait<'a> {
    /// Any of these keys may be the one that is waited for.
    pub keys: Vec<&'a str>,
    /// How long a request that is under way may take to be undone.
    pub grace: Duration,
    /// The exit code of a refusal.
    pub refused: u8,
}

impl Wait<'_> {
    /// Waits for a request, which a signal ends. A claim that is in flight then is undone.
    pub async fn for_request<DB: Database, G>(
        &self,
        lock: &LeaseLock<DB>,
        stop: &mut StopSignals,
        request: impl Future<Output = Result<G, Error>>,
    ) -> Result<Waited<G>, Failure> {
        let granted = tokio::select! {
            granted = self.show_during(lock, request) => granted,
            signal = stop.next() => {
                let _ = stop.within(self.grace, lock.shutdown(Duration::MAX)).await;
                return Ok(Waited::Over(exit::SIGNAL + number(signal)));
            }
        };
        let error = match granted {
            Ok(granted) => return Ok(Waited::Granted(granted)),
            Err(error) => error,
        };
        // A claim that is being undone would otherwise keep its key until its lease ends.
        let _ = stop.within(self.grace, lock.shutdown(Duration::MAX)).await;
        let Error::Refused(refusal) = error else { return Err(error.into()) };
        out::print_refusal(refusal, self.refused);
        Ok(Waited::Over(self.refused))
    }

    /// Waits for a request. If stderr is a terminal, its last line tells what is waited for.
    pub async fn show_during<DB: Database, T>(&self, lock: &LeaseLock<DB>, request: impl Future<Output = T>) -> T {
        if !std::io::stderr().is_terminal() {
            return request.await;
        }
        let line = Line::default();
        tokio::select! {
            biased;
            reply = request => reply,
            never = self.tell(lock, &line) => match never {},
        }
    }

    async fn tell<DB: Database>(&self, lock: &LeaseLock<DB>, line: &Line) -> std::convert::Infallible {
        let (began, mut holder, mut lines) = (Instant::now(), None, 0);
        sleep(FIRST).await;
        loop {
            if lines % READ_EVERY == 0 {
                holder = self.holder(lock).await;
            }
            line.write(&text(self.keys.first().copied().unwrap_or_default(), holder.as_ref(), began.elapsed()));
            lines += 1;
            sleep(EVERY).await;
        }
    }

    /// Returns the first key that is held. A database that does not reply shows no holder.
    async fn holder<DB: Database>(&self, lock: &LeaseLock<DB>) -> Option<LockInfo> {
        for key in &self.keys {
            let row = lock.inspect(key).await.ok().flatten();
            if let Some(row) = row.filter(|row| row.state != LockState::Free) {
                return Some(row);
            }
        }
        None
    }
}

/// Describes a wait.
fn text(key: &str, holder: Option<&LockInfo>, waited: Duration) -> String {
    let waited = humantime::format_duration(Duration::from_secs(waited.as_secs()));
    let Some(row) = holder else { return format!("{key}: waiting for {waited}") };
    let by = if row.by.is_empty() { String::new() } else { format!(" by {}", row.by) };
    let since = row.since.map(|since| format!(" since {}", clock(since))).unwrap_or_default();
    format!("{}: {}{by}{since}; waiting for {waited}", row.key, row.state)
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
