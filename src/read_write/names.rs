//! The keys of the readers of a name.

use crate::{invalid::Invalid, key::Key, lease::readers::MAX_READERS, store::admin::KeyRange};

/// A name and the keys of its readers.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub name: Key,
    /// A range that holds the readers' keys.
    pub readers: KeyRange,
    /// The longest of the readers' keys.
    pub longest: Key,
}

impl Names {
    pub fn new(name: &str) -> Result<Self, Invalid> {
        let name = Key::new(name)?;
        let (first, longest) = (reader_key(&name, 1)?, reader_key(&name, MAX_READERS)?);
        // A colon follows the digits in byte order.
        let last = Key::new(&format!("{name}#r:"))?;
        Ok(Self { readers: KeyRange { first, last }, longest, name })
    }

    /// Stands for a name that is none. It is never sent.
    pub fn none() -> Self {
        let (name, first, last, longest) = (Key::none(), Key::none(), Key::none(), Key::none());
        Self { name, readers: KeyRange { first, last }, longest }
    }

    pub fn reader(&self, number: u32) -> Result<Key, Invalid> {
        reader_key(&self.name, number)
    }

    /// Returns the number of a reader's key, or `None` for any other key.
    pub fn number(&self, key: &str) -> Option<u32> {
        Key::number_after(key, &self.name, "#r", MAX_READERS)
    }
}

fn reader_key(name: &Key, number: u32) -> Result<Key, Invalid> {
    Key::new(&format!("{name}#r{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_keys_of_readers_have_a_number() {
        let names = Names::new("k").unwrap();
        for number in 1..=MAX_READERS {
            let key = names.reader(number).unwrap();
            assert_eq!(names.number(key.as_str()), Some(number));
            assert!(names.readers.first <= key && key <= names.readers.last, "{key} is in the range");
        }
        for other in ["k", "k#1", "k#r", "k#r0", "k#r01", "k#r+1", "k#r1025", "k#r1#r1", "j#r1", "k#r1 "] {
            assert_eq!(names.number(other), None, "{other}");
        }
    }
}
