//! The values of a file of jobs.

use std::{collections::BTreeMap, ffi::OsString, ops::RangeInclusive, path::PathBuf, time::Duration};

use clap::ValueEnum as _;
use toml::de::DeValue;

use crate::args::{
    schedules::CatchUpWith,
    values::{self, duration},
};

/// The variables that the program itself gives to commands begin with this.
const OWN: &str = "ROWLOCK_";

pub fn string(value: &DeValue<'_>) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "it has to be a text in quotes".to_owned())
}

pub fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "it has to be true or false, without quotes".to_owned())
}

pub fn yes(value: &DeValue<'_>) -> Result<(), String> {
    let wrong = "it has to be true; a job that is run has no such key";
    value.as_bool().filter(|yes| *yes).map(drop).ok_or_else(|| wrong.to_owned())
}

/// The text of a duration.
fn lasting(value: &DeValue<'_>) -> Result<String, String> {
    string(value).map_err(|wrong| match value.as_integer() {
        Some(number) => format!("{wrong}, with a unit, such as \"{}s\"", number.as_str()),
        None => wrong,
    })
}

pub fn time(value: &DeValue<'_>) -> Result<Duration, String> {
    duration(&lasting(value)?)
}

pub fn period(value: &DeValue<'_>) -> Result<Duration, String> {
    values::period(&lasting(value)?)
}

pub fn timeout(value: &DeValue<'_>) -> Result<Duration, String> {
    values::timeout(&lasting(value)?)
}

/// A number of these.
pub fn integer(value: &DeValue<'_>, possible: RangeInclusive<u32>) -> Result<u32, String> {
    let digits = value.as_integer().filter(|integer| integer.radix() == 10);
    let number = digits.and_then(|integer| integer.as_str().parse().ok()).filter(|number| possible.contains(number));
    let (least, most) = (possible.start(), possible.end());
    number.ok_or_else(|| format!("it has to be a whole number from {least} to {most}, without quotes"))
}

/// How many ticks are caught up on.
pub fn max(value: &DeValue<'_>) -> Result<u32, String> {
    integer(value, 1..=1_000)
}

/// The most bytes of an output that are kept, which are the default.
pub const MOST_OUTPUT: u32 = 64 * 1024;

/// The only version of the file that there is.
pub fn version(value: &DeValue<'_>) -> Result<(), String> {
    integer(value, 1..=1).map(drop).map_err(|_| "it has to be 1, the only version that this program knows".to_owned())
}

pub fn catch_up(value: &DeValue<'_>) -> Result<CatchUpWith, String> {
    let with = value.as_str().and_then(|text| CatchUpWith::from_str(text, false).ok());
    with.ok_or_else(|| "it has to be \"skip\", \"once\" or \"all\"".to_owned())
}

/// One name, or several.
pub fn names(value: &DeValue<'_>) -> Result<Vec<String>, String> {
    let texts = match value.as_array() {
        Some(names) => names.iter().map(|name| name.get_ref().as_str().map(str::to_owned)).collect(),
        None => value.as_str().map(|name| vec![name.to_owned()]),
    };
    texts.ok_or_else(|| "it has to be a text in quotes, or a list of texts".to_owned())
}

/// The words of a command, which no shell splits.
pub fn words(value: &DeValue<'_>) -> Result<Vec<OsString>, String> {
    let words = value.as_array().map(|words| words.iter().map(|word| word.get_ref().as_str()));
    match words.and_then(|words| words.collect::<Option<Vec<_>>>()) {
        Some(words) if words.iter().any(|word| word.contains('\0')) => Err("a word has a zero byte".to_owned()),
        Some(words) if !words.is_empty() => Ok(words.into_iter().map(OsString::from).collect()),
        Some(_) => Err("it is empty: write a list of texts, like [\"/opt/app/report\", \"--full\"]".to_owned()),
        None => Err("it has to be a list of texts, like [\"/opt/app/report\", \"--full\"]".to_owned()),
    }
}

/// The words of a command that may be left out.
pub fn hook(value: &DeValue<'_>) -> Result<Vec<OsString>, String> {
    if value.as_array().is_some_and(|words| words.is_empty()) { Ok(Vec::new()) } else { words(value) }
}

/// Variables by their names.
pub fn variables(value: &DeValue<'_>) -> Result<BTreeMap<String, String>, String> {
    let wrong = "it has to be a table of texts, like { LANG = \"C.UTF-8\", TARGET = \"archive\" }";
    let table = value.as_table().ok_or(wrong)?;
    let variable = |(name, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let name: &toml::de::DeString<'_> = name.get_ref();
        let value = value.get_ref().as_str().ok_or(wrong)?;
        match name.as_ref() {
            "" => Err("a name is empty".to_owned()),
            name if name.contains(['=', '\0']) || value.contains('\0') => {
                Err(format!("{name:?}: a name has no equals sign, and neither part has a zero byte"))
            }
            name if name.starts_with(OWN) => {
                Err(format!("{name}: the names that begin with {OWN} are the program's own"))
            }
            name => Ok((name.to_owned(), value.to_owned())),
        }
    };
    table.iter().map(variable).collect()
}

pub fn folder(value: &DeValue<'_>) -> Result<PathBuf, String> {
    let path = PathBuf::from(string(value)?);
    path.is_absolute().then_some(path).ok_or_else(|| "it has to begin with a slash".to_owned())
}

pub fn umask(value: &DeValue<'_>) -> Result<u32, String> {
    values::umask(&string(value)?)
}

/// The name of a user.
pub fn user(value: &DeValue<'_>) -> Result<String, String> {
    let name = string(value)?;
    is_user(&name).then_some(name).ok_or_else(|| "it has to be the name of a user".to_owned())
}

pub fn is_user(name: &str) -> bool {
    !name.is_empty() && !name.contains(['\0', ':', '/'])
}
