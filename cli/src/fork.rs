//! `ramet fork`: shorthand for the `ctr run` that forks a checkpoint image.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::Context;

use crate::Connection;
use crate::checkpoint_command::RUNTIME;
use crate::client::Client;
use crate::image;
use crate::output::command_line;

/// Arguments of `ramet fork`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Print the command and stop
    #[arg(long)]
    dry_run: bool,
    /// Run in the background
    #[arg(short, long)]
    detach: bool,
    /// Name of the checkpoint image
    image: String,
    /// Id of the new container
    container: String,
    /// Command to run in the fork; without one the checkpointed process goes on
    #[arg(last = true)]
    args: Vec<String>,
}

/// Becomes `ctr run`.
pub(crate) async fn run(connection: &Connection, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let words = words(connection, arguments);
    if arguments.dry_run {
        println!("ctr {}", command_line(&words, usize::MAX));
        return Ok(ExitCode::SUCCESS);
    }
    let client = Client::connect(connection).await?;
    let record = image::get(&client, &arguments.image).await?;
    let resolved = image::resolve(&client, &record).await?;
    resolved
        .checkpoint()
        .with_context(|| format!("image {} is not a checkpoint image", arguments.image))?;
    let error = Command::new("ctr").args(words).exec();
    Err(error).context("cannot run ctr, containerd's command line client")
}

fn words(connection: &Connection, arguments: &Arguments) -> Vec<String> {
    let mut words = vec![
        "--address".to_owned(),
        connection.address.display().to_string(),
        "--namespace".to_owned(),
        connection.namespace.clone(),
        "run".to_owned(),
        "--runtime".to_owned(),
        RUNTIME.to_owned(),
        "--snapshotter".to_owned(),
        connection.snapshotter.clone(),
        if arguments.detach { "--detach" } else { "--rm" }.to_owned(),
        arguments.image.clone(),
        arguments.container.clone(),
    ];
    words.extend(arguments.args.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    #[test]
    fn the_command_is_an_ordinary_ctr_run() {
        let cli = Cli::parse_from(["ramet", "-n", "demo", "fork", "warm:1", "w7", "--", "sh", "-c", "ls -l"]);
        let Command::Fork(arguments) = &cli.command else {
            panic!("{cli:?}")
        };
        let line = command_line(&words(&cli.connection, arguments), usize::MAX);
        assert_eq!(
            line,
            "--address /run/containerd/containerd.sock --namespace demo run --runtime io.containerd.ramet.v2 \
             --snapshotter ramet --rm warm:1 w7 sh -c 'ls -l'"
        );
    }
}
