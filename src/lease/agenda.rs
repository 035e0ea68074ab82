//! What a renewer has to do: leases to renew and claims to end, by when it is due.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::{
    key::Claim,
    lease::{
        changes::GroupReply,
        ending::{EndOutcome, Ending},
        state::{LeaseState, Span},
    },
    pacing,
    session::time::Instant,
    store::{BATCH, Change},
};

struct Scheduled {
    held: Arc<LeaseState>,
    renew_at: Instant,
    /// The server refused its renewal, alone or in a batch.
    was_refused: bool,
}

/// The leases in the order of a time, so that what is due is found without looking at the others.
type Order = BTreeSet<(Instant, usize)>;

/// Returns the leases whose time is not after `due`.
fn until(order: &Order, due: Instant) -> impl Iterator<Item = usize> {
    order.range(..=(due, usize::MAX)).map(|(_, id)| *id)
}

/// The leases of one span, which one statement renews.
#[derive(Default)]
struct Renewals {
    /// Leases whose last renewal was not refused, by the time of the next one.
    accepted: Order,
    refused: Order,
    /// A renewal of them is in flight.
    in_flight: bool,
}

impl Renewals {
    fn order(&mut self, was_refused: bool) -> &mut Order {
        if was_refused { &mut self.refused } else { &mut self.accepted }
    }

    /// Returns when the next renewal is due, unless one is in flight.
    fn next(&self) -> Option<Instant> {
        let first = self.accepted.first().into_iter().chain(self.refused.first()).min();
        first.map(|(at, _)| *at).filter(|_| !self.in_flight)
    }

    fn is_empty(&self) -> bool {
        self.accepted.is_empty() && self.refused.is_empty() && !self.in_flight
    }
}

#[derive(Default)]
pub(crate) struct Agenda {
    /// When the task that does what is due looks again by itself. If unset, there is no task.
    pub looks_at: Option<Instant>,
    /// Keyed by [`LeaseState::id`], because a claim that is attached is held by a second state.
    leases: HashMap<usize, Scheduled>,
    renewals: HashMap<Span, Renewals>,
    /// Keyed by number.
    endings: BTreeMap<u64, Ending>,
    last_number: u64,
    /// A statement of endings is in flight.
    is_ending: bool,
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

/// Leases of one span to renew.
pub(crate) type RenewalBatch = (Span, Batch<Arc<LeaseState>>);

/// Claims to end with one change, each with the number of its ending.
pub(crate) type EndingBatch = (Span, Change, Batch<(u64, Claim)>);

impl Agenda {
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
        let id = held.id();
        self.renewals.entry(held.span).or_default().order(was_refused).insert((renew_at, id));
        self.leases.insert(id, Scheduled { held, renew_at, was_refused });
    }

    /// Removes a lease.
    pub fn remove(&mut self, id: usize) -> Option<Arc<LeaseState>> {
        let Scheduled { held, renew_at, was_refused } = self.leases.remove(&id)?;
        if let Some(renewals) = self.renewals.get_mut(&held.span) {
            renewals.order(was_refused).remove(&(renew_at, id));
            if renewals.is_empty() {
                self.renewals.remove(&held.span);
            }
        }
        Some(held)
    }

    /// Returns what is due, and marks it as in flight. The endings come first: where renewals of
    /// their span are always due, they would wait for ever.
    pub fn due(&mut self) -> (Option<EndingBatch>, Vec<RenewalBatch>) {
        (self.endings(), std::iter::from_fn(|| self.renewals()).collect())
    }

    /// Returns leases of one span whose renewal is due, as many as one statement has room for, and
    /// marks it as in flight. What is left over was due before what comes next, and is first then.
    /// A lease that is lost is removed.
    fn renewals(&mut self) -> Option<RenewalBatch> {
        let now = Instant::now();
        let mut due = self.renewals.iter_mut().filter_map(|(span, renewals)| Some((renewals.next()?, span, renewals)));
        let (_, span, renewals) = due.find(|(at, ..)| *at <= now)?;
        renewals.in_flight = true;
        // Renewals that are due a little later join. Those that were refused together are due
        // together. They are shuffled, so that different ones are left over each time when there is
        // no time for all.
        let due = now + pacing::joins_within(span.lease);
        let mut refused: Vec<usize> = until(&renewals.refused, due).collect();
        fastrand::shuffle(&mut refused);
        let ids = until(&renewals.accepted, due).chain(refused);
        let mut lost = Vec::new();
        let leases = ids.filter_map(|id| self.leases.get(&id)).filter(|kept| {
            // After a pause of the process, a renewal would close the key of a lease that is over.
            let stands = kept.held.stands();
            lost.extend((!stands).then(|| kept.held.id()));
            stands
        });
        let Batch { items, refused_from } = Batch::of(leases, |kept| kept.was_refused, |kept| kept.held.claims.len());
        let items = items.into_iter().map(|kept| kept.held.clone()).collect();
        let span = *span;
        lost.into_iter().for_each(|id| drop(self.remove(id)));
        Some((span, Batch { items, refused_from }))
    }

