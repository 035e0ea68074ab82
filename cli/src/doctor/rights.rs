//! The rights of the user on each table.

use sqlx::AssertSqlSafe;

use crate::doctor::{finding::Finding, servers::Server};

/// The rights on one table.
pub struct Rights {
    pub check: &'static str,
    pub table: &'static str,
    /// A column that is written.
    column: &'static str,
    needed: &'static [&'static str],
    /// What needs them.
    by: &'static str,
    /// What takes the right to delete, if it is not needed otherwise.
    deleted_by: Option<&'static str>,
}

impl Rights {
    /// Returns each right with a statement that takes it and changes nothing.
    fn statements(&self) -> [(&'static str, String); 4] {
        let Self { table, column, .. } = self;
        [
            ("SELECT", format!("SELECT {column} FROM {table} WHERE 1 = 0")),
            ("INSERT", format!("INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0")),
            ("UPDATE", format!("UPDATE {table} SET {column} = {column} WHERE 1 = 0")),
            ("DELETE", format!("DELETE FROM {table} WHERE 1 = 0")),
        ]
    }
}

/// The rights that `docs/threats.md` names.
pub fn rights<DB: Server>() -> [Rights; 9] {
    const ADD: &[&str] = &["SELECT", "INSERT"];
    const ROW: &[&str] = &["SELECT", "INSERT", "UPDATE"];
    const ALL: &[&str] = &["SELECT", "INSERT", "UPDATE", "DELETE"];
    const FORGET: Option<&str> = Some("`rowlock forget`");
    const RUNS: Option<&str> = Some("`rowlock forget --runs`");
    const CORRECTED: Option<&str> = Some("`rowlock forget --runs`, `rowlock reset` or a clock that is put right");
    const REMOVE: Option<&str> = Some("`rowlock remove`");
    let on = |check, table, column, needed, by, deleted_by| Rights { check, table, column, needed, by, deleted_by };
    [
        on("rights to claim", "t_resource_lock", "status", ROW, "every claim", FORGET),
        on("rights to queue", "t_resource_lock_queue", "alive_until", ALL, "`--fair`", None),
        on("rights to schedule", "t_resource_schedule", "slot", ROW, "every schedule", REMOVE),
        on("rights to announce instances", "t_resource_schedule_instance", "beats", ALL, "every schedule", None),
        on("rights to keep times", "t_resource_schedule_times", "known", ROW, "every schedule", REMOVE),
        on("rights to record runs", "t_resource_schedule_run", "missed", DB::RECORDS_RUNS, "every schedule", CORRECTED),
        on("rights to keep output", "t_resource_schedule_detail", "note", ROW, "every schedule", CORRECTED),
        on("rights to order", "t_resource_order", "who", ALL, "every schedule", None),
        on(
            "rights to record changes",
            "t_resource_change",
            "detail",
            ADD,
            "`rowlock release --force` and every schedule",
            RUNS,
        ),
    ]
}

/// Sends statements that concern no row: the server still asks for the rights. Another error is
/// that of the check: the table may be missing, or busy.
pub async fn check_rights<DB: Server>(conn: &mut DB::Connection, rights: &Rights) -> Result<Finding, sqlx::Error> {
    let Rights { check, table, needed, by, deleted_by, .. } = *rights;
    let mut denied = Vec::new();
    for (right, sql) in rights.statements() {
        match DB::text(conn, AssertSqlSafe(sql)).await {
            Ok(_) => {}
            Err(error) if error.as_database_error().is_some_and(DB::is_denied) => denied.push(right),
            Err(error) => return Err(error),
        }
    }
    let missing: Vec<&str> = needed.iter().filter(|right| denied.contains(right)).copied().collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        let found = format!("{missing} on {table} is denied, which {by} needs");
        let advice = match grantee::<DB>(conn).await {
            Some(user) => format!(
                "GRANT {missing} ON {table} TO {user}; if it has them, the database only reads: connect to the primary"
            ),
            None => "check the permissions of the file and of its folder, and `mode` in the database URL".to_owned(),
        };
        return Ok(Finding::problem(check, found, advice));
    }
    Ok(match deleted_by {
        Some(command) if denied.contains(&"DELETE") => {
            Finding::note(check, format!("DELETE on {table} is denied"), format!("only {command} needs it"))
        }
        _ => Finding::good(check, format!("{} on {table}", needed.join(", "))),
    })
}

/// Returns the user of the connection, as GRANT takes it. SQLite has none.
async fn grantee<DB: Server>(conn: &mut DB::Connection) -> Option<String> {
    let user = DB::text(conn, DB::USER?).await.ok().flatten();
    Some(user.unwrap_or_else(|| "the user".to_owned()))
}
