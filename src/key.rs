//! Names and numbers that identify a claim, checked where they enter.

use std::{fmt, sync::Arc};

use uuid::Uuid;

/// The name of one resource: 1 to 255 bytes of UTF-8, no NUL, no white space at the start or end.
///
/// Keys are compared byte by byte on every database.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The most bytes a key may have.
    pub const MAX_BYTES: usize = 255;

    /// Checks `text` and makes a key of it.
    ///
    /// # Errors
    /// [`InvalidKey`] says what is wrong with the text.
    pub fn new(text: &str) -> Result<Self, InvalidKey> {
        let wrong = if text.is_empty() {
            "is empty"
        } else if text.len() > Self::MAX_BYTES {
            "has more than 255 bytes"
        } else if text.contains('\0') {
            "has a NUL character in it"
        } else if text.trim() != text {
            "has white space at the start or end"
        } else {
            return Ok(Self(text.into()));
        };
        Err(InvalidKey { key: text.chars().take(80).collect(), wrong })
    }

    /// The key's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::borrow::Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

/// The error for a text that is not a key. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key {key:?} {wrong}: use 1 to 255 bytes of UTF-8, without NUL and without white space at the start or end")]
#[non_exhaustive]
pub struct InvalidKey {
    /// The text, or its first 80 characters.
    pub key: String,
    /// What is wrong with it.
    pub wrong: &'static str,
}

/// The error for a text that is not the id of a holder. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not the id of a holder: use the UUID that was given with the claim")]
#[non_exhaustive]
pub struct InvalidHolder {
    /// The text, or its first 80 characters.
    pub text: String,
}

/// The identity of one claim: a UUID made for it and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder(Uuid);

impl Holder {
    pub(crate) fn unique() -> Self {
        Self(Uuid::new_v4())
    }

    pub(crate) fn new(id: Uuid) -> Self {
        Self(id)
    }

    /// Reads the id that another process was given with its claim.
    ///
    /// # Errors
    /// [`InvalidHolder`] if the text is not a UUID.
    pub fn parse(text: &str) -> Result<Self, InvalidHolder> {
        let invalid = || InvalidHolder { text: text.chars().take(80).collect() };
        Uuid::parse_str(text).map(Self).map_err(|_| invalid())
    }

    /// The UUID, as it stands in the column `holder`.
    pub fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A fencing token: it grows with every claim and every forced release of its key, and never falls.
///
/// Hand it to a system outside the database with each write, and let that system refuse a token
/// lower than the highest it has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(i64);

impl Token {
    pub(crate) fn new(number: i64) -> Self {
        Self(number)
    }

    /// The number, as it stands in the column `token`.
    pub fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The right to change one resource, as the table knows it.
///
/// A row is this claim's while it is locked, has its holder and its token, and `claimed_at` still
/// repeats `begin_time`; a program that knows nothing of rowlock moves the latter alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The resource.
    pub key: Key,
    /// The claim's own id.
    pub holder: Holder,
    /// Its fencing token.
    pub token: Token,
}

/// The claim that a lease took over from: its holder had let it expire, or abandoned it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreviousClaim {
    /// That claim's token; whatever it wrote was written under this number.
    pub token: Token,
    /// Who held it: the column `client_ip`.
    pub label: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_checked_at_the_door() {
        for good in ["a", "é", "nightly report", &"x".repeat(255), "'; DROP TABLE t_resource_lock; --"] {
            assert_eq!(Key::new(good).unwrap().as_str(), good);
        }
        for (bad, says) in [
            ("", "is empty"),
            (" a", "white space"),
            ("a\n", "white space"),
            ("a\0b", "NUL"),
            (&"é".repeat(128), "255 bytes"),
        ] {
            let error = Key::new(bad).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
