//! The schedule of a renewer's background task: leases to renew and claims to end.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
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

struct Scheduled {
    held: Arc<LeaseState>,
    renew_at: Instant,
    /// The server refused its renewal, alone or in a batch.
    was_refused: bool,
    /// What the lease's deadline was when it was scheduled. Since then it may have moved forward.
    deadline: Instant,
}

/// The leases in the order of a time, so that what is due is found without looking at the others.
#[derive(Default)]
struct Order(BTreeSet<(Instant, usize)>);

impl Order {
    fn first(&self) -> Option<Instant> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Returns the leases whose time is not after `due`.
    fn until(&self, due: Instant) -> impl Iterator<Item = usize> {
        self.0.range(..=(due, usize::MAX)).map(|(_, id)| *id)
    }
}

pub(crate) struct Agenda {
    pub duty: Duty,
    /// Keyed by [`LeaseState::id`], because a claim that is resumed is held by a second state.
    leases: HashMap<usize, Scheduled>,
    /// Leases whose last renewal was not refused, by the time of the next one.
    renewals: Order,
    /// Leases whose last renewal was refused, by the time of the next one.
    refused: Order,
    deadlines: Order,
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
    /// Takes as many items as one statement has room for, in their order: first those that were not
    /// refused.
    fn of(items: impl Iterator<Item = T>, was_refused: impl Fn(&T) -> bool, claims: impl Fn(&T) -> usize) -> Self {
        let mut room = BATCH;
        let fits = items.take_while(|item| {
            let left = room.checked_sub(claims(item));
            room = left.unwrap_or_default();
            left.is_some()
        });
        let items: Vec<T> = fits.collect();
        Self { refused_from: items.partition_point(|item| !was_refused(item)), items }
    }
}

