//! The rows of keys, and what they are by their names: `NAME#3` is a permit of a semaphore,
//! `NAME#r3` a reader's.

use std::borrow::Cow;

use rowlock::{
    Database, Error, LeaseLock,
    admin::{ListOptions, LockInfo, LockState},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind<'a> {
    Lock,
    Permit { of: &'a str },
    Reader { of: &'a str },
}

pub fn kind(key: &str) -> Kind<'_> {
    let Some((of, number)) = key.rsplit_once('#') else { return Kind::Lock };
    let is_number = |text: &str| !text.is_empty() && !text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit());
    match number.strip_prefix('r') {
        _ if is_number(number) => Kind::Permit { of },
        Some(number) if is_number(number) => Kind::Reader { of },
        _ => Kind::Lock,
    }
}

/// Returns the key under which the waiters of a key queue: those of a permit wait for any permit.
pub fn queue(key: &str) -> Cow<'_, str> {
    match kind(key) {
        Kind::Permit { of } => format!("{of}#").into(),
        Kind::Lock | Kind::Reader { .. } => key.into(),
    }
}

/// The most rows of one statement, which take less than a second to read.
pub const PAGE: u32 = 10_000;

/// Returns all rows that are selected, page by page.
pub async fn pages<DB: Database>(lock: &LeaseLock<DB>, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
    let mut entries: Vec<LockInfo> = Vec::new();
    loop {
        let after = entries.last().map(|entry| entry.key.clone()).unwrap_or_default();
        let page = lock.list(&filter.clone().after(&after).limit(PAGE)).await?;
        let last = page.len() < PAGE as usize;
        entries.extend(page);
        if last {
            return Ok(entries);
        }
    }
}

pub fn is_claimed(state: LockState) -> bool {
    matches!(state, LockState::Held | LockState::Expired | LockState::HeldByAnotherProgram)
}

/// The rows of a name's permits and readers that are claimed; `None` if the name never had any.
pub struct Parts {
    pub permits: Option<Vec<LockInfo>>,
    pub readers: Option<Vec<LockInfo>>,
}

impl Parts {
    pub async fn of<DB: Database>(lock: &LeaseLock<DB>, name: &str) -> Result<Self, Error> {
        let rows = pages(lock, &ListOptions::default().prefix(&format!("{name}#"))).await?;
        let (mut permits, mut readers) = (Vec::new(), Vec::new());
        for row in rows {
            match kind(&row.key) {
                Kind::Permit { of } if of == name => permits.push(row),
                Kind::Reader { of } if of == name => readers.push(row),
                _ => {}
            }
        }
        let claimed = |rows: Vec<LockInfo>| {
            (!rows.is_empty()).then(|| rows.into_iter().filter(|row| is_claimed(row.state)).collect())
        };
        Ok(Self { permits: claimed(permits), readers: claimed(readers) })
    }

    pub fn is_empty(&self) -> bool {
        self.permits.is_none() && self.readers.is_none()
    }

    /// Says what the name is, with the rows that are claimed.
    pub fn described(&self, name: &str) -> Vec<(String, &[LockInfo])> {
        let held = |rows: &[LockInfo]| rows.iter().filter(|row| row.state == LockState::Held).count();
        let semaphore = self.permits.as_deref().map(|rows| {
            let permits = match held(rows) {
                0 => "no permit is held",
                1 => "1 permit is held",
                number => &format!("{number} permits are held"),
            };
            (format!("{name} is the name of a semaphore: {permits}"), rows)
        });
        let read_write = self.readers.as_deref().map(|rows| {
            let readers = match held(rows) {
                0 => "no reader",
                1 => "1 reader",
                number => &format!("{number} readers"),
            };
            (format!("{name} is the name of a read-write lock: {readers}"), rows)
        });
        semaphore.into_iter().chain(read_write).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_key_is_told_by_its_suffix() {
        let kinds = [
            ("k", Kind::Lock),
            ("k#3", Kind::Permit { of: "k" }),
            ("a#1#12", Kind::Permit { of: "a#1" }),
            ("k#r3", Kind::Reader { of: "k" }),
            ("k#", Kind::Lock),
            ("k#r", Kind::Lock),
            ("k#03", Kind::Lock),
            ("k#x3", Kind::Lock),
        ];
        for (key, of) in kinds {
            assert_eq!(kind(key), of, "{key}");
        }
    }
}
