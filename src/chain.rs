//! How errors print themselves and their sources.

use std::fmt;

use crate::store::fault;

/// `Debug` for an error that a `main` may return.
macro_rules! prints_its_chain {
    ($($error:ty),*) => {$(
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::chain::print_chain(self, f)
            }
        }
    )*};
}
pub(crate) use prints_its_chain;

/// Prints an error and all its sources on one line. A text that an error repeats from its source,
/// as sqlx's errors do, is printed once.
pub(crate) fn print_chain(error: &dyn std::error::Error, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut said = error.to_string();
    f.write_str(&said)?;
    let mut source = error.source();
    while let Some(error) = source {
        let of_driver = error.downcast_ref::<sqlx::Error>();
        let text = of_driver.map_or_else(|| error.to_string(), fault::said);
        if !said.contains(&text) {
            write!(f, ": {text}")?;
        }
        // The server's own error is a part of the text.
        let is_servers = of_driver.is_some_and(|error| error.as_database_error().is_some());
        (said, source) = (text, error.source().filter(|_| !is_servers));
    }
    Ok(())
}
