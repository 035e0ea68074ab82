//! What a command of `rowlock cron` finds when it begins.

use std::{collections::BTreeMap, ffi::OsString, path::Path};

use nix::unistd::{Uid, User};
use tokio::process::Command;

use crate::{
    args::process::Beginning,
    process::{find::find_in, service},
};

/// The variable that has the database's password. A command gets it only if its job asks for it.
const DATABASE_URL: &str = "DATABASE_URL";
/// The variables that tell a command about its user.
const OF_USER: [&str; 3] = ["HOME", "USER", "LOGNAME"];

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
        if !folder.is_dir() {
            return Some(format!("cwd: there is no folder {}", folder.display()));
        }
        if let Some(Err(wrong)) = user.as_deref().map(user_of_commands) {
            return Some(format!("user: {wrong}"));
        }
        let path = self.variables.get("PATH").map(OsString::from).or_else(|| std::env::var_os("PATH"));
        find_in(command, path.as_deref(), folder).err().map(|failure| format!("command: {failure}"))
    }

    /// Gives the process above the command what the command is to have.
    pub fn apply(&self, command: &mut Command) {
        if !self.database_url {
            command.env_remove(DATABASE_URL);
        }
        // A command does not speak for the service.
        for name in service::VARIABLES {
            command.env_remove(name);
        }
        if self.beginning.user.is_some() {
            for name in OF_USER {
                command.env_remove(name);
            }
        }
        command.envs(&self.variables);
    }
}

/// Returns a user as whom this process can run commands: its own, and for root any.
pub fn user_of_commands(name: &str) -> Result<User, String> {
    let user = User::from_name(name).map_err(|error| format!("{name} could not be looked up: {error}"))?;
    let user = user.ok_or_else(|| format!("there is no user {name}"))?;
    let own = Uid::effective();
    let possible = user.uid == own || own.is_root();
    possible.then_some(user).ok_or_else(|| format!("only root can run commands as {name}"))
}
