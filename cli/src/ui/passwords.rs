//! The files of passwords and tokens, and what a request proves by them.

use std::{fmt::Display, os::unix::fs::MetadataExt as _, path::Path};

use axum::http::{HeaderMap, header};
use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::exit::{Failure, USAGE};

/// Reads the token of the metrics.
pub fn read_token(file: &Path) -> Result<String, Failure> {
    let option = "--metrics-token-file";
    let text = read_secret(option, file)?;
    let token = text.trim();
    match token.is_empty() || token.contains(char::is_whitespace) {
        true => Err(wrong(option, file, "the token has to be its only line, without spaces")),
        false => Ok(token.to_owned()),
    }
}

/// Reads a file that its owner's group may read, and no one else.
fn read_secret(option: &str, file: &Path) -> Result<String, Failure> {
    if std::fs::metadata(file).is_ok_and(|found| found.mode() & 0o007 != 0) {
        return Err(wrong(option, file, "every user of this machine may read or write it: chmod 600"));
    }
    std::fs::read_to_string(file).map_err(|error| wrong(option, file, error))
}

fn wrong(option: &str, file: &Path, why: impl Display) -> Failure {
    Failure::new(USAGE, format_args!("{option} {}: {why}", file.display()))
}

/// The operators' names and passwords.
#[derive(Debug)]
pub struct Passwords(Vec<String>);

impl Passwords {
    pub fn read(file: &Path) -> Result<Self, Failure> {
        let option = "--password-file";
        let text = read_secret(option, file)?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        // The line is not printed, since it may be a password.
        let is_pair = |line: &String| {
            line.split_once(':').is_some_and(|(name, password)| !name.is_empty() && !password.is_empty())
        };
        if lines.is_empty() || !lines.iter().all(is_pair) {
            return Err(wrong(option, file, "each line has to be NAME:PASSWORD"));
        }
        Ok(Self(lines))
    }

    /// Returns the name that the request proves.
    pub fn name(&self, headers: &HeaderMap) -> Option<String> {
        let sent = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, sent) = sent.split_once(' ')?;
        let sent = BASE64_STANDARD.decode(sent.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
        let sent = String::from_utf8(sent).ok()?;
        let found = self.0.iter().filter(|line| is_same(line, &sent)).count() > 0;
        found.then(|| sent.split(':').next().unwrap_or_default().to_owned())
    }
}

/// Compares secrets. The time it takes tells their lengths at most.
pub fn is_same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    one.len() == other.len() && one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authorized(sent: &str) -> HeaderMap {
        [(header::AUTHORIZATION, sent.parse().unwrap())].into_iter().collect()
    }

    #[test]
    fn a_password_proves_its_own_name() {
        let passwords = Passwords(vec!["ann:one".into(), "bob:two:three".into()]);
        let name = |pair: &str| {
            let sent = format!("Basic {}", BASE64_STANDARD.encode(pair));
            passwords.name(&authorized(&sent))
        };
        assert_eq!(name("ann:one").as_deref(), Some("ann"));
        assert_eq!(name("bob:two:three").as_deref(), Some("bob"));
        for wrong in ["ann:two:three", "ann:", "ann", "", "ann:one2", "bob:two"] {
            assert_eq!(name(wrong), None, "{wrong}");
        }
        assert_eq!(passwords.name(&HeaderMap::new()), None);
    }
}
