//! The statements of a migration: what creates and completes the lock's tables, and what takes them
//! away.

use std::future::Future;

use crate::store::{
    Reply, Store,
    schema::{INSTANCES, Installed, SCHEDULE, Schema},
};

/// A statement that changes the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// The statement, without a semicolon at its end.
    pub sql: String,
    /// What it locks, and for how long.
    pub locks: &'static str,
}

/// What a migration creates, in the order in which it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Locks,
    #[cfg(feature = "schedule")]
    Schedules,
    Functions,
    /// What takes all of it away.
    Removal,
}

impl Part {
    pub fn subject(self) -> &'static str {
        match self {
            Self::Locks => "the table t_resource_lock",
            #[cfg(feature = "schedule")]
            Self::Schedules => "the tables of schedules",
            Self::Functions => "the lock's functions",
            Self::Removal => {
                "the tables, whose removal takes the rights ALTER, DROP and, on MySQL and MariaDB, LOCK TABLES,"
            }
        }
    }
}

/// Returns the definitions of the columns that the table lacks. `new` is the type of the times of a
/// new table.
pub fn additions(schema: &Schema, new: &str) -> Vec<String> {
    let kind = |column| schema.column(column).map_or(new, |column| column.kind.as_str());
    let missing = schema.ours.iter().filter(|(name, _)| schema.column(name).is_none());
    let definition = |of: &str| of.replace("{begin}", kind("begin_time")).replace("{end}", kind("end_time"));
    missing.map(|(name, of)| format!("{name} {}", definition(of))).collect()
}

/// What a new table locks.
const NEW_TABLE: &str = "none on what exists";
/// What an index locks whose table exists.
const NEW_INDEX: &str = "writes to its table, while it is built";

/// Returns the statements of a migration's files that create tables and indexes which do not exist
/// yet.
pub fn creations(schema: &Schema, files: &[&str]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut lines = files.iter().flat_map(|file| file.lines());
    while let Some(first) = lines.next() {
        let Some((_, rest)) = first.trim_start().split_once("CREATE ").filter(|(before, _)| before.is_empty()) else {
            continue;
        };
        let indent = first.len() - first.trim_start().len();
        let mut sql = first.trim().to_owned();
        while !sql.ends_with(';') {
            let Some(line) = lines.next() else { break };
            sql.push('\n');
            sql.push_str(line.get(indent..).unwrap_or_default().trim_end());
        }
        let after = |word| rest.split_once(word).and_then(|(_, rest)| rest.split_whitespace().next());
        let exists = |word| after(word).is_some_and(|name| schema.has(name));
        if !exists(" EXISTS ") {
            let locks = if rest.starts_with("INDEX") && exists(" ON ") { NEW_INDEX } else { NEW_TABLE };
            steps.push(Step { sql: sql.trim_end_matches(';').to_owned(), locks });
        }
    }
    steps
}

/// Returns the text of a file of functions, as a statement.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn without_end(file: &str) -> String {
    file.trim_end().trim_end_matches(';').to_owned()
}

/// Returns the statements that leave the article's table alone: between the lock and its end the
/// tables, which takes the right that is likeliest to lack, and the columns; then the functions.
pub fn removal(
    schema: &Schema,
    together: bool,
    routine: &str,
    lock: (&str, &str, &str),
    end: Option<Step>,
) -> Vec<Step> {
    let (before, between, after) = lock;
    let ours: Vec<&str> =
        schema.ours.iter().map(|(name, _)| *name).filter(|name| schema.column(name).is_some()).collect();
    if ours.is_empty() && schema.tables().next().is_none() && schema.routines.is_empty() {
        return Vec::new();
    }
    let mut steps = Vec::new();
    if !schema.columns.is_empty() && !before.is_empty() {
        let tables = schema.tables().chain(["t_resource_lock"]).collect::<Vec<_>>().join(between);
        steps.push(Step { sql: format!("{before}{tables}{after}"), locks: "exclusive, on these, up to the end" });
    }
    let dropped = |sql: String| Step { sql, locks: "exclusive, on what is dropped" };
    steps.extend(schema.tables().map(|table| dropped(format!("DROP TABLE {table}"))));
    let columns: Vec<String> = match together {
        true if ours.is_empty() => Vec::new(),
        true => vec![ours.join(",\n    DROP COLUMN ")],
        false => ours.into_iter().map(str::to_owned).collect(),
    };
    steps.extend(columns.into_iter().map(|columns| Step {
        sql: format!("ALTER TABLE t_resource_lock\n    DROP COLUMN {columns}"),
        locks: "exclusive, on t_resource_lock: for a moment where only the definition is changed, else while it is copied",
    }));
    steps.extend(end.filter(|_| !schema.columns.is_empty()));
    steps.extend(schema.routines.iter().map(|name| dropped(format!("DROP {routine} {name}"))));
    steps
}

/// Returns how many of the steps come before the tables are locked.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub fn until_locked(steps: &[Step]) -> usize {
    steps.iter().position(|step| step.sql.starts_with("LOCK TABLE")).map_or(0, |at| at + 1)
}

