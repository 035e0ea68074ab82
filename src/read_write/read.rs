//! How a reader is let in.

use std::sync::Arc;

use crate::{
    action::Certainty,
    error::Error,
    grant::Attempt,
    key::Token,
    lease::{
        attempt::ClaimAttempt,
        guard::Reader,
        handle::LeaseHandle,
        readers::{Entrance, MAX_READERS, Number},
        wanted::Wanted,
    },
    pacing::retry_backoff,
    read_write::call::Call,
    rules::{Reason, Refusal, Verdict},
    session::time::Instant,
    store::{
        Database,
        admin::{KeyRange, Listed},
    },
    sync::lock,
};

/// How many numbers a reader asks for before it is refused.
const NUMBERS: usize = 8;

/// What the name's row says to a reader.
enum NameState {
    /// Free, under this token of the last claim.
    Open(Token),
    /// Held; or to be claimed first, because its last claim has expired or it was never claimed.
    Closed(Option<Refusal>),
}

/// The outcome of an attempt to be let in.
enum Entry<DB: Database> {
    In(Reader<DB>),
    /// The reader has to wait for the name.
    Closed(Option<Refusal>),
    /// All keys of readers are held.
    Full(Refusal),
    /// Its claim did not stand long enough.
    TooLate,
}

impl<'a, DB: Database> Call<'a, DB> {
    pub async fn read(&self) -> Result<Attempt<Reader<DB>>, Error> {
        self.within(self.let_in()).await
    }

    async fn let_in(&self) -> Result<Attempt<Reader<DB>>, Error> {
        let (mut retry, mut pauses) = (self.retry(), retry_backoff());
        loop {
            let Some(entry) = retry.final_or_pause(self.enter().await).await else { continue };
            match entry? {
                Entry::In(reader) => return Ok(Attempt::Acquired(reader)),
                Entry::Closed(Some(refusal)) => return Ok(Attempt::Refused(refusal)),
                Entry::Full(refusal) if self.is_one_attempt() => return Ok(Attempt::Refused(refusal)),
                Entry::Closed(None) | Entry::TooLate if self.is_one_attempt() => {
                    return Err(self.timed_out(Certainty::Unknown));
                }
                Entry::Full(refusal) => {
                    self.record(&refusal);
                    pauses.pause(self.left()).await;
                }
                Entry::Closed(None) | Entry::TooLate => pauses.pause(self.left()).await,
            }
        }
    }

    async fn enter(&self) -> Result<Entry<DB>, Error> {
        let since = Instant::now();
        match self.enter_if_open().await? {
            Entry::Closed(Some(refusal)) if self.is_one_attempt() => Ok(Entry::Closed(Some(refusal))),
            Entry::Closed(refusal) => {
                refusal.iter().for_each(|refusal| self.record(refusal));
                self.enter_in_turn(since).await
            }
            entry => Ok(entry),
        }
    }

    /// Claims a reader's key, and is let in if a read of the name's row, which begins after that
    /// claim, shows no other claim.
    async fn enter_if_open(&self) -> Result<Entry<DB>, Error> {
        // A claim that may have been granted is requested first of all, because it keeps writers
        // out.
        if self.readers.was_closed()
            && lock(&self.unanswered).is_none()
            && let NameState::Closed(refusal) = self.access().await?
        {
            return Ok(Entry::Closed(refusal));
        }
        let reader = match self.claim_reader(false).await? {
            Attempt::Acquired(reader) => reader,
            Attempt::Refused(refusal) if refusal.reason == Reason::Queued => return Ok(Entry::Closed(Some(refusal))),
            Attempt::Refused(refusal) => return Ok(Entry::Full(refusal)),
        };
        // If the look fails, dropping the reader's claim puts its row back.
        let entry = match self.access().await? {
            NameState::Open(token) if reader.held.stands() => {
                return Ok(Entry::In((reader, token, None)));
            }
            NameState::Open(_) => Entry::TooLate,
            NameState::Closed(refusal) => Entry::Closed(refusal),
        };
        reader.undo().await;
        Ok(entry)
    }

    /// Looks at the name's row.
    async fn access(&self) -> Result<NameState, Error> {
        let rows = self.read_rows(&KeyRange::one(self.names.name.clone())).await?;
        let access = rows.first().map_or(NameState::Closed(None), |listed| self.access_of(listed));
        self.readers.set_closed(matches!(access, NameState::Closed(Some(_))));
        Ok(access)
    }

    /// A claim that has expired counts: its holder may still renew it, or confirm it. A row without
    /// a token was never claimed, so that its token would not be above those of writers whose row
    /// was deleted since.
    fn access_of(&self, listed: &Listed) -> NameState {
        let Listed { row, now, .. } = listed;
        match self.judge(listed) {
            Verdict::Acquire if row.token > 0 => NameState::Open(Token::new(row.token)),
            Verdict::Refuse(reason, until) => {
                NameState::Closed(Some(Refusal::new(self.names.name.clone(), reason, until, row, *now)))
            }
            Verdict::Acquire | Verdict::Create | Verdict::Same | Verdict::TakeOver => NameState::Closed(None),
        }
    }

