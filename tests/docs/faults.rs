//! The grid of `docs/faults.md`: each thing that a user holds beside each fault has a test, or the
//! page says why there is none.

use std::collections::BTreeMap;

use crate::{
    assert_none,
    cited::{Cell, Table, tables},
    repository,
};

const HELD: [&str; 14] = [
    "A key",
    "A set",
    "A permit",
    "A reader",
    "A writer",
    "A leader",
    "A tick",
    "A tick's transaction",
    "A fenced transaction",
    "A balance",
    "rowlock run",
    "rowlock cron",
    "A function in SQL",
    "A Python lease",
];

const FAULTS: [&str; 15] = [
    "killed",
    "paused past the lease",
    "its thread blocked",
    "its future dropped",
    "a reply lost",
    "a connection silent",
    "the server restarted",
    "failed over",
    "a deadlock or serialization failure inside",
    "foreign session settings",
    "the clock stepped",
    "the pool exhausted",
    "another version beside it",
    "a migration under way",
    "a disk full",
];

/// A reason is a few words.
const LONGEST: usize = 12;

/// What a cell of the grid says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said<'a> {
    Tests,
    /// The same code as another thing's, whose cell has the tests.
    As(&'a str),
    DoesNotApply,
    /// There is no test, for this reason.
    None(&'a str),
}

impl<'a> Said<'a> {
    fn of(cell: &'a Cell) -> Self {
        match cell.text.trim() {
            _ if !cell.code.is_empty() => Self::Tests,
            text if text.starts_with("does not apply") => Self::DoesNotApply,
            text => text.strip_prefix("as ").map_or(Self::None(text), Self::As),
        }
    }

    /// The mark in the overview.
    fn mark(self) -> char {
        match self {
            Self::Tests => '●',
            Self::As(_) => '○',
            Self::DoesNotApply => '–',
            Self::None(_) => '?',
        }
    }
}

/// What is wrong with the grid of a page.
fn problems(text: &str) -> Vec<String> {
    let (tables, _) = tables(text);
    let Some((overview, sections)) = tables.split_first() else { return vec!["there is no table".into()] };
    let mut problems = Vec::new();
    let headings: Vec<&str> = sections.iter().map(|section| section.heading.as_str()).collect();
    if headings != HELD {
        problems.push(format!("the sections are {headings:?}, not {HELD:?}"));
    }
    let grid: BTreeMap<String, Vec<Said<'_>>> =
        sections.iter().map(|section| (section.heading.to_lowercase(), row(section))).collect();
    for section in sections {
        let faults: Vec<&str> = section.rows.iter().map(|row| row[0].text.trim()).collect();
        if faults != FAULTS {
            problems.push(format!("{}: the faults are {faults:?}, not {FAULTS:?}", section.heading));
            continue;
        }
        for (place, (said, fault)) in row(section).into_iter().zip(FAULTS).enumerate() {
            let problem = match said {
                Said::As(other) if grid.get(other).and_then(|row| row.get(place)) != Some(&Said::Tests) => {
                    format!("{other} has no test either")
                }
                Said::None(reason) if !(1..=LONGEST).contains(&reason.split_whitespace().count()) => {
                    format!("neither a test, nor a reason of at most {LONGEST} words")
                }
                _ => continue,
            };
            problems.push(format!("{}, {fault}: {problem}", section.heading));
        }
    }
    let marks = |section: &Table| row(section).into_iter().map(Said::mark).collect::<String>();
    let expected: Vec<_> = sections.iter().map(|section| (section.heading.clone(), marks(section))).collect();
    let shown: Vec<_> = overview
        .rows
        .iter()
        .map(|row| (name(&row[0]), row[1..].iter().map(|cell| cell.text.as_str()).collect()))
        .collect();
    if shown != expected {
        problems.push(format!("the overview has to be:\n{}", table(&expected)));
    }
    problems
}

fn row(section: &Table) -> Vec<Said<'_>> {
    section.rows.iter().map(|row| Said::of(&row[1])).collect()
}

/// The name of a thing, which is code if it is that of a program.
fn name(cell: &Cell) -> String {
    cell.code.first().unwrap_or(&cell.text).clone()
}

/// The rows of the overview.
fn table(rows: &[(String, String)]) -> String {
    let line = |(name, marks): &(String, String)| {
        let name = if name.starts_with("rowlock") { format!("`{name}`") } else { name.clone() };
        format!("| {name} | {} |\n", marks.chars().map(String::from).collect::<Vec<_>>().join(" | "))
    };
    rows.iter().map(line).collect()
}

fn page() -> String {
    std::fs::read_to_string(repository().join("docs/faults.md")).unwrap()
}

#[test]
fn each_cell_of_the_grid_has_a_test_or_a_reason() {
    assert_none(&problems(&page()));
}

#[test]
fn holes_in_the_grid_are_found() {
    let page = page();
    let with = |from: &str, to: &str| {
        assert!(page.contains(from), "{from}");
        problems(&page.replacen(from, to, 1)).join("\n")
    };
    assert!(with("## A permit", "## A permission").contains("the sections are"));
    assert!(with("\n| failed over |", "\n| failed |").contains("A key: the faults are"));
    let cell = page.lines().find(|line| line.starts_with("| a disk full |")).unwrap();
    assert!(with(cell, "| a disk full | |").contains("A key, a disk full: neither a test"));
    assert!(with(cell, "| a disk full | as a dream |").contains("A key, a disk full: a dream has no test either"));
    assert!(with(cell, "| a disk full | no promise yet |").contains("the overview has to be"));
}