    /// Records that the renewal of these leases is over.
    pub fn renewed(&mut self, span: Span) {
        if let Some(renewals) = self.renewals.get_mut(&span) {
            renewals.in_flight = false;
            if renewals.is_empty() {
                self.renewals.remove(&span);
            }
        }
    }

    pub fn end(&mut self, ending: Ending) {
        self.remove(ending.held.id());
        self.last_number += 1;
        self.endings.insert(self.last_number, ending);
    }

    /// Returns the change to send and the claims whose ending is due, each with the number of its
    /// ending, and marks them as in flight.
    ///
    /// An ending waits for the renewals of its span in flight, of which one might revive the claim
    /// that it ended.
    fn endings(&mut self) -> Option<EndingBatch> {
        let now = Instant::now();
        let renewals = &self.renewals;
        let may_end = |ending: &Ending| !renewals.get(&ending.held.span).is_some_and(|renewals| renewals.in_flight);
        let is_due = |ending: &Ending| may_end(ending) && ending.at <= now;
        if self.is_ending {
            return None;
        }
        let (span, change) =
            self.endings.values().find(|ending| is_due(ending)).map(|ending| (ending.held.span, ending.change))?;
        // Endings that are due later join. Those that were refused do not, because they would take
        // statements of their own.
        let joins =
            |ending: &Ending| may_end(ending) && ending.not_before <= now && (ending.at <= now || !ending.was_refused);
        let of_kind = |ending: &Ending| ending.change == change && ending.held.span == span && joins(ending);
        let mut due: Vec<(&u64, &mut Ending)> = self.endings.iter_mut().filter(|(_, ending)| of_kind(ending)).collect();
        // Shuffled, so that different ones are left over each time when there is no time for all.
        fastrand::shuffle(&mut due);
        due.sort_by_key(|(_, ending)| ending.was_refused);
        let Batch { items, refused_from } =
            Batch::of(due.into_iter(), |(_, ending)| ending.was_refused, |(_, ending)| ending.left.len());
        let others = items.iter().take(refused_from).map(|(_, ending)| ending.left.len()).sum();
        let claims = items.into_iter().flat_map(|(number, ending)| {
            ending.sending();
            ending.left.iter().map(|claim| (*number, claim.clone()))
        });
        let batch = Batch { items: claims.collect(), refused_from: others };
        self.is_ending = true;
        Some((span, change, batch))
    }

