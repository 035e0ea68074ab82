//! Compare-and-set on the application's own table: the statements, and what they require of a
//! database.

use std::{any::type_name, future::Future};

use sqlx::{Row as _, ValueRef as _, error::BoxDynError, query::Query};
use uuid::Uuid;

use crate::store::{Reply, Store};
use crate::{
    causes::Setup,
    error::Error,
    invalid::Invalid,
    key::Key,
    version::{
        amount::is_exact,
        identifier::{Name, TableName},
    },
};

/// The application's table and the columns in use.
#[derive(Clone, Debug)]
pub struct Names {
    pub table: TableName,
    pub key: Name,
    pub version: Name,
    /// The column that is read and written beside the version.
    pub value: Name,
}

/// The kind of values that a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    Text,
    Integer,
    Uuid,
    /// UUIDs that are sent as text.
    UuidAsText,
    Other,
}

/// One column of the application's table.
#[derive(Clone, Debug)]
pub struct Column {
    pub name: String,
    /// The type, as the database names it.
    pub column_type: String,
    pub holds: Holds,
    /// No two rows have the same value.
    pub unique: bool,
    /// The database computes it.
    pub generated: bool,
    /// How many decimals a decimal number keeps.
    pub scale: Option<i32>,
    /// The expression that reads the column, with `{}` for its name. Integers of any width are read
    /// as 64 bits.
    pub read: &'static str,
    /// The expression that spells the value out, where the types that it is read as may hold less.
    pub text: Option<&'static str>,
    /// The expression that a key is compared with, with `{}` for the parameter.
    pub parameter: &'static str,
}

/// A table as read from the database.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Empty if the table does not exist.
    pub columns: Vec<Column>,
    /// A trigger or a rule may alter what an UPDATE writes.
    pub triggers: bool,
    /// Why the table or the connection is unusable.
    pub wrong: Option<String>,
}

/// A key in the type of its column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyValue {
    Text(String),
    Integer(i64),
    Uuid(Uuid),
}

/// A type of the value column: any that sqlx reads and writes on the database.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # let table = "CREATE TABLE page (id TEXT PRIMARY KEY, body TEXT, version INTEGER)";
/// # sqlx::query(table).execute(&pool).await?;
/// # sqlx::query("INSERT INTO page VALUES ('home', 'Hello', 0)").execute(&pool).await?;
/// use rowlock::{VersionedTable, balances::Columns};
/// use std::convert::Infallible;
///
/// let columns = Columns { table: "page", key: "id", value: "body", version: "version" };
/// let pages = VersionedTable::new(pool, columns).of::<String>();
/// let updated = pages.update("home", |body| Ok::<_, Infallible>(format!("{body}!")));
/// assert_eq!(updated.await?.value, "Hello!");
/// # Ok(())
/// # }
/// ```
pub trait Value<DB: sqlx::Database>:
    for<'q> sqlx::Encode<'q, DB> + for<'r> sqlx::Decode<'r, DB> + sqlx::Type<DB> + Clone + Send + Sync + Unpin + 'static
{
}

impl<DB: sqlx::Database, V> Value<DB> for V where
    V: for<'q> sqlx::Encode<'q, DB>
        + for<'r> sqlx::Decode<'r, DB>
        + sqlx::Type<DB>
        + Clone
        + Send
        + Sync
        + Unpin
        + 'static
{
}

/// The new value of a row, and an optional condition on its previous value, besides the version.
#[derive(Clone, Debug)]
pub struct Write<V> {
    pub value: V,
    pub guard: Option<Guard<V>>,
}

/// `was` detects a program that changes the value without the version. `least` is the lowest value
/// that the statement writes over. `same` compares values as the statement does.
#[derive(Clone, Debug)]
pub struct Guard<V> {
    pub was: V,
    pub least: V,
    pub same: fn(&V, &V) -> bool,
}

