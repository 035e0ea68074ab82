//! Deductions from a balance and deposits to it.

use std::convert::Infallible;

use crate::{
    error::Error,
    invalid::Invalid,
    key::Key,
    store::{
        Database,
        version::{Guard, Value, Write},
    },
    version::{
        amount::{Amount, Insufficient},
        table::{Basis, VersionedTable},
        update::{UpdateError, Updated},
    },
};

impl<DB: Database, V: Value<DB> + Amount> VersionedTable<DB, V> {
    /// Deducts `amount` from the balance of `key`, never below zero. The call retries when another
    /// change came first.
    ///
    /// The write has three guards: the version; the value that was read, against programs that do
    /// not raise the version; and `balance >= amount`. (The guard `balance >= left_balance`, which
    /// is widely published, protects nothing: it compares with the remainder, and holds after any
    /// number of lost updates.)
    ///
    /// # Errors
    /// [`Insufficient`] in [`UpdateError::Computation`]; [`Error::Invalid`] unless the amount
    /// is positive and fits; otherwise as [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`update`](Self::update). A future that was polled, is not polled again and is not
    /// dropped may block the row's local queue and occupy a connection of the pool.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool, names);
    /// use rowlock::balances::{Insufficient, UpdateError};
    ///
    /// assert_eq!(accounts.deduct("alice", 30).await?.value, 70);
    /// let refused = accounts.deduct("alice", 71).await;
    /// assert!(matches!(refused, Err(UpdateError::Computation(Insufficient { balance: 70, .. }))));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn deduct(&self, key: &str, amount: V) -> Result<Updated<V>, UpdateError<Insufficient<V>>> {
        let key = positive(key, &amount)?;
        self.change(&key, Basis::Known, |balance| deduction(&key, balance, &amount)).await
    }

    /// Deducts `amount` in the caller's transaction, which is neither committed nor rolled back:
    /// one attempt of [`deduct`](Self::deduct), with the same guards.
    ///
    /// # Errors
    /// As [`deduct`](Self::deduct) and [`update_in`](Self::update_in).
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller rolls back.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool.clone(), names);
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // `begin()` on a server
    /// accounts.deduct_in(&mut tx, "alice", 30).await?;
    /// accounts.deposit_in(&mut tx, "bob", 30).await?;
    /// tx.commit().await?; // both, or neither
    /// # assert_eq!(accounts.read("bob").await?.map(|bob| bob.value), Some(30));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn deduct_in(
        &self,
        tx: &mut DB::Connection,
        key: &str,
        amount: V,
    ) -> Result<Updated<V>, UpdateError<Insufficient<V>>> {
        let key = positive(key, &amount)?;
        self.change_in(tx, &key, |balance| deduction(&key, balance, &amount)).await
    }

    /// Adds `amount` to the balance of `key`. The call retries when another change came first.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the amount is positive and the sum fits; otherwise as
    /// [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`deduct`](Self::deduct).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
    /// # sqlx::raw_sql("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, version INT);
    /// #     INSERT INTO account VALUES ('alice', 100, 0), ('bob', 0, 0)").execute(&pool).await?;
    /// # use rowlock::balances::Columns;
    /// # let names = Columns { table: "account", key: "id", value: "balance", version: "version" };
    /// # let accounts = rowlock::VersionedTable::new(pool, names);
    /// assert_eq!(accounts.deposit("bob", 30).await?.value, 30);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn deposit(&self, key: &str, amount: V) -> Result<Updated<V>, Error> {
        let key = positive(key, &amount)?;
        let deposited = self.change(&key, Basis::Known, |balance| deposit(&key, balance, &amount));
        deposited.await.map_err(failed)
    }

    /// Adds `amount` in the caller's transaction, which is neither committed nor rolled back: one
    /// attempt of [`deposit`](Self::deposit). [`deduct_in`](Self::deduct_in) has an example.
    ///
    /// # Errors
    /// As [`deposit`](Self::deposit) and [`update_in`](Self::update_in).
    ///
    /// # Cancel safety
    /// If the future is dropped, the caller rolls back.
    pub async fn deposit_in(&self, tx: &mut DB::Connection, key: &str, amount: V) -> Result<Updated<V>, Error> {
        let key = positive(key, &amount)?;
        self.change_in(tx, &key, |balance| deposit(&key, balance, &amount)).await.map_err(failed)
    }
}

fn deduction<V: Amount>(key: &Key, balance: &V, amount: &V) -> Result<Write<V>, UpdateError<Insufficient<V>>> {
    if balance < amount {
        let (balance, amount) = (balance.clone(), amount.clone());
        return Err(UpdateError::Computation(Insufficient { balance, amount }));
    }
    let value = balance.minus(amount).ok_or_else(|| too_much(key, amount))?;
    Ok(Write { value, guard: Some(Guard { was: balance.clone(), least: amount.clone(), same: V::eq }) })
}

/// A deposit requires no minimum balance.
fn deposit<V: Amount>(key: &Key, balance: &V, amount: &V) -> Result<Write<V>, UpdateError<Infallible>> {
    let value = balance.plus(amount).ok_or_else(|| too_much(key, amount))?;
    Ok(Write { value, guard: Some(Guard { was: balance.clone(), least: balance.clone(), same: V::eq }) })
}

fn failed(error: UpdateError<Infallible>) -> Error {
    match error {
        UpdateError::Computation(never) => match never {},
        UpdateError::Other(error) => error,
    }
}

fn positive<V: Amount>(key: &str, amount: &V) -> Result<Key, Error> {
    let key = Key::new(key)?;
    if *amount > V::NOTHING {
        return Ok(key);
    }
    Err(Invalid::amount(key.as_str(), amount, "it has to be more than zero").into())
}

fn too_much<V: Amount>(key: &Key, amount: &V) -> Error {
    Invalid::amount(key.as_str(), amount, "with the balance it is more than the type holds").into()
}
