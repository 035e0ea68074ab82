//! The waiters' operations on a database: tickets, and release notifications where the database
//! supports them.

use std::future::{Future, pending, ready};

use chrono::{DateTime, Utc};
use sqlx::Pool;

use crate::key::Key;
use crate::store::{Reply, Store, TooLate};

/// How long a ticket lives without a heartbeat, in seconds.
pub const ALIVE_SECONDS: u64 = 12;
/// How many tickets of a queue are read: the front decides the position.
pub const FRONT: u64 = 16;

/// A ticket in the queue of one key, as it was read. A number in several queues belongs to a waiter
/// for all of their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueEntry {
    pub key: String,
    pub number: i64,
    /// How long the ticket still lives; zero or less if it has lapsed.
    pub left_micros: i64,
}

/// What a notification says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification {
    /// This key was released.
    Released(String),
    /// Any key may have been.
    Changed,
}

/// The waiters' operations of a [`Store`]. None waits for a row that another transaction has
/// locked.
pub trait QueueStore: Store {
    /// Whether the database delivers release notifications.
    const NOTIFIES: bool = false;
    /// Whether a release is notified only if [`request_notification`](Self::request_notification)
    /// has marked the row.
    const NOTIFIES_IF_MARKED: bool = false;
    /// What receives notifications: a connection, or a watch on files.
    type Notifications: Send;

    /// Begins to receive, outside the pool. Returns `None` if there are no notifications: a pooler
    /// shares the server's connections, where listening would do harm, or the database is in
    /// memory.
    fn listen(_pool: &Pool<Self>) -> impl Future<Output = Reply<Option<Self::Notifications>>> + Send {
        pending()
    }

    /// Returns the next notification, or `None` if some may have been lost.
    fn next_notification(
        _notifications: &mut Self::Notifications,
    ) -> impl Future<Output = Reply<Option<Notification>>> + Send {
        pending()
    }

    /// Checks that the connection still answers.
    fn check_listening(_notifications: &mut Self::Notifications) -> impl Future<Output = Reply<()>> + Send {
        ready(Ok(()))
    }

    /// Ends it.
    fn stop_listening(_notifications: Self::Notifications) -> impl Future<Output = ()> + Send {
        ready(())
    }

    /// Marks the keys' rows so that their releases are notified. Returns whether one of the rows is
    /// free, in which case its release was not notified.
    fn request_notification(_conn: &mut Self::Connection, _keys: &[Key]) -> impl Future<Output = Reply<bool>> + Send {
        ready(Ok(false))
    }

    /// Adds a ticket at the end of the queues of these keys, under one number, which is higher than
    /// any before. After `not_after` none is added; on MySQL and MariaDB, those that were added
    /// before to some of several queues lapse.
    fn join(
        conn: &mut Self::Connection,
        keys: &[Key],
        not_after: Option<DateTime<Utc>>,
    ) -> impl Future<Output = Reply<Result<i64, TooLate>>> + Send;

    /// Reads the front of each key's queue up to this number, in order.
    fn front(
        conn: &mut Self::Connection,
        keys: &[Key],
        number: i64,
    ) -> impl Future<Output = Reply<Vec<QueueEntry>>> + Send;

    /// Sends a heartbeat for the tickets with these numbers.
    fn heartbeat(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Deletes the tickets with these numbers.
    fn leave(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Deletes those of these tickets that have lapsed.
    fn clear(conn: &mut Self::Connection, numbers: &[i64]) -> impl Future<Output = Reply<()>> + Send;

    /// Counts the tickets of each key that have not lapsed.
    fn queue_lengths(conn: &mut Self::Connection) -> impl Future<Output = Reply<Vec<(String, i64)>>> + Send;

    /// Deletes tickets that lapsed more than an hour ago.
    fn sweep(conn: &mut Self::Connection) -> impl Future<Output = Reply<()>> + Send;
}

/// Implements those operations that are the same on every database except for the statements, which
/// are constants beside them, and the types of its driver.
macro_rules! operations {
    ($connection:ty) => {
        async fn queue_lengths(conn: &mut $connection) -> Reply<Vec<(String, i64)>> {
            sqlx::query_as(LENGTHS).fetch_all(conn).await
        }

        async fn sweep(conn: &mut $connection) -> Reply<()> {
            sqlx::query(SWEEP).execute(conn).await.map(drop)
        }
    };
}

pub(super) use operations;
