//! The statements of a migration, and how they are printed.

use std::fmt;

use crate::store::{
    Database,
    schema::{OURS, Schema, Step, TABLES},
};

const DROPPED: &str = "exclusive, on what is dropped";

/// The statements of a migration. It is displayed as a script for the database's own client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub(super) parts: Vec<PlannedPart>,
    pub(super) notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPart {
    pub around: (&'static str, &'static str),
    pub steps: Vec<Step>,
}

impl Plan {
    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the statements, in their order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.parts.iter().flat_map(|part| &part.steps)
    }

    /// Returns what should be known before it is carried out.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for note in &self.notes {
            writeln!(f, "-- NOTE: {note}")?;
        }
        for PlannedPart { around: (before, after), steps } in &self.parts {
            f.write_str(before)?;
            for Step { sql, locks } in steps {
                writeln!(f, "-- lock: {locks}\n{sql};")?;
            }
            f.write_str(after)?;
        }
        Ok(())
    }
}

/// Returns the statements that leave the article's table alone. Functions come first: they need the
/// columns.
pub fn removal<DB: Database>(schema: &Schema, functions: &[String]) -> Vec<Step> {
    let dropped = |sql: String| Step { sql, locks: DROPPED };
    let functions = functions.iter().map(|name| dropped(format!("DROP {} {name}", DB::ROUTINE)));
    let ours: Vec<_> = OURS.into_iter().filter(|name| schema.column(name).is_some()).collect();
    let columns: Vec<String> = match DB::ALTERS_TOGETHER {
        true if ours.is_empty() => Vec::new(),
        true => vec![ours.join(",\n    DROP COLUMN ")],
        false => ours.into_iter().map(str::to_owned).collect(),
    };
    let columns = columns.into_iter().map(|columns| Step {
        sql: format!("ALTER TABLE t_resource_lock\n    DROP COLUMN {columns}"),
        locks: "exclusive, on t_resource_lock: for a moment, or until it is copied",
    });
    let tables = TABLES.into_iter().filter(|table| schema.has(table));
    let tables = tables.map(|table| dropped(format!("DROP TABLE {table}")));
    let steps: Vec<_> = functions.chain(columns).chain(tables).collect();
    let path = schema.place.as_ref().filter(|_| !steps.is_empty());
    let path = path.map(|place| Step { sql: format!("SET LOCAL search_path = {place}"), locks: "none" });
    path.into_iter().chain(steps).collect()
}