    /// Waits for the name like a writer, claims a reader's key while it holds the name, and passes
    /// the name on. The readers of this process that have waited as long enter under one claim.
    async fn enter_in_turn(&self, since: Instant) -> Result<Entry<DB>, Error> {
        let key_terms = &self.lock.key_terms;
        let mut last = if self.is_one_attempt() { None } else { Some(self.readers.entrance.lock().await) };
        let open = last.as_ref().and_then(|last| last.upgrade());
        let entrance = match open.filter(|entrance| entrance.admits(since, key_terms)) {
            Some(entrance) => entrance,
            None => {
                let claim = match self.claim_name().await? {
                    Attempt::Acquired(claim) => claim,
                    Attempt::Refused(refusal) => return Ok(Entry::Closed(Some(refusal))),
                };
                let (key_terms, granted_at) = (key_terms.clone(), Instant::now());
                let entrance = Arc::new(Entrance { claim, key_terms, granted_at });
                last.iter_mut().for_each(|last| **last = Arc::downgrade(&entrance));
                entrance
            }
        };
        drop(last);
        self.readers.set_closed(false);
        self.enter_under(entrance).await
    }

    /// The reader is in if the name was held when its own claim was granted: no writer's claim on
    /// the name is older than that.
    async fn enter_under(&self, entrance: Arc<Entrance<DB>>) -> Result<Entry<DB>, Error> {
        let claimed = self.claim_reader(true).await?;
        let (token, took_over) = (entrance.claim.held.claims[0].token, entrance.claim.prior().is_some());
        let entry = match claimed {
            Attempt::Acquired(reader) if entrance.claim.held.stands() && reader.held.stands() => {
                if took_over {
                    return Ok(Entry::In((reader, token, Some(entrance))));
                }
                Entry::In((reader, token, None))
            }
            Attempt::Acquired(_) => Entry::TooLate,
            Attempt::Refused(refusal) => Entry::Full(refusal),
        };
        match Arc::into_inner(entrance) {
            // It is put back, unless a reader was told of the claim that it took over.
            Some(last) if took_over => last.claim.undo().await,
            Some(last) => last.claim.pass_on().await,
            None => {}
        }
        Ok(entry)
    }

    /// Claims any reader's key: first the one whose claim has no reply, or one that no reader of
    /// this process uses, and then one that a read of the rows shows to be free.
    pub async fn claim_reader(&self, ahead_of_queue: bool) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let (mut number, mut before) = match lock(&self.unanswered).take() {
            Some((number, unanswered)) => (Some(number), Some(unanswered)),
            None => (self.readers.take_number(None, |_| false), None),
        };
        let mut refused = Vec::new();
        loop {
            let Some(taken) = number else { return Ok(Attempt::Refused(refused.pop().unwrap_or_else(|| self.full()))) };
            match self.claim_number(taken, before.take(), ahead_of_queue).await? {
                Attempt::Refused(refusal) if refusal.reason != Reason::Queued && refused.len() < NUMBERS => {
                    refused.push(refusal);
                }
                attempt => return Ok(attempt),
            }
            let held = self.held_numbers().await?;
            number = self.readers.take_number(Some(fastrand::u32(1..=MAX_READERS)), |number| held.contains(&number));
        }
    }

    /// Returns the numbers of the readers' keys that are held, by a lease that has not ended.
    async fn held_numbers(&self) -> Result<Vec<u32>, Error> {
        let rows = self.read_rows(&self.names.readers).await?;
        let held = rows.iter().filter(|listed| matches!(self.judge(listed), Verdict::Refuse(..)));
        Ok(held.filter_map(|listed| self.names.number(&listed.key)).collect())
    }

    /// The refusal of a reader when readers of this process use all numbers.
    pub fn full(&self) -> Refusal {
        let by = self.lock.key_terms.terms.label.clone();
        Refusal { by, ..Refusal::bare(self.names.readers.first.clone(), Reason::Held) }
    }

    /// Claims the key of this number, or goes on with the attempt `before`. An attempt without a
    /// reply is kept, and so is its number.
    async fn claim_number(
        &self,
        number: Number<DB>,
        before: Option<ClaimAttempt<'a, DB>>,
        ahead_of_queue: bool,
    ) -> Result<Attempt<LeaseHandle<DB>>, Error> {
        let mut attempt = match before {
            Some(before) => before,
            None => {
                let keys = [self.names.reader(number.number)?].into();
                // A fair reader does not precede those that wait for the name.
                let queues = [self.names.name.clone()].into();
                self.attempt(&Wanted { keys, queues, any: false, name: None })
            }
        };
        if ahead_of_queue {
            attempt = attempt.ahead_of_queue();
        }
        let claimed = attempt.run().await;
        // The statement of a call that does not wait may be in flight at its time limit. A grant
        // that comes after that is put back, and must not be one of the next attempt.
        let unanswered = attempt.into_unanswered().filter(|_| !self.is_one_attempt());
        match (&claimed, unanswered) {
            (Ok(Attempt::Acquired(granted)), _) => granted.held.keep(number),
            (_, Some(attempt)) => *lock(&self.unanswered) = Some((number, attempt)),
            (_, None) => {}
        }
        claimed
    }
}
