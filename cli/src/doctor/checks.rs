//! The checks, and what they advise.

use std::time::Duration;

use chrono::Utc;
use rowlock::{Error, LeaseLock, Schedule, Schedules, admin::ListOptions, errors::Setup, migration::Functions};
use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    database::said,
    doctor::{
        finding::Finding,
        rights::{check_rights, rights},
        servers::{Notifications, Server},
    },
    exit::Failure,
    migrate::described,
};

const LOCKS: &str = "tables of locks";
/// How the names of all tables begin.
const TABLES: &str = "t_resource_";
const MIGRATE: &str = "run `rowlock migrate` once, as a user that may create and alter tables";
/// By how much, in microseconds, the clocks may differ unnoticed.
const NEAR: i64 = 1_000_000;
/// By how much, in microseconds, this machine's clock may be ahead for `run --cron`.
const FAR: i64 = 5_000_000;
/// How long the answers to one check may take.
const REPLY: Duration = Duration::from_secs(5);

/// Splits the message of a failed connection into what was found and what to do.
pub fn unreachable(message: &str) -> (String, String) {
    let (found, advice) = found_and_advice(message).unwrap_or((message, "check the database URL"));
    (found.to_owned(), advice.to_owned())
}

/// Splits a message before its advice, which comes last. What was found may have any text in it.
fn found_and_advice(message: &str) -> Option<(&str, &str)> {
    message.rsplit_once("; ")
}

/// Runs all checks of a database that has been connected to.
pub async fn all<DB: Server>(pool: &Pool<DB>) -> Vec<Finding> {
    let mut findings = asked(pool, "server", server::<DB>).await;
    findings.extend(asked(pool, "place", place::<DB>).await);
    let (lock_table, has_locks) = locks(pool).await;
    let (schedule_tables, has_schedules) = schedules(pool, has_locks).await;
    findings.extend([lock_table, schedule_tables]);
    for rights in &rights::<DB>() {
        let exists = if rights.table.starts_with("t_resource_lock") { has_locks } else { has_schedules };
        if exists {
            let check = async |conn: &mut _| check_rights::<DB>(conn, rights).await.map(Some);
            findings.extend(asked(pool, rights.check, check).await);
        }
    }
    if has_locks {
        findings.extend(table(pool).await);
    }
    findings.extend(asked(pool, "clock", clock::<DB>).await);
    findings.push(Finding::good("time zones", format!("release {}, built in", Schedule::zones_release())));
    findings.extend(asked(pool, "pooler", pooler::<DB>).await);
    findings.extend(judge_notifications(DB::notifications(pool).await));
    findings.extend(asked(pool, "settings", settings::<DB>).await);
    findings
}

/// Makes a check. One that gets no reply is given up; the pool then closes its connection.
async fn asked<DB: Server, F: IntoIterator<Item = Finding>>(
    pool: &Pool<DB>,
    check: &'static str,
    make: impl AsyncFnOnce(&mut DB::Connection) -> Result<F, sqlx::Error>,
) -> Vec<Finding> {
    let found = timeout(REPLY, async { make(&mut *pool.acquire().await?).await });
    match found.await {
        Ok(Ok(findings)) => findings.into_iter().collect(),
        Ok(Err(error)) => {
            let log = "look at the server's log; a pooler or a proxy may refuse the statement";
            vec![Finding::problem(check, said(&error), if is_of_no_table(&error) { MIGRATE } else { log })]
        }
        Err(_) => {
            let advice = "another transaction may have locked the table: look for it in the server's list of sessions";
            vec![Finding::problem(check, format!("no reply within {REPLY:?}"), advice)]
        }
    }
}

fn is_of_no_table(error: &sqlx::Error) -> bool {
    let error = error.as_database_error();
    let code = error.and_then(|error| error.code());
    ["42P01", "42S02"].map(Some).contains(&code.as_deref())
        || error.is_some_and(|error| error.message().starts_with("no such table"))
}

async fn server<DB: Server>(conn: &mut DB::Connection) -> Result<Option<Finding>, sqlx::Error> {
    Ok(Some(Finding::good("server", DB::text(conn, DB::VERSION).await?.unwrap_or_default())))
}

