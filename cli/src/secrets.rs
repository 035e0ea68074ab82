//! The passwords that the program knows. They are masked in its messages, and in what it passes on
//! and records of the output of commands.

use std::{
    borrow::Cow,
    sync::{PoisonError, RwLock},
};

use percent_encoding::percent_decode_str;

use crate::database::{Kind, Secrets, client};

/// What stands in the place of a password.
const MASK: &str = "***";
/// Shorter passwords are not masked: they are parts of other words.
const SHORTEST: usize = 4;

static KNOWN: RwLock<Vec<String>> = RwLock::new(Vec::new());

/// Adds passwords to those that are known: of the database's URL, and of the files and the variable
/// that its driver reads.
pub fn keep(secrets: &Secrets) {
    let Secrets { kind, url, passwords: text } = secrets;
    let of_file: Vec<String> = match kind {
        Kind::Sqlite => Vec::new(),
        Kind::Postgres => text.lines().filter_map(of_pgpass).collect(),
        Kind::MySql => client(text).remove("password").into_iter().collect(),
    };
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    known.extend(passwords(url, of_file.into_iter().chain(std::env::var("PGPASSWORD").ok())));
    // One may contain another.
    known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    known.dedup();
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

fn without<'a>(text: &'a str, known: &[String]) -> Cow<'a, str> {
    let found = known.iter().filter(|secret| text.contains(secret.as_str()));
    found.fold(Cow::Borrowed(text), |text, secret| text.replace(secret, MASK).into())
}

/// Returns the password of a line of `.pgpass`: `host:port:database:user:password`, with a backslash
/// before a colon or a backslash of a field.
fn of_pgpass(line: &str) -> Option<String> {
    let (mut fields, mut chars) = (vec![String::new()], line.chars());
    while let Some(c) = chars.next() {
        match (c, fields.len()) {
            (':', ..5) => fields.push(String::new()),
            ('\\', _) => fields.last_mut()?.extend(chars.next()),
            _ => fields.last_mut()?.push(c),
        }
    }
    fields.into_iter().nth(4)
}

/// Returns the passwords as they are written in the URL, and as the server gets them, and others.
fn passwords(url: &str, others: impl Iterator<Item = String>) -> Vec<String> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // The second one is of a password whose special characters are not encoded.
    let users = [authority, rest].into_iter().filter_map(|text| text.rsplit_once('@'));
    let of_users = users.filter_map(|(user, _)| user.split_once(':')).map(|(_, password)| password);
    let settings = rest.split_once('?').map_or("", |(_, settings)| settings).split('&');
    let of_settings = settings.filter_map(|setting| setting.strip_prefix("password="));
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let of_users = of_users.flat_map(|text| [text.to_owned(), decoded(text)]);
    let of_settings = of_settings.flat_map(|text| [text.to_owned(), decoded(&text.replace('+', " "))]);
    of_users.chain(of_settings).chain(others).filter(|secret| secret.chars().count() >= SHORTEST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_masked_as_they_are_written_and_as_they_are() {
        let known =
            passwords("postgres://app:p%40ss/w@rd@db:5432/app?password=other+one", std::iter::once("third".to_owned()));
        for (text, masked) in [
            ("login failed: p%40ss/w@rd", "login failed: ***"),
            ("p@ss/w@rd, other one and third", "***, *** and ***"),
            ("nothing of it: app", "nothing of it: app"),
        ] {
            assert_eq!(without(text, &known), masked);
        }
    }

    #[test]
    fn an_at_sign_elsewhere_hides_no_password() {
        let known = passwords("postgres://app:secret@db/app?application_name=cron@host", std::iter::empty());
        assert_eq!(without("of secret", &known), "of ***");
    }

    #[test]
    fn the_fifth_field_of_a_line_is_its_password() {
        assert_eq!(of_pgpass(r"*:5432:app:me:a\:b\\c:d").as_deref(), Some(r"a:b\c:d"));
        assert_eq!((of_pgpass("# a comment"), of_pgpass("a:b:c:d")), (None, None));
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
            let known = passwords(url, std::iter::empty());
            assert!(known.is_empty(), "{url}: {known:?}");
        }
    }
}
