//! Output that the program does not wait for.
//!
//! A reader that has stopped reading (a pager, a terminal after Ctrl-S, a log driver) blocks a
//! write. The leases are renewed and the signals handled in one thread, so that another thread
//! writes.

use std::{
    collections::VecDeque,
    io::Write,
    mem::take,
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use tokio::time::sleep;

/// How many bytes may wait for the reader.
const MAX_BUFFERED: usize = 256 * 1024;
/// How long a message waits to be written, so that messages and the output of a command keep their
/// order. A reader that takes longer is not waited for.
const MOMENT: Duration = Duration::from_millis(50);
/// After how long without progress the lines of commands are dropped.
const STALLED: Duration = Duration::from_secs(5);
/// The pause before another look for room.
const PAUSE: Duration = Duration::from_millis(5);

/// A stream, with the lines that are not written yet.
pub struct Writer {
    open: fn() -> Box<dyn Write>,
    /// Told how many lines were dropped, once a line is written again.
    dropped: fn(u64),
    queue: Mutex<Queue>,
    changed: Condvar,
    thread: OnceLock<bool>,
}

struct Queue {
    /// The first line is empty while it is written.
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Since when the first line is written.
    since: Option<Instant>,
    dropped: u64,
}

impl Queue {
    fn is_late(&self, limit: Duration) -> bool {
        self.since.is_some_and(|since| since.elapsed() >= limit)
    }

    fn has_room(&self, line: &[u8], most: usize) -> bool {
        self.lines.is_empty() || self.bytes + line.len() <= most
    }
}

impl Writer {
    pub const fn new(open: fn() -> Box<dyn Write>, dropped: fn(u64)) -> Self {
        let queue = Queue { lines: VecDeque::new(), bytes: 0, since: None, dropped: 0 };
        Self { open, dropped, queue: Mutex::new(queue), changed: Condvar::new(), thread: OnceLock::new() }
    }

    /// Writes a message, and waits a moment for that. It is dropped if too much waits already.
    pub fn write(&'static self, line: &[u8]) {
        let queue = self.add(line, MAX_BUFFERED);
        if !queue.is_late(MOMENT) {
            self.wait_for_writes(queue, MOMENT);
        }
    }

    /// Writes a line once there is room for it. It is dropped if the reader has stopped reading.
    pub async fn pass(&'static self, line: &[u8]) {
        let is_to_wait = || {
            let queue = self.queue();
            !queue.has_room(line, MAX_BUFFERED) && !queue.is_late(STALLED)
        };
        while is_to_wait() {
            sleep(PAUSE).await;
        }
        drop(self.add(line, MAX_BUFFERED));
    }

    /// Adds a line that says what was dropped. There is room for it behind those that wait.
    pub fn add_note(&'static self, line: &[u8]) {
        drop(self.add(line, 2 * MAX_BUFFERED));
    }

    /// Adds a line for the thread, and does not wait.
    fn add(&'static self, line: &[u8], most: usize) -> MutexGuard<'static, Queue> {
        if !self.has_thread() {
            let _ = (self.open)().write_all(line);
            return self.queue();
        }
        let mut queue = self.queue();
        if queue.has_room(line, most) {
            queue.bytes += line.len();
            queue.lines.push_back(line.to_owned());
            self.changed.notify_all();
        } else {
            queue.dropped += 1;
        }
        queue
    }

    /// Waits until everything is written, within the limit.
    pub fn flush(&'static self, limit: Duration) {
        self.wait_for_writes(self.queue(), limit);
    }

    fn wait_for_writes(&self, queue: MutexGuard<'_, Queue>, limit: Duration) {
        drop(self.changed.wait_timeout_while(queue, limit, |queue| !queue.lines.is_empty()));
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread with the first line. Without one, lines are written where they arise.
    fn has_thread(&'static self) -> bool {
        let start = || std::thread::Builder::new().spawn(|| self.write_all()).is_ok();
        *self.thread.get_or_init(start)
    }

    fn write_all(&self) {
        loop {
            let line = self.next();
            let mut to = (self.open)();
            // A stream that cannot be written (its disk is full) must not end the work.
            let is_written = to.write_all(&line).and_then(|()| to.flush()).is_ok();
            let dropped = self.remove(&line, is_written);
            if dropped > 0 {
                (self.dropped)(dropped);
            }
        }
    }

    fn next(&self) -> Vec<u8> {
        let queue = self.changed.wait_while(self.queue(), |queue| queue.lines.is_empty());
        let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
        queue.since = Some(Instant::now());
        queue.lines.front_mut().map(take).unwrap_or_default()
    }

    /// Returns how many lines were dropped before this one, if it was written.
    fn remove(&self, line: &[u8], is_written: bool) -> u64 {
        let mut queue = self.queue();
        queue.lines.pop_front();
        queue.bytes -= line.len();
        queue.since = None;
        self.changed.notify_all();
        if is_written {
            return take(&mut queue.dropped);
        }
        queue.dropped += 1;
        0
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Error, ErrorKind},
        sync::atomic::{AtomicBool, AtomicU64, Ordering},
    };

    use super::*;

    static IS_FULL: AtomicBool = AtomicBool::new(true);
    static DROPPED: AtomicU64 = AtomicU64::new(0);
    static WRITER: Writer = Writer::new(|| Box::new(Disk), |lines| DROPPED.store(lines, Ordering::SeqCst));

    struct Disk;

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if IS_FULL.load(Ordering::SeqCst) { Err(Error::from(ErrorKind::StorageFull)) } else { Ok(bytes.len()) }
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_a_full_disk_has_lost_are_counted() {
        let limit = Duration::from_secs(20);
        for _ in 0..2 {
            WRITER.add_note(b"lost\n");
        }
        WRITER.flush(limit);
        assert_eq!(DROPPED.load(Ordering::SeqCst), 0, "nothing could be said");
        IS_FULL.store(false, Ordering::SeqCst);
        WRITER.add_note(b"written\n");
        let began = Instant::now();
        while DROPPED.load(Ordering::SeqCst) != 2 {
            assert!(began.elapsed() < limit, "it is said how many");
            std::thread::sleep(PAUSE);
        }
    }
}
