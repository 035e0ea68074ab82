//! The schedule of a renewer's background task: leases to renew and claims to end.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use tokio::time::Instant;

use crate::{
    key::Claim,
    lease::{
        changes::GroupReply,
        ending::{EndOutcome, Ending},
        state::LeaseState,
    },
    store::{BATCH, Change},
    task::Duty,
};

pub(crate) struct Scheduled {
    pub held: Arc<LeaseState>,
    pub renew_at: Instant,
    /// The server refused its renewal, alone or in a batch.
    pub was_refused: bool,
}

pub(crate) struct Agenda {
    pub duty: Duty,
    /// Keyed by [`LeaseState::id`], because a claim that is resumed is held by a second state.
    pub leases: HashMap<usize, Scheduled>,
    /// Keyed by number.
    endings: BTreeMap<u64, Ending>,
    last_number: u64,
}

/// The items of one statement, unless the server refuses it.
pub(crate) struct Batch<T> {
    pub items: Vec<T>,
    /// The index from which on the server refused the items before.
    pub refused_from: usize,
}

impl<T> Batch<T> {
    /// Takes as many items as one statement has room for, those that were refused last.
    fn of(mut items: Vec<T>, was_refused: impl Fn(&T) -> bool, claims: impl Fn(&T) -> usize) -> Self {
        // Shuffled, so that different ones of these are left over each time when there is no time
        // for all of them.
        fastrand::shuffle(&mut items);
        items.sort_by_key(&was_refused);
        let mut room = BATCH;
        let fits = items.iter().take_while(|item| {
            let left = room.checked_sub(claims(item));
            room = left.unwrap_or_default();
            left.is_some()
        });
        let count = fits.count();
        items.truncate(count);
        Self { refused_from: items.partition_point(|item| !was_refused(item)), items }
    }
}

impl Agenda {
    pub fn new(duty: Duty) -> Self {
        Self { duty, leases: HashMap::new(), endings: BTreeMap::new(), last_number: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.endings.is_empty()
    }

    /// Removes and returns the leases whose deadline has passed without a renewal.
    pub fn take_late(&mut self) -> Vec<Arc<LeaseState>> {
        let now = Instant::now();
        self.leases.extract_if(|_, kept| kept.held.deadline() <= now).map(|(_, kept)| kept.held).collect()
    }

    /// Returns the leases whose renewal is due by `due`.
    pub fn renewals(&self, due: Instant) -> Batch<Arc<LeaseState>> {
        let due: Vec<&Scheduled> = self.leases.values().filter(|kept| kept.renew_at <= due).collect();
        let Batch { items, refused_from } = Batch::of(due, |kept| kept.was_refused, |kept| kept.held.claims.len());
        Batch { items: items.into_iter().map(|kept| kept.held.clone()).collect(), refused_from }
    }

    pub fn end(&mut self, ending: Ending) {
        self.leases.remove(&ending.held.id());
        self.last_number += 1;
        self.endings.insert(self.last_number, ending);
    }

    /// Returns the change to send and the claims whose ending is due, each with the number of its
    /// ending. The endings are marked as in flight.
    pub fn endings(&mut self) -> Option<(Change, Batch<(u64, Claim)>)> {
        let now = Instant::now();
        let is_due = |ending: &Ending| !ending.in_flight && ending.at <= now;
        let change = self.endings.values().find(|ending| is_due(ending))?.change;
        // Endings that are due later join. Those that were refused do not, because they would take
        // statements of their own.
        let joins = |ending: &Ending| is_due(ending) || !(ending.in_flight || ending.was_refused);
        let due = self.endings.iter_mut().filter(|(_, ending)| ending.change == change && joins(ending)).collect();
        let Batch { items, refused_from } =
            Batch::of(due, |(_, ending)| ending.was_refused, |(_, ending)| ending.left.len());
        let others = items.iter().take(refused_from).map(|(_, ending)| ending.left.len()).sum();
        let claims = items.into_iter().flat_map(|(number, ending)| {
            ending.in_flight = true;
            ending.left.iter().map(|claim| (*number, claim.clone()))
        });
        Some((change, Batch { items: claims.collect(), refused_from: others }))
    }

    /// Applies the replies for the claims of an ending. Removes and returns the ending if they
    /// settle it.
    pub fn apply_replies<'a>(
        &mut self,
        number: u64,
        replies: impl Iterator<Item = (&'a Claim, &'a GroupReply)>,
    ) -> Option<(EndOutcome, Ending)> {
        let ended = self.endings.get_mut(&number)?.apply_replies(replies)?;
        Some((ended, self.endings.remove(&number)?))
    }

    /// Called when another task continues what the previous task had in flight.
    pub fn take_over(&mut self) {
        self.endings.values_mut().for_each(Ending::forget_request);
    }

    /// Returns when something is due, apart from what waits for a statement in flight.
    pub fn next(&self, renewing: bool, ending: bool) -> Option<Instant> {
        let deadlines = self.leases.values().map(|kept| kept.held.deadline());
        let renewals = self.leases.values().map(|kept| kept.renew_at).filter(|_| !renewing);
        let waiting = self.endings.values().filter(|waiting| !(renewing || ending || waiting.in_flight));
        let endings = waiting.map(|waiting| waiting.at);
        deadlines.chain(renewals).chain(endings).min()
    }

    /// Removes and returns all leases and endings.
    pub fn clear(&mut self) -> (Vec<Arc<LeaseState>>, Vec<Ending>) {
        let leases = self.leases.drain().map(|(_, kept)| kept.held).collect();
        (leases, std::mem::take(&mut self.endings).into_values().collect())
    }
}
