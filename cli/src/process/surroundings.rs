//! What a command of `rowlock cron` finds when it begins.

use std::{collections::BTreeMap, ffi::OsString, io::ErrorKind, path::Path};

use nix::unistd::{Uid, User};
use tokio::process::Command;

use crate::{
    args::process::Beginning,
    process::{find::find_in, service},
};

/// The variables that lead to the database, with its password.
const OF_DATABASE: [&str; 4] = ["DATABASE_URL", "DATABASE_URL_FILE", "PGPASSWORD", "PGPASSFILE"];

/// The variables of claims. Those of a program around this one are not the command's.
pub const OF_CLAIMS: [&str; 6] =
    ["ROWLOCK_KEY", "ROWLOCK_TOKEN", "ROWLOCK_HOLDER", "ROWLOCK_TOKENS", "ROWLOCK_PERMIT", "ROWLOCK_WRITER_TOKEN"];

#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    pub variables: BTreeMap<String, String>,
    pub beginning: Beginning,
    /// Whether the command gets the database's URL.
    pub database_url: bool,
}

impl Surroundings {
    /// Returns why the command cannot run here, if it cannot.
    pub fn refusal(&self, command: &[OsString]) -> Option<String> {
        let Beginning { user, cwd, .. } = &self.beginning;
        let folder = cwd.as_deref().unwrap_or(Path::new("."));
        match std::fs::metadata(folder) {
            Ok(found) if found.is_dir() => {}
            // The command's user may have a folder that root cannot enter.
            Err(error) if error.kind() == ErrorKind::PermissionDenied && user.is_some() => {}
            _ => return Some(format!("cwd: there is no folder {}", folder.display())),
        }
        if let Some(Err(wrong)) = user.as_deref().map(user_of_commands) {
            return Some(format!("user: {wrong}"));
        }
        let path = self.variables.get("PATH").map(OsString::from).or_else(|| std::env::var_os("PATH"));
        find_in(command, path.as_deref(), folder).err().map(|failure| format!("command: {failure}"))
    }

    /// Gives the process above the command what the command is to have. A command of another user
    /// gets none of this program's variables but `PATH`.
    pub fn apply(&self, command: &mut Command, database_url: Option<&str>) {
        if self.beginning.user.is_some() {
            command.env_clear();
            command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        }
        // A command does not speak for the service either.
        for name in OF_DATABASE.into_iter().chain(OF_CLAIMS).chain(service::VARIABLES) {
            command.env_remove(name);
        }
        command.envs(database_url.map(|url| ("DATABASE_URL", url)));
        command.envs(&self.variables);
    }
}

/// Returns a user as whom this process can run commands: its own, and for root any.
pub fn user_of_commands(name: &str) -> Result<User, String> {
    let user = User::from_name(name).map_err(|error| format!("{name} could not be looked up: {error}"))?;
    let user = user.ok_or_else(|| format!("there is no user {name}"))?;
    let own = Uid::effective();
    match () {
        () if user.uid == own => Ok(user),
        () if !own.is_root() => Err(format!("only root can run commands as {name}")),
        // Its groups cannot be given up there.
        () if cfg!(target_vendor = "apple") => Err(format!("commands cannot run as {name} on this system")),
        () => Ok(user),
    }
}
