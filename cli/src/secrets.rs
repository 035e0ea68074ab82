//! The passwords that the program knows. They are masked in its messages, and in what it passes on
//! and records of the output of commands.

use std::{borrow::Cow, sync::OnceLock};

use percent_encoding::percent_decode_str;

/// What stands in the place of a password.
const MASK: &str = "***";
/// Shorter passwords are not masked: they are parts of other words.
const SHORTEST: usize = 4;

static KNOWN: OnceLock<Vec<String>> = OnceLock::new();

/// Keeps the passwords of a database's URL, and of the variable that its driver reads.
pub fn keep(url: &str) {
    let _ = KNOWN.set(passwords(url, std::env::var("PGPASSWORD").ok()));
}

/// Returns a text without the passwords.
pub fn masked(text: &str) -> Cow<'_, str> {
    without(text, KNOWN.get().map(Vec::as_slice).unwrap_or_default())
}

/// Masks the passwords in a line. Without one, the line stays as it is, also if it is no text.
pub fn mask(line: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(line);
    if let Cow::Owned(masked) = masked(&text) {
        *line = masked.into_bytes();
    }
}

fn without<'a>(text: &'a str, known: &[String]) -> Cow<'a, str> {
    let found = known.iter().filter(|secret| text.contains(secret.as_str()));
    found.fold(Cow::Borrowed(text), |text, secret| text.replace(secret, MASK).into())
}

/// Returns the passwords as they are written in the URL, and as the server gets them, the longest
/// first: one may contain another.
fn passwords(url: &str, variable: Option<String>) -> Vec<String> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    // Also of a password whose special characters are not encoded.
    let of_user = rest.rsplit_once('@').and_then(|(user, _)| user.split_once(':')).map(|(_, password)| password);
    let settings = rest.split_once('?').map_or("", |(_, settings)| settings).split('&');
    let of_settings = settings.filter_map(|setting| setting.strip_prefix("password="));
    let written = of_user.into_iter().chain(of_settings);
    let both = written.flat_map(|text| [text.to_owned(), percent_decode_str(text).decode_utf8_lossy().into_owned()]);
    let mut all: Vec<String> = both.chain(variable).filter(|secret| secret.chars().count() >= SHORTEST).collect();
    all.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_masked_as_they_are_written_and_as_they_are() {
        let known = passwords("postgres://app:p%40ss/w@rd@db:5432/app?password=other+one", Some("third".to_owned()));
        for (text, masked) in [
            ("login failed: p%40ss/w@rd", "login failed: ***"),
            ("p@ss/w@rd, other+one and third", "***, *** and ***"),
            ("nothing of it: app", "nothing of it: app"),
        ] {
            assert_eq!(without(text, &known), masked);
        }
    }

    #[test]
    fn without_a_password_nothing_is_masked() {
        for url in [
            "postgres://app@db/app",
            "sqlite:a:b.db",
            "sqlite:///a@b:c",
            "mysql://root:@db/app",
            "",
            "postgres://a:abc@db/x",
        ] {
            let known = passwords(url, None);
            assert!(known.is_empty(), "{url}: {known:?}");
        }
    }
}