/// A database that supports compare-and-set.
pub trait VersionStore: Store {
    /// The quote around names. On SQLite it is not `"`, inside which a misspelt column would be
    /// read as a text.
    const QUOTE: char;
    /// Whether names are case-sensitive.
    const EXACT_NAMES: bool;
    /// Whether a binary fraction may be NaN. Elsewhere it is refused, or stored as NULL.
    const HAS_NAN: bool = false;
    /// What has a SELECT see the row that an UPDATE of the same transaction sees, at any isolation.
    const AS_IT_IS_NOW: &'static str = "";

    /// Returns the parameter at a position, from 1.
    fn mark(index: usize) -> String;

    /// Reads the columns of the table.
    fn table_columns(conn: &mut Self::Connection, table: &TableName) -> impl Future<Output = Reply<Seen>> + Send;

    /// Runs [`Statements::read`] where the version is the value.
    fn version(
        conn: &mut Self::Connection,
        sql: &str,
        key: &KeyValue,
    ) -> impl Future<Output = Reply<Option<i64>>> + Send;

    /// Runs [`Statements::read`].
    fn read<V: Value<Self>>(
        conn: &mut Self::Connection,
        sql: &str,
        key: &KeyValue,
    ) -> impl Future<Output = Reply<Option<(V, i64)>>> + Send;

    /// Runs [`Statements::write`] or [`Statements::write_guarded`]. Returns how many rows matched.
    fn write<V: Value<Self>>(
        conn: &mut Self::Connection,
        sql: &str,
        write: &Write<V>,
        key: &KeyValue,
        version: i64,
    ) -> impl Future<Output = Reply<u64>> + Send;

    /// Runs [`Statements::raise`]. Returns how many rows matched.
    fn raise(
        conn: &mut Self::Connection,
        sql: &str,
        key: &KeyValue,
        version: i64,
    ) -> impl Future<Output = Reply<u64>> + Send;
}

/// The statements on one table, built when the table is first read.
#[derive(Debug)]
pub struct Statements {
    key: Holds,
    key_name: String,
    /// How many decimals the value keeps, if they are limited.
    pub scale: Option<i32>,
    /// What stands after a write is read.
    pub triggers: bool,
    pub read: String,
    /// The same for the row that a write of the same transaction sees.
    pub read_now: String,
    pub write: String,
    pub write_guarded: String,
    pub raise: String,
}

impl Statements {
    pub fn new<DB: VersionStore>(names: &Names, seen: &Seen) -> Result<Self, Error> {
        let unfit = |wrong: String| Error::Setup(Setup::TableUnfit { table: names.table.to_string(), wrong });
        if let Some(wrong) = &seen.wrong {
            return Err(unfit(wrong.clone()));
        }
        if seen.columns.is_empty() {
            return Err(unfit("it does not exist here; create it, or name its schema".into()));
        }
        let find = |name: &Name| {
            let same = |column: &&Column| match DB::EXACT_NAMES {
                true => column.name == name.as_str(),
                false => column.name.eq_ignore_ascii_case(name.as_str()),
            };
            let column = seen.columns.iter().find(same);
            column.ok_or_else(|| unfit(format!("it has no column {}", name.as_str())))
        };
        let (key, version, value) = (find(&names.key)?, find(&names.version)?, find(&names.value)?);
        let named = |column: &Column| format!("its column {} ({})", column.name, column.column_type);
        if key.holds == Holds::Other {
            return Err(unfit(format!("{} is no key; use a text, an integer or a UUID", named(key))));
        }
        if !key.unique {
            return Err(unfit(format!(
                "{} has no unique index of its own that holds for all rows, so that a key may mean several rows",
                named(key)
            )));
        }
        if version.holds != Holds::Integer {
            return Err(unfit(format!("{} does not count; use an integer", named(version))));
        }
        if let Some(column) = [version, value].into_iter().find(|column| column.generated) {
            return Err(unfit(format!(
                "{} is generated, so that nothing can be written to it; use a plain one",
                named(column)
            )));
        }
        let quoted = |name: &Name| name.quoted(DB::QUOTE);
        let (table, v, n) = (names.table.quoted(DB::QUOTE), quoted(&names.version), quoted(&names.value));
        let is_key = |index| format!("{} = {}", quoted(&names.key), key.parameter.replace("{}", &DB::mark(index)));
        let (value_read, version_read) = (value.read.replace("{}", &n), version.read.replace("{}", &v));
        let mark = DB::mark;
        let write =
            format!("UPDATE {table} SET {n} = {}, {v} = {v} + 1 WHERE {} AND {v} = {}", mark(1), is_key(2), mark(3));
        let text = value.text.map(|text| format!(", {}", text.replace("{}", &n))).unwrap_or_default();
        let read = format!("SELECT {value_read}, {version_read}{text} FROM {table} WHERE {}", is_key(1));
        Ok(Self {
            key: key.holds,
            key_name: format!("{}.{}", names.table, names.key.as_str()),
            scale: value.scale,
            triggers: seen.triggers,
            read_now: format!("{read}{}", DB::AS_IT_IS_NOW),
            read,
            write_guarded: format!("{write} AND {n} = {} AND {n} >= {}", mark(4), mark(5)),
            write,
            raise: format!("UPDATE {table} SET {v} = {v} + 1 WHERE {} AND {v} = {}", is_key(1), mark(2)),
        })
    }

