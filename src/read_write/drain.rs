//! How a writer is let in: it claims the name, and waits for the readers that were let in before.

use std::sync::Arc;

use crate::{
    error::Error,
    grant::Attempt,
    key::{Claim, Key, Token},
    lease::{attempt::ClaimAttempt, handle::LeaseHandle, ledger::Pending, wanted::Wanted},
    pacing::poll_backoff,
    queue::releases::Releases,
    read_write::call::Call,
    rules::{Reason, Refusal, Verdict},
    session::{time::Instant, timers::timeout_at},
    store::{Database, admin::Listed},
};

/// The claim of a reader that a writer waits for.
struct Reader {
    token: Token,
    /// The refusal of the writer while the claim stands. It names the reader's key.
    refusal: Refusal,
    expired: bool,
}

impl Reader {
    fn claim(&self) -> (Key, Token) {
        (self.refusal.key.clone(), self.token)
    }
}

fn keys<'a>(readers: impl Iterator<Item = &'a Reader>) -> Arc<[Key]> {
    readers.map(|reader| reader.refusal.key.clone()).collect()
}

impl<DB: Database> Call<'_, DB> {
    /// Lets a writer in. It does not wait for `own`, its own claim as a reader.
    pub async fn write(&self, own: Option<&Claim>) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        self.within(self.claim_alone(own)).await
    }

    async fn claim_alone(&self, own: Option<&Claim>) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        loop {
            let claim = match self.claim_name().await? {
                Attempt::Acquired(claim) => claim,
                Attempt::Refused(refusal) => return Ok(Attempt::Refused(refusal)),
            };
            match self.drain(&claim, own).await {
                Ok(None) => return Ok(Attempt::Acquired(claim)),
                Ok(Some(refusal)) => {
                    claim.undo().await;
                    return Ok(Attempt::Refused(refusal));
                }
                Err(error @ Error::Lost { .. }) if !self.is_one_attempt() && !self.left().is_zero() => {
                    tracing::debug!(%error, "the wait for the readers begins again");
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until no reader is left that was let in before `claim` was granted on the name, apart
    /// from `own`. The claim is renewed like any other. Returns the refusal if a reader is left and
    /// the call makes one attempt, and [`Error::Lost`] if the claim was lost.
    ///
    /// The first look shows all of these readers, because it begins after the claim is committed. A
    /// reader whose claim is committed later sees the claim on the name and is not let in, so it is
    /// not waited for: readers that come and find the name held do not delay the writer.
    async fn drain(&self, claim: &LeaseHandle<DB>, own: Option<&Claim>) -> Result<Option<Refusal>, Error> {
        let mut before: Option<Vec<(Key, Token)>> = None;
        let (mut retry, mut pauses, mut releases) = (self.retry(), poll_backoff(DB::NOTIFIES), None);
        loop {
            let Some(rows) = retry.final_or_pause(self.read_rows(&self.names.readers).await).await else { continue };
            let mut readers: Vec<Reader> = rows?.iter().filter_map(|listed| self.reader_in(listed, own)).collect();
            if let Some(before) = &before {
                readers.retain(|reader| before.contains(&reader.claim()));
            }
            before = Some(readers.iter().map(Reader::claim).collect());
            let mut left = Vec::new();
            for mut reader in readers {
                if reader.expired {
                    let Some(refusal) = self.end_expired(&reader.refusal).await? else { continue };
                    reader.refusal = Refusal { awaited: reader.refusal.awaited, ..refusal };
                }
                left.push(reader);
            }
            if !claim.held.stands() {
                return Err(claim.error_lost());
            }
            let Some(first) = left.first() else { return Ok(None) };
            if self.is_one_attempt() {
                return Ok(Some(first.refusal.clone()));
            }
            self.record(&first.refusal);
            let until = Instant::now() + pauses.next().min(first.refusal.retry_after.unwrap_or(self.left()));
            let shared = &self.lock.shared;
            let releases = releases.get_or_insert_with(|| Releases::of(&shared.listener, &keys(left.iter())));
            let unmarked = keys(left.iter().filter(|reader| !reader.refusal.awaited));
            // A reader may have gone by then.
            if !releases.request(&shared.sessions, &unmarked, Some(self.limit())).await {
                // The loss of the claim ends the pause.
                let _ = timeout_at(until, async {
                    tokio::select! {
                        () = claim.lost() => {}
                        () = releases.notified_before(until) => {}
                    }
                })
                .await;
            }
        }
    }

    /// Returns the reader whose claim the row has, apart from `own`.
    fn reader_in(&self, listed: &Listed, own: Option<&Claim>) -> Option<Reader> {
        let Listed { key, row, now, .. } = listed;
        let token = Token::new(row.token);
        let is_own = own.is_some_and(|own| own.key.as_str() == key && own.token == token);
        if !row.locked || is_own {
            return None;
        }
        let key = self.names.reader(self.names.number(key)?).ok()?;
        let (expired, reason, until) = match self.judge(listed) {
            Verdict::TakeOver => (true, Reason::Busy, None),
            Verdict::Refuse(reason, until) => (false, reason, until),
            Verdict::Acquire | Verdict::Create | Verdict::Same => return None,
        };
        Some(Reader { token, refusal: Refusal::new(key, reason, until, row, *now), expired })
    }

    /// Takes over the claim of a reader whose lease is over, so that the reader can neither renew
    /// it nor confirm it, and frees the key. Returns the refusal if its row is locked: a
    /// transaction of the reader may be about to commit.
    async fn end_expired(&self, reader: &Refusal) -> Result<Option<Refusal>, Error> {
        let wanted = Wanted::all([reader.key.clone()].into());
        let (until, pending) = (Some(self.limit()), Pending::default());
        let attempt = ClaimAttempt::new(&self.lock.shared, &self.lock.key_terms, &wanted, until, &pending);
        match attempt.ahead_of_queue().run().await {
            Ok(Attempt::Acquired(claim)) => {
                claim.pass_on().await;
                Ok(None)
            }
            Ok(Attempt::Refused(refusal)) => Ok(Some(refusal)),
            Err(error) if error.is_retryable() && !self.is_one_attempt() => Ok(Some(reader.clone())),
            Err(error) => Err(error),
        }
    }
}
