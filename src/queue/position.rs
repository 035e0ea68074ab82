//! Positions in queues: a pure function of the fronts of the queues.

use std::time::Duration;

use crate::{
    key::Key,
    store::queue::{FRONT, QueueEntry},
};

/// The position of a waiter, as read from its queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueView {
    pub at: Position,
    /// Tickets before the waiter's own that have lapsed.
    pub lapsed: Vec<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// No live ticket is before it.
    First,
    /// A live ticket is before it, which lapses after `left` unless another heartbeat arrives.
    Behind { key: Key, number: i64, left: Duration },
    /// The waiter's own ticket lapsed, and another waiter deleted it.
    TicketMissing,
    /// Unknown: every ticket at the front of a queue has lapsed, which hides the rest.
    Unknown,
}

/// Reads the position from the fronts of the queues of these keys. A number of `i64::MAX` stands
/// for a task without a ticket.
pub(crate) fn read_queue(keys: &[Key], number: i64, front: &[QueueEntry]) -> QueueView {
    let mut at = Position::First;
    let mut lapsed = Vec::new();
    for key in keys {
        let entries: Vec<&QueueEntry> = front.iter().filter(|entry| entry.key == key.as_str()).collect();
        lapsed.extend(
            entries.iter().filter(|entry| entry.number < number && entry.left_micros <= 0).map(|entry| entry.number),
        );
        let first = entries.iter().find(|entry| entry.number == number || entry.left_micros > 0);
        let full = u64::try_from(entries.len()).is_ok_and(|count| count >= FRONT);
        let here = match first {
            Some(entry) if entry.number == number => Position::First,
            Some(entry) => {
                let left = Duration::from_micros(entry.left_micros.unsigned_abs());
                Position::Behind { key: key.clone(), number: entry.number, left }
            }
            None if full => Position::Unknown,
            None if number == i64::MAX => Position::First,
            None => Position::TicketMissing,
        };
        if at == Position::First || matches!(here, Position::TicketMissing | Position::Unknown) {
            at = here;
        }
    }
    QueueView { at, lapsed }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(key: &str, number: i64, left_micros: i64) -> QueueEntry {
        QueueEntry { key: key.into(), number, left_micros }
    }

    fn at(keys: &[&str], number: i64, front: &[QueueEntry]) -> QueueView {
        let keys: Vec<Key> = keys.iter().map(|key| Key::new(key).unwrap()).collect();
        read_queue(&keys, number, front)
    }

    #[test]
    fn the_lowest_number_that_is_alive_is_first() {
        let front = [entry("a", 1, -5), entry("a", 2, 7), entry("a", 3, 7)];
        assert_eq!(at(&["a"], 2, &front[..2]), QueueView { at: Position::First, lapsed: vec![1] });
        let key = Key::new("a").unwrap();
        let behind = Position::Behind { key, number: 2, left: Duration::from_micros(7) };
        assert_eq!(at(&["a"], 3, &front), QueueView { at: behind.clone(), lapsed: vec![1] });
        assert_eq!(at(&["a"], i64::MAX, &front).at, behind);
        assert_eq!(at(&["a"], i64::MAX, &front[..1]).at, Position::First);
        let own = QueueView { at: Position::First, lapsed: Vec::new() };
        assert_eq!(at(&["a"], 1, &front[..1]), own, "its own heartbeat may be late");
        let lapses_now = [entry("a", 1, 0), entry("a", 2, 7)];
        assert_eq!(at(&["a"], 2, &lapses_now), QueueView { at: Position::First, lapsed: vec![1] });
    }

    #[test]
    fn a_ticket_that_is_not_there_is_missing() {
        assert_eq!(at(&["a"], 3, &[entry("a", 1, -5)]).at, Position::TicketMissing);
        assert_eq!(at(&["a", "b"], 3, &[entry("a", 3, 5)]).at, Position::TicketMissing);
    }

    #[test]
    fn one_queue_with_another_first_is_enough() {
        let front = [entry("a", 3, 5), entry("b", 2, 5), entry("b", 3, 5)];
        assert!(matches!(at(&["a", "b"], 3, &front).at, Position::Behind { number: 2, .. }));
        assert_eq!(at(&["a"], 3, &front).at, Position::First);
    }

    #[test]
    fn a_front_of_lapsed_tickets_hides_the_rest() {
        let front: Vec<QueueEntry> = (0..16).map(|number| entry("a", number, -1)).collect();
        let QueueView { at, lapsed } = at(&["a"], 99, &front);
        assert_eq!((at, lapsed.len()), (Position::Unknown, 16));
    }
}
