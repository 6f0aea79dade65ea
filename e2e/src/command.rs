//! Running other programs.
//!
//! In: a command. Out: its standard output, or an error that holds the command line, the exit status and what
//! it printed, so that nobody has to run it again to learn why it failed.

use std::ffi::OsStr;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// A command of `program` with `args`.
pub fn command<I, S>(program: impl AsRef<OsStr>, args: I) -> Command
where
    I: IntoIterator<Item = S>,
    S: AsRef<OsStr>,
{
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// Runs `command` to its end and returns its standard output.
pub async fn output(command: &mut Command) -> Result<String> {
    output_with_input(command, "").await
}

/// Runs `command` with `input` as its standard input and returns its standard output.
pub async fn output_with_input(command: &mut Command, input: &str) -> Result<String> {
    let shown = show(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().with_context(|| format!("cannot start `{shown}`: is it installed?"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read its input ends the pipe early; its exit status says if that was wrong.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    let output = child.wait_with_output().await.with_context(|| format!("waiting for `{shown}`"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` failed ({}):\n{}{}", output.status, stderr, stdout);
    }
    Ok(stdout)
}

/// The command line, for messages.
fn show(command: &Command) -> String {
    let command = command.as_std();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let mut line = words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ");
    if line.len() > 300 {
        let cut = line.floor_char_boundary(300);
        line.truncate(cut);
        line.push('…');
    }
    line
}

/// Quotes `text` as one word for `sh`.
#[must_use]
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_is_returned_and_failure_explained() {
        assert_eq!(output_with_input(&mut command("cat", ["-"]), "hello").await.unwrap(), "hello");
        let error = output(&mut command("sh", ["-c", "echo why >&2; exit 3"])).await.unwrap_err().to_string();
        assert!(error.contains("sh -c") && error.contains("why") && error.contains('3'), "{error}");
        let error = output(&mut command("no-such-program", [""; 0])).await.unwrap_err();
        assert!(format!("{error:#}").contains("is it installed"), "{error:#}");
    }

    #[tokio::test]
    async fn quoted_survives_the_shell() {
        let text = r#"it's "$HOME" \ done"#;
        let script = format!("printf %s {}", quoted(text));
        assert_eq!(output(&mut command("sh", ["-c", &script])).await.unwrap(), text);
    }
}
