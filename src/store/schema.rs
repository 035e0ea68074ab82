//! The lock's tables and functions, as they are found in a database.

use crate::key::Key;
use crate::store::Form;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use crate::store::servers::{Support, refusal, support};

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
