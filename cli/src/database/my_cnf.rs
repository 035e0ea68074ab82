//! The file in which MySQL's programs find a user's password.

use std::collections::BTreeMap;

use crate::format::without_quotes;

/// Returns the settings of the section `[client]`.
pub fn client(text: &str) -> BTreeMap<&str, String> {
    let mut section = "";
    let mut settings = BTreeMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.trim();
        } else if let ("client", Some((name, value))) = (section, line.split_once('=')) {
            settings.insert(name.trim(), unquoted(value.trim()));
        }
    }
    settings
}

/// Takes quotes away, and replaces what a backslash stands for, as MySQL's programs do.
fn unquoted(text: &str) -> String {
    let text = without_quotes(text);
    let (mut out, mut chars) = (String::with_capacity(text.len()), text.chars());
    while let Some(c) = chars.next() {
        match (c, chars.clone().next()) {
            ('\\', Some(next @ ('\\' | 's' | 't' | 'n' | 'r' | 'b' | '"' | '\''))) => {
                chars.next();
                out.push(match next {
                    's' => ' ',
                    't' => '\t',
                    'n' => '\n',
                    'r' => '\r',
                    'b' => '\u{8}',
                    same => same,
                });
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_section_of_clients_counts() {
        let text =
            "password = other\n[client]\n# password=old\nuser = app\npassword=\"a #b\\\\c\\s\"\n[mysqld]\nuser=mysql\n";
        let settings = client(text);
        assert_eq!(settings.get("user").map(String::as_str), Some("app"));
        assert_eq!(settings.get("password").map(String::as_str), Some("a #b\\c "));
        assert_eq!(settings.len(), 2);
        assert!(client("").is_empty());
    }
}
