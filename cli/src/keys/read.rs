//! Reads the rows of keys.

use rowlock::{
    Database, Error, LeaseLock,
    admin::{ListOptions, LockInfo, LockState},
};

/// Returns all rows that are selected, page by page.
pub async fn pages<DB: Database>(lock: &LeaseLock<DB>, filter: &ListOptions) -> Result<Vec<LockInfo>, Error> {
    const PAGE: u32 = 1000;
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
