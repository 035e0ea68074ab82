//! The label of an instance: the column `client_ip`.

use crate::invalid::Invalid;

/// The most characters of a label.
const MAX_CHARS: usize = 45;

/// # Errors
/// [`Invalid`] for a label that is too long or has control characters.
pub(crate) fn check(label: &str) -> Result<(), Invalid> {
    if label.chars().count() <= MAX_CHARS && !label.chars().any(char::is_control) {
        return Ok(());
    }
    let value = format!("{:?}", label.chars().take(60).collect::<String>());
    Err(Invalid::setting("a label", value, "it has to have at most 45 characters, and no control characters"))
}

/// Returns the default label: the host name without control characters, and `/process id`. Of a
/// host name that is too long for 45 characters, the end is kept: the names of pods differ there.
pub(crate) fn default() -> String {
    of(&gethostname::gethostname().to_string_lossy(), std::process::id())
}

fn of(host: &str, process: u32) -> String {
    let process = format!("/{process}");
    let host: Vec<char> = host.chars().filter(|c| !c.is_control()).collect();
    let kept = host.iter().skip(host.len().saturating_sub(MAX_CHARS - process.len()));
    kept.copied().chain(process.chars()).collect()
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
    fn pods_whose_names_differ_at_the_end_have_labels_that_differ() {
        let pod = |end: &str| of(&format!("payments-scheduler-deployment-7c9d8f6b5-{end}"), 1);
        assert_eq!(pod("x2kqp"), "yments-scheduler-deployment-7c9d8f6b5-x2kqp/1");
        assert_ne!(pod("x2kqp"), pod("m4t7z"));
    }

    #[test]
    fn a_label_that_its_column_does_not_hold_is_refused() {
        for good in ["", "host/1", &"é".repeat(MAX_CHARS)] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in ["a\nb", "\u{7f}", &"x".repeat(MAX_CHARS + 1)] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
