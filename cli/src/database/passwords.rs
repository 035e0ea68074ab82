//! Where passwords stand in a URL, and in the files of PostgreSQL's and MySQL's programs.

use std::collections::BTreeMap;

use percent_encoding::percent_decode_str;

use crate::format::without_quotes;

/// Returns the passwords of a URL, as they are written and as the server gets them.
pub fn of_url(url: &str) -> Vec<String> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // The second one is of a password whose special characters are not encoded.
    let users = [authority, rest].into_iter().filter_map(|text| text.rsplit_once('@'));
    let of_users = users.filter_map(|(user, _)| user.split_once(':')).map(|(_, password)| password);
    let settings = rest.split_once('?').map_or("", |(_, settings)| settings).split('&');
    let of_settings = settings.filter_map(|setting| setting.strip_prefix("password="));
    let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let of_users = of_users.flat_map(|text| [text.to_owned(), decoded(text)]);
    let of_settings = of_settings.flat_map(|text| [text.to_owned(), decoded(&text.replace('+', " "))]);
    of_users.chain(of_settings).filter(|password| !password.is_empty()).collect()
}

/// Returns the password of a line of `.pgpass`: `host:port:database:user:password`, with a
/// backslash before a colon or a backslash of a field.
pub fn of_pgpass(line: &str) -> Option<String> {
    let (mut fields, mut chars) = (vec![String::new()], line.chars());
    while let Some(c) = chars.next() {
        match (c, fields.len()) {
            (':', ..5) => fields.push(String::new()),
            ('\\', _) => fields.last_mut()?.extend(chars.next()),
            _ => fields.last_mut()?.push(c),
        }
    }
    fields.into_iter().nth(4)
}

/// Returns the settings of the section `[client]` of `.my.cnf`.
pub fn client_of_my_cnf(text: &str) -> BTreeMap<&str, String> {
    let mut section = "";
    let mut settings = BTreeMap::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = name.trim();
        } else if let ("client", Some((name, value))) = (section, line.split_once('=')) {
            settings.insert(name.trim(), unquoted(without_comment(value).trim()));
        }
    }
    settings
}

/// Takes a comment away, which begins at the first `#` that is not in quotes.
fn without_comment(value: &str) -> &str {
    let (mut quote, mut is_escaped) = (None, false);
    let end = value.find(|c| {
        if !is_escaped && matches!(c, '"' | '\'') && quote.is_none_or(|open| open == c) {
            quote = if quote.is_none() { Some(c) } else { None };
        }
        is_escaped = quote.is_some() && c == '\\' && !is_escaped;
        quote.is_none() && c == '#'
    });
    end.and_then(|end| value.get(..end)).unwrap_or(value)
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
    fn a_password_is_found_as_it_is_written_and_as_it_is() {
        let known = of_url("postgres://app:p%40ss/w@rd@db:5432/app?password=other+one");
        for password in ["p%40ss/w@rd", "p@ss/w@rd", "other+one", "other one"] {
            assert!(known.iter().any(|one| one == password), "{password}: {known:?}");
        }
        let known = of_url("postgres://app:secret@db/app?application_name=cron@host");
        assert!(known.iter().any(|one| one == "secret"), "an at sign elsewhere hides none: {known:?}");
    }

    #[test]
    fn a_url_without_a_password_has_none() {
        for url in ["postgres://app@db/app", "sqlite:a:b.db", "sqlite:///a@b:c", "mysql://root:@db/app", ""] {
            let known = of_url(url);
            assert!(known.is_empty(), "{url}: {known:?}");
        }
    }

    #[test]
    fn the_fifth_field_of_a_line_is_its_password() {
        assert_eq!(of_pgpass(r"*:5432:app:me:a\:b\\c:d").as_deref(), Some(r"a:b\c:d"));
        assert_eq!((of_pgpass("# a comment"), of_pgpass("a:b:c:d")), (None, None));
    }

    #[test]
    fn only_the_section_of_clients_counts() {
        let text = "password = other\n[client]\n# password=old\nuser = app  # of the \"app\"\npassword=\"a #b\\\\c\\s\" # it's\n[mysqld]\nuser=mysql\n";
        let settings = client_of_my_cnf(text);
        assert_eq!(settings.get("user").map(String::as_str), Some("app"));
        assert_eq!(settings.get("password").map(String::as_str), Some("a #b\\c "));
        assert_eq!(settings.len(), 2);
        assert!(client_of_my_cnf("").is_empty());
    }
}
