//! The texts of the statements that contenders send by hand, for each database.

use sqlx::{MySql, Postgres, Sqlite};

/// The statements that all databases have. Parameters are bound in the order in which they are
/// named here.
pub trait Dialect {
    /// Begins a transaction that writes.
    const BEGIN: &'static str;
    /// The article's read of a row (key), which locks it where that is possible.
    const ARTICLE_LOOK: &'static str;
    /// The article's lock: client, key.
    const ARTICLE_TAKE: &'static str;
    /// The article's unlock: key.
    const ARTICLE_FREE: &'static str;
    /// Locks the row unless it is held: client, holder, key. Returns the token. Writes the columns
    /// that rowlock writes.
    const SINGLE_TAKE: &'static str;
    /// Unlock: key, holder, token.
    const SINGLE_FREE: &'static str;
    /// A lock of the connection (key), and its unlock; both return 1. SQLite has none.
    const ADVISORY: Option<(&'static str, &'static str)>;
    /// A claim by the function (key, client) with the columns granted, token and holder, and its
    /// release: key, holder, token. SQLite has none.
    const FUNCTIONS: Option<(&'static str, &'static str)>;
    /// The simplest change of a row of `plain`: id.
    const PLAIN: &'static str;
    /// Deducts an amount from an account if the balance is sufficient: amount, id, amount.
    const DEDUCT: &'static str;
    /// The balance (id), locked where that is possible.
    const BALANCE: &'static str;
    /// Sets the balance: balance, id.
    const SET_BALANCE: &'static str;
    /// The settings that decide whether a COMMIT is durable, as one row of texts, and their names.
    const SETTINGS: (&'static str, &'static [&'static str]);
    /// Runs after a table was filled.
    const ANALYZE: &'static str;
    /// How many connections this database has, counted on one of them. SQLite does not count them.
    const CONNECTIONS: Option<&'static str>;

    /// Whether a commit is durable with these settings.
    fn durable(settings: &[&str]) -> bool;
}

impl Dialect for Postgres {
    const BEGIN: &'static str = "BEGIN";
    const ARTICLE_LOOK: &'static str = "SELECT status, lock_flag, begin_time, end_time, client_ip, time FROM t_resource_lock WHERE key_resource = $1 FOR UPDATE";
    const ARTICLE_TAKE: &'static str = "UPDATE t_resource_lock SET status = 'P', lock_flag = 1, begin_time = now(), client_ip = $1 WHERE key_resource = $2";
    const ARTICLE_FREE: &'static str =
        "UPDATE t_resource_lock SET status = 'S', lock_flag = 0, end_time = now() WHERE key_resource = $1";
    const SINGLE_TAKE: &'static str = "
UPDATE t_resource_lock SET lock_flag = 1, status = 'P', client_ip = $1, holder = $2, begin_time = now(), claimed_at = now(), end_time = NULL,
    token = greatest(token + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), prior_token = NULL, prior_client_ip = NULL,
    expires_at = clock_timestamp() + interval '30 seconds'
WHERE key_resource = $3 AND (lock_flag = 0 OR expires_at <= clock_timestamp()) RETURNING token";
    const SINGLE_FREE: &'static str = "
UPDATE t_resource_lock SET lock_flag = 0, status = 'S', end_time = clock_timestamp(), holder = NULL, expires_at = NULL,
    claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL
WHERE key_resource = $1 AND holder = $2 AND token = $3";
    const ADVISORY: Option<(&'static str, &'static str)> = Some((
        "SELECT pg_try_advisory_lock(hashtextextended($1, 0))::int",
        "SELECT pg_advisory_unlock(hashtextextended($1, 0))::int",
    ));
    const FUNCTIONS: Option<(&'static str, &'static str)> = Some((
        "SELECT granted::int, token, holder::text FROM rowlock_try_acquire($1, label => $2)",
        "SELECT rowlock_release($1, $2::uuid, $3)",
    ));
    const PLAIN: &'static str = "UPDATE plain SET n = n + 1 WHERE id = $1";
    const DEDUCT: &'static str = "UPDATE by_guard SET balance = balance - $1 WHERE id = $2 AND balance >= $3";
    const BALANCE: &'static str = "SELECT balance FROM by_lock WHERE id = $1 FOR UPDATE";
    const SET_BALANCE: &'static str = "UPDATE by_lock SET balance = $1 WHERE id = $2";
    const SETTINGS: (&'static str, &'static [&'static str]) = (
        "SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes')",
        &["version", "fsync", "synchronous_commit", "full_page_writes"],
    );
    const ANALYZE: &'static str = "VACUUM ANALYZE t_resource_lock";
    const CONNECTIONS: Option<&'static str> =
        Some("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()");

    fn durable(settings: &[&str]) -> bool {
        matches!(settings, [_, "on", "on" | "local" | "remote_write" | "remote_apply", "on"])
    }
}

impl Dialect for MySql {
    const BEGIN: &'static str = "BEGIN";
    const ARTICLE_LOOK: &'static str = "SELECT status, lock_flag, begin_time, end_time, client_ip, time FROM t_resource_lock WHERE key_resource = ? FOR UPDATE";
    const ARTICLE_TAKE: &'static str = "UPDATE t_resource_lock SET status = 'P', lock_flag = 1, begin_time = UTC_TIMESTAMP(6), client_ip = ? WHERE key_resource = ?";
    const ARTICLE_FREE: &'static str =
        "UPDATE t_resource_lock SET status = 'S', lock_flag = 0, end_time = UTC_TIMESTAMP(6) WHERE key_resource = ?";
    const SINGLE_TAKE: &'static str = "
UPDATE t_resource_lock SET lock_flag = 1, status = 'P', client_ip = ?, holder = ?, begin_time = UTC_TIMESTAMP(6), claimed_at = begin_time, end_time = NULL,
    token = LAST_INSERT_ID(GREATEST(token + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), prior_token = NULL, prior_client_ip = NULL,
    expires_at = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND
WHERE key_resource = ? AND (lock_flag = 0 OR expires_at <= UTC_TIMESTAMP(6))";
    const SINGLE_FREE: &'static str = "
UPDATE t_resource_lock SET lock_flag = 0, status = 'S', end_time = UTC_TIMESTAMP(6), holder = NULL, expires_at = NULL,
    claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL
WHERE key_resource = ? AND holder = ? AND token = ?";
    const ADVISORY: Option<(&'static str, &'static str)> = Some(("SELECT GET_LOCK(?, 0)", "SELECT RELEASE_LOCK(?)"));
    const FUNCTIONS: Option<(&'static str, &'static str)> =
        Some(("CALL rowlock_try_acquire(?, NULL, ?, NULL, NULL, NULL)", "CALL rowlock_release(?, ?, ?, 'S')"));
    const PLAIN: &'static str = "UPDATE plain SET n = n + 1 WHERE id = ?";
    const DEDUCT: &'static str = "UPDATE by_guard SET balance = balance - ? WHERE id = ? AND balance >= ?";
    const BALANCE: &'static str = "SELECT balance FROM by_lock WHERE id = ? FOR UPDATE";
    const SET_BALANCE: &'static str = "UPDATE by_lock SET balance = ? WHERE id = ?";
    const SETTINGS: (&'static str, &'static [&'static str]) = (
        "SELECT CONVERT(@@version USING utf8mb4), CAST(@@innodb_flush_log_at_trx_commit AS CHAR), CAST(@@log_bin AS CHAR), CAST(@@sync_binlog AS CHAR)",
        &["version", "innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog"],
    );
    const ANALYZE: &'static str = "ANALYZE TABLE t_resource_lock";
    const CONNECTIONS: Option<&'static str> =
        // MySQL's older list fails on statements with binary values in them; MariaDB has no other.
        Some(
            "SELECT COUNT(*) FROM /*M! information_schema. */ /*!80022 performance_schema. */ processlist WHERE db = DATABASE()",
        );

    /// If a binary log is kept, it is part of the commit.
    fn durable(settings: &[&str]) -> bool {
        matches!(settings, [_, "1", "0" | "OFF", _] | [_, "1", "1" | "ON", "1"])
    }
}

/// SQLite's clock has a resolution of milliseconds. Times are stored in microseconds.
macro_rules! now {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000"
    };
}

impl Dialect for Sqlite {
    const BEGIN: &'static str = "BEGIN IMMEDIATE";
    const ARTICLE_LOOK: &'static str =
        "SELECT status, lock_flag, begin_time, end_time, client_ip, time FROM t_resource_lock WHERE key_resource = ?1";
    const ARTICLE_TAKE: &'static str = concat!(
        "UPDATE t_resource_lock SET status = 'P', lock_flag = 1, begin_time = ",
        now!(),
        ", client_ip = ?1 WHERE key_resource = ?2"
    );
    const ARTICLE_FREE: &'static str = concat!(
        "UPDATE t_resource_lock SET status = 'S', lock_flag = 0, end_time = ",
        now!(),
        " WHERE key_resource = ?1"
    );
    const SINGLE_TAKE: &'static str = concat!(
        "UPDATE t_resource_lock SET lock_flag = 1, status = 'P', client_ip = ?1, holder = ?2, begin_time = ",
        now!(),
        ", claimed_at = ",
        now!(),
        ", end_time = NULL, token = max(token + 1, ",
        now!(),
        "), prior_token = NULL, prior_client_ip = NULL, expires_at = ",
        now!(),
        " + 30000000 WHERE key_resource = ?3 AND (lock_flag = 0 OR expires_at <= ",
        now!(),
        ") RETURNING token"
    );
    const SINGLE_FREE: &'static str = concat!(
        "UPDATE t_resource_lock SET lock_flag = 0, status = 'S', end_time = ",
        now!(),
        ", holder = NULL, expires_at = NULL, claimed_at = NULL, prior_token = NULL, prior_client_ip = NULL
        WHERE key_resource = ?1 AND holder = ?2 AND token = ?3"
    );
    const ADVISORY: Option<(&'static str, &'static str)> = None;
    const FUNCTIONS: Option<(&'static str, &'static str)> = None;
    const PLAIN: &'static str = "UPDATE plain SET n = n + 1 WHERE id = ?1";
    const DEDUCT: &'static str = "UPDATE by_guard SET balance = balance - ?1 WHERE id = ?2 AND balance >= ?3";
    const BALANCE: &'static str = "SELECT balance FROM by_lock WHERE id = ?1";
    const SET_BALANCE: &'static str = "UPDATE by_lock SET balance = ?1 WHERE id = ?2";
    const SETTINGS: (&'static str, &'static [&'static str]) = (
        "SELECT sqlite_version(), CAST((SELECT synchronous FROM pragma_synchronous) AS TEXT), (SELECT journal_mode FROM pragma_journal_mode)",
        &["version", "synchronous", "journal_mode"],
    );
    const ANALYZE: &'static str = "ANALYZE";
    const CONNECTIONS: Option<&'static str> = None;

    /// FULL or EXTRA, and a journal in a file.
    fn durable(settings: &[&str]) -> bool {
        matches!(settings, [_, "2" | "3", "wal" | "delete" | "truncate" | "persist"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_may_lose_a_commit_is_not_durable() {
        assert!(Postgres::durable(&["17", "on", "on", "on"]));
        assert!(!Postgres::durable(&["17", "off", "on", "on"]) && !Postgres::durable(&["17", "on", "off", "on"]));
        assert!(!Postgres::durable(&["17", "on", "on", "off"]));
        assert!(MySql::durable(&["8", "1", "1", "1"]) && MySql::durable(&["10", "1", "OFF", "0"]));
        assert!(!MySql::durable(&["8", "2", "0", "1"]) && !MySql::durable(&["8", "1", "1", "0"]));
        assert!(Sqlite::durable(&["3", "2", "wal"]));
        assert!(!Sqlite::durable(&["3", "1", "wal"]) && !Sqlite::durable(&["3", "2", "memory"]));
    }
}
