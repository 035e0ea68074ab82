//! The label of an instance: the column `client_ip`.

use crate::error::Error;

/// The most characters of a label.
const MAX_CHARS: usize = 45;

/// # Errors
/// [`Error::InvalidSetting`] for a label that is too long or has control characters.
pub(crate) fn check(label: &str) -> Result<(), Error> {
    if label.chars().count() <= MAX_CHARS && !label.chars().any(char::is_control) {
        return Ok(());
    }
    Err(Error::InvalidSetting {
        setting: "a label",
        value: format!("{:?}", label.chars().take(60).collect::<String>()),
        rule: "it has to have at most 45 characters, and no control characters",
    })
}

/// Returns the default label: the host name without control characters, cut so that `/process id`
/// fits into 45 characters.
pub(crate) fn default() -> String {
    of(&gethostname::gethostname().to_string_lossy(), std::process::id())
}

fn of(host: &str, process: u32) -> String {
    let process = format!("/{process}");
    let host = host.chars().filter(|c| !c.is_control()).take(MAX_CHARS - process.len());
    host.chain(process.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_label_fits_its_column_and_names_the_process() {
        let label = default();
        assert!(label.chars().count() <= MAX_CHARS, "{label}");
        assert!(label.ends_with(&format!("/{}", std::process::id())), "{label}");
        assert_eq!(of("a\tb", 7), "ab/7");
        let cut = of(&"é".repeat(MAX_CHARS), 123);
        assert_eq!(cut, format!("{}/123", "é".repeat(MAX_CHARS - 4)));
    }

    #[test]
    fn a_label_that_its_column_does_not_hold_is_refused() {
        for good in ["", "host/1", &"é".repeat(MAX_CHARS)] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["a\nb", "\u{7f}", &"x".repeat(MAX_CHARS + 1)] {
            assert!(matches!(check(bad), Err(Error::InvalidSetting { .. })), "{bad}");
        }
    }
}
