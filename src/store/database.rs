//! All operations of a database under one name.

#[cfg(feature = "schedule")]
use crate::store::instances::InstanceStore;
use crate::store::{
    ClaimStore, HeldStore, admin::AdminStore, migration::SchemaStore, queue::QueueStore, version::VersionStore,
};

/// Stands in for the operations of the feature `schedule`.
#[cfg(not(feature = "schedule"))]
pub trait InstanceStore {}

#[cfg(not(feature = "schedule"))]
impl<DB> InstanceStore for DB {}

/// A database that rowlock supports: `sqlx::Postgres`, `sqlx::MySql` (MariaDB too) or
/// `sqlx::Sqlite`.
///
/// Code that takes it as a parameter works on each of them. `sqlx::Any` is none of them: it has no
/// UUIDs, and its connections do not show what server they lead to.
///
/// ```
/// use rowlock::{Database, Error, LeaseLock};
///
/// async fn connect<DB: Database>(url: &str) -> Result<LeaseLock<DB>, Error> {
///     let lock = LeaseLock::<DB>::connect(url).await?;
///     rowlock::migrate(lock.pool()).await?;
///     Ok(lock)
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "rowlock has no locks in `{Self}`, or was built without its feature",
    label = "`sqlx::Postgres`, `sqlx::MySql` or `sqlx::Sqlite`, and its feature of rowlock",
    note = "add the feature in Cargo.toml: `rowlock = {{ features = [\"postgres\"] }}`, or \"mysql\" (MariaDB too), or \"sqlite\" (the default)",
    note = "`sqlx::Any` has no locks: connect with the driver that the URL names"
)]
pub trait Database:
    ClaimStore + HeldStore + AdminStore + SchemaStore + VersionStore + QueueStore + InstanceStore
{
}

// What is missing is the feature, not one of these traits.
#[diagnostic::do_not_recommend]
impl<DB> Database for DB where
    DB: ClaimStore + HeldStore + AdminStore + SchemaStore + VersionStore + QueueStore + InstanceStore
{
}