impl Agenda {
    pub fn new(duty: Duty) -> Self {
        Self {
            duty,
            leases: HashMap::new(),
            renewals: Order::default(),
            refused: Order::default(),
            deadlines: Order::default(),
            endings: BTreeMap::new(),
            last_number: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.endings.is_empty()
    }

    /// Adds a lease.
    pub fn add(&mut self, held: Arc<LeaseState>, renew_at: Instant) {
        self.schedule(held, renew_at, false);
    }

    /// Changes when a lease is renewed. One that has been removed stays so.
    pub fn reschedule(&mut self, id: usize, renew_at: Instant, was_refused: bool) {
        if let Some(held) = self.remove(id) {
            self.schedule(held, renew_at, was_refused);
        }
    }

    fn schedule(&mut self, held: Arc<LeaseState>, renew_at: Instant, was_refused: bool) {
        let (id, deadline) = (held.id(), held.deadline());
        self.deadlines.0.insert((deadline, id));
        let order = if was_refused { &mut self.refused } else { &mut self.renewals };
        order.0.insert((renew_at, id));
        self.leases.insert(id, Scheduled { held, renew_at, was_refused, deadline });
    }

    /// Removes a lease.
    pub fn remove(&mut self, id: usize) -> Option<Arc<LeaseState>> {
        let Scheduled { held, renew_at, was_refused, deadline } = self.leases.remove(&id)?;
        self.deadlines.0.remove(&(deadline, id));
        let order = if was_refused { &mut self.refused } else { &mut self.renewals };
        order.0.remove(&(renew_at, id));
        Some(held)
    }

    /// Removes and returns the leases whose deadline has passed without a renewal.
    pub fn take_late(&mut self) -> Vec<Arc<LeaseState>> {
        let now = Instant::now();
        let ids: Vec<usize> = self.deadlines.until(now).collect();
        ids.into_iter().filter_map(|id| self.take_if_late(id, now)).collect()
    }

    /// Removes and returns the lease, unless its deadline has moved forward since it was scheduled.
    fn take_if_late(&mut self, id: usize, now: Instant) -> Option<Arc<LeaseState>> {
        let Scheduled { held, renew_at, was_refused, .. } = self.leases.get(&id)?;
        if held.deadline() <= now {
            return self.remove(id);
        }
        self.reschedule(id, *renew_at, *was_refused);
        None
    }

    /// Returns when the next lease is renewed.
    fn next_renewal(&self) -> Option<Instant> {
        self.renewals.first().into_iter().chain(self.refused.first()).min()
    }

    /// Returns whether the renewal of a lease is due.
    pub fn has_renewals(&self, now: Instant) -> bool {
        self.next_renewal().is_some_and(|next| next <= now)
    }

    /// Returns the leases whose renewal is due by `due`, as many as one statement has room for.
    /// What is left over was due before what comes next, and is first then.
    pub fn renewals(&self, due: Instant) -> Batch<Arc<LeaseState>> {
        // Those that were refused together are due together. They are shuffled, so that different
        // ones are left over each time when there is no time for all.
        let mut refused: Vec<usize> = self.refused.until(due).collect();
        fastrand::shuffle(&mut refused);
        let ids = self.renewals.until(due).chain(refused);
        let leases = ids.filter_map(|id| self.leases.get(&id));
        let Batch { items, refused_from } = Batch::of(leases, |kept| kept.was_refused, |kept| kept.held.claims.len());
        Batch { items: items.into_iter().map(|kept| kept.held.clone()).collect(), refused_from }
    }

    pub fn end(&mut self, ending: Ending) {
        self.remove(ending.held.id());
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
        let mut due: Vec<(&u64, &mut Ending)> =
            self.endings.iter_mut().filter(|(_, ending)| ending.change == change && joins(ending)).collect();
        // Shuffled, so that different ones are left over each time when there is no time for all.
        fastrand::shuffle(&mut due);
        due.sort_by_key(|(_, ending)| ending.was_refused);
        let Batch { items, refused_from } =
            Batch::of(due.into_iter(), |(_, ending)| ending.was_refused, |(_, ending)| ending.left.len());
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
        let renewal = self.next_renewal().filter(|_| !renewing);
        let waiting = self.endings.values().filter(|waiting| !(renewing || ending || waiting.in_flight));
        let endings = waiting.map(|waiting| waiting.at);
        self.deadlines.first().into_iter().chain(renewal).chain(endings).min()
    }

    /// Removes and returns all leases and endings.
    pub fn clear(&mut self) -> (Vec<Arc<LeaseState>>, Vec<Ending>) {
        let ids: Vec<usize> = self.leases.keys().copied().collect();
        let leases = ids.into_iter().filter_map(|id| self.remove(id)).collect();
        (leases, std::mem::take(&mut self.endings).into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uuid::Uuid;

    use super::*;
    use crate::key::{Holder, Key, Token};

    const SECOND: Duration = Duration::from_secs(1);

    fn agenda() -> (Agenda, Instant) {
        (Agenda::new(Duty::new(SECOND)), Instant::now())
    }

    fn lease(deadline: Instant) -> Arc<LeaseState> {
        let claim = Claim { key: Key::new("k").unwrap(), holder: Holder::new(Uuid::new_v4()), token: Token::new(1) };
        Arc::new(LeaseState::new(vec![claim], deadline, deadline, Arc::default()))
    }

    fn ids(leases: &[Arc<LeaseState>]) -> Vec<usize> {
        leases.iter().map(|held| held.id()).collect()
    }

    #[test]
    fn what_is_left_over_is_first_in_the_next_batch() {
        let (mut agenda, start) = agenda();
        let leases: Vec<_> = (0..BATCH + 2).map(|_| lease(start + 60 * SECOND)).collect();
        for (number, held) in (0..).zip(&leases) {
            agenda.add(held.clone(), start + number * SECOND / 1_000_000);
        }
        let due = start + SECOND;
        assert_eq!(ids(&agenda.renewals(due).items), ids(&leases[..BATCH]));
        for held in &leases[..BATCH] {
            agenda.reschedule(held.id(), due, false);
        }
        assert_eq!(ids(&agenda.renewals(due).items)[..2], ids(&leases[BATCH..]));
        assert_eq!(agenda.next(false, false), Some(start + (BATCH as u32) * SECOND / 1_000_000));
    }

    #[test]
    fn what_was_refused_comes_last() {
        let (mut agenda, start) = agenda();
        let [refused, other, later] = [(); 3].map(|()| lease(start + 60 * SECOND));
        agenda.add(refused.clone(), start);
        agenda.add(other.clone(), start + SECOND);
        agenda.add(later, start + 3 * SECOND);
        agenda.reschedule(refused.id(), start, true);
        let batch = agenda.renewals(start + 2 * SECOND);
        assert_eq!((ids(&batch.items), batch.refused_from), (ids(&[other, refused]), 1));
    }

    #[test]
    fn of_those_that_were_refused_together_each_is_first_sometimes() {
        let (mut agenda, start) = agenda();
        let leases = [(); 3].map(|()| lease(start + 60 * SECOND));
        for held in &leases {
            agenda.add(held.clone(), start);
            agenda.reschedule(held.id(), start, true);
        }
        let first: BTreeSet<usize> = (0..200).map(|_| agenda.renewals(start).items[0].id()).collect();
        assert_eq!(first.len(), leases.len());
    }

    #[test]
    fn a_lease_whose_deadline_has_moved_is_not_late() {
        let (mut agenda, start) = agenda();
        let [late, renewed, removed] = [(); 3].map(|()| lease(start));
        for held in [&late, &renewed, &removed] {
            agenda.add(held.clone(), start);
        }
        renewed.hold_until(start + 60 * SECOND);
        agenda.remove(removed.id());
        assert_eq!(ids(&agenda.take_late()), ids(&[late]));
        assert_eq!(agenda.next(true, false), Some(start + 60 * SECOND));
        agenda.reschedule(removed.id(), start, false);
        assert_eq!(ids(&agenda.renewals(start).items), ids(&[renewed]));
    }
}