async fn place<DB: Server>(conn: &mut DB::Connection) -> Result<Option<Finding>, sqlx::Error> {
    Ok(Some(match DB::text(conn, DB::PLACE).await? {
        Some(place) => Finding::good("place", place),
        None => {
            let why = "the URL names no database, or the search_path no schema that exists";
            Finding::problem("place", why, "name a database in the URL, or a schema in the search_path")
        }
    }))
}

fn unfit(error: Error) -> Finding {
    let advice = "change the table as said, or let rowlock use a database or schema of its own";
    Finding::problem(LOCKS, Failure::from(error).to_string(), advice)
}

/// Asks the library, which reads the shape of the table before it uses it.
async fn locks<DB: Server>(pool: &Pool<DB>) -> (Finding, bool) {
    match LeaseLock::new(pool.clone()).list(&ListOptions::default().limit(1)).await {
        Ok(_) => (Finding::good(LOCKS, "t_resource_lock and t_resource_lock_queue are complete"), true),
        Err(error @ (Error::Setup(Setup::TableMissing) | Error::Setup(Setup::ColumnMissing { .. }))) => {
            match described(pool.clone()).plan().await {
                Err(error @ Error::Setup(Setup::TableUnfit { .. })) => (unfit(error), false),
                _ => (Finding::problem(LOCKS, first_part(error), MIGRATE), false),
            }
        }
        Err(error @ Error::Setup(Setup::TableUnfit { .. })) => (unfit(error), false),
        Err(error @ Error::Setup(Setup::Unsupported { .. })) => {
            (Finding::problem(LOCKS, Failure::from(error).to_string(), "use another database for the locks"), false)
        }
        // The rights tell more.
        Err(error) => (Finding::problem(LOCKS, Failure::from(error).to_string(), "see the rights below"), true),
    }
}

async fn schedules<DB: Server>(pool: &Pool<DB>, has_locks: bool) -> (Finding, bool) {
    const CHECK: &str = "tables of schedules";
    match Schedules::new(pool.clone()).list().await {
        Ok(_) => (complete(pool, CHECK, has_locks).await, true),
        Err(error @ Error::Setup(Setup::ScheduleTablesMissing)) => {
            (Finding::problem(CHECK, first_part(error), MIGRATE), false)
        }
        Err(error) => (Finding::problem(CHECK, Failure::from(error).to_string(), "see the rights below"), true),
    }
}

/// Asks whether the migration would change anything. `Schedules::list` does not read every table.
async fn complete<DB: Server>(pool: &Pool<DB>, check: &'static str, has_locks: bool) -> Finding {
    match described(pool.clone()).plan().await {
        Ok(plan) => {
            let mut words =
                plan.steps().filter_map(|step| step.sql.split_whitespace().find(|word| word.starts_with(TABLES)));
            match words.find(|name| has_locks || !name.starts_with("t_resource_lock")) {
                None => Finding::good(check, "all tables of schedules exist"),
                Some(name) => {
                    let found = format!("{name}, or a part of it, is missing, or hidden from this user");
                    Finding::problem(check, found, MIGRATE)
                }
            }
        }
        Err(error) => Finding::problem(check, Failure::from(error).to_string(), "see the rights below"),
    }
}

/// Returns what else there is to say of a table that is complete: of other programs' rows, and of
/// the functions.
async fn table<DB: Server>(pool: &Pool<DB>) -> Vec<Finding> {
    const CHECK: &str = "functions";
    const MIGRATE: &str = "run `rowlock migrate --functions`, before programs that call them are replaced";
    let migration = described(pool.clone());
    let notes = migration.plan().await.map(|plan| plan.notes().to_vec()).unwrap_or_default();
    let mut findings: Vec<_> = notes
        .iter()
        .map(|note| {
            let (found, advice) = found_and_advice(note).unwrap_or((note, ""));
            Finding::note("times of other programs", found, advice)
        })
        .collect();
    findings.extend(match migration.installed_functions().await {
        Ok(Functions::Incomplete(missing)) => {
            Some(Finding::problem(CHECK, format!("{} is missing", missing.join(", ")), MIGRATE))
        }
        Ok(Functions::Older) => {
            Some(Finding::problem(CHECK, "they are older than this program, or rowlock_version is missing", MIGRATE))
        }
        Ok(Functions::Current) => Some(Finding::good(CHECK, "all exist, in this version or a newer one")),
        Ok(_) => None,
        Err(Error::Setup(Setup::Unsupported { .. })) => None,
        Err(error) => Some(Finding::problem(CHECK, Failure::from(error).to_string(), "see the rights above")),
    });
    findings
}

