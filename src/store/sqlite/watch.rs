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

use tokio::time::sleep;

/// How often the files are looked at.
const PERIOD: Duration = Duration::from_millis(4);
/// The steps of a file's time. A second change within one step leaves no trace of its own.
const STEP: Duration = Duration::from_millis(10);

/// The length and time of the database's file, and of its write-ahead log.
type Seen = [Option<(u64, SystemTime)>; 2];

pub struct FileWatch {
    files: [PathBuf; 2],
    seen: Seen,
    /// The last change was seen within the same step of time.
    unsettled: bool,
}

impl FileWatch {
    /// Returns `None` if the database is not in a file.
    pub fn new(database: &Path) -> Option<Self> {
        let mut log = OsString::from(database);
        log.push("-wal");
        let files = [database.to_owned(), log.into()];
        let seen = look(&files);
        seen[0].map(|_| Self { files, seen, unsettled: true })
    }

    /// Returns after the next commit of any connection. Some calls return although nothing has
    /// changed.
    pub async fn changed(&mut self) {
        loop {
            sleep(PERIOD).await;
            let seen = look(&self.files);
            let is_recent = |(_, time): (u64, SystemTime)| time.elapsed().is_ok_and(|elapsed| elapsed < STEP);
            let is_unsettled = seen.iter().flatten().copied().any(is_recent);
            let was_unsettled = std::mem::replace(&mut self.unsettled, is_unsettled);
            if std::mem::replace(&mut self.seen, seen) != seen || (was_unsettled && !is_unsettled) {
                return;
            }
        }
    }
}

fn look(files: &[PathBuf; 2]) -> Seen {
    files.each_ref().map(|file| fs::metadata(file).ok().and_then(|data| Some((data.len(), data.modified().ok()?))))
}
