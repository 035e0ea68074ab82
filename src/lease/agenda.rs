//! What a lock object's background task has to do, and when: leases to renew, claims to end.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use tokio::time::Instant;

use crate::{
    key::Claim,
    lease::{
        changes::PartReply,
        ending::{Ended, Ending},
        state::LeaseState,
    },
    store::{BATCH, Change},
    task::Duty,
};

pub(crate) struct Scheduled {
    pub held: Arc<LeaseState>,
    pub renew_at: Instant,
    /// The server refused its renewal, by itself or among others.
    pub suspect: bool,
}

pub(crate) struct Agenda {
    pub duty: Duty,
    /// By [`LeaseState::id`]: a claim that is resumed is kept once more.
    pub leases: HashMap<usize, Scheduled>,
    /// By their numbers.
    endings: BTreeMap<u64, Ending>,
    last_number: u64,
}

/// What goes in one statement, unless the server refuses it.
pub(crate) struct Batch<T> {
    pub items: Vec<T>,
    /// From here on the server refused them before.
    pub suspects: usize,
}

impl<T> Batch<T> {
    /// As many as a statement has room for, suspects behind all others.
    fn of(mut items: Vec<T>, is_suspect: impl Fn(&T) -> bool, claims: impl Fn(&T) -> usize) -> Self {
        // Where there is no time for all suspects, it is not for the same ones each time.
        fastrand::shuffle(&mut items);
        items.sort_by_key(&is_suspect);
        let mut room = BATCH;
        let fits = items.iter().take_while(|item| {
            let left = room.checked_sub(claims(item));
            room = left.unwrap_or_default();
            left.is_some()
        });
        let count = fits.count();
        items.truncate(count);
        Self { suspects: items.partition_point(|item| !is_suspect(item)), items }
    }
}

impl Agenda {
    pub fn new(duty: Duty) -> Self {
        Self { duty, leases: HashMap::new(), endings: BTreeMap::new(), last_number: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.endings.is_empty()
    }

    /// Takes out what is lost by now: no renewal came through.
    pub fn take_late(&mut self) -> Vec<Arc<LeaseState>> {
        let now = Instant::now();
        self.leases.extract_if(|_, kept| kept.held.deadline() <= now).map(|(_, kept)| kept.held).collect()
    }

    /// Leases whose renewal is due by then.
    pub fn renewals(&self, due: Instant) -> Batch<Arc<LeaseState>> {
        let due: Vec<&Scheduled> = self.leases.values().filter(|kept| kept.renew_at <= due).collect();
        let Batch { items, suspects } = Batch::of(due, |kept| kept.suspect, |kept| kept.held.claims.len());
        Batch { items: items.into_iter().map(|kept| kept.held.clone()).collect(), suspects }
    }

    pub fn end(&mut self, ending: Ending) {
        self.leases.remove(&ending.held.id());
        self.last_number += 1;
        self.endings.insert(self.last_number, ending);
    }

    /// Claims whose ending is due, by the numbers of their endings, and what is to be changed; they count as under way.
    pub fn endings(&mut self) -> Option<(Change, Batch<(u64, Claim)>)> {
        let now = Instant::now();
        let is_due = |ending: &Ending| !ending.under_way && ending.at <= now;
        let change = self.endings.values().find(|ending| is_due(ending))?.change;
        // Those that are due later travel along, but for those that would take statements of their own.
        let goes = |ending: &Ending| is_due(ending) || !(ending.under_way || ending.suspect);
        let due = self.endings.iter_mut().filter(|(_, ending)| ending.change == change && goes(ending)).collect();
        let Batch { items, suspects } = Batch::of(due, |(_, ending)| ending.suspect, |(_, ending)| ending.left.len());
        let others = items.iter().take(suspects).map(|(_, ending)| ending.left.len()).sum();
        let claims = items.into_iter().flat_map(|(number, ending)| {
            ending.under_way = true;
            ending.left.iter().map(|claim| (*number, claim.clone()))
        });
        Some((change, Batch { items: claims.collect(), suspects: others }))
    }

    /// What a request came to for the claims of an ending; takes it out where that settles it.
    pub fn hear<'a>(
        &mut self,
        number: u64,
        shares: impl Iterator<Item = (&'a Claim, &'a PartReply)>,
    ) -> Option<(Ended, Ending)> {
        let ended = self.endings.get_mut(&number)?.hear(shares)?;
        Some((ended, self.endings.remove(&number)?))
    }

    /// Another task goes on with what one had under way.
    pub fn take_over(&mut self) {
        self.endings.values_mut().for_each(Ending::forget_request);
    }

    /// When something is due, as far as no statement is under way that is waited for first.
    pub fn next(&self, renewing: bool, ending: bool) -> Option<Instant> {
        let deadlines = self.leases.values().map(|kept| kept.held.deadline());
        let renewals = self.leases.values().map(|kept| kept.renew_at).filter(|_| !renewing);
        let waiting = self.endings.values().filter(|waiting| !(renewing || ending || waiting.under_way));
        let endings = waiting.map(|waiting| waiting.at);
        deadlines.chain(renewals).chain(endings).min()
    }

    /// Takes out all of it.
    pub fn clear(&mut self) -> (Vec<Arc<LeaseState>>, Vec<Ending>) {
        let leases = self.leases.drain().map(|(_, kept)| kept.held).collect();
        (leases, std::mem::take(&mut self.endings).into_values().collect())
    }
}
