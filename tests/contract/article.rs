//! The article's table and its program. The program knows only the seven columns of that table.

use chrono::{NaiveDateTime, TimeDelta, Utc};
use harness::{Table, TestDatabase, TestDb};
use sqlx::Pool;

/// Returns definitions of the article's table as an application may have it, the most usual one
/// first.
pub fn shapes(server: &str) -> Vec<String> {
    let shape = |time: &str, text: &str, number: &str, more: &str| {
        format!(
            "CREATE TABLE t_resource_lock (
                key_resource varchar(45) {text} NOT NULL PRIMARY KEY,
                status char(1) {text} NOT NULL DEFAULT '',
                lock_flag {number} NOT NULL DEFAULT 0,
                begin_time {time} DEFAULT NULL,
                end_time {time} DEFAULT NULL,
                client_ip varchar(45) {text} NOT NULL DEFAULT '',
                time {number} NOT NULL DEFAULT 60
            ) {more}"
        )
    };
    match server {
        "sqlite" => ["datetime", "TIMESTAMP", "varchar(19)"].map(|time| shape(time, "", "int", "")).into(),
        "postgres" => ["timestamp", "timestamp(0)", "timestamptz(3)"].map(|time| shape(time, "", "integer", "")).into(),
        _ => {
            let text = "CHARACTER SET utf8 COLLATE utf8_bin";
            ["ENGINE=InnoDB", "ENGINE=InnoDB DEFAULT CHARSET=latin1"]
                .map(|more| shape("datetime", text, "int(10) unsigned", more))
                .into()
        }
    }
}

/// Replaces the existing table with this one.
pub async fn put<DB: TestDatabase>(db: &TestDb<DB>, table: Table) {
    db.execute("DROP TABLE t_resource_lock").await;
    if table == Table::Articles {
        db.execute(&shapes(db.server.name)[0]).await;
    }
    rowlock::migrate(&db.pool).await.unwrap();
}

/// The result of a claim by the article's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Taken,
    Locked,
    /// Locked for longer than `time` minutes. The program detects this and leaves the key to an
    /// operator.
    TimedOut,
    NotSucceeded,
    WithinMinInterval,
    /// The database rolled the program's transaction back.
    Failed,
}

/// The article's program: plain SQL, its own clock, local time.
pub struct Program<DB: TestDatabase> {
    pub pool: Pool<DB>,
    server: String,
    /// How far the program's clock is ahead of UTC: the offset of local time, plus the time that a
    /// test skips instead of waiting.
    pub ahead: TimeDelta,
    /// On SQLite: whether the table stores times as text.
    textual: bool,
}

impl<DB: TestDatabase> Program<DB> {
    pub async fn new(pool: Pool<DB>, server: &str, ahead: TimeDelta) -> Self {
        let kind = "SELECT type FROM pragma_table_info('t_resource_lock') WHERE name = 'begin_time'";
        let textual = server != "sqlite" || DB::text(&pool, kind).await.as_deref() != Some("INTEGER");
        Self { pool, server: server.to_owned(), ahead, textual }
    }

    /// Returns the same program with another clock.
    pub fn at(&self, ahead: TimeDelta) -> Self {
        Self { pool: self.pool.clone(), server: self.server.clone(), ahead, textual: self.textual }
    }

    pub fn now(&self) -> NaiveDateTime {
        (Utc::now() + self.ahead).naive_utc()
    }

    fn now_sql(&self) -> String {
        let text = format!("'{}'", self.now().format("%Y-%m-%d %H:%M:%S"));
        if self.textual { text } else { format!("unixepoch({text}) * 1000000") }
    }

    /// Returns one of the program's times as the program reads it: local time as text, in whole
    /// seconds.
    pub async fn time(&self, key: &str, column: &str) -> Option<NaiveDateTime> {
        let text = self.time_sql(column);
        let text =
            DB::text(&self.pool, &format!("SELECT {text} FROM t_resource_lock WHERE key_resource = '{key}'")).await;
        text.map(|text| parse(&text))
    }

    fn time_sql(&self, column: &str) -> String {
        match self.server.as_str() {
            "sqlite" if self.textual => column.to_owned(),
            "sqlite" => format!("datetime({column} / 1000000, 'unixepoch')"),
            "postgres" => format!("to_char({column}, 'YYYY-MM-DD HH24:MI:SS')"),
            _ => format!("DATE_FORMAT({column}, '%Y-%m-%d %H:%i:%s')"),
        }
    }

    /// Claims a key in one transaction, as in the article.
    pub async fn take(&self, key: &str) -> Answer {
        let mut conn = self.pool.acquire().await.unwrap();
        let answer = self.take_on(&mut conn, key).await.unwrap_or(Answer::Failed);
        let end = if answer == Answer::Failed { "ROLLBACK" } else { "COMMIT" };
        DB::execute_on(&mut conn, end).await.unwrap();
        answer
    }

    async fn take_on(&self, conn: &mut DB::Connection, key: &str) -> Result<Answer, sqlx::Error> {
        DB::execute_on(conn, DB::BEGIN).await?;
        let row = format!("concat_ws('|', status, lock_flag, time, {})", self.time_sql("begin_time"));
        let row = if self.server.starts_with('m') { format!("CONVERT({row} USING utf8mb4)") } else { row };
        let for_update = if self.server == "sqlite" { "" } else { "FOR UPDATE" };
        let sql = format!("SELECT {row} FROM t_resource_lock WHERE key_resource = '{key}' {for_update}");
        if let Some(row) = DB::text_on(conn, &sql).await? {
            let mut columns = row.split('|');
            let mut next = || columns.next().unwrap_or_default();
            let (status, locked, minutes, begin) = (next(), next() == "1", next().parse().unwrap(), next());
            let interval = TimeDelta::minutes(minutes);
            let over = begin.is_empty() || parse(begin) + interval <= self.now();
            match (locked, over) {
                (true, false) => return Ok(Answer::Locked),
                (true, true) => return Ok(Answer::TimedOut),
                _ if status.trim() != "S" => return Ok(Answer::NotSucceeded),
                (false, false) => return Ok(Answer::WithinMinInterval),
                (false, true) => {}
            }
        } else {
            let insert =
                format!("INSERT INTO t_resource_lock (key_resource, status, lock_flag) VALUES ('{key}', 'S', 0)");
            DB::execute_on(conn, &insert).await?;
        }
        let sql = format!(
            "UPDATE t_resource_lock SET lock_flag = 1, status = 'P', begin_time = {}, client_ip = '10.0.0.7' WHERE key_resource = '{key}'",
            self.now_sql()
        );
        DB::execute_on(conn, &sql).await?;
        Ok(Answer::Taken)
    }

    /// Unlocks a key. The statement does not check the holder.
    pub async fn give(&self, key: &str, status: &str) {
        let sql = format!(
            "UPDATE t_resource_lock SET lock_flag = 0, status = '{status}', end_time = {} WHERE key_resource = '{key}'",
            self.now_sql()
        );
        DB::execute(&self.pool, &sql).await.unwrap();
    }
}

/// Accepts only the format in which the program writes its own times.
#[track_caller]
fn parse(text: &str) -> NaiveDateTime {
    NaiveDateTime::parse_from_str(text, "%Y-%m-%d %H:%M:%S").unwrap_or_else(|error| panic!("{text:?}: {error}"))
}
