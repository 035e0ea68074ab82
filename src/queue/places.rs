//! Which of several keys this process uses, and which of the others are believed to be free: pure.
//!
//! What is believed decides only which key is claimed first. The database decides who has it.

/// The keys of which one is enough, by index.
#[derive(Debug, Default)]
pub(crate) struct Places(Vec<State>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct State {
    /// How many tasks of this process hold the key or claim it.
    users: usize,
    /// The last claim was refused, because another process holds the key.
    refused: bool,
}

impl Places {
    pub fn new(count: usize) -> Self {
        Self(vec![State::default(); count])
    }

    fn free(&self) -> impl Iterator<Item = usize> {
        let free = |state: &State| *state == State::default();
        self.0.iter().enumerate().filter(move |(_, state)| free(state)).map(|(index, _)| index)
    }

    /// Takes a key that is believed to be free. Where there are several, `random` decides, so that
    /// processes choose different ones.
    pub fn take(&mut self, random: usize) -> Option<usize> {
        let count = self.free().count();
        let index = self.free().nth(random.checked_rem(count)?)?;
        self.0[index].users += 1;
        Some(index)
    }

    /// Takes the key at this index, which was seen to be free.
    pub fn take_at(&mut self, index: usize) {
        self.0[index].users += 1;
    }

    /// Gives up a key. It is free then, unless the claim on it was refused.
    pub fn leave(&mut self, index: usize, refused: bool) {
        self.0[index].users -= 1;
        self.0[index].refused = refused;
    }

    /// Returns whether tasks of this process hold or claim every key, so that none can become free
    /// without the process noticing.
    pub fn are_all_in_use(&self) -> bool {
        self.0.iter().all(|state| state.users > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_use_is_not_taken_and_one_that_was_left_is() {
        let mut places = Places::new(3);
        let mut taken: Vec<usize> = (0..3).filter_map(|_| places.take(7)).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2]);
        assert!(places.take(0).is_none() && places.are_all_in_use());
        places.leave(1, false);
        assert!(!places.are_all_in_use());
        assert_eq!(places.take(5), Some(1));
    }

    #[test]
    fn all_free_keys_are_chosen() {
        let mut chosen: Vec<Option<usize>> = (0..4).map(|random| Places::new(4).take(random)).collect();
        chosen.sort_unstable();
        assert_eq!(chosen, [Some(0), Some(1), Some(2), Some(3)]);
    }

    #[test]
    fn a_refused_key_is_not_taken_until_it_was_held_again() {
        let mut places = Places::new(2);
        places.take_at(0);
        places.leave(0, true);
        assert_eq!((places.take(0), places.take(0)), (Some(1), None));
        assert!(!places.are_all_in_use(), "another process has one");
        places.take_at(0);
        assert!(places.are_all_in_use());
        places.leave(0, false);
        assert_eq!(places.take(0), Some(0));
    }

    #[test]
    fn a_key_with_two_users_is_free_when_both_have_left() {
        let mut places = Places::new(1);
        places.take_at(0);
        places.take_at(0);
        places.leave(0, true);
        assert!(places.take(0).is_none());
        places.leave(0, false);
        assert_eq!(places.take(0), Some(0));
    }
}
