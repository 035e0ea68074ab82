//! A user of a server who has few rights.

use crate::{
    TestDatabase, TestDb,
    server::{database_of, unique_name},
};

/// A user of the test's database. The server keeps it until it is removed.
pub struct User {
    pub name: String,
    /// The test's database for this user.
    pub url: String,
    drop: Vec<String>,
}

impl<DB: TestDatabase> TestDb<DB> {
    /// Makes a user with rights on tables, such as `("SELECT, INSERT", "t_resource_lock")`. An
    /// empty password is none.
    pub async fn user(&self, password: &str, rights: &[(&str, &str)]) -> User {
        self.named_user(unique_name()[..16].to_owned(), password, rights).await
    }

    /// Creates a user of MariaDB whose name is longer than a label.
    pub async fn long_user(&self, rights: &[(&str, &str)]) -> User {
        self.named_user(format!("{}{}", &unique_name()[..16], "x".repeat(50)), "", rights).await
    }

    async fn named_user(&self, name: String, password: &str, rights: &[(&str, &str)]) -> User {
        let database = database_of(&self.url);
        let (users, verb, of, drop) = if self.server.name == "postgres" {
            let drop = vec![format!("DROP OWNED BY {name}"), format!("DROP ROLE {name}")];
            (vec![name.clone()], "PASSWORD", String::new(), drop)
        } else {
            // From `localhost` too, where an anonymous user may exist and would match first.
            let users = ["%", "localhost"].map(|host| format!("{name}@'{host}'")).to_vec();
            let drop = vec![format!("DROP USER {}", users.join(", "))];
            (users, "IDENTIFIED BY", format!("{database}."), drop)
        };
        let (how, secret) = match password {
            "" => (String::new(), String::new()),
            _ => (format!(" {verb} '{password}'"), format!(":{password}")),
        };
        for user in &users {
            self.execute(&format!("CREATE USER {user}{how}")).await;
            for (rights, table) in rights {
                self.execute(&format!("GRANT {rights} ON {of}{table} TO {user}")).await;
            }
        }
        let (scheme, rest) = self.url.split_once("://").unwrap();
        let address = rest.rsplit_once('@').map_or(rest, |(_, address)| address);
        let url = format!("{scheme}://{name}{secret}@{address}");
        User { name, url, drop }
    }
}

impl User {
    pub async fn remove<DB: TestDatabase>(self, db: &TestDb<DB>) {
        for statement in &self.drop {
            db.execute(statement).await;
        }
    }
}
