//! `ramet`: makes checkpoint images of running containers, shows them, removes them, and says what a host lacks.

mod build;
mod checkpoint_command;
mod client;
mod content;
mod doctor;
mod fork;
mod image;
mod images_command;
mod output;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Checkpoints and forks of running containers.
#[derive(Debug, Parser)]
#[command(name = "ramet", version, about, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: Command,
}

/// Where containerd is; the same flags and variables as ctr's.
#[derive(Clone, Debug, Args)]
struct Connection {
    /// Socket of containerd
    #[arg(
        short,
        long,
        global = true,
        env = "CONTAINERD_ADDRESS",
        default_value = "/run/containerd/containerd.sock"
    )]
    address: PathBuf,
    /// Namespace in containerd
    #[arg(short, long, global = true, env = "CONTAINERD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// Name of the snapshotter in containerd
    #[arg(long, global = true, env = "CONTAINERD_SNAPSHOTTER", default_value = "ramet")]
    snapshotter: String,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a checkpoint image of a running container
    Checkpoint(checkpoint_command::Arguments),
    /// Run a checkpoint image as a new container: prints and executes the ctr command for it
    Fork(fork::Arguments),
    /// List checkpoint images
    Ls(OutputFlag),
    /// Show everything about a checkpoint image
    Inspect(images_command::InspectArguments),
    /// Remove checkpoint images
    Rm(images_command::RemoveArguments),
    /// Check that this host can run Ramet
    Doctor(doctor::Arguments),
}

/// How results are printed.
#[derive(Clone, Copy, Debug, Args)]
struct OutputFlag {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("ramet: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(cli));
    // After an interruption a packing thread may still be busy with work that nobody wants.
    runtime.shutdown_background();
    match result {
        Ok(code) => code,
        Err(error) => {
            output::print_error(&error);
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let connection = &cli.connection;
    match cli.command {
        Command::Checkpoint(arguments) => checkpoint_command::run(connection, arguments).await,
        Command::Fork(arguments) => fork::run(connection, &arguments).await,
        Command::Ls(output) => images_command::list(connection, output).await,
        Command::Inspect(arguments) => images_command::inspect(connection, arguments).await,
        Command::Rm(arguments) => images_command::remove(connection, arguments).await,
        Command::Doctor(arguments) => doctor::run(connection, arguments).await,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn leave_running_is_the_default_and_can_be_turned_off() {
        let leave_running = |arguments: &[&str]| match Cli::parse_from(arguments).command {
            Command::Checkpoint(arguments) => arguments.leave_running,
            other => panic!("{other:?}"),
        };
        assert!(leave_running(&["ramet", "checkpoint", "c1", "warm:1"]));
        assert!(leave_running(&[
            "ramet",
            "checkpoint",
            "--leave-running",
            "c1",
            "warm:1"
        ]));
        assert!(!leave_running(&[
            "ramet",
            "checkpoint",
            "--leave-running=false",
            "c1",
            "warm:1"
        ]));
    }

    #[test]
    fn global_flags_may_follow_the_command() {
        let cli = Cli::parse_from([
            "ramet",
            "ls",
            "-n",
            "k8s.io",
            "-a",
            "/tmp/c.sock",
            "--snapshotter",
            "other",
        ]);
        assert_eq!(cli.connection.namespace, "k8s.io");
        assert_eq!(cli.connection.address, PathBuf::from("/tmp/c.sock"));
        assert_eq!(cli.connection.snapshotter, "other");
    }
}
