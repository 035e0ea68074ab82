//! Where the program finds the database's URL and its password, also a new one.

use std::path::Path;

use harness::{PROCESSES, TestDatabase, TestDb, eventually};

use crate::{
    program::{Stage, rowlock, start},
    program_cron::{ended_as, job, runs},
};

harness::tests!(
    everywhere(a_file_has_the_url, an_option_goes_before_a_variable),
    mysql_and_mariadb(a_new_password_is_used, the_file_of_mysqls_programs_is_read)
);

async fn a_file_has_the_url<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = stage.file("url");
    let list = || rowlock("list --database-url-file", &[file.to_str().unwrap()]);
    let ended = start(list()).ended().await.with(2);
    assert!(ended.err.contains("url: No such file or directory"), "{ended:?}");
    for text in ["", "\n", "postgres://a:secret@b/c\nmore\n"] {
        std::fs::write(&file, text).unwrap();
        let ended = start(list()).ended().await.with(2);
        assert!(ended.err.contains("has to be its only line") && !ended.err.contains("secret"), "{ended:?}");
    }
    std::fs::write(&file, format!("{}\n", db.url)).unwrap();
    start(list()).ended().await.with(0);
    // It goes before the variable.
    let mut command = list();
    command.env("DATABASE_URL", "postgres://127.0.0.1:1/none");
    start(command).ended().await.with(0);
}

async fn an_option_goes_before_a_variable<DB: TestDatabase>(db: TestDb<DB>) {
    let stage = Stage::new();
    let file = stage.file("url");
    std::fs::write(&file, &db.url).unwrap();
    let file = file.to_str().unwrap();
    for option in [["--database-url", &db.url], ["--database-url-file", file]] {
        let mut command = rowlock("list", &option);
        command.env("DATABASE_URL", "postgres://127.0.0.1:1/none").env("DATABASE_URL_FILE", stage.file("none"));
        start(command).ended().await.with(0);
        let both = start(rowlock("list --local", &option)).ended().await.with(2);
        assert!(both.err.contains("leave out --database-url and --database-url-file"), "{both:?}");
    }
    let mut local = rowlock("list --local --json", &[]);
    local.env("DATABASE_URL_FILE", file).env("XDG_STATE_HOME", stage.path());
    assert_eq!(start(local).ended().await.with(0).out, "[]\n");
    assert!(stage.file("rowlock/locks.db").exists());
}

/// A user with a password of the database of the test.
struct User {
    name: String,
    /// `127.0.0.1:3306/database`
    place: String,
}

impl User {
    async fn make<DB: TestDatabase>(db: &TestDb<DB>, password: &str) -> Self {
        let place = db.url.rsplit_once('@').unwrap().1.to_owned();
        let database = place.rsplit_once('/').unwrap().1;
        let name = format!("u{}", &database[database.len().saturating_sub(20)..]);
        let user = Self { name, place: place.clone() };
        user.each(db, "CREATE USER", &format!("IDENTIFIED BY '{password}'")).await;
        user.each(db, &format!("GRANT ALL ON `{database}`.* TO"), "").await;
        user
    }

    /// A server may have a user without a name for connections from its own machine, who would be
    /// taken for this one.
    async fn each<DB: TestDatabase>(&self, db: &TestDb<DB>, what: &str, how: &str) {
        for host in ["%", "localhost"] {
            db.execute(&format!("{what} '{}'@'{host}' {how}", self.name)).await;
        }
    }

    fn write_url(&self, file: &Path, password: &str) {
        let new = file.with_extension("new");
        std::fs::write(&new, format!("mysql://{}:{password}@{}\n", self.name, self.place)).unwrap();
        std::fs::rename(new, file).unwrap();
    }

    async fn drop<DB: TestDatabase>(self, db: &TestDb<DB>) {
        self.each(db, "DROP USER", "").await;
    }
}

async fn a_new_password_is_used<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, user) = (Stage::new(), User::make(&db, "first-word").await);
    let url = stage.file("url");
    user.write_url(&url, "first-word");
    let path = job(&stage, "k", "every = \"1s\"\nlease = \"2s\"", "true");
    let words = ["--database-url-file", url.to_str().unwrap(), "cron", path.to_str().unwrap()];
    let mut running = start(rowlock("-v", &words));
    ended_as(&db, "k", "succeeded").await;
    user.each(&db, "ALTER USER", "IDENTIFIED BY 'second-word'").await;
    user.write_url(&url, "second-word");
    running.complains("the password of the database has changed").await;
    // Connections that are open stay open until the server closes them.
    let ids = format!("SELECT GROUP_CONCAT(id) FROM {PROCESSES} WHERE user = '{}'", user.name);
    for id in db.text(&ids).await.unwrap().split(',') {
        db.execute(&format!("KILL {id}")).await;
    }
    let before = runs(&db, "k").await.len();
    eventually("it runs on", async || runs(&db, "k").await.len() > before + 1).await;
    // Another database is not followed.
    std::fs::write(&url, "mysql://root@127.0.0.1:1/none\n").unwrap();
    running.complains("the URL is that of another database now").await;
    let ended = running.stopped().await;
    assert!(!ended.err.contains("-word"), "{ended:?}");
    user.drop(&db).await;
}

async fn the_file_of_mysqls_programs_is_read<DB: TestDatabase>(db: TestDb<DB>) {
    let (stage, user) = (Stage::new(), User::make(&db, "a word").await);
    let text = format!("[client]\nuser = {}\npassword = \"a\\sword\"\n", user.name);
    std::fs::write(stage.file(".my.cnf"), text).unwrap();
    for (authority, code) in [("", 0), (&format!("{}@", user.name), 0), ("root:@", 0), ("none@", 69)] {
        let mut command = rowlock("list --database-url", &[&format!("mysql://{authority}{}", user.place)]);
        command.env("HOME", stage.path());
        let ended = start(command).ended().await.with(code);
        assert!(!ended.err.contains("a word"), "{ended:?}");
    }
    user.drop(&db).await;
}
