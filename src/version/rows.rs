//! Rows with versions: their names, their statements, and why a statement has no result.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use sqlx::Pool;

use crate::{
    action::{Action, Certainty},
    causes::{NotFound, Setup},
    error::Error,
    invalid::{Faults, Invalid},
    key::Key,
    retry::{Retry, TIME_LIMIT, time_limit},
    session::{
        sessions::{Purpose, Sessions},
        time::Instant,
        timers::{Elapsed, timeout_at},
    },
    store::{
        Database, Reply,
        failure::Failure,
        fault::{Fault, fault},
        version::{Names, Seen, Statements},
    },
    version::identifier::{Name, TableName},
};

/// A table of the application whose rows have versions. The table is inspected once, and the result
/// is kept.
pub(crate) struct Rows<DB: Database> {
    pub pool: Sessions<DB>,
    pub names: Arc<Names>,
    pub retry: Retry,
    pub time_limit: Duration,
    /// What is wrong with the names and the settings. Each call reports it.
    pub faults: Faults,
    statements: Arc<OnceLock<Statements>>,
}

impl<DB: Database> Clone for Rows<DB> {
    fn clone(&self) -> Self {
        Self {
            pool: self.pool.clone(),
            names: self.names.clone(),
            retry: self.retry,
            time_limit: self.time_limit,
            faults: self.faults.clone(),
            statements: self.statements.clone(),
        }
    }
}

