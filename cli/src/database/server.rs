//! How connections to a server are opened: from a URL, and from the files with its password.

use std::{path::PathBuf, str::FromStr as _};

use sqlx::{mysql::MySqlConnectOptions, postgres::PgConnectOptions};

use crate::{
    database::{passwords::client_of_my_cnf, source::Secrets},
    exit::{Failure, USAGE},
};

/// How connections to a server are opened.
pub trait Server: Sized + Send {
    fn read(secrets: &Secrets) -> Result<Self, Failure>;
    /// The address of the server for messages, without user name and settings.
    fn address(&self) -> String;
}

fn on_server(host: &str, port: u16, socket: Option<&PathBuf>, database: Option<&str>) -> String {
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
    let server = socket.map_or(format!("{host}:{port}"), |socket| socket.display().to_string());
    database.map_or(server.clone(), |database| format!("{server}, database {database}"))
}

impl Server for PgConnectOptions {
    /// The driver reads `.pgpass` by itself.
    fn read(secrets: &Secrets) -> Result<Self, Failure> {
        Self::from_str(&secrets.url).map_err(unreadable)
    }

    fn address(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

impl Server for MySqlConnectOptions {
    /// The section `[client]` of `.my.cnf` has the user and the password that the URL does not
    /// have.
    fn read(secrets: &Secrets) -> Result<Self, Failure> {
        let mut options = Self::from_str(&secrets.url).map_err(unreadable)?;
        let rest = secrets.url.split_once("://").map_or("", |(_, rest)| rest);
        let user = rest.rsplit_once('@').map(|(user, _)| user).filter(|user| !user.is_empty());
        let client = client_of_my_cnf(&secrets.passwords);
        if let Some(name) = client.get("user").filter(|_| user.is_none()) {
            options = options.username(name);
        }
        if let Some(password) = client.get("password").filter(|_| user.is_none_or(|user| !user.contains(':'))) {
            options = options.password(password);
        }
        Ok(options)
    }

    fn address(&self) -> String {
        on_server(self.get_host(), self.get_port(), self.get_socket(), self.get_database())
    }
}

pub fn unreadable(_: sqlx::Error) -> Failure {
    // The parser's error may quote parts of the URL.
    Failure::new(
        USAGE,
        "the database URL cannot be read: write it like postgres://user:password@host:5432/database, with special characters percent-encoded",
    )
}
