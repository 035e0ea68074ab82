//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{Sqlite, SqliteConnection};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change, operations},
    micros,
    sqlite::row::sql,
};

const RECORD: &str =
    sql!("INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (" now ", ?1, ?2, ?3, ?4)");

const LIST: &str = "
SELECT at, who, what, name, detail FROM t_resource_change WHERE ?1 IS NULL OR name = ?2 ORDER BY id DESC LIMIT ?3";

const FORGET: &str = sql!("DELETE FROM t_resource_change WHERE at < " now " - ?1");

impl ChangeStore for Sqlite {
    operations!(SqliteConnection);
}
