//! A plain claim on a name that has readers: it keeps new ones out, and is refused while one is in.

use rowlock::{
    Database, LeaseLock,
    admin::{ListOptions, LockInfo, LockState},
};

use crate::{exit::Failure, out::print_refusal};

/// The most readers of a name at a time, so that one page has them all.
const MAX_READERS: u32 = 1024;

/// Fails with this exit code if a reader of one of these names is in. The caller has claimed them,
/// so that no reader comes in any more.
pub async fn refuse_beside_readers<DB: Database>(
    lock: &LeaseLock<DB>,
    names: &[&str],
    refused: u8,
) -> Result<(), Failure> {
    for name in names {
        let prefix = format!("{name}#r");
        let readers = ListOptions::default().held().prefix(&prefix).limit(MAX_READERS);
        let is_in = |row: &LockInfo| row.state == LockState::Held && is_reader(&row.key, &prefix);
        if let Some(reader) = lock.list(&readers).await?.into_iter().find(is_in) {
            let why = format!("{name} is read by {}: `rowlock run --exclusive` waits for readers", reader.by);
            print_refusal(why, refused);
            return Err(Failure::new(refused, ""));
        }
    }
    Ok(())
}

fn is_reader(key: &str, prefix: &str) -> bool {
    let number = key.strip_prefix(prefix).filter(|number| !number.starts_with(['0', '+']));
    number.is_some_and(|number| number.parse().is_ok_and(|number: u32| number <= MAX_READERS))
}
