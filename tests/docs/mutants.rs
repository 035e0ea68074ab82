//! The table of mutated statements: each text stands in its file, no replacement is longer, and
//! each test that notices is in the sources. `scripts/mutants --sql` relies on it.

use std::fs::read_to_string;

use crate::{assert_none, cited::Tests, repository};

#[test]
fn the_mutated_statements_are_those_of_the_sources() {
    let root = repository();
    let (tests, mut problems) = (Tests::of(&root), Vec::new());
    for row in read_to_string(root.join("scripts/sql_mutants.tsv")).unwrap().lines().filter(|row| !row.starts_with('#'))
    {
        let [file, text, replacement, _, result] = row.split('\t').collect::<Vec<_>>()[..] else {
            problems.push(format!("{row}: five cells"));
            continue;
        };
        let file = file.trim_start_matches("mariadb:");
        let path = if file.starts_with("functions/") { root.join(file) } else { root.join("src/store").join(file) };
        if !read_to_string(&path).is_ok_and(|source| of_database(source, file).contains(text)) {
            problems.push(format!("{file} has no {text:?}"));
        }
        if replacement.len() > text.len() {
            problems.push(format!("{replacement:?} is longer than {text:?}"));
        }
        let test = result.replace("::tests::", "::");
        let mut parts = test.rsplitn(3, "::");
        let (name, module) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let is_known =
            result == "waits in vain" || ["survives: ", "open: "].iter().any(|known| result.starts_with(known));
        if !is_known && !tests.has(&format!("{module}::{name}")) {
            problems.push(format!("no test is named {result}"));
        }
    }
    assert_none(&problems);
}

/// Returns a source as the executables have it: in a file that the databases share, which lies
/// above a folder of one, the macro `sql!` writes the clock and the parameters.
fn of_database(mut source: String, file: &str) -> String {
    let Some((database, _)) = file.split_once("/../") else { return source };
    let (now, mark) = match database {
        "postgres" => ("clock_timestamp()", "$"),
        "mysql" => ("UTC_TIMESTAMP(6)", "?"),
        _ => ("CAST(unixepoch('subsec') * 1000 AS INTEGER) * 1000", "?"),
    };
    let number = |number: u8| if database == "mysql" { String::new() } else { number.to_string() };
    let marks = (1..=9).map(|of| (format!("[{of}]"), format!("{mark}{}", number(of))));
    for (part, text) in marks.chain([("now".to_owned(), now.to_owned())]) {
        for part in [format!("\" {part} \""), format!("\" {part}"), format!("\"{part}")] {
            source = source.replace(&part, &text);
        }
    }
    source
}
