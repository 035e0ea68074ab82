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
}

/// The leases of one span, which one statement renews.
#[derive(Default)]
struct Renewals {
    /// By the time of the next renewal, so that what is due is found without looking at the others.
    order: BTreeSet<(Instant, usize)>,
    /// A renewal of them is in flight.
    in_flight: bool,
}

impl Renewals {
    /// Returns when the next renewal is due, unless one is in flight.
    fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at).filter(|_| !self.in_flight)
    }

    fn is_empty(&self) -> bool {
        self.order.is_empty() && !self.in_flight
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

/// Takes as many items as one statement has room for, in their order.
fn fitting<T>(items: impl IntoIterator<Item = T>, claims: impl Fn(&T) -> usize) -> Vec<T> {
    let mut room = BATCH;
    let fits = items.into_iter().take_while(|item| {
        let left = room.checked_sub(claims(item));
        room = left.unwrap_or_default();
        left.is_some()
    });
    fits.collect()
}

/// Leases of one span to renew.
pub(crate) type RenewalBatch = (Span, Vec<Arc<LeaseState>>);

/// Claims to end with one change, each with the number of its ending.
pub(crate) type EndingBatch = (Span, Change, Vec<(u64, Claim)>);

impl Agenda {
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.endings.is_empty()
    }

    /// Adds a lease.
    pub fn add(&mut self, held: Arc<LeaseState>, renew_at: Instant) {
        let id = held.id();
        self.renewals.entry(held.span).or_default().order.insert((renew_at, id));
        self.leases.insert(id, Scheduled { held, renew_at });
    }

    /// Changes when a lease is renewed. One that has been removed stays so.
    pub fn reschedule(&mut self, id: usize, renew_at: Instant) {
        if let Some(held) = self.remove(id) {
            self.add(held, renew_at);
        }
    }

    /// Removes a lease.
    pub fn remove(&mut self, id: usize) -> Option<Arc<LeaseState>> {
        let Scheduled { held, renew_at } = self.leases.remove(&id)?;
        if let Some(renewals) = self.renewals.get_mut(&held.span) {
            renewals.order.remove(&(renew_at, id));
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
        let (_, &span, renewals) = due.find(|(at, ..)| *at <= now)?;
        renewals.in_flight = true;
        // Renewals that are due a little later join.
        let joining = renewals.order.range(..=(now + pacing::joins_within(span.lease), usize::MAX));
        let mut lost = Vec::new();
        let leases = joining.filter_map(|(_, id)| Some(self.leases.get(id)?.held.clone())).filter(|held| {
            // After a pause of the process, a renewal would close the key of a lease that is over.
            let stands = held.stands();
            lost.extend((!stands).then(|| held.id()));
            stands
        });
        let mut batch = fitting(leases, |held| held.claims.len());
        lost.into_iter().for_each(|id| drop(self.remove(id)));
        // Shuffled, so that different ones are left over each time when the server refuses some and
        // there is no time for all.
        fastrand::shuffle(&mut batch);
        Some((span, batch))
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
        let of_kind = |ending: &Ending| ending.change == change && ending.held.span == span && is_due(ending);
        let mut due: Vec<(&u64, &mut Ending)> = self.endings.iter_mut().filter(|(_, ending)| of_kind(ending)).collect();
        // Shuffled, so that different ones are left over each time when there is no time for all.
        // Those that are sent for the first time do not wait for those that the server refuses.
        fastrand::shuffle(&mut due);
        due.sort_by_key(|(_, ending)| ending.first_sent.is_some());
        let claims = fitting(due, |(_, ending)| ending.left.len()).into_iter().flat_map(|(number, ending)| {
            ending.sending();
            ending.left.iter().map(|claim| (*number, claim.clone()))
        });
        let claims = claims.collect();
        self.is_ending = true;
        Some((span, change, claims))
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

    fn ids(leases: &[Arc<LeaseState>]) -> BTreeSet<usize> {
        leases.iter().map(|held| held.id()).collect()
    }

    fn renewals(agenda: &mut Agenda) -> Vec<Arc<LeaseState>> {
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
        assert_eq!(ids(&renewals(&mut agenda)), ids(&leases[..BATCH]));
        for held in &leases[..BATCH] {
            agenda.reschedule(held.id(), start + SECOND);
        }
        assert_eq!(agenda.next(), Some(start + (BATCH as u32) * SECOND / 1_000_000));
        assert!(ids(&renewals(&mut agenda)).is_superset(&ids(&leases[BATCH..])));
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
        assert!(renewals(&mut agenda).is_empty());
        assert!(agenda.is_empty(), "they are forgotten");
    }

    #[test]
    fn a_renewal_that_is_due_a_little_later_joins() {
        let (mut agenda, start) = agenda();
        let [due, joining, later] = [(); 3].map(|()| lease());
        agenda.add(due.clone(), start);
        agenda.add(joining.clone(), start + SECOND + SECOND / 2);
        agenda.add(later, start + 10 * SECOND);
        assert_eq!(ids(&renewals(&mut agenda)), ids(&[due, joining]));
    }

    #[test]
    fn of_those_that_are_renewed_together_each_is_first_sometimes() {
        let (mut agenda, start) = agenda();
        let leases = [(); 3].map(|()| lease());
        let mut first = BTreeSet::new();
        for _ in 0..200 {
            leases.iter().for_each(|held| agenda.add(held.clone(), start));
            first.insert(renewals(&mut agenda)[0].id());
            leases.iter().for_each(|held| drop(agenda.remove(held.id())));
        }
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
        agenda.reschedule(held.id(), start);
        agenda.renewed(held.span);
        let (endings, renewals) = agenda.due();
        assert!(endings.is_some_and(|(_, _, batch)| batch.len() == 1) && renewals.len() == 1);
    }

    #[test]
    fn an_ending_that_must_wait_does_not_join_others() {
        let (mut agenda, _) = agenda();
        agenda.end(ending_at(Instant::now() + 10 * SECOND));
        assert!(agenda.endings().is_none(), "nothing is due");
        agenda.end(ending());
        let (_, _, batch) = agenda.endings().unwrap();
        assert_eq!(batch.iter().map(|(number, _)| *number).collect::<Vec<u64>>(), [2]);
    }

    #[test]
    fn an_ending_does_not_wait_for_those_that_were_sent() {
        let (mut agenda, start) = agenda();
        let send = |agenda: &mut Agenda, at| {
            agenda.endings.values_mut().for_each(|sent| sent.at = at);
            agenda.end(ending());
            let (_, _, batch) = agenda.endings().unwrap();
            agenda.ended();
            assert_eq!(batch[0].0, agenda.last_number);
            batch.len()
        };
        for others in 0..10 {
            assert_eq!(send(&mut agenda, Instant::now() + 10 * SECOND), 1, "the others pause");
            assert_eq!(send(&mut agenda, start), 2 * others + 2);
        }
    }

    #[test]
    fn a_removed_lease_is_not_renewed() {
        let (mut agenda, start) = agenda();
        let (kept, removed) = (lease(), lease());
        agenda.add(kept.clone(), start);
        agenda.add(removed.clone(), start);
        agenda.remove(removed.id());
        agenda.reschedule(removed.id(), start);
        assert_eq!(ids(&renewals(&mut agenda)), ids(&[kept]));
    }
}
