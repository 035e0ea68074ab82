//! The tables, as a lock or a schedule has to know them before it uses them.

use std::time::Duration;

use crate::{
    action::{Action, Certainty},
    causes::Setup,
    error::Error,
    invalid::Invalid,
    key::Key,
    session::{sessions::Sessions, time::Instant},
    store::{Database, migration::Part, schema::Schema},
};

/// Reads the definition of the tables, in order to use this part of them, on a server that can be
/// used.
pub async fn schema<DB: Database>(
    connections: &Sessions<DB>,
    limit: Instant,
    time_limit: Duration,
    part: Part,
) -> Result<Schema, Error> {
    let schema = connections.send_repeatedly(limit, async |conn| DB::schema(conn).await).await;
    let schema = schema.map_err(|failure| {
        failure.into_error(Action::Inspect, part.subject().to_owned(), time_limit, Certainty::NothingChanged)
    })?;
    match schema.refused {
        Some(wrong) => Err(Setup::Unsupported { wrong }.into()),
        None => Ok(schema),
    }
}

pub fn unfit(wrong: String) -> Error {
    Error::Setup(Setup::TableUnfit { table: "t_resource_lock".to_owned(), wrong })
}

/// Reads the shape of the tables, and refuses a table that a lock cannot use.
pub async fn usable<DB: Database>(
    connections: &Sessions<DB>,
    limit: Instant,
    time_limit: Duration,
) -> Result<Schema, Error> {
    let mut schema = schema(connections, limit, time_limit, Part::Locks).await?;
    if schema.columns.is_empty() {
        return Err(Setup::TableMissing.into());
    }
    if let Some(wrong) = schema.foreign() {
        return Err(unfit(wrong));
    }
    let missing = schema.missing();
    if !missing.is_empty() {
        return Err(Setup::ColumnMissing { table: "t_resource_lock", columns: missing.join(", ") }.into());
    }
    if let Some(wrong) = schema.wrong.take() {
        return Err(unfit(wrong));
    }
    if let Some((server, version, says)) = &schema.untried {
        tracing::warn!(server, version, "{says}");
    }
    Ok(schema)
}

impl Schema {
    /// Checks that the table can hold the key and the label of its holder.
    pub fn admits(&self, key: &Key, label: &str) -> Result<(), Error> {
        if !self.key_limit.holds(key) {
            return Err(Invalid::key_unfit(key.as_str(), "t_resource_lock.key_resource", &self.key_type).into());
        }
        if let Some(chars) = self.label_chars.filter(|most| label.chars().count() > *most) {
            return Err(Invalid::new(format!(
                "the label {label:?} does not fit: the column t_resource_lock.client_ip holds {chars} characters; \
                 set a shorter one (`label`, `--label`)"
            ))
            .into());
        }
        Ok(())
    }
}
