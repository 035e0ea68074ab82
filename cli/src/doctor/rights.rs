//! The rights of the user on each table.

use crate::doctor::{finding::Finding, servers::Server};

/// The rights on one table.
pub struct Rights {
    pub check: &'static str,
    pub table: &'static str,
    /// Each right with a statement that takes it and changes nothing.
    statements: [(&'static str, &'static str); 4],
    needed: &'static [&'static str],
    needed_by: &'static str,
    /// What takes the right to delete, if it is not needed otherwise.
    deleted_by: Option<&'static str>,
}

/// The rights on a table; the column is one that is written.
macro_rules! rights {
    ($check:literal, $table:literal, $column:literal, $needed:expr, $needed_by:literal, $deleted_by:expr) => {
        Rights {
            check: concat!("rights to ", $check),
            table: $table,
            statements: [
                ("SELECT", concat!("SELECT ", $column, " FROM ", $table, " WHERE 1 = 0")),
                ("INSERT", concat!("INSERT INTO ", $table, " SELECT * FROM ", $table, " WHERE 1 = 0")),
                ("UPDATE", concat!("UPDATE ", $table, " SET ", $column, " = ", $column, " WHERE 1 = 0")),
                ("DELETE", concat!("DELETE FROM ", $table, " WHERE 1 = 0")),
            ],
            needed: $needed,
            needed_by: $needed_by,
            deleted_by: $deleted_by,
        }
    };
}

/// The rights that `docs/threats.md` names.
pub fn rights<DB: Server>() -> [Rights; 9] {
    const ADD: &[&str] = &["SELECT", "INSERT"];
    const ROW: &[&str] = &["SELECT", "INSERT", "UPDATE"];
    const ALL: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];
    const FORGET: Option<&str> = Some("`rowlock forget`");
    const RUNS: Option<&str> = Some("`rowlock forget --runs`");
    const REMOVE: Option<&str> = Some("`rowlock remove`");
    [
        rights!("claim", "t_resource_lock", "status", ROW, "every claim", FORGET),
        rights!("queue", "t_resource_lock_queue", "alive_until", ALL, "`--fair`", None),
        rights!("schedule", "t_resource_schedule", "slot", ROW, "every schedule", REMOVE),
        rights!("announce instances", "t_resource_schedule_instance", "beats", ALL, "every schedule", None),
        rights!("keep times", "t_resource_schedule_times", "known", ROW, "every schedule", REMOVE),
        rights!("record runs", "t_resource_schedule_run", "missed", DB::RECORDS_RUNS, "every schedule", RUNS),
        rights!("keep output", "t_resource_schedule_detail", "note", ROW, "every schedule", RUNS),
        rights!("order", "t_resource_order", "who", ALL, "every schedule", None),
        rights!(
            "record changes",
            "t_resource_change",
            "detail",
            ADD,
            "`rowlock release --force` and every schedule",
            RUNS
        ),
    ]
}

/// Sends statements that concern no row: the server still asks for the rights.
pub async fn check_rights<DB: Server>(conn: &mut DB::Connection, rights: &Rights) -> Finding {
    let Rights { check, table, needed, needed_by, deleted_by, .. } = *rights;
    let mut denied = Vec::new();
    for (right, sql) in rights.statements {
        if is_denied::<DB>(conn, sql).await {
            denied.push(right);
        }
    }
    let missing: Vec<&str> = needed.iter().filter(|right| denied.contains(right)).copied().collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        let found = format!("{missing} on {table} is denied, which {needed_by} needs");
        let advice = match grantee::<DB>(conn).await {
            Some(user) => format!(
                "GRANT {missing} ON {table} TO {user}; if it has them, the database only reads: connect to the primary"
            ),
            None => "check the permissions of the file and of its folder, and `mode` in the database URL".to_owned(),
        };
        return Finding::problem(check, found, advice);
    }
    match deleted_by {
        Some(command) if denied.contains(&"DELETE") => {
            Finding::note(check, format!("DELETE on {table} is denied"), format!("only {command} needs it"))
        }
        _ => Finding::good(check, format!("{} on {table}", needed.join(", "))),
    }
}

/// Returns the user of the connection, as GRANT takes it. SQLite has none.
async fn grantee<DB: Server>(conn: &mut DB::Connection) -> Option<String> {
    let user = DB::text(conn, DB::USER?).await.ok().flatten();
    Some(user.unwrap_or_else(|| "the user".to_owned()))
}

async fn is_denied<DB: Server>(conn: &mut DB::Connection, sql: &'static str) -> bool {
    let reply = DB::text(conn, sql).await;
    reply.is_err_and(|error| error.as_database_error().is_some_and(DB::is_denied))
}