/// Says what uses the tables, and what to do about it.
pub type Says = fn((String, String)) -> String;

/// Says that a key is claimed.
fn claimed((key, label): (String, String)) -> String {
    format!(
        "key {key:?} is claimed by {label:?}; release it, by force if its holder is gone (`rowlock list --claimed`)"
    )
}

/// Says that a run is under way.
fn running((name, label): (String, String)) -> String {
    format!("{label:?} runs {name:?}; stop it, or wait for the end of its lease")
}

/// Says that an instance is alive.
fn alive((_, label): (String, String)) -> String {
    format!("instance {label:?} runs schedules; stop it, or forget it if it is gone (`rowlock instances --forget`)")
}

/// Returns the statements, of these for claims, runs and instances, whose tables exist. Each one
/// finds one row that needs the tables: its name and its label. Until the lease of a run ends,
/// `due_at` is that end.
pub fn uses(schema: &Schema, sql: [&'static str; 3]) -> impl Iterator<Item = (&'static str, Says)> {
    // Without the columns there are no claims.
    let has_claims = ["holder", "claimed_at"].iter().all(|column| schema.column(column).is_some());
    let exist = [has_claims, schema.has(SCHEDULE), schema.has(INSTANCES)];
    let says: [Says; 3] = [claimed, running, alive];
    sql.into_iter().zip(says).zip(exist).filter_map(|(one, exists)| exists.then_some(one))
}

/// Reads what uses the tables, if something does: by the statements of the module that calls it.
macro_rules! read_use {
    ($conn:expr, $schema:expr) => {{
        let mut used = None;
        for (sql, says) in $crate::store::migration::uses($schema, [STANDING, RUNNING, ALIVE]) {
            if used.is_none() {
                used = sqlx::query_as(sql).fetch_optional(&mut *$conn).await?.map(says);
            }
        }
        used
    }};
}
pub(crate) use read_use;

/// Declares the files of a database's migrations, by what they create.
macro_rules! files {
    ($folder:literal) => {
        const LOCKS: [&str; 2] = [
            include_str!(concat!("../../../migrations/", $folder, "/20260101000000_rowlock.sql")),
            include_str!(concat!("../../../migrations/", $folder, "/20261128000000_changes.sql")),
        ];
        #[cfg(feature = "schedule")]
        const SCHEDULES: [&str; 3] = [
            include_str!(concat!("../../../migrations/", $folder, "/20260601000000_schedule.sql")),
            include_str!(concat!("../../../migrations/", $folder, "/20261126000000_instances.sql")),
            include_str!(concat!("../../../migrations/", $folder, "/20261128000001_orders.sql")),
        ];
    };
}
pub(crate) use files;

/// The schema operations of a [`Store`].
pub trait SchemaStore: Store {
    /// Whether the steps of a part are carried out as a whole or not at all, since they are one
    /// transaction.
    const CHANGES_ATOMICALLY: bool = false;
    /// What precedes the steps of a part where a person carries them out, and what follows them.
    fn around(part: Part) -> (&'static str, &'static str);

    /// Reads the definition of the tables.
    fn schema(conn: &mut Self::Connection) -> impl Future<Output = Reply<Schema>> + Send;

    /// Returns the statements that create what a part lacks, or that take all away.
    fn steps(schema: &Schema, part: Part) -> Vec<Step>;

    /// Carries the steps of a part out. It may run at any time, in any number of processes. It
    /// waits for a lock for a second at most, on the server: requests of other clients wait behind
    /// it.
    fn alter(conn: &mut Self::Connection, steps: &[Step]) -> impl Future<Output = Reply<()>> + Send;

    /// Fails if the user lacks a right that a later one of these steps needs. Changes nothing.
    fn check_rights(_: &mut Self::Connection, _: &[Step]) -> impl Future<Output = Reply<()>> + Send {
        std::future::ready(Ok(()))
    }

    /// Describes the oldest transaction that keeps the lock's table from being changed, if one is
    /// found. Changes nothing.
    fn blocker(conn: &mut Self::Connection) -> impl Future<Output = Reply<Option<String>>> + Send;

    /// Returns a key whose row has a `begin_time` more than five minutes in the future, on clocks
    /// that are ahead of UTC by these seconds.
    fn ahead(conn: &mut Self::Connection, offset: i64) -> impl Future<Output = Reply<Option<String>>> + Send;

    /// Carries the steps of a removal out, unless something stands that needs the tables: then
    /// nothing is changed, and that is returned.
    fn remove(
        conn: &mut Self::Connection,
        schema: &Schema,
        steps: &[Step],
    ) -> impl Future<Output = Reply<Option<String>>> + Send;

    /// Returns the lock's functions that exist here. `None` where the database has no functions.
    fn functions(
        conn: &mut Self::Connection,
        with_version: bool,
    ) -> impl Future<Output = Reply<Option<Installed>>> + Send;
}
