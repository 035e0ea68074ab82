//! The transaction that the work receives, and returns by dropping it.

use std::{
    fmt,
    ops::{Deref, DerefMut},
};

use tokio::sync::oneshot;

use crate::{key::Claim, session::loan::Loan, store::Database};

/// The transaction that is passed to the work. Use `&mut *tx` where sqlx expects a connection.
/// Dropping it returns the transaction, which is then committed or rolled back.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
/// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
/// use rowlock::Tx;
/// use sqlx::Sqlite;
///
/// async fn add(tx: &mut Tx<Sqlite>, key: &str, amount: i64) -> Result<(), sqlx::Error> {
///     let sql = "UPDATE account SET balance = balance + ? WHERE id = ?";
///     sqlx::query(sql).bind(amount).bind(key).execute(&mut **tx).await.map(|_| ())
/// }
///
/// # let lock = rowlock::VersionLock::new(pool, "account", "id", "version");
/// let paid = lock.transaction("alice", async |mut tx| {
///     add(&mut tx, "alice", -30).await?;
///     add(&mut tx, "bob", 30).await
/// });
/// paid.await?;
/// # Ok(())
/// # }
/// ```
pub struct Tx<DB: Database> {
    claim: Claim,
    /// The connection, and the way back.
    lent: Option<(Loan<DB>, oneshot::Sender<Loan<DB>>)>,
}

impl<DB: Database> Tx<DB> {
    /// The receiver gets the connection when the transaction is dropped. If it does not wait any
    /// more, the connection is closed.
    pub(super) fn lend(conn: Loan<DB>, claim: Claim) -> (Self, oneshot::Receiver<Loan<DB>>) {
        let (back, returned) = oneshot::channel();
        (Self { claim, lent: Some((conn, back)) }, returned)
    }

    /// Returns the claim on which the commit depends: key, holder and token.
    pub fn claim(&self) -> &Claim {
        &self.claim
    }
}

impl<DB: Database> fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").field("claim", &self.claim).finish_non_exhaustive()
    }
}

impl<DB: Database> Deref for Tx<DB> {
    type Target = DB::Connection;

    #[expect(clippy::expect_used, reason = "it is taken out by `drop` alone")]
    fn deref(&self) -> &DB::Connection {
        self.lent.as_ref().expect("the transaction was not dropped").0.peek()
    }
}

impl<DB: Database> DerefMut for Tx<DB> {
    #[expect(clippy::expect_used, reason = "it is taken out by `drop` alone")]
    fn deref_mut(&mut self) -> &mut DB::Connection {
        self.lent.as_mut().expect("the transaction was not dropped").0.get()
    }
}

impl<DB: Database> Drop for Tx<DB> {
    fn drop(&mut self) {
        if let Some((conn, back)) = self.lent.take() {
            back.send(conn).ok();
        }
    }
}
