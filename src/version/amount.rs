//! Amounts of money and the like: taken from a balance, or added to it.

use std::{any::Any, fmt};

use crate::{
    error::Error,
    key::Key,
    store::{
        Database,
        version::{Guard, Value, Write},
    },
    version::table::{Basis, UpdateError, Updated, VersionedTable},
};

/// A number that balances are kept in: `i64`, and with the feature `rust_decimal` its `Decimal` (PostgreSQL, MySQL, MariaDB).
pub trait Amount: Clone + PartialOrd + fmt::Display + sealed::Sealed {
    /// Nothing.
    const NOTHING: Self;

    /// The exact sum, unless it does not fit.
    fn plus(&self, other: &Self) -> Option<Self>;

    /// The exact difference, unless it does not fit.
    fn minus(&self, other: &Self) -> Option<Self>;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for i64 {}

impl Amount for i64 {
    const NOTHING: Self = 0;

    fn plus(&self, other: &Self) -> Option<Self> {
        self.checked_add(*other)
    }

    fn minus(&self, other: &Self) -> Option<Self> {
        self.checked_sub(*other)
    }
}

#[cfg(feature = "rust_decimal")]
mod decimal {
    use rust_decimal::Decimal;

    impl super::sealed::Sealed for Decimal {}

    impl super::Amount for Decimal {
        const NOTHING: Self = Self::ZERO;

        fn plus(&self, other: &Self) -> Option<Self> {
            exact(self, other, self.checked_add(*other)?)
        }

        fn minus(&self, other: &Self) -> Option<Self> {
            exact(self, other, self.checked_sub(*other)?)
        }
    }

    /// Where the digits run out, decimals are rounded away; that shows in their number.
    fn exact(one: &Decimal, other: &Decimal, result: Decimal) -> Option<Decimal> {
        (result.scale() >= one.normalize().scale().max(other.normalize().scale())).then_some(result)
    }
}

/// How many decimals a value needs, if it is a decimal number; fewer than none, if it ends in zeros before the point.
#[cfg_attr(not(feature = "rust_decimal"), expect(unused_variables))]
pub(crate) fn decimals(value: &dyn Any) -> Option<i32> {
    #[cfg(feature = "rust_decimal")]
    if let Some(value) = value.downcast_ref::<rust_decimal::Decimal>() {
        let value = value.normalize();
        let (mut digits, mut decimals) = (value.mantissa(), value.scale().cast_signed());
        while decimals <= 0 && digits != 0 && digits % 10 == 0 {
            (digits, decimals) = (digits / 10, decimals - 1);
        }
        return Some(if digits == 0 { i32::MIN } else { decimals });
    }
    None
}

/// The balance does not cover the amount; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a balance of {balance} does not cover {amount}")]
pub struct Insufficient<V: fmt::Debug + fmt::Display> {
    /// The balance that was read.
    pub balance: V,
    /// The amount that was asked for.
    pub amount: V,
}

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
