//! The migrations that a release contains do not change: sqlx compares their checksums. A file of
//! functions that is changed gets another name and another version.

use std::path::PathBuf;

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

fn changed(folder: &str, advice: &str) -> Vec<String> {
    let (folder, repository) = (repository().join(folder), repository());
    let page = std::fs::read_to_string(repository.join("docs/upgrading.md")).unwrap();
    let listed = listed(&page);
    let check = |file: PathBuf| {
        let sum = Sha256::digest(std::fs::read(&file).unwrap());
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = shown(&file, &folder);
        match listed.iter().find(|(place, name, _)| path == format!("{place}/{name}")) {
            None => Some(format!("docs/upgrading.md does not list {path}: {sum}")),
            Some((.., known)) if !sum.starts_with(known) || known.len() < 16 => {
                Some(format!("{path} was changed ({sum}), and databases have it as {known}: {advice}"))
            }
            Some(_) => None,
        }
    };
    files(&folder, "sql").into_iter().filter_map(check).collect()
}

#[test]
fn migrations_are_those_that_the_page_lists() {
    assert_none(&changed("migrations", "add a file instead"));
    let page = std::fs::read_to_string(repository().join("docs/upgrading.md")).unwrap();
    let gone = listed(&page).into_iter().map(|(folder, name, _)| format!("{folder}/{name}"));
    let exists =
        |path: &String| ["migrations", "functions"].iter().any(|root| repository().join(root).join(path).exists());
    assert_none(&gone.filter(|path| !exists(path)).map(|path| format!("{path} is gone")).collect::<Vec<_>>());
}

#[test]
fn functions_that_are_changed_get_another_version() {
    assert_none(&changed(
        "functions",
        "give the file another name, and rowlock_version and FUNCTIONS_VERSION its date",
    ));
    let schema = std::fs::read_to_string(repository().join("src/store/schema.rs")).unwrap();
    for file in files(&repository().join("functions"), "sql") {
        let version = &file.file_name().unwrap().to_str().unwrap()[..8];
        let constant = format!("FUNCTIONS_VERSION: i64 = {}_{}_{};", &version[..2], &version[2..5], &version[5..]);
        assert!(schema.contains(&constant), "src/store/schema.rs lacks {constant}");
        let text = std::fs::read_to_string(&file).unwrap();
        let has = |before| text.contains(&format!("{before} {version}"));
        assert!(has("SELECT") && has(">"), "{file:?}");
    }
}