/// Returns what is wrong, without the advice of the message.
fn first_part(error: Error) -> String {
    let message = Failure::from(error).to_string();
    message.split(": run ").next().unwrap_or_default().to_owned()
}

async fn clock<DB: Server>(conn: &mut DB::Connection) -> Result<Option<Finding>, sqlx::Error> {
    let Some(sql) = DB::NOW else { return Ok(Some(Finding::good("clock", "this machine's"))) };
    let micros = || Utc::now().timestamp_micros();
    let before = micros();
    Ok(Some(match DB::text(conn, sql).await? {
        Some(now) => {
            let middle = before + (micros() - before) / 2;
            // MySQL writes a fraction.
            let now = now.split('.').next().and_then(|now| now.parse().ok()).unwrap_or(middle);
            judge_clocks(middle - now)
        }
        None => Finding::good("clock", "the server returned no time"),
    }))
}

/// Judges by how many microseconds this machine's clock is ahead of the database's.
fn judge_clocks(ahead: i64) -> Finding {
    let apart = Duration::from_millis(ahead.unsigned_abs() / 1000);
    let found = match humantime::format_duration(apart) {
        _ if apart.is_zero() => "this machine's clock and the database's agree".to_owned(),
        apart if ahead < 0 => format!("this machine's clock is {apart} behind the database's"),
        apart => format!("this machine's clock is {apart} ahead of the database's"),
    };
    let advice = "synchronize the clocks (NTP); locks and schedules go by the database's, `run --cron` is started by \
                  this machine's";
    match ahead {
        FAR.. => Finding::problem("clock", found, advice),
        _ if ahead.abs() >= NEAR => Finding::note("clock", found, advice),
        _ => Finding::good("clock", found),
    }
}

async fn pooler<DB: Server>(conn: &mut DB::Connection) -> Result<Option<Finding>, sqlx::Error> {
    let Some(sql) = DB::POOLER else { return Ok(None) };
    let version = DB::text(conn, sql).await.ok().flatten();
    let advice = "a standby must not answer for the primary: switch its load balancing off, or leave its lists of \
                  functions empty";
    Ok(version.map(|version| Finding::note("pooler", format!("Pgpool-II {version}"), advice)))
}

/// Judges what became of a notification.
fn judge_notifications(notifications: Notifications) -> Option<Finding> {
    const CHECK: &str = "notifications";
    const POLLED: &str = "waiters poll instead";
    match notifications {
        Notifications::None => None,
        Notifications::Arrive => Some(Finding::good(CHECK, "no pooler in between; LISTEN works")),
        Notifications::Pooled => Some(Finding::note(
            CHECK,
            format!("a pooler such as PgBouncer is in between, so that LISTEN is not used; {POLLED}"),
            "to receive notifications, connect to the server directly; PgBouncer has to be 1.21 or later",
        )),
        Notifications::Missing(why) => {
            Some(Finding::note(CHECK, format!("LISTEN does not work: {why}; {POLLED}"), "look for a proxy in between"))
        }
    }
}

async fn settings<DB: Server>(conn: &mut DB::Connection) -> Result<Vec<Finding>, sqlx::Error> {
    Ok(judge_settings(&DB::settings(conn).await?))
}

