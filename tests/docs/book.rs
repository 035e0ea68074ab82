//! The book, as mdBook builds it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use mdbook_driver::{MDBook, config::Config};
use tempfile::TempDir;

use crate::{
    assert_none, files, html,
    links::{self, Target},
    repository, shown,
};

/// The pages that `SUMMARY.md` lists. A chapter without a page has an empty link.
fn listed(source: &Path) -> Vec<PathBuf> {
    let links = links::read(&source.join("SUMMARY.md")).links;
    links.into_iter().filter(|(_, link)| !link.is_empty()).map(|(_, link)| source.join(link)).collect()
}

/// What `book.toml` describes, built outside the repository.
fn build(root: &Path) -> TempDir {
    let output = tempfile::tempdir().unwrap();
    let mut config = Config::from_disk(root.join("book.toml")).unwrap();
    config.build.build_dir = output.path().to_owned();
    MDBook::load_with_config(root, config).unwrap().build().unwrap();
    output
}

/// Differences between the folder of the book's source, its summary and the built book.
fn missing(source: &Path, output: &Path) -> Vec<String> {
    let listed = listed(source);
    let pages = files(source, "md");
    let unlisted = pages.iter().filter(|page| !page.ends_with("SUMMARY.md") && !listed.contains(page));
    let mut problems: Vec<_> =
        unlisted.map(|page| format!("SUMMARY.md does not list {}", shown(page, source))).collect();
    for page in listed {
        let built = output.join(page.strip_prefix(source).unwrap()).with_extension("html");
        if !built.is_file() {
            problems.push(format!("{} is not built", shown(&built, output)));
        }
    }
    problems
}

/// The links of the built pages that lead nowhere.
fn dead_links(output: &Path) -> Vec<String> {
    let mut pages = BTreeMap::new();
    // The links of 404.html start at the root of the site.
    for file in files(output, "html").into_iter().filter(|file| !file.ends_with("404.html")) {
        let page = html::attributes(&std::fs::read_to_string(&file).unwrap());
        pages.insert(file, page);
    }
    let dead = |from: &Path, link: &str| match links::target(from, link, output) {
        Ok(Target::Inside(path, _)) if !path.is_file() => Some(format!("{link} is not a page")),
        Ok(Target::Inside(path, Some(anchor))) if !anchor.is_empty() => {
            let known = pages.get(&path).is_some_and(|page| page.anchors.contains(&anchor));
            (!known).then(|| format!("{link}: no such anchor"))
        }
        Ok(_) => None,
        Err(problem) => Some(problem),
    };
    let mut problems = Vec::new();
    for (file, page) in &pages {
        let found = page.links.iter().filter_map(|link| dead(file, link));
        problems.extend(found.map(|problem| format!("{}: {problem}", shown(file, output))));
    }
    problems
}

#[test]
fn every_page_is_in_the_book_and_its_links_work() {
    let root = repository();
    let output = build(&root);
    let built = output.path().canonicalize().unwrap();
    assert_none(&missing(&root.join("docs"), &built));
    assert_none(&dead_links(&built));
}

#[test]
fn missing_pages_and_dead_links_are_found() {
    let root = tempfile::tempdir().unwrap();
    let source = root.path().join("docs");
    std::fs::create_dir_all(source.join("folder")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(root.path().join(name), text).unwrap();
    write("book.toml", "book.src = 'docs'\n");
    write("README.md", "# Outside of the book\n");
    write("docs/SUMMARY.md", "- [Page](page.md)\n- [Draft]()\n  - [Inner](folder/inner.md)\n");
    write("docs/page.md", "# Page\n\n[1](folder/inner.md#inner) [2](folder/inner.md#page) [3](folder)\n");
    write("docs/folder/inner.md", "# Inner\n\n[1](../page.md#page) [2](../../README.md) [3](other.md)\n");

    let output = build(root.path());
    let built = output.path().canonicalize().unwrap();
    assert_none(&missing(&source, &built));
    let dead = dead_links(&built);
    let dead = dead.iter().filter(|problem| problem.starts_with("page.html") || problem.starts_with("folder"));
    let expected = [
        "folder/inner.html: ../../README.html leads out of the folder",
        "folder/inner.html: other.html does not exist",
        "page.html: folder/inner.html#page: no such anchor",
        "page.html: folder is not a page",
    ];
    assert_eq!(dead.collect::<Vec<_>>(), expected);

    write("docs/unlisted.md", "");
    std::fs::remove_file(built.join("folder/inner.html")).unwrap();
    let expected = ["SUMMARY.md does not list unlisted.md", "folder/inner.html is not built"];
    assert_eq!(missing(&source, &built), expected);
}
