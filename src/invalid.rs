//! What is wrong with what a program passed. Settings are reported together, by the first call that
//! uses them.

use std::{error, fmt};

use crate::chain::prints_its_chain;

/// What is wrong with what a program passed: a key, a name, a setting, a schedule. Nothing was
/// changed.
///
/// Setters return no error. The faults of all settings are returned together, by the first call
/// that uses them.
///
/// ```
/// use rowlock::Schedule;
///
/// let report = Schedule::cron("report", "30 2 * *").zone("Berlin");
/// let faults = report.check().unwrap_err();
/// assert_eq!(faults.faults().count(), 2);
/// println!("{faults}");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Invalid(Vec<String>);

impl Invalid {
    pub(crate) fn new(fault: impl Into<String>) -> Self {
        Self(vec![fault.into()])
    }

    /// A setting out of its range.
    pub(crate) fn setting(setting: &str, value: impl fmt::Display, rule: &str) -> Self {
        Self::new(format!("{setting} of {value} is not possible: {rule}"))
    }

    /// A key that a column cannot hold.
    pub(crate) fn key_unfit(key: &str, column: &str, holds: &str) -> Self {
        Self::new(format!(
            "key {key:?} does not fit: the column {column} holds {holds}; pass a key that fits, or change the column"
        ))
    }

    /// An amount that is not possible.
    pub(crate) fn amount(key: &str, amount: impl fmt::Display, rule: &str) -> Self {
        Self::new(format!("an amount of {amount} is not possible for key {key:?}: {rule}"))
    }

    /// Returns the faults, each of which says what is possible.
    pub fn faults(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Names what has these faults.
    #[cfg(any(test, feature = "schedule"))]
    pub(crate) fn of(self, what: impl fmt::Display) -> Self {
        Self(self.0.into_iter().map(|fault| format!("{what}: {fault}")).collect())
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

impl error::Error for Invalid {}

prints_its_chain!(Invalid);

/// The faults of settings so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults(Vec<String>);

impl Faults {
    pub fn add(&mut self, fault: Invalid) {
        self.0.extend(fault.0);
    }

    /// Returns the value of a setting, or adds what is wrong with it.
    pub fn accept<T>(&mut self, checked: Result<T, Invalid>) -> Option<T> {
        checked.map_err(|fault| self.add(fault)).ok()
    }

    /// Returns all faults as an error.
    pub fn check(&self) -> Result<(), Invalid> {
        if self.0.is_empty() { Ok(()) } else { Err(Invalid(self.0.clone())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_faults_are_reported_together() {
        let mut faults = Faults::default();
        assert!(faults.check().is_ok());
        assert_eq!(faults.accept(Ok(1)), Some(1));
        faults.add(Invalid::new("a name is empty"));
        let before = faults.clone();
        assert_eq!(faults.accept::<u32>(Err(Invalid::setting("a grace", "2d", "it has to be a day"))), None);
        assert_eq!(before.check().unwrap_err().faults().count(), 1);
        let said = faults.check().unwrap_err().of("the job \"j\"").to_string();
        assert!(said.contains("the job \"j\": a grace of 2d is not possible: it has to be a day"), "{said}");
        assert!(said.starts_with("the job \"j\": a name is empty; "), "{said}");
    }
}
