//! What a claim request is for: all of its keys together, or any one of them.

use std::{cmp::Reverse, sync::Arc};

use crate::{
    key::Key,
    rules::{Reason, Verdict},
};

/// The keys of a claim request.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// In key order if all of them are wanted.
    pub keys: Arc<[Key]>,
    /// The keys in whose queues a waiter of a fair handle draws its ticket.
    pub queues: Arc<[Key]>,
    /// One of the keys is enough.
    pub any: bool,
    /// The name that was asked for, if it is none of the keys.
    pub name: Option<Key>,
}

impl Wanted {
    pub fn all(keys: Arc<[Key]>) -> Self {
        Self { queues: keys.clone(), keys, any: false, name: None }
    }

    /// Any one of these keys of a name, for which waiters queue under one key.
    pub fn any(keys: Arc<[Key]>, queue: Key, name: Key) -> Self {
        Self { any: keys.len() > 1, keys, queues: [queue].into(), name: Some(name) }
    }

    /// Returns the key that a refusal by a queue names: the one that the caller asked for.
    pub fn asked(&self, queue: Key) -> Key {
        self.name.clone().unwrap_or(queue)
    }
}

/// What to do about several rows of which one is enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Claim the key at this index. Its row may be missing.
    Claim(usize),
    /// Refuse. The row at this index is the first that may be free: a key that is held may be
    /// released before any minimum interval is over.
    Refuse(usize),
}

/// Chooses by the verdicts on the rows. A claim that the holder has already comes first, because an
/// earlier request of it may have brought no reply; then a free row, then one to take over, then
/// one that is missing. Among equals, `random` decides, so that requests that see the same rows
/// choose different ones.
pub(crate) fn choose(verdicts: &[Verdict], random: usize) -> Choice {
    let rank = |verdict: &Verdict| match verdict {
        Verdict::Same => Some(0),
        Verdict::Acquire => Some(1),
        Verdict::TakeOver => Some(2),
        Verdict::Create => Some(3),
        Verdict::Refuse(..) => None,
    };
    if let Some(best) = verdicts.iter().filter_map(rank).min() {
        let free: Vec<usize> = (0..verdicts.len()).filter(|index| rank(&verdicts[*index]) == Some(best)).collect();
        return Choice::Claim(free[random % free.len()]);
    }
    let free_at = |index: &usize| match verdicts[*index] {
        Verdict::Refuse(reason, until) => (reason == Reason::WithinMinInterval, Reverse(until.map(Reverse))),
        _ => (true, Reverse(None)),
    };
    Choice::Refuse((0..verdicts.len()).min_by_key(free_at).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use chrono::DateTime;

    use super::*;

    fn held(seconds: Option<i64>) -> Verdict {
        Verdict::Refuse(Reason::Held, seconds.and_then(|seconds| DateTime::from_timestamp(seconds, 0)))
    }

    #[test]
    fn one_key_of_one_is_all_of_them() {
        let key = |text| Key::new(text).unwrap();
        let any = |keys: &[Key]| Wanted::any(keys.into(), key("queue"), key("name")).any;
        assert_eq!((any(&[key("a")]), any(&[key("a"), key("b")])), (false, true));
    }

    #[test]
    fn the_holders_own_claim_comes_before_a_free_row() {
        let verdicts = [Verdict::Acquire, Verdict::TakeOver, Verdict::Same, Verdict::Create];
        for random in 0..4 {
            assert_eq!(choose(&verdicts, random), Choice::Claim(2));
        }
    }

    #[test]
    fn free_rows_are_chosen_at_random_and_before_expired_ones() {
        let verdicts = [Verdict::TakeOver, Verdict::Acquire, held(Some(1)), Verdict::Acquire];
        assert_eq!(choose(&verdicts, 4), Choice::Claim(1));
        assert_eq!(choose(&verdicts, 5), Choice::Claim(3));
        assert_eq!(choose(&[Verdict::Create, Verdict::TakeOver], 1), Choice::Claim(1));
    }

    #[test]
    fn a_missing_row_is_chosen_only_if_none_is_free() {
        let verdicts = [held(None), Verdict::Create, Verdict::Create];
        assert_eq!((choose(&verdicts, 0), choose(&verdicts, 1)), (Choice::Claim(1), Choice::Claim(2)));
    }

    #[test]
    fn the_refusal_is_that_of_the_row_that_is_free_first() {
        assert_eq!(choose(&[held(None), held(Some(9)), held(Some(7))], 0), Choice::Refuse(2));
        assert_eq!(choose(&[held(None), held(None)], 0), Choice::Refuse(0));
    }

    #[test]
    fn a_held_key_may_be_free_before_a_minimum_interval_is_over() {
        let interval = || Verdict::Refuse(Reason::WithinMinInterval, DateTime::from_timestamp(5, 0));
        assert_eq!(choose(&[interval(), held(Some(9)), interval()], 0), Choice::Refuse(1));
        assert_eq!(choose(&[interval(), interval()], 0), Choice::Refuse(0));
    }
}