impl<DB: Database> Rows<DB> {
    /// `value` is the column that is read and written beside the version, if there is one.
    pub fn new(pool: Pool<DB>, table: &str, key: &str, version: &str, value: Option<&str>) -> Self {
        let mut faults = Faults::default();
        let table = TableName::new(table, &mut faults);
        let (key, version) = (Name::column(key, &mut faults), Name::column(version, &mut faults));
        let value = value.map(|value| Name::column(value, &mut faults));
        let is_same = |(one, other): &(&Name, &Name)| match DB::EXACT_NAMES {
            true => one == other,
            false => one.as_str().eq_ignore_ascii_case(other.as_str()),
        };
        let of_value = value.iter().flat_map(|value| [(&key, value), (value, &version)]);
        let twice = [(&key, &version)].into_iter().chain(of_value).find(is_same);
        if let (Ok(()), Some((name, _))) = (faults.check(), twice) {
            let rule = "key, value and version are columns of their own";
            faults.add(Invalid::new(format!("{:?} cannot be the name of a column: {rule}", name.as_str())));
        }
        let value = value.unwrap_or_else(|| version.clone());
        Self {
            pool: Sessions::new(pool, Purpose::Values),
            names: Arc::new(Names { table, key, version, value }),
            retry: Retry::default(),
            time_limit: TIME_LIMIT,
            faults,
            statements: Arc::default(),
        }
    }

    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = self.faults.accept(retry.checked()).unwrap_or(self.retry);
        self
    }

    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = self.faults.accept(time_limit(limit)).unwrap_or(self.time_limit);
        self
    }

    pub fn share_pool(mut self) -> Self {
        self.pool.share_pool();
        self
    }

    pub fn limit(&self) -> Instant {
        Instant::now() + self.time_limit
    }

    /// Returns the statements. The first call inspects the table.
    pub async fn prepared(&self, limit: Instant) -> Result<&Statements, Failed> {
        self.faults.check()?;
        if let Some(statements) = self.statements.get() {
            return Ok(statements);
        }
        let inspect = async |conn: &mut DB::Connection| DB::table_columns(conn, &self.names.table).await;
        self.prepare(&self.pool.send_repeatedly(limit, inspect).await?)
    }

    /// As `prepared`, over the connection of a transaction: the pool may have no other connection
    /// to give.
    pub async fn prepared_on(&self, tx: &mut DB::Connection, limit: Instant) -> Result<&Statements, Failed> {
        self.faults.check()?;
        if let Some(statements) = self.statements.get() {
            return Ok(statements);
        }
        let reply = timeout_at(limit, DB::table_columns(tx, &self.names.table)).await;
        self.prepare(&answered(reply)?)
    }

    fn prepare(&self, seen: &Seen) -> Result<&Statements, Failed> {
        let statements = Statements::new::<DB>(&self.names, seen)?;
        Ok(self.statements.get_or_init(|| statements))
    }

    pub fn not_found(&self, key: &Key) -> Error {
        Error::NotFound(NotFound::Row { table: self.names.table.to_string(), key: key.clone() })
    }

    /// Returns the version after this one. Beyond 64 bits, SQLite would continue with a rounded
    /// number.
    pub fn next(&self, key: &Key, version: i64) -> Result<i64, Error> {
        let wrong = || format!("the version of key {:?} is {version}, and cannot grow", key.as_str());
        version
            .checked_add(1)
            .ok_or_else(|| Error::Setup(Setup::TableUnfit { table: self.names.table.to_string(), wrong: wrong() }))
    }

    /// Returns the version after a write to a row of version `version` that matched `rows` rows, or
    /// `None` for a conflict. `found` is the version that the row has after it, if the rest of the
    /// write's condition holds too.
    pub fn judge(&self, key: &Key, version: i64, rows: u64, found: Option<i64>) -> Result<Option<i64>, Error> {
        let (key, table) = (key.as_str(), self.names.table.to_string());
        let wrong = match (rows, found) {
            (0, Some(found)) if found == version => format!(
                "an UPDATE of key {key:?} at version {version}, which it has, changes no row: look for a trigger, \
                 a rule or a row policy that suppresses it"
            ),
            (0, _) => return Ok(None),
            (_, Some(found)) if found > version => return Ok(Some(found)),
            _ => format!(
                "a trigger keeps the version of key {key:?} at {version} or removes the row, so that no other program \
                 would notice a change; let the version rise"
            ),
        };
        Err(Error::Setup(Setup::TableUnfit { table, wrong }))
    }

    pub fn error(&self, failed: Failed, action: Action, key: &Key) -> Error {
        match failed {
            Failed::Refused(error) => error,
            Failed::Database(Failure::Failed(sqlx::Error::ColumnDecode { index, source })) => {
                let column = if index == "0" { &self.names.value } else { &self.names.version };
                let column = format!("{}.{}", self.names.table, column.as_str());
                let is_null = source.is::<sqlx::error::UnexpectedNullError>();
                let wrong = if is_null { "it is NULL, or exceeds 64 bits".into() } else { source.to_string() };
                Error::Setup(Setup::ValueUnfit { key: key.clone(), column, wrong })
            }
            // The table or column existed when the table was inspected.
            Failed::Database(Failure::Failed(error))
                if matches!(fault(&error), Fault::MissingTable | Fault::MissingColumn) =>
            {
                Error::Setup(Setup::TableUnfit { table: self.names.table.to_string(), wrong: error.to_string() })
            }
            Failed::Database(failure) => {
                let subject = key.quoted();
                failure.into_error(action, subject, self.time_limit, Certainty::NothingChanged)
            }
        }
    }
}

/// Why a statement about a row has no result.
#[derive(Debug)]
pub(crate) enum Failed {
    Refused(Error),
    Database(Failure),
}

impl From<Invalid> for Failed {
    fn from(invalid: Invalid) -> Self {
        Self::Refused(invalid.into())
    }
}

impl Failed {
    /// Returns whether a statement that changes nothing may be sent again.
    pub fn is_connection_failure(&self) -> bool {
        matches!(self, Self::Database(failure) if failure.is_connection_failure())
    }

    pub fn is_contention(&self) -> bool {
        matches!(self, Self::Database(failure) if failure.fault() == Fault::Contention)
    }

    /// Returns whether a statement may still be running on the connection.
    pub fn may_still_run(&self) -> bool {
        match self {
            Self::Refused(_) => false,
            Self::Database(failure) => failure.may_still_run(),
        }
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self::Database(failure)
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Returns the reply to a statement in the caller's transaction, whose connection is the caller's
/// to close.
pub(crate) fn answered<T>(reply: Result<Reply<T>, Elapsed>) -> Result<T, Failed> {
    Ok(reply.map_err(|_| Failure::NoReply)?.map_err(Failure::Failed)?)
}
