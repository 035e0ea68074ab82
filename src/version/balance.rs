//! Amounts taken from a balance, or added to it.

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
    /// Takes an amount from a balance, never below zero: in one call, tried again when somebody else was faster.
    ///
    /// The write is guarded three times: by the version; by the value that was read, against programs that forget the version; and by `balance >= amount`.
    /// (The guard `balance >= left_balance`, which is passed on in articles, protects nothing: it compares with what is left, and holds after any number of lost updates.)
    ///
    /// # Errors
    /// [`Insufficient`], in [`UpdateError::Computation`]; [`Error::InvalidAmount`] unless the amount is positive and fits; otherwise as [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`update`](Self::update). One that has begun, is not polled on and not dropped either may keep the turn, and a connection of the pool.
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

    /// Adds an amount to a balance, in one call, tried again when somebody else was faster.
    ///
    /// # Errors
    /// [`Error::InvalidAmount`] unless the amount is positive and the sum fits; otherwise as [`update`](Self::update).
    ///
    /// # Cancel safety
    /// As [`deduct`](Self::deduct).
    pub async fn deposit(&self, key: &str, amount: V) -> Result<Updated<V>, Error> {
        let key = positive(key, &amount)?;
        let deposited = self.change::<std::convert::Infallible>(&key, Basis::Known, |balance| {
            let value = balance.plus(&amount).ok_or_else(|| too_much(&key, &amount))?;
            // Any balance may grow.
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