    /// Records that the statement of endings is over.
    pub fn ended(&mut self) {
        self.is_ending = false;
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

    /// Returns when something is due, apart from what waits for a statement in flight.
    pub fn next(&self) -> Option<Instant> {
        let renewals = self.renewals.values().filter_map(Renewals::next);
        let waits = |ending: &&Ending| self.renewals.get(&ending.held.span).is_some_and(|renewals| renewals.in_flight);
        let endings = self.endings.values().filter(|ending| !self.is_ending && !waits(ending));
        renewals.chain(endings.map(|ending| ending.at)).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chrono::TimeDelta;
    use tokio_util::task::TaskTracker;
    use uuid::Uuid;

    use super::*;
    use crate::key::{Holder, Key, Token};

    /// Renewals that are due within a second join.
    const LEASE: Duration = Duration::from_secs(12);
    const SECOND: Duration = Duration::from_secs(1);

    fn agenda() -> (Agenda, Instant) {
        (Agenda::default(), Instant::now() - SECOND)
    }

    fn lease_of(lease: Duration) -> Arc<LeaseState> {
        let claim = Claim { key: Key::new("k").unwrap(), holder: Holder::new(Uuid::new_v4()), token: Token::new(1) };
        let span = Span { lease, lock_delay: TimeDelta::zero() };
        let deadline = Instant::now() + lease;
        LeaseState::unwatched(vec![claim], span, (deadline, deadline), Arc::default())
    }

    fn lease() -> Arc<LeaseState> {
        lease_of(LEASE)
    }

    fn ids(leases: &[Arc<LeaseState>]) -> Vec<usize> {
        leases.iter().map(|held| held.id()).collect()
    }

    fn renewals(agenda: &mut Agenda) -> Batch<Arc<LeaseState>> {
        let (span, batch) = agenda.renewals().unwrap();
        assert!(agenda.renewals().is_none_or(|(other, _)| other != span), "it is in flight");
        agenda.renewed(span);
        batch
    }

    #[test]
    fn what_is_left_over_is_first_in_the_next_batch() {
        let (mut agenda, start) = agenda();
        let leases: Vec<_> = (0..BATCH + 2).map(|_| lease()).collect();
        for (number, held) in (0..).zip(&leases) {
            agenda.add(held.clone(), start + number * SECOND / 1_000_000);
        }
        assert_eq!(ids(&renewals(&mut agenda).items), ids(&leases[..BATCH]));
        for held in &leases[..BATCH] {
            agenda.reschedule(held.id(), start + SECOND, false);
        }
        assert_eq!(agenda.next(), Some(start + (BATCH as u32) * SECOND / 1_000_000));
        assert_eq!(ids(&renewals(&mut agenda).items)[..2], ids(&leases[BATCH..]));
    }

    #[test]
    fn a_lease_that_is_over_is_not_renewed() {
        let (mut agenda, start) = agenda();
        let claims = lease().claims.clone();
        let span = Span { lease: LEASE, lock_delay: TimeDelta::zero() };
        let over = LeaseState::unwatched(claims, span, (start, start), Arc::default());
        let lost = lease();
        lost.mark_lost(0, "for the test");
        agenda.add(over, start);
        agenda.add(lost, start);
        assert!(renewals(&mut agenda).items.is_empty());
        assert!(agenda.is_empty(), "they are forgotten");
    }

    #[test]
    fn what_was_refused_comes_last() {
        let (mut agenda, start) = agenda();
        let [refused, other, later] = [(); 3].map(|()| lease());
        agenda.add(refused.clone(), start);
        agenda.add(other.clone(), start + SECOND);
        agenda.add(later, start + 10 * SECOND);
        agenda.reschedule(refused.id(), start, true);
        let batch = renewals(&mut agenda);
        assert_eq!((ids(&batch.items), batch.refused_from), (ids(&[other, refused]), 1));
    }

    #[test]
    fn of_those_that_were_refused_together_each_is_first_sometimes() {
        let (mut agenda, start) = agenda();
        let leases = [(); 3].map(|()| lease());
        for held in &leases {
            agenda.add(held.clone(), start);
            agenda.reschedule(held.id(), start, true);
        }
        let first: BTreeSet<usize> = (0..200).map(|_| renewals(&mut agenda).items[0].id()).collect();
        assert_eq!(first.len(), leases.len());
    }

    #[test]
    fn leases_of_another_span_are_renewed_beside_a_renewal_in_flight() {
        let (mut agenda, start) = agenda();
        let (long, short) = (lease_of(4 * LEASE), lease());
        agenda.add(long.clone(), start);
        agenda.add(short.clone(), start);
        let (first, second) = (agenda.renewals().unwrap(), agenda.renewals().unwrap());
        assert_ne!(first.0, second.0);
        assert!(agenda.renewals().is_none() && agenda.next().is_none());
        agenda.renewed(first.0);
        assert_eq!(agenda.next(), Some(start));
    }

    fn ending() -> Ending {
        ending_at(Instant::now())
    }

    fn ending_at(at: Instant) -> Ending {
        Ending::new(lease(), Change::Abandon(TimeDelta::zero()), at, TaskTracker::new().token()).0
    }

    /// A renewal takes as long as leases are renewed after.
    #[test]
    fn an_ending_is_sent_although_renewals_of_its_span_are_always_due() {
        let (mut agenda, start) = agenda();
        let held = lease();
        agenda.add(held.clone(), start);
        assert_eq!(agenda.due().1.len(), 1);
        agenda.end(ending());
        assert!(agenda.due().0.is_none(), "a renewal is in flight");
        agenda.reschedule(held.id(), start, false);
        agenda.renewed(held.span);
        let (endings, renewals) = agenda.due();
        assert!(endings.is_some_and(|(_, _, batch)| batch.items.len() == 1) && renewals.len() == 1);
    }

    #[test]
    fn an_ending_that_must_wait_does_not_join_others() {
        let (mut agenda, _) = agenda();
        let at = Instant::now() + 10 * SECOND;
        let (mut later, postponed) = (ending(), ending_at(at));
        later.at = at;
        agenda.end(postponed);
        agenda.end(later);
        assert!(agenda.endings().is_none(), "nothing is due");
        agenda.end(ending());
        let (_, _, batch) = agenda.endings().unwrap();
        let mut numbers: Vec<u64> = batch.items.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [2, 3]);
    }

    #[test]
    fn a_removed_lease_is_not_renewed() {
        let (mut agenda, start) = agenda();
        let (kept, removed) = (lease(), lease());
        agenda.add(kept.clone(), start);
        agenda.add(removed.clone(), start);
        agenda.remove(removed.id());
        agenda.reschedule(removed.id(), start, false);
        assert_eq!(ids(&renewals(&mut agenda).items), ids(&[kept]));
    }
}
