//! The tests of a module, by the servers that they stop and kill.

use std::{
    future::Future,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use libtest_mimic::Trial;
use tokio::time::timeout;

/// No test takes half as long.
const LONGEST: Duration = Duration::from_secs(600);

/// Servers in the folder that the variable names. Their tests run one after the other, because one
/// kills what another would use. Tests on other servers run in parallel with them.
pub struct Servers {
    variable: &'static str,
    in_use: Mutex<()>,
    /// The servers are these, if their folder has a file, which stands for something.
    same: Option<(&'static Self, &'static str, &'static str)>,
}

impl Servers {
    const fn new(variable: &'static str) -> Self {
        Self { variable, in_use: Mutex::new(()), same: None }
    }

    const fn with(&'static self, file: &'static str, what: &'static str) -> Self {
        Self { same: Some((self, file, what)), ..Self::new(self.variable) }
    }

    fn in_use(&self) -> &Mutex<()> {
        self.same.map_or(&self.in_use, |(servers, ..)| &servers.in_use)
    }

    /// Returns the folder, or what is missing.
    fn folder(&self) -> Result<PathBuf, String> {
        let folder = std::env::var_os(self.variable).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let folder = folder.ok_or_else(|| format!("{}: scripts/clusters", self.variable))?;
        match self.same {
            Some((_, file, what)) if !folder.join(file).exists() => Err(format!("{what}: scripts/clusters says why")),
            _ => Ok(folder),
        }
    }
}

pub static GALERA: Servers = Servers::new("GALERA");
pub static GROUP: Servers = Servers::new("GROUP");
/// The nodes have networks of their own.
pub static SWITCH: Servers = GROUP.with("switch", "networks that can be split");
pub static POSTGRES: Servers = Servers::new("ALONE");
pub static MARIADB: Servers = Servers::new("ALONE");
pub static SYNCHRONOUS: Servers = Servers::new("SYNCHRONOUS");
pub static ASYNCHRONOUS: Servers = Servers::new("ASYNCHRONOUS");
pub static PATRONI: Servers = Servers::new("PATRONI");

/// Lists the tests of a module, as `SERVERS(name, ...), ...`, in a function `register` of that
/// module.
macro_rules! tests {
    ($($servers:ident($($name:ident),+ $(,)?)),+ $(,)?) => {
        /// Adds the tests of this module to the trials.
        pub fn register(trials: &mut Vec<libtest_mimic::Trial>) {
            let module = module_path!().rsplit("::").next().unwrap_or_default();
            $($(
                let name = format!("{module}::{}", stringify!($name));
                trials.push($crate::suite::trial(&$crate::suite::$servers, name, $name));
            )+)+
        }
    };
}

pub(crate) use tests;

pub fn trial<F>(servers: &'static Servers, name: String, test: fn(PathBuf) -> F) -> Trial
where
    F: Future<Output = ()> + 'static,
{
    let folder = servers.folder();
    let kind = folder.as_ref().err().map(|missing| format!("needs {missing}")).unwrap_or_default();
    let missing = folder.is_err();
    let run = move || {
        let _in_use = servers.in_use().lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let folder = folder?;
        runtime.block_on(async { timeout(LONGEST, test(folder)).await })?;
        Ok(())
    };
    Trial::test(name, run).with_ignored_flag(missing).with_kind(kind)
}
