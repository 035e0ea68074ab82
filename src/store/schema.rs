//! The lock's tables: how they are defined on this database, how they are created, and what takes
//! them away.

use std::future::Future;

use crate::key::Key;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::store::servers::{Support, refusal, support};
use crate::store::{Form, Reply, Store};

/// The lock's table as found on this database, and the other tables. By default there are none.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    /// Empty if there is no table.
    pub columns: Vec<Column>,
    /// The columns that rowlock adds on this database, and their definitions, in which `{begin}`
    /// and `{end}` stand for the types of `begin_time` and `end_time`: copies round alike.
    pub ours: &'static [(&'static str, &'static str)],
    /// The tables of rowlock that exist, and indexes. On PostgreSQL, those beside the table.
    pub relations: Vec<String>,
    /// The lock's functions, as DROP takes them, if they were looked for.
    pub routines: Vec<String>,
    /// PostgreSQL: why the statements would not use the tables beside `t_resource_lock`.
    pub apart: Option<String>,
    /// PostgreSQL: the schema of the lock's tables, if the `search_path` does not begin with it.
    pub place: Option<String>,
    /// Whether a column can be added that statements without a list of columns do not see.
    pub hides_columns: bool,
    /// Whether the table is copied when a column is added.
    pub copies_to_add: bool,
    /// The type of the key column, as the database names it.
    pub key_type: String,
    pub key_limit: KeyLimit,
    /// How many characters the column `client_ip` holds, if they are limited.
    pub label_chars: Option<usize>,
    /// The statements that this server and table allow.
    pub form: Form,
    /// Why the table or the connection is unusable.
    pub wrong: Option<String>,
    /// Why the database is unusable, whatever its table.
    pub refused: Option<String>,
    /// Another server than the database itself: its name, its version banner, and what is to be
    /// said of it.
    pub untried: Option<(&'static str, String, &'static str)>,
}

#[derive(Clone, Debug)]
pub struct Column {
    pub name: String,
    /// As the database names it.
    pub kind: String,
}

/// How much the key column holds. What is not limited is not set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyLimit {
    pub bytes: Option<usize>,
    pub chars: Option<usize>,
    /// No characters of four bytes (MySQL's utf8mb3).
    pub three_byte_chars: bool,
}

impl KeyLimit {
    pub fn holds(&self, key: &Key) -> bool {
        let text = key.as_str();
        self.bytes.is_none_or(|most| text.len() <= most)
            && self.chars.is_none_or(|most| text.chars().count() <= most)
            && !(self.three_byte_chars && text.chars().any(|c| c.len_utf8() > 3))
    }
}

pub const INSTANCES: &str = "t_resource_schedule_instance";
pub const SCHEDULE: &str = "t_resource_schedule";
const QUEUE: &str = "t_resource_lock_queue";
/// What operators have changed.
pub const CHANGES: &str = "t_resource_change";

/// The columns that every program on the table knows.
const THEIRS: [&str; 7] = ["key_resource", "status", "lock_flag", "begin_time", "end_time", "client_ip", "time"];

/// What a column holds, by parts of the names of its types on all databases, and of `Schema::ours`.
const FAMILIES: [(&str, &[&str]); 6] = [
    ("none of these", &["interval", "point"]),
    ("of bytes", &["uuid", "binary", "blob", "bytea"]),
    ("a time", &["timestamp", "datetime", "{"]),
    ("text", &["char", "text"]),
    ("an integer", &["int"]),
    ("a boolean", &["bool"]),
];

