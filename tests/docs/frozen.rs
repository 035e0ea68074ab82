//! The migrations that a release contains do not change: sqlx compares their checksums.

use sha2::{Digest as _, Sha256};

use crate::{assert_none, files, repository, shown};

const FOLDERS: [&str; 3] = ["postgres", "mysql", "sqlite"];

/// Returns the folder, the name and the beginning of the checksum of each file that the page lists.
fn listed(page: &str) -> Vec<(&'static str, &str, &str)> {
    let rows = page.lines().filter(|line| line.starts_with("| `") && line.contains(".sql` |"));
    rows.flat_map(|row| {
        let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`')).skip(1);
        let file = cells.next().unwrap();
        FOLDERS.into_iter().zip(cells).filter(|(_, sum)| !sum.is_empty()).map(move |(folder, sum)| (folder, file, sum))
    })
    .collect()
}

#[test]
fn migrations_are_those_that_the_page_lists() {
    let migrations = repository().join("migrations");
    let page = std::fs::read_to_string(repository().join("docs/upgrading.md")).unwrap();
    let listed = listed(&page);
    let mut problems = Vec::new();
    for file in files(&migrations, "sql") {
        let sum: String =
            Sha256::digest(std::fs::read(&file).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect();
        let path = shown(&file, &migrations);
        match listed.iter().find(|(folder, name, _)| path == format!("{folder}/{name}")) {
            None => problems.push(format!("docs/upgrading.md does not list {path}: {sum}")),
            Some((.., known)) if !sum.starts_with(known) || known.len() < 16 => {
                problems.push(format!("{path} was changed ({sum}): databases have it as {known}; add a file instead"));
            }
            Some(_) => {}
        }
    }
    let gone = listed.iter().map(|(folder, name, _)| format!("{folder}/{name}"));
    problems.extend(gone.filter(|path| !migrations.join(path).exists()).map(|path| format!("{path} is gone")));
    assert_none(&problems);
}
