//! Tables and times, for people and for programs.

use std::time::Duration;

use anstyle::Style;
use chrono::{DateTime, SecondsFormat, Utc};
use unicode_width::UnicodeWidthStr as _;

/// Aligns the columns of a table. The last one is not padded.
pub fn aligned<const N: usize>(rows: &[(Style, [String; N])]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| match column + 1 < N {
        true => rows.iter().map(|(_, cells)| cells[column].width()).max().unwrap_or_default() + 2,
        false => 0,
    });
    let line = |(style, cells): &(Style, [String; N])| {
        let padded = cells
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell}{}", " ".repeat(width.saturating_sub(cell.width()))));
        format!("{style}{}{style:#}", padded.collect::<String>().trim_end())
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Aligns the columns of a table below their names.
pub fn tabular<const N: usize>(names: [&str; N], rows: impl Iterator<Item = (Style, [String; N])>) -> String {
    let header = (Style::new().bold(), names.map(str::to_owned));
    aligned(&std::iter::once(header).chain(rows).collect::<Vec<_>>())
}

pub fn clock(time: DateTime<Utc>) -> String {
    time.format("%Y-%m-%d %H:%M:%SZ").to_string()
}

/// Writes a time that may be absent.
pub fn clock_or_dash(time: Option<DateTime<Utc>>) -> String {
    time.map_or_else(|| "-".to_owned(), clock)
}

/// Writes a text that may be empty.
pub fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

/// Milliseconds are enough for a person.
pub fn brief(duration: Duration) -> String {
    let millis = Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    humantime::format_duration(millis).to_string()
}

pub fn precise(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Micros, true)
}

/// Takes the quotes away that stand around a whole value.
pub fn without_quotes(text: &str) -> &str {
    let within = |quote| text.strip_prefix(quote).and_then(|text| text.strip_suffix(quote));
    within('"').or_else(|| within('\'')).unwrap_or(text)
}
