//! The statements of a migration, and how they are printed.

use std::fmt;

use crate::store::schema::Step;

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
    pub(super) fn of(around: (&'static str, &'static str), steps: Vec<Step>) -> Self {
        let part = (!steps.is_empty()).then_some(PlannedPart { around, steps });
        Self { parts: part.into_iter().collect(), notes: Vec::new() }
    }

    /// Returns whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns the statements, in their order.
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.parts.iter().flat_map(|part| &part.steps)
    }

    /// Returns notes to read before the plan is run.
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
