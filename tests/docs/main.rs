//! The documentation: mdBook builds the book, and the links of all Markdown files lead somewhere.
//!
//! `book.rs` builds the book into a temporary folder and checks what was written there. `links.rs`
//! checks the Markdown files as GitHub shows them. Nothing is fetched.

#![allow(clippy::unwrap_used)]

mod book;
mod html;
mod links;

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
fn the_readme_is_short() {
    let text = std::fs::read_to_string(repository().join("README.md")).unwrap();
    let (lines, bytes) = (text.lines().count(), text.len());
    assert!(
        lines <= 150 && bytes <= 9_000,
        "README.md has {lines} lines of at most 150, {bytes} bytes of at most 9000"
    );
}
