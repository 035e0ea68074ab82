//! What waiting asks of a database: who comes next, and word of a release where there is such a thing.

use std::future::{Future, pending, ready};

use sqlx::Pool;

use crate::key::Key;
use crate::store::{Reply, Store};

/// How long a place in a queue is kept for somebody who gives no sign of life, in seconds.
pub const ALIVE_SECONDS: u64 = 12;
/// How much of a queue is looked at: the front of it decides.
pub const FRONT: u64 = 16;

/// A place in a queue, as it was seen. A number that stands in several queues is of one who wants all of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    pub key: String,
    pub number: i64,
    /// How long it is kept; nothing, if whoever had it has gone.
    pub left_micros: i64,
}

/// The waiters' side of a [`Store`]. None of it waits for a row that another transaction has locked.
pub trait QueueStore: Store {
    /// Whether the database passes word of releases on.
    const NOTIFIES: bool = false;
    /// A connection on which it does.
    type Notifications: Send;

    /// Opens it, outside the pool; `None` if something in between shares the server's connections, where listening would do harm.
    fn listen(_pool: &Pool<Self>) -> impl Future<Output = Reply<Option<Self::Notifications>>> + Send {
        pending()
    }

    /// The next key that was freed, or `None` when some may have gone unheard.
    fn next_notification(
        _notifications: &mut Self::Notifications,
    ) -> impl Future<Output = Reply<Option<String>>> + Send {
        pending()
    }

    /// Closes it.
    fn stop_listening(_notifications: Self::Notifications) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// Says on the key's row that its release is to be told; whether the row is free, so that its release was not told.
    fn request_notification(_conn: &mut Self::Connection, _key: &Key) -> impl Future<Output = Reply<bool>> + Send {
        ready(Ok(false))
    }

    /// Takes a place at the end of the queues of these keys, under one number, which is higher than any before.
    fn join(conn: &mut Self::Connection, keys: &[Key]) -> impl Future<Output = Reply<i64>> + Send;

    /// The front of each key's queue up to this number, in order.
    fn front(conn: &mut Self::Connection, keys: &[Key], number: i64) -> impl Future<Output = Reply<Vec<Place>>> + Send;

    /// A sign of life for whoever has these numbers.
    fn heartbeat(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Gives the places under these numbers up.
    fn leave(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Deletes those of these places that have lapsed.
    fn clear(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Deletes places that were given up without a word more than an hour ago.
    fn sweep(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;
}
