//! Another kernel: user-mode-linux, a Linux that runs as a process, for what the machine's own kernel may lack (IPVS,
//! dummy devices, SCTP).
//!
//! In: a command, and what it may use. Out: a process that runs the command in that kernel, on the machine's files. It sees
//! them all; what it writes goes to memory, except in folders that are shared. The process has a mount and a process
//! namespace of its own, which end with it: nothing of it can stay.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::process::Command;
use tokio::time::timeout;

use crate::command::{command, output, quoted};
use crate::stamp::{Inputs, cached, repository};

/// What a kernel is started with.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Its memory in MiB; taken from the host as it is used.
    pub memory: u32,
    /// Folders in which it writes to the host's files, by absolute paths.
    pub shared: Vec<PathBuf>,
    /// More arguments of the kernel, such as a network device.
    pub arguments: Vec<String>,
}

impl Default for Machine {
    fn default() -> Self {
        Self { memory: 1024, shared: Vec::new(), arguments: Vec::new() }
    }
}

impl Machine {
    /// The words of a host's command that boots the kernel, runs `script` in a shell in it, and exits as the script does;
    /// with 125 and the kernel's messages if it did not come to that. The environment is handed on. Standard output and
    /// error are the script's, its standard input is empty.
    pub async fn words(&self, script: &str) -> Result<Vec<String>> {
        ensure!(
            Path::new("/usr/bin/linux.uml").exists() && Path::new("/sbin/modprobe").exists(),
            "user-mode-linux is missing: apt-get install user-mode-linux kmod"
        );
        let mut shared = Vec::new();
        for folder in &self.shared {
            let path = text(folder.as_os_str())?;
            ensure!(folder.is_absolute() && folder.is_dir(), "{path}: not the absolute path of a folder");
            ensure!(!path.contains(['\n', ',']), "{path}: a shared folder's path has no comma");
            shared.push(path);
        }
        let scripts = repository().join("e2e/src/uml");
        let unshare =
            ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child=KILL", "--", "sh"];
        let mut words = unshare.map(str::to_owned).to_vec();
        for path in [scripts.join("host.sh"), xstate().await?, scripts.join("init.sh")] {
            words.push(text(path.as_os_str())?.to_owned());
        }
        words.extend([script.to_owned(), shared.join("\n"), format!("mem={}M", self.memory)]);
        words.extend(self.arguments.iter().cloned());
        Ok(words)
    }

    /// The command of these words, which ends with the thread that starts it: then setpriv is killed, with it unshare, and
    /// so all inside.
    pub async fn command(&self, script: &str) -> Result<Command> {
        let mut setpriv = command("setpriv", ["--pdeathsig", "KILL"]);
        setpriv.args(self.words(script).await?);
        Ok(setpriv)
    }
}

/// A script that becomes `words` in the folder that this process is in.
pub fn script(words: &[OsString]) -> Result<String> {
    let mut script = format!("cd {} && exec", quoted(text(std::env::current_dir()?.as_os_str())?));
    for word in words {
        script += " ";
        script += &quoted(text(word)?);
    }
    Ok(script)
}

fn text(word: &OsStr) -> Result<&str> {
    word.to_str().with_context(|| format!("{}: not UTF-8", word.display()))
}

/// What is preloaded into user-mode-linux; says itself why.
async fn xstate() -> Result<PathBuf> {
    let source = repository().join("e2e/src/uml/xstate.c");
    cached("uml-xstate.so", Inputs::new().path(&source)?, async |to| {
        output(command("cc", ["-O2", "-shared", "-fPIC", "-o"]).arg(to).arg(&source)).await.map(drop)
    })
    .await
}

/// Runs `command`, made by [`Machine::command`], to its end: its exit status, or 124 if it takes longer than `limit`.
pub async fn run(mut command: Command, limit: Duration) -> Result<u8> {
    let mut child =
        command.stdin(Stdio::null()).spawn().context("cannot start setpriv: is util-linux installed?")?;
    if let Ok(status) = timeout(limit, child.wait()).await {
        // Without a status it was killed by a signal.
        return Ok(status?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(125));
    }
    child.kill().await?;
    eprintln!("uml: stopped after {} s", limit.as_secs());
    Ok(124)
}
