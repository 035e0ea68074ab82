//! The passwords that the program knows. They are masked in its messages, and in what it passes on
//! and records of the output of commands.

use std::{
    borrow::Cow,
    cmp::Reverse,
    sync::{PoisonError, RwLock},
};

/// What stands in the place of a password.
const MASK: &str = "***";
/// Shorter passwords are not masked: they are parts of other words.
const SHORTEST: usize = 4;

/// How many passwords are known. One that changes every quarter of an hour stays known for ten
/// days.
const MOST: usize = 1_000;

/// The passwords, each once, in the order in which they were last used.
static KNOWN: RwLock<Vec<String>> = RwLock::new(Vec::new());

/// Adds passwords to those that are known.
pub fn keep(passwords: impl Iterator<Item = String>) {
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    for secret in passwords.filter(|secret| secret.chars().count() >= SHORTEST) {
        known.retain(|one| *one != secret);
        known.push(secret);
    }
    let over = known.len().saturating_sub(MOST);
    known.drain(..over);
}

/// Returns a text without the passwords.
pub fn masked(text: &str) -> Cow<'_, str> {
    without(text, &KNOWN.read().unwrap_or_else(PoisonError::into_inner))
}

/// Masks the passwords in a line. Without one, the line stays as it is, also if it is no text.
pub fn mask(line: &mut Vec<u8>) {
    let text = String::from_utf8_lossy(line);
    if let Cow::Owned(masked) = masked(&text) {
        *line = masked.into_bytes();
    }
}

/// Returns how many bytes at the end of a text may be a password, or the first part of one.
pub fn begun(text: &[u8]) -> usize {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    known.iter().map(|secret| begun_of(text, secret.as_bytes())).max().unwrap_or_default()
}

/// Returns how many bytes at the end of a text are the first ones of this word.
pub fn begun_of(text: &[u8], word: &[u8]) -> usize {
    (1..=word.len()).rev().find(|length| text.ends_with(&word[..*length])).unwrap_or_default()
}

fn without<'a>(text: &'a str, known: &[String]) -> Cow<'a, str> {
    let mut found: Vec<&String> = known.iter().filter(|secret| text.contains(secret.as_str())).collect();
    // One may contain another.
    found.sort_by_key(|secret| Reverse(secret.len()));
    found.into_iter().fold(Cow::Borrowed(text), |text, secret| text.replace(secret, MASK).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_masked_wherever_it_stands() {
        let known = ["word", "secret", "a secret"].map(str::to_owned);
        assert_eq!(without("of a secret, wordword", &known), "of ***, ******");
        assert!(matches!(without("nothing of it", &known), Cow::Borrowed(_)));
    }

    #[test]
    fn a_password_is_kept_once() {
        for _ in 0..3 {
            keep(["one-of-ten", "two-of-ten", "one-of-ten"].map(str::to_owned).into_iter());
        }
        let known = KNOWN.read().unwrap();
        assert_eq!(known.iter().filter(|secret| secret.ends_with("-of-ten")).count(), 2);
    }

    #[test]
    fn a_password_may_be_cut() {
        for (text, begun) in [("a sec", 3), ("a secsec", 3), ("a secret", 6), ("a secret ", 0), ("", 0)] {
            assert_eq!(begun_of(text.as_bytes(), b"secret"), begun, "{text}");
        }
        assert_eq!(begun_of(b"abcab", b"abcab"), 5, "its end is its beginning, too");
    }

    #[test]
    fn short_passwords_are_parts_of_other_words() {
        keep(["abc", "zq-xj-1"].map(str::to_owned).into_iter());
        assert_eq!(masked("abc of zq-xj-1"), "abc of ***");
        let mut line = b"\xff zq-xj-1".to_vec();
        mask(&mut line);
        assert_eq!(line, "\u{fffd} ***".as_bytes());
        let mut line = b"\xff abc".to_vec();
        mask(&mut line);
        assert_eq!(line, b"\xff abc");
    }
}
