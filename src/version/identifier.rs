//! Names of the application's table and columns, validated before they become part of a statement.

use crate::invalid::{Faults, Invalid};

/// The longest name that no database truncates. PostgreSQL truncates longer ones.
const MAX_BYTES: usize = 63;

/// One identifier: ASCII letters, digits and underscores. It does not begin with a digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(String);

impl Name {
    /// Returns the name of a column, or adds what is wrong with it to the faults.
    pub(crate) fn column(text: &str, faults: &mut Faults) -> Self {
        let rule = "use ASCII letters, digits and underscores, at most 63";
        let name = Self::new(text).ok_or_else(|| invalid(text, "column", rule));
        faults.accept(name).unwrap_or_else(|| Self(String::new()))
    }

    fn new(text: &str) -> Option<Self> {
        let begins = |c: char| c.is_ascii_alphabetic() || c == '_';
        let fits = text.len() <= MAX_BYTES
            && text.starts_with(begins)
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        fits.then(|| Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the name within the database's quotes. The name contains none.
    pub fn quoted(&self, quote: char) -> String {
        format!("{quote}{}{quote}", self.0)
    }
}

/// A table name, with or without a schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableName {
    pub schema: Option<Name>,
    pub table: Name,
}

impl TableName {
    /// Returns the name of a table, or adds what is wrong with it to the faults.
    pub(crate) fn new(text: &str, faults: &mut Faults) -> Self {
        let parts = match text.split_once('.') {
            Some((schema, table)) => Name::new(schema).map(Some).zip(Name::new(table)),
            None => Name::new(text).map(|table| (None, table)),
        };
        let rule = "use a name, or schema.name, of ASCII letters, digits and underscores, at most 63 each";
        let name = parts.map(|(schema, table)| Self { schema, table }).ok_or_else(|| invalid(text, "table", rule));
        faults.accept(name).unwrap_or_else(|| Self { schema: None, table: Name(String::new()) })
    }

    pub fn quoted(&self, quote: char) -> String {
        let table = self.table.quoted(quote);
        self.schema.as_ref().map_or_else(|| table.clone(), |schema| format!("{}.{table}", schema.quoted(quote)))
    }
}

impl std::fmt::Display for TableName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{}.", schema.0)?;
        }
        f.write_str(&self.table.0)
    }
}

fn invalid(text: &str, what: &str, rule: &str) -> Invalid {
    let name: String = text.chars().take(80).collect();
    Invalid::new(format!("{name:?} cannot be the name of a {what}: {rule}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_identifiers_become_part_of_a_statement() {
        let table = |text: &str, faults: &mut Faults| TableName::new(text, faults);
        let mut none = Faults::default();
        for good in ["account", "_a1", "bank.account", &"x".repeat(63)] {
            assert_eq!(table(good, &mut none).to_string(), good);
        }
        assert_eq!(table("bank.account", &mut none).quoted('"'), r#""bank"."account""#);
        assert!(none.check().is_ok());
        let bad = ["", ".", "a.", ".a", "a.b.c", "1a", "a b", "a\"b", "a`b", "a'; --", "ä", "a\0", &"x".repeat(64)];
        for bad in bad {
            let mut faults = Faults::default();
            table(bad, &mut faults);
            Name::column(bad, &mut faults);
            assert_eq!(faults.check().unwrap_err().faults().count(), 2, "{bad}");
        }
        let mut faults = Faults::default();
        Name::column("bank.account", &mut faults);
        assert!(faults.check().is_err());
    }
}