/// Judges the settings of a MySQL or MariaDB server.
fn judge_settings(settings: &[(String, String)]) -> Vec<Finding> {
    let setting = |wanted: &str| {
        let found = settings.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
        found.map(|(_, value)| value.to_ascii_uppercase())
    };
    let is_on = |name| setting(name).is_some_and(|value| value == "ON" || value == "1");
    let mut findings = Vec::new();
    if let Some(isolation) = setting("transaction_isolation").or_else(|| setting("tx_isolation")) {
        let format = if is_on("log_bin") { setting("binlog_format").unwrap_or_default() } else { "off".to_owned() };
        findings.push(binary_log(&format, &isolation));
    }
    if is_on("wsrep_on") {
        let advice = "docs/clusters.md says what a node that leaves the cluster means";
        findings.push(Finding::note("cluster", "a Galera cluster", advice));
    }
    if is_on("sysdate_is_now") {
        let advice = "start the server without --sysdate-is-now: a statement that has waited for a row is granted, \
                      although its sender has given up";
        findings.push(Finding::problem("SYSDATE", "the time at which a statement began", advice));
    }
    findings.extend(setting("journal_mode").map(|mode| journal(&mode)));
    findings
}

fn binary_log(format: &str, isolation: &str) -> Finding {
    const CHECK: &str = "binary log";
    if format == "STATEMENT" && isolation.starts_with("READ-") {
        let found = format!("binlog_format is STATEMENT, and the isolation level is {isolation}");
        return Finding::problem(CHECK, found, "InnoDB refuses every write then (error 1665): set binlog_format = ROW");
    }
    Finding::good(CHECK, format!("{format}; isolation level {isolation}"))
}

/// Judges SQLite's journal mode. Only WAL is stored in the file. MEMORY and OFF belong to one
/// connection, so that those of another program are not seen. A database in memory, which ends with
/// its program, has the mode MEMORY.
fn journal(mode: &str) -> Finding {
    const CHECK: &str = "journal";
    let advice = "PRAGMA journal_mode = WAL: without it, readers and writers wait for each other, and a program may \
                  use the mode MEMORY or OFF unseen; a crash may then destroy the file with all locks and schedules";
    match mode {
        "WAL" | "MEMORY" => Finding::good(CHECK, mode),
        _ => Finding::note(CHECK, mode, advice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Mark;

    #[test]
    fn clocks_may_differ_a_little() {
        for (ahead, mark) in [
            (0, Mark::Good),
            (900_000, Mark::Good),
            (-900_000, Mark::Good),
            (2_000_000, Mark::Note),
            (-90_000_000, Mark::Note),
            (6_000_000, Mark::Problem),
        ] {
            assert_eq!(judge_clocks(ahead).mark, mark, "{ahead}");
        }
        assert!(judge_clocks(-90_000_000).found.contains("1m 30s behind"), "{:?}", judge_clocks(-90_000_000));
    }

    #[test]
    fn a_log_of_statements_needs_another_isolation_level() {
        let of = |format: &str, log: &str, isolation: &str| {
            let settings = [("binlog_format", format), ("log_bin", log), ("transaction_isolation", isolation)];
            judge_settings(&settings.map(|(name, value)| (name.to_owned(), value.to_owned())))[0].mark
        };
        assert_eq!(of("STATEMENT", "ON", "READ-COMMITTED"), Mark::Problem);
        assert_eq!(of("STATEMENT", "OFF", "READ-COMMITTED"), Mark::Good);
        assert_eq!(of("STATEMENT", "ON", "REPEATABLE-READ"), Mark::Good);
        assert_eq!(of("ROW", "ON", "READ-COMMITTED"), Mark::Good);
        assert!(judge_settings(&[]).is_empty(), "other databases have none of them");
    }

    #[test]
    fn a_clock_that_stands_still_within_a_statement_is_a_problem() {
        let of = |value: &str| judge_settings(&[("sysdate_is_now".to_owned(), value.to_owned())]);
        assert_eq!(of("ON")[0].mark, Mark::Problem);
        assert!(of("OFF").is_empty());
    }

    #[test]
    fn a_notification_that_does_not_arrive_is_no_problem() {
        let found = judge_notifications(Notifications::Missing("why".to_owned())).unwrap();
        assert_eq!(found.mark, Mark::Note);
    }
}