    /// Converts the key to the type of its column.
    pub fn key(&self, key: &Key) -> Result<KeyValue, Error> {
        let text = key.as_str();
        let (value, holds) = match self.key {
            Holds::Integer => {
                // "007" is another key than "7", and would mean its row.
                let number = text.parse().ok().filter(|number: &i64| number.to_string() == text);
                (number.map(KeyValue::Integer), "integers")
            }
            Holds::Uuid => (Uuid::parse_str(text).ok().map(KeyValue::Uuid), "UUIDs"),
            Holds::UuidAsText => {
                (Uuid::parse_str(text).ok().map(|uuid| KeyValue::Text(uuid.hyphenated().to_string())), "UUIDs")
            }
            Holds::Text | Holds::Other => (Some(KeyValue::Text(text.to_owned())), "texts"),
        };
        value.ok_or_else(|| Invalid::key_unfit(text, &self.key_name, holds).into())
    }
}

/// Decodes a column. NULL is an error unless the type also represents it: SQLite's driver decodes
/// it as 0, or as an empty text.
pub fn whole<DB, V>(row: &DB::Row, index: usize) -> Reply<V>
where
    DB: sqlx::Database<ArgumentBuffer: Default>,
    V: Value<DB>,
    usize: sqlx::ColumnIndex<DB::Row>,
{
    let value: V = row.try_get(index)?;
    let undecoded = |source| undecoded(index, source);
    if row.try_get_raw(index)?.is_null() {
        let again = value.encode_by_ref(&mut Default::default()).map_err(undecoded)?;
        if !again.is_null() {
            return Err(undecoded(Box::new(sqlx::error::UnexpectedNullError)));
        }
    }
    Ok(value)
}

/// Decodes the value, and compares it with the text that the statement adds for some columns.
pub fn exact<DB, V>(row: &DB::Row) -> Reply<V>
where
    DB: sqlx::Database<ArgumentBuffer: Default>,
    V: Value<DB>,
    String: Value<DB>,
    usize: sqlx::ColumnIndex<DB::Row>,
{
    let value = whole::<DB, V>(row, 0);
    let text: Option<String> = if row.len() > 2 { row.try_get(2)? } else { None };
    let Some(text) = text else { return value };
    let wrong = match value {
        Ok(mut value) => {
            if is_exact(&mut value, &text) {
                return Ok(value);
            }
            format!("it is {text}, of which {} holds only a part", type_name::<V>())
        }
        Err(sqlx::Error::ColumnDecode { source, .. }) => {
            format!("it is {text}, which cannot be read as {}: {source}", type_name::<V>())
        }
        Err(error) => return Err(error),
    };
    Err(undecoded(0, wrong.into()))
}