impl Schema {
    /// Records what the server's version banner says about support.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub fn judge_server(&mut self, banner: String) {
        match support(&banner) {
            Support::Known => {}
            Support::Untried(name, says) => self.untried = Some((name, banner, says)),
            Support::Refused(name) => self.refused = Some(refusal(name, &banner)),
        }
    }

    pub fn column(&self, wanted: &str) -> Option<&Column> {
        self.columns.iter().find(|has| has.name.eq_ignore_ascii_case(wanted))
    }

    /// Returns the columns of rowlock that the table lacks.
    pub fn missing_columns(&self) -> Vec<&'static str> {
        self.ours.iter().map(|(name, _)| *name).filter(|wanted| self.column(wanted).is_none()).collect()
    }

    /// Says what shows that the table is not one to complete or to take back: other tables would be
    /// used beside it, a column of the article is missing, or one of another program has the name
    /// of one of rowlock's.
    pub fn foreign(&self) -> Option<String> {
        if self.columns.is_empty() || self.apart.is_some() {
            return self.apart.clone();
        }
        let lacks = THEIRS.into_iter().filter(|column| self.column(column).is_none()).collect::<Vec<_>>().join(", ");
        if !lacks.is_empty() {
            return Some(format!("it lacks {lacks}, which rowlock does not add to a table of another program"));
        }
        self.ours.iter().find_map(|(name, definition)| {
            let kind = &self.column(name)?.kind;
            let (theirs, ours) = (family(kind)?, family(definition)?);
            (theirs != ours).then(|| {
                format!("its column {name} ({kind}) is another program's, as rowlock's is {ours}; give it another name")
            })
        })
    }

    /// Refuses a table whose `claimed_at` rounds otherwise than `begin_time`: no claim would stand.
    /// `change` gives it the type `{begin}`.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub fn judge_copy(&mut self, change: &str) {
        // MariaDB notes a format of older versions behind a type.
        let kind = |name| self.column(name).and_then(|column| column.kind.split(" /*").next());
        if let (Some(copy), Some(begin)) = (kind("claimed_at"), kind("begin_time"))
            && self.wrong.is_none()
            && copy != begin
        {
            let change = change.replace("{begin}", begin);
            self.wrong = Some(format!(
                "its column claimed_at ({copy}) does not have the type of begin_time ({begin}), which it repeats; \
                 ALTER TABLE t_resource_lock {change}"
            ));
        }
    }

    /// Returns what locks need and do not find.
    pub fn missing(&self) -> Vec<&'static str> {
        let queue = (!self.has(QUEUE)).then_some("its table t_resource_lock_queue");
        self.missing_columns().into_iter().chain(queue).collect()
    }

    /// Returns the tables beside `t_resource_lock` that belong to it.
    pub fn tables(&self) -> impl Iterator<Item = &'static str> {
        TABLES.into_iter().filter(|table| self.has(table))
    }

    pub fn has(&self, relation: &str) -> bool {
        self.relations.iter().any(|has| has.eq_ignore_ascii_case(relation))
    }
}

/// Returns what a column of this type holds. `None`: any value (SQLite).
fn family(kind: &str) -> Option<&'static str> {
    let kind = kind.to_ascii_lowercase();
    let word = kind.split([' ', '(']).next().filter(|word| !["", "any"].contains(word))?;
    let known = FAMILIES.into_iter().find(|(_, parts)| parts.iter().any(|part| word.contains(part)));
    Some(known.map_or("none of these", |(family, _)| family))
}

/// What is wrong with a table in which a key can have several rows.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub const NO_KEY: &str =
    "its column key_resource is not unique by itself; delete rows with the same key, and make it the primary key";

/// Describes a column whose type does not fit the statements.
pub fn unfit(column: &str, column_type: &str, fit: &str) -> String {
    format!("its column {column} ({column_type}) does not hold what rowlock writes there; use {fit}")
}

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

/// The tables beside `t_resource_lock`. Schedules need all but the first.
pub const TABLES: [&str; 8] = [
    QUEUE,
    CHANGES,
    SCHEDULE,
    "t_resource_schedule_run",
    INSTANCES,
    "t_resource_schedule_times",
    "t_resource_order",
    "t_resource_schedule_detail",
];

/// The functions of the lock that exist.
#[derive(Debug, Default)]
pub struct Installed {
    pub names: Vec<String>,
    /// The same, as DROP takes them.
    pub routines: Vec<String>,
    pub version: Option<i64>,
}

/// The lock's functions, and the version of this crate's.
pub const FUNCTIONS: [&str; 9] = [
    "rowlock_try_acquire",
    "rowlock_unmatched",
    "rowlock_renew",
    "rowlock_release",
    "rowlock_abandon",
    "rowlock_put_back",
    "rowlock_confirm",
    "rowlock_list",
    MARKER,
];
/// The function that returns the version of all.
pub const MARKER: &str = "rowlock_version";
pub const FUNCTIONS_VERSION: i64 = 20_261_202;

/// Which of the lock's functions exist in a database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Functions {
    /// None of them.
    Absent,
    /// Some of them; these are missing.
    Incomplete(Vec<&'static str>),
    /// They are of an older version, which may lack some of them.
    Older,
    /// All of them, in this version or a newer one.
    Current,
}

impl Installed {
    /// Returns whether nothing is to be replaced. What a newer version has installed is its own.
    pub fn is_enough(&self) -> bool {
        self.version > Some(FUNCTIONS_VERSION) || self.judge() == Functions::Current
    }

    pub fn judge(&self) -> Functions {
        let missing = FUNCTIONS.into_iter().filter(|name| !self.names.iter().any(|found| found == name));
        let missing: Vec<_> = missing.collect();
        if missing.len() == FUNCTIONS.len() {
            Functions::Absent
        } else if self.version.is_none() && missing != [MARKER] {
            Functions::Incomplete(missing)
        } else if self.version < Some(FUNCTIONS_VERSION) {
            Functions::Older
        } else if !missing.is_empty() {
            Functions::Incomplete(missing)
        } else {
            Functions::Current
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
pub const NEW_TABLE: &str = "none on what exists";
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
        for (sql, says) in $crate::store::schema::uses($schema, [STANDING, RUNNING, ALIVE]) {
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
