//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{MySql, MySqlConnection};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change, operations},
    micros,
};

const RECORD: &str =
    "INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (UTC_TIMESTAMP(6), ?, ?, ?, ?)";

const LIST: &str = "
SELECT at, CONVERT(who USING utf8mb4) AS who, CONVERT(what USING utf8mb4) AS what, CONVERT(name USING utf8mb4) AS name,
       CONVERT(detail USING utf8mb4) AS detail FROM t_resource_change
WHERE ? IS NULL OR t_resource_change.name = ? ORDER BY id DESC LIMIT ?";

const FORGET: &str = "DELETE FROM t_resource_change WHERE at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND";

impl ChangeStore for MySql {
    operations!(MySqlConnection);
}
