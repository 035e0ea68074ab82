//! Deductions from a balance and deposits to it.

use std::fmt;

use crate::{
    error::Error,
    key::Key,
    store::{
        Database,
        version::{Guard, Value, Write},
    },
    version::{
        amount::{Amount, Insufficient},
        table::{Basis, UpdateError, Updated, VersionedTable},
    },
};

impl<DB: Database, V: Value<DB> + Amount + fmt::Debug> VersionedTable<DB, V> {
    /// Deducts `amount` from the balance of `key`, never below zero. The call retries when another
    /// change came first.
    ///
    /// The write has three guards: the version; the value that was read, against programs that do
    /// not raise the version; and `balance >= amount`. (The guard `balance >= left_balance`, which
    /// is widely published, protects nothing: it compares with the remainder, and holds after any
    /// number of lost updates.)
    ///
    /// # Errors
    /// [`Insufficient`] in [`UpdateError::Computation`]; [`Error::InvalidAmount`] unless the amount
    /// is positive and fits; otherwise as [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`update`](Self::update). A future that was polled, is not polled again and is not
    /// dropped may block the row's local queue and occupy a connection of the pool.
    pub async fn deduct(&self, key: &str, amount: V) -> Result<Updated<V>, UpdateError<Insufficient<V>>> {
        let key = positive(key, &amount)?;
        self.change(&key, Basis::Known, |balance| {
            if *balance < amount {
                let (balance, amount) = (balance.clone(), amount.clone());
                return Err(UpdateError::Computation(Insufficient { balance, amount }));
            }
            let value = balance.minus(&amount).ok_or_else(|| too_much(&key, &amount))?;
            Ok(Write { value, guard: Some(Guard { was: balance.clone(), least: amount.clone() }) })
        })
        .await
    }

    /// Adds `amount` to the balance of `key`. The call retries when another change came first.
    ///
    /// # Errors
    /// [`Error::InvalidAmount`] unless the amount is positive and the sum fits; otherwise as
    /// [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`deduct`](Self::deduct).
    pub async fn deposit(&self, key: &str, amount: V) -> Result<Updated<V>, Error> {
        let key = positive(key, &amount)?;
        let deposited = self.change::<std::convert::Infallible>(&key, Basis::Known, |balance| {
            let value = balance.plus(&amount).ok_or_else(|| too_much(&key, &amount))?;
            // A deposit requires no minimum balance.
            Ok(Write { value, guard: Some(Guard { was: balance.clone(), least: balance.clone() }) })
        });
        deposited.await.map_err(|error| match error {
            UpdateError::Computation(never) => match never {},
            UpdateError::Failed(error) => error,
        })
    }
}

fn positive<V: Amount>(key: &str, amount: &V) -> Result<Key, Error> {
    let key = Key::new(key)?;
    if *amount > V::NOTHING {
        return Ok(key);
    }
    Err(Error::InvalidAmount { key, amount: amount.to_string(), rule: "it has to be more than zero".into() })
}

fn too_much<V: Amount>(key: &Key, amount: &V) -> Error {
    let rule = "with the balance it is more than the type holds".into();
    Error::InvalidAmount { key: key.clone(), amount: amount.to_string(), rule }
}
