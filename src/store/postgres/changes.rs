//! What operators have changed.

use chrono::TimeDelta;
use sqlx::{PgConnection, Postgres};

use crate::store::{
    Reply,
    changes::{Change, ChangeInfo, ChangeStore, listed_change, operations},
    micros,
};

const RECORD: &str =
    "INSERT INTO t_resource_change (at, who, what, name, detail) VALUES (clock_timestamp(), $1, $2, $3, $4)";

const LIST: &str = "
SELECT at, who::text AS who, what::text AS what, name::text AS name, detail FROM t_resource_change
WHERE $1::text IS NULL OR name = $2 ORDER BY id DESC LIMIT $3";

const FORGET: &str =
    "DELETE FROM t_resource_change WHERE at < clock_timestamp() - $1::bigint * interval '1 microsecond'";

impl ChangeStore for Postgres {
    operations!(PgConnection);
}
