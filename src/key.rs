//! Names and numbers that identify a claim, validated on construction.

use std::{fmt, sync::Arc};

use uuid::Uuid;

use crate::invalid::{Faults, Invalid};

/// The name of one resource: 1 to 255 bytes of UTF-8, no NUL, no white space at the start or end.
///
/// Keys are compared byte by byte on every database. Methods take a key as `&str` and check it.
///
/// ```
/// use rowlock::Key;
///
/// assert_eq!(Key::new("nightly report")?.as_str(), "nightly report");
/// assert!(Key::new("").is_err());
/// # Ok::<(), rowlock::errors::Invalid>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// The maximum length of a key in bytes.
    pub const MAX_BYTES: usize = 255;

    /// Creates a key from `text`.
    ///
    /// # Errors
    /// [`Invalid`] states what is wrong with the text.
    pub fn new(text: &str) -> Result<Self, Invalid> {
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
        let key: String = text.chars().take(80).collect();
        let rule = "use 1 to 255 bytes of UTF-8, without NUL and without white space at the start or end";
        Err(Invalid::new(format!("key {key:?} {wrong}: {rule}")))
    }

    /// Stands for a text that is no key. It is never sent.
    pub(crate) fn none() -> Self {
        Self("".into())
    }

    /// Returns the key, or adds what is wrong with the text to the faults.
    pub(crate) fn checked(text: &str, faults: &mut Faults) -> Self {
        faults.accept(Self::new(text)).unwrap_or_else(Self::none)
    }

    /// Returns the key's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the key as an error names it.
    pub(crate) fn quoted(&self) -> String {
        format!("{:?}", self.as_str())
    }

    /// Returns the number of a key that is `prefix`, `mark` and a number from 1 to `most`; `None`
    /// for any other key.
    pub(crate) fn number_after(key: &str, prefix: &Self, mark: &str, most: u32) -> Option<u32> {
        let digits = key.strip_prefix(prefix.as_str())?.strip_prefix(mark)?;
        let number = digits.parse().ok().filter(|number| (1..=most).contains(number))?;
        // A number has one text: not `0`, `+3` or `007`.
        (digits == number.to_string()).then_some(number)
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

/// The identity of one claim: a UUID that is generated for the claim and never reused.
///
/// A process that passes its claim to another process sends the key and the holder. The other
/// process takes the claim up with [`LeaseLock::attach`](crate::LeaseLock::attach).
///
/// ```
/// use rowlock::leases::Holder;
///
/// let holder = Holder::parse("b40f1084-8cd5-4f63-8b42-6c5fed160fd4")?;
/// assert_eq!(holder.to_string(), "b40f1084-8cd5-4f63-8b42-6c5fed160fd4");
/// assert_ne!(Holder::unique(), Holder::unique());
/// # Ok::<(), rowlock::errors::Invalid>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Holder(Uuid);

impl Holder {
    /// Creates an id that no other claim has, for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn unique() -> Self {
        // A feature of the crate has the random numbers of a thread repeat themselves after a fork.
        Self(Uuid::from_u128(Uuid::new_v4().as_u128() ^ u128::from(std::process::id())))
    }

    pub(crate) fn new(id: Uuid) -> Self {
        Self(id)
    }

    /// Parses the id that another process received with its claim.
    ///
    /// # Errors
    /// [`Invalid`] if the text is not a UUID.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        Uuid::parse_str(text).map(Self).map_err(|_| {
            let text: String = text.chars().take(80).collect();
            Invalid::new(format!("{text:?} is not the id of a holder: use the UUID that was given with the claim"))
        })
    }

    /// Returns the UUID, as stored in the column `holder`.
    pub fn as_uuid(&self) -> &Uuid {
        &self.0
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A fencing token. It grows with every claim and every forced release of its key, and never
/// decreases.
///
/// The caller sends it with each write to a system outside the database. That system rejects a
/// token lower than the highest it has seen.
///
/// ```
/// use rowlock::Token;
///
/// /// A storage that refuses late writes.
/// struct Storage {
///     highest: Token,
/// }
///
/// impl Storage {
///     fn write(&mut self, token: Token, _data: &str) -> Result<(), &'static str> {
///         if token < self.highest {
///             return Err("the writer has lost its claim");
///         }
///         self.highest = token;
///         Ok(())
///     }
/// }
/// # let mut storage = Storage { highest: Token::new(2) };
/// # assert!(storage.write(Token::new(1), "").is_err());
/// # assert!(storage.write(Token::new(3), "").is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Token(i64);

impl Token {
    /// Creates a token with this number, for a lock of the application's own
    /// ([`ResourceLock`](crate::ResourceLock)).
    pub fn new(number: i64) -> Self {
        Self(number)
    }

    /// Returns the number, as stored in the column `token`.
    pub fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The right to change one resource, as recorded in the table.
///
/// A row belongs to this claim while it is locked, has the claim's holder and token, and
/// `claimed_at` still equals `begin_time`. A program that does not know rowlock changes
/// `begin_time` alone.
///
/// ```
/// # fn example<DB: rowlock::Database>(lease: rowlock::Lease<DB>) -> Result<(), rowlock::Error> {
/// let claim = lease.detach(); // the lease is not renewed any more, and not ended
/// println!("{} is claimed by {} under token {}", claim.key, claim.holder, claim.token);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Claim {
    /// The resource.
    pub key: Key,
    /// The claim's own id.
    pub holder: Holder,
    /// Its fencing token.
    pub token: Token,
}

/// The claim that a lease took over from. Its holder let it expire or abandoned it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # rowlock::migrate(&pool).await?;
/// # let lock = rowlock::LeaseLock::new(pool);
/// lock.try_acquire("import").await?.acquired().expect("the key is free").abandon().await?;
/// let lease = lock.try_acquire("import").await?.acquired().expect("the key is abandoned");
/// if let Some(previous) = lease.taken_over_from() {
///     println!("undo what {} wrote under token {}", previous.label, previous.token);
/// }
/// # assert!(lease.taken_over_from().is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PreviousClaim {
    /// The token of that claim. Everything that its holder wrote was written under this number.
    pub token: Token,
    /// The label of its holder: the column `client_ip`.
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

    #[test]
    fn a_key_is_its_text() {
        let key = Key::new("report").unwrap();
        let borrowed: &str = std::borrow::Borrow::borrow(&key);
        assert_eq!(
            (key.as_str(), key.as_ref(), borrowed, key.to_string().as_str()),
            ("report", "report", "report", "report")
        );
    }

    #[test]
    fn a_number_after_a_key_has_one_text() {
        let name = Key::new("k").unwrap();
        let number = |key| Key::number_after(key, &name, "#r", 12);
        assert_eq!([number("k#r1"), number("k#r12")], [Some(1), Some(12)]);
        for other in ["k", "k#r", "k#r0", "k#r13", "k#r+3", "k#r007", "k#r-1", "l#r1", "k#w1", "k#r1x"] {
            assert_eq!(number(other), None, "{other}");
        }
    }

    #[test]
    fn holders_and_tokens_are_told_as_they_are() {
        let (one, other) = (Holder::unique(), Holder::unique());
        assert!(one != other && !one.as_uuid().is_nil());
        assert_eq!(Holder::parse(&one.to_string()), Ok(one));
        let error = Holder::parse("no holder").unwrap_err();
        assert!(error.to_string().contains("\"no holder\" is not the id of a holder"), "{error}");
        assert_eq!((Token::new(7).get(), Token::new(7).to_string()), (7, "7".to_owned()));
    }
}
