//! Notices commits of other processes by the times and lengths of the database's files.
//!
//! The files are never opened: closing one would end the locks that SQLite holds on it in this
//! process. A change that is missed costs a waiter its pause.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::session::{time::Instant, timers::sleep};

/// The time between two looks at the files. It doubles while each look finds a change.
const PERIOD: Duration = Duration::from_millis(2);
const LONGEST_PERIOD: Duration = Duration::from_millis(8);
/// The same after a minute without a change.
const IDLE_PERIOD: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_secs(60);
/// A look that takes longer blocks the thread `rowlock` too long: the file system is not local.
const SLOW: Duration = Duration::from_millis(100);
/// The steps of a file's time. A second change within one step leaves no trace of its own.
const STEP: Duration = Duration::from_millis(10);

/// The length and time of the database's file, and of its write-ahead log.
type Seen = [Option<(u64, SystemTime)>; 2];

pub struct FileWatch {
    files: [PathBuf; 2],
    seen: Seen,
    /// The last change was seen within the same step of time.
    unsettled: bool,
    period: Duration,
    changed_at: Instant,
}

impl FileWatch {
    /// Returns `None` if the database is not in a file.
    pub fn new(database: &Path) -> Option<Self> {
        // The log is beside the file to which a link leads.
        let database = fs::canonicalize(database).ok()?;
        let mut log = OsString::from(&database);
        log.push("-wal");
        let files = [database, log.into()];
        let seen = look(&files);
        seen[0].map(|_| Self { files, seen, unsettled: true, period: PERIOD, changed_at: Instant::now() })
    }

    /// Returns after the next commit of any connection. Some calls return although nothing has
    /// changed. Returns `false` if the files cannot be watched any more.
    pub async fn changed(&mut self) -> bool {
        loop {
            sleep(self.period).await;
            let began = Instant::now();
            let seen = look(&self.files);
            if began.elapsed() > SLOW {
                return false;
            }
            let is_recent = |(_, time): (u64, SystemTime)| time.elapsed().is_ok_and(|elapsed| elapsed < STEP);
            let is_unsettled = seen.iter().flatten().copied().any(is_recent);
            let was_unsettled = std::mem::replace(&mut self.unsettled, is_unsettled);
            let is_changed = std::mem::replace(&mut self.seen, seen) != seen;
            if is_changed {
                (self.period, self.changed_at) = ((self.period * 2).min(LONGEST_PERIOD), began);
            } else {
                self.period = if self.changed_at.elapsed() < IDLE { PERIOD } else { IDLE_PERIOD };
            }
            if is_changed || (was_unsettled && !is_unsettled) {
                return true;
            }
        }
    }
}

fn look(files: &[PathBuf; 2]) -> Seen {
    files.each_ref().map(|file| fs::metadata(file).ok().and_then(|data| Some((data.len(), data.modified().ok()?))))
}
