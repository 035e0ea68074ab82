//! The documentation: mdBook builds the book, the links of all Markdown files lead somewhere, and
//! the tests that pages cite exist.
//!
//! `book.rs` builds the book into a temporary folder and checks what was written there. `links.rs`
//! checks the Markdown files as GitHub shows them. `cited.rs` looks for the tests that pages cite
//! in the sources, `faults.rs` checks the grid of features and faults, `mutants.rs` the table of
//! mutated statements, and `frozen.rs` the migrations. `architecture.rs` compares ARCHITECTURE.md
//! with the code, and `pictures.rs` draws its pictures. Nothing is fetched.

#![allow(clippy::unwrap_used)]

mod architecture;
mod book;
mod cited;
mod faults;
mod frozen;
mod html;
mod links;
mod mutants;
mod pictures;

use std::path::{Path, PathBuf};

/// The root of the repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All files in the folder with this extension, sorted, without hidden folders and build output.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            if name != "target" && !name.to_string_lossy().starts_with('.') {
                found.extend(files(&path, extension));
            }
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A path as messages show it.
fn shown(path: &Path, folder: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).display().to_string()
}

#[track_caller]
fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn the_unit_of_the_guide_is_that_of_the_package() {
    let read = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let (guide, unit) = (read("docs/cron.md"), read("packaging/rowlock-cron.service"));
    let shown = guide.split("```ini\n# packaging/rowlock-cron.service\n").nth(1).unwrap();
    assert_eq!(shown.split("```").next().unwrap(), unit);
}

#[test]
fn the_readme_is_short() {
    let text = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let (lines, bytes) = (text.lines().count(), text.len());
    assert!(
        lines < 120 && bytes <= 7_000,
        "README.md has {lines} lines of fewer than 120, {bytes} bytes of at most 7000"
    );
}

/// A page that is longer is read by searching. These two are lists.
#[test]
fn the_pages_are_short() {
    const LISTS: [&str; 2] = ["faults.md", "guarantees.md"];
    let folder = repository().join("docs");
    let long = files(&folder, "md").into_iter().filter_map(|file| {
        let name = shown(&file, &folder);
        let lines = std::fs::read_to_string(&file).unwrap().lines().count();
        (lines >= 250 && !LISTS.contains(&name.as_str())).then(|| format!("{name} has {lines} lines"))
    });
    assert_none(&long.collect::<Vec<_>>());
}

/// The first screen says how to see the library at work, and how to test it.
#[test]
fn the_readme_begins_with_two_commands() {
    const FIRST: usize = 40;
    let root = repository();
    let text = std::fs::read_to_string(root.join("README.md")).unwrap();
    let first: Vec<&str> = text.lines().take(FIRST).map(str::trim_end).collect();
    for (command, file) in
        [("cargo run --example scheduled_job", "examples/scheduled_job/main.rs"), ("scripts/test", "scripts/test")]
    {
        let at = first.iter().position(|line| line.split('#').next().is_some_and(|line| line.trim_end() == command));
        let fences = at.map(|at| first[..at].iter().filter(|line| line.starts_with("```")).count());
        assert!(
            fences.is_some_and(|fences| fences % 2 == 1),
            "README.md has no fenced `{command}` in its first {FIRST} lines"
        );
        assert!(root.join(file).is_file(), "{file}");
    }
}
