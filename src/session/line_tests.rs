#![allow(clippy::unwrap_used)] // those of the helpers too

use sqlx::{
    Sqlite, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use super::*;

/// Returns a line on a file of its own.
pub async fn of_file(most: usize) -> (tempfile::TempDir, Arc<Line<Sqlite>>) {
    let folder = tempfile::tempdir().unwrap();
    let options = SqliteConnectOptions::new().filename(folder.path().join("lock.db")).create_if_missing(true);
    let pool = SqlitePool::connect_with(options.journal_mode(SqliteJournalMode::Wal)).await.unwrap();
    (folder, Line::new(&pool, most, false))
}

pub async fn take(line: &Arc<Line<Sqlite>>) -> Session<Sqlite> {
    line.take(Instant::now() + Duration::from_secs(20)).await.unwrap().unwrap()
}
