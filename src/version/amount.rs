//! Amounts that are deducted from a balance or added to it.

use std::{any::Any, fmt};

/// A numeric type of balances: `i64`, and with the feature `rust_decimal` its `Decimal`
/// (PostgreSQL, MySQL, MariaDB). Its calculations are exact.
///
/// ```
/// use rowlock::balances::Amount;
///
/// assert_eq!(70i64.minus(&30), Some(40));
/// assert_eq!(i64::MAX.plus(&1), None);
/// ```
pub trait Amount: Clone + PartialOrd + fmt::Debug + fmt::Display + sealed::Sealed {
    /// Zero.
    const NOTHING: Self;

    /// Returns the exact sum, or `None` if it does not fit the type.
    fn plus(&self, other: &Self) -> Option<Self>;

    /// Returns the exact difference, or `None` if it does not fit the type.
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

    /// Returns `result` unless digits were lost. When the digits of the type are exhausted,
    /// decimals are rounded away, and the scale of the result is lower than that of an operand.
    fn exact(one: &Decimal, other: &Decimal, result: Decimal) -> Option<Decimal> {
        (result.scale() >= one.normalize().scale().max(other.normalize().scale())).then_some(result)
    }
}

/// Returns whether a value is the number that its column holds, which `text` spells out. A decimal
/// number of more digits than its type has is read rounded. PostgreSQL's driver also reads numbers
/// with more zeros at their end than the type has decimals, which it could not send: they are cut.
#[cfg_attr(not(feature = "rust_decimal"), expect(unused_variables))]
pub(crate) fn is_exact(value: &mut dyn Any, text: &str) -> bool {
    #[cfg(feature = "rust_decimal")]
    if let Some(read) = number::<rust_decimal::Decimal>(value) {
        let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { text };
        let Some(exact) = rust_decimal::Decimal::from_str_exact(text).ok().filter(|exact| exact == read) else {
            return false;
        };
        if read.scale() > rust_decimal::Decimal::MAX_SCALE {
            match value.downcast_mut() {
                Some(value) => *value = exact,
                None => *value.downcast_mut().unwrap_or(&mut None) = Some(exact),
            }
        }
    }
    true
}

/// Returns the number of this type that a value is or contains.
fn number<N: 'static>(value: &dyn Any) -> Option<&N> {
    value.downcast_ref().or_else(|| value.downcast_ref::<Option<_>>()?.as_ref())
}

/// Returns how many decimals a value needs if it is a decimal number. The count is negative if the
/// value ends in zeros before the point.
#[cfg_attr(not(feature = "rust_decimal"), expect(unused_variables))]
pub(crate) fn decimals(value: &dyn Any) -> Option<i32> {
    #[cfg(feature = "rust_decimal")]
    if let Some(value) = number::<rust_decimal::Decimal>(value) {
        let value = value.normalize();
        let (mut digits, mut decimals) = (value.mantissa(), value.scale().cast_signed());
        while decimals <= 0 && digits != 0 && digits % 10 == 0 {
            (digits, decimals) = (digits / 10, decimals - 1);
        }
        return Some(if digits == 0 { i32::MIN } else { decimals });
    }
    None
}

/// Returns whether a value is no number, which most databases do not keep.
pub(crate) fn is_nan(value: &dyn Any) -> bool {
    number(value).is_some_and(|value: &f64| value.is_nan()) || number(value).is_some_and(|value: &f32| value.is_nan())
}

/// The error for an amount that the balance does not cover. Nothing was changed.
///
/// ```
/// use rowlock::balances::Insufficient;
///
/// let error = Insufficient { balance: 20, amount: 30 };
/// assert_eq!(error.to_string(), "a balance of 20 does not cover 30");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a balance of {balance} does not cover {amount}")]
pub struct Insufficient<V: fmt::Debug + fmt::Display> {
    /// The balance that was read.
    pub balance: V,
    /// The requested amount.
    pub amount: V,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_noticed_in_an_option_too() {
        let numbers: [&dyn Any; 5] = [&1.5f64, &Some(1.5f32), &None::<f64>, &7i64, &"NaN"];
        let no_numbers: [&dyn Any; 4] = [&f64::NAN, &f32::NAN, &Some(f64::NAN), &Some(f32::NAN)];
        assert!(!numbers.into_iter().any(is_nan));
        assert!(no_numbers.into_iter().all(is_nan));
    }
}