fn undecoded(index: usize, source: BoxDynError) -> sqlx::Error {
    sqlx::Error::ColumnDecode { index: index.to_string(), source }
}

/// Implements the operations, which are the same on every database except for the types of its
/// driver.
macro_rules! operations {
    ($connection:ty) => {
        async fn version(conn: &mut $connection, sql: &str, key: &KeyValue) -> Reply<Option<i64>> {
            Ok(Self::read(conn, sql, key).await?.map(|(version, _)| version))
        }

        async fn read<V: Value<Self>>(conn: &mut $connection, sql: &str, key: &KeyValue) -> Reply<Option<(V, i64)>> {
            let query = bind_key(sqlx::query(sqlx::AssertSqlSafe(sql)), key);
            let Some(row) = query.fetch_optional(conn).await? else { return Ok(None) };
            Ok(Some((exact::<Self, _>(&row)?, whole::<Self, _>(&row, 1)?)))
        }

        async fn write<V: Value<Self>>(
            conn: &mut $connection,
            sql: &str,
            write: &Write<V>,
            key: &KeyValue,
            version: i64,
        ) -> Reply<u64> {
            let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(write.value.clone());
            let query = bind_key(query, key).bind(version);
            let query = match &write.guard {
                Some(guard) => query.bind(guard.was.clone()).bind(guard.least.clone()),
                None => query,
            };
            Ok(query.execute(conn).await?.rows_affected())
        }

        async fn raise(conn: &mut $connection, sql: &str, key: &KeyValue, version: i64) -> Reply<u64> {
            let query = bind_key(sqlx::query(sqlx::AssertSqlSafe(sql)), key).bind(version);
            Ok(query.execute(conn).await?.rows_affected())
        }
    };
}

pub(super) use operations;

/// Binds a key in the type of its column.
pub fn bind_key<'q, DB>(query: Query<'q, DB, DB::Arguments>, key: &KeyValue) -> Query<'q, DB, DB::Arguments>
where
    DB: sqlx::Database,
    String: Value<DB>,
    i64: Value<DB>,
    Uuid: Value<DB>,
{
    match key {
        KeyValue::Text(text) => query.bind(text.clone()),
        KeyValue::Integer(number) => query.bind(*number),
        KeyValue::Uuid(uuid) => query.bind(*uuid),
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::invalid::Faults;

    fn column(name: &str, holds: Holds) -> Column {
        let (name, column_type) = (name.to_owned(), String::new());
        Column {
            name,
            column_type,
            holds,
            unique: true,
            generated: false,
            scale: None,
            read: "{}",
            text: None,
            parameter: "{}",
        }
    }

    /// The last guard repeats in SQL what was decided in Rust, so that no run can show that it is
    /// there.
    #[test]
    fn a_guarded_write_compares_the_version_the_value_and_the_least_value() {
        let mut faults = Faults::default();
        let table = TableName::new("account", &mut faults);
        let mut name = |text| Name::column(text, &mut faults);
        let names = Names { table, key: name("id"), version: name("version"), value: name("balance") };
        let columns =
            vec![column("id", Holds::Text), column("balance", Holds::Integer), column("version", Holds::Integer)];
        let statements = Statements::new::<sqlx::Sqlite>(&names, &Seen { columns, ..Seen::default() }).unwrap();
        let write = "UPDATE `account` SET `balance` = ?1, `version` = `version` + 1 WHERE `id` = ?2 AND `version` = ?3";
        assert_eq!(statements.write, write);
        assert_eq!(statements.write_guarded, format!("{write} AND `balance` = ?4 AND `balance` >= ?5"));
    }
}
