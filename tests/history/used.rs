//! The lock that the workers of a history use, and what it promises.

use std::time::Duration;

use crate::record::Promised;

pub const LEASE: Duration = Duration::from_millis(1500);
pub const DELAY: Duration = Duration::from_millis(400);
pub const KEYS: [&str; 2] = ["k", "j"];

/// The lock that the workers of a history use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Used {
    Keys,
    /// Keys with a lock-delay.
    Delayed,
    /// The permits of a semaphore.
    Permits,
    /// One elected leader at a time.
    Election,
    /// Many readers or one writer.
    ReadWrite,
}

impl Used {
    pub fn named(name: &str) -> Self {
        let all = [Self::Keys, Self::Delayed, Self::Permits, Self::Election, Self::ReadWrite];
        *all.iter().find(|used| format!("{used:?}") == name).unwrap()
    }

    /// What the workers ask for.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Keys | Self::Delayed => &KEYS,
            Self::Permits | Self::Election | Self::ReadWrite => &KEYS[..1],
        }
    }

    /// The keys that they are granted, apart from most of those of readers.
    pub fn rows(self) -> &'static [&'static str] {
        match self {
            Self::Permits => &["k#1", "k#2"],
            Self::ReadWrite => &["k", "k#r1"],
            _ => self.names(),
        }
    }

    /// Whether some work is done in transactions.
    pub fn has_transactions(self) -> bool {
        matches!(self, Self::Keys | Self::Delayed)
    }

    pub fn promised(self) -> Promised {
        let delay = if self == Self::Delayed { DELAY } else { Duration::ZERO };
        Promised {
            lease: LEASE,
            delay,
            most: if self == Self::Permits { self.rows().len() } else { 1 },
            shared: self == Self::ReadWrite,
        }
    }
}

/// Picks one of these, the first more often.
pub fn pick(names: &'static [&'static str], random: &mut fastrand::Rng) -> &'static str {
    names[usize::from(random.u8(..10) > 6) % names.len()]
}
