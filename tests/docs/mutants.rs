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
        if !read_to_string(&path).is_ok_and(|source| source.contains(text)) {
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
