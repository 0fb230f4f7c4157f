//! Every chore of the project: `cargo xtask demo`, `test`, `lab`, `image`, `bench`, `check`.

mod base;
mod bench;
mod beside_runc;
mod build;
mod check;
mod containerd;
mod cpio;
mod demo;
mod e2e;
mod guest;
mod images;
mod kernel;
mod lab;
mod mirror;
mod setup;
mod snapshot_suite;
mod test;
mod tools;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Every chore of the project")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all tests, in every tier; does all its set-up first
    Test(test::Args),
    /// Provision a parent, checkpoint it and fork it twelve times, beside cold workers and plain containers
    Demo(demo::Args),
    /// Work with the lab, a throw-away VM that has KVM
    Lab {
        #[command(subcommand)]
        command: lab::Command,
    },
    /// Build the guest image (kernel and initramfs) into target/guest
    Image {
        /// Use this static program as /init instead of ramet-agent
        #[arg(long, value_name = "PATH")]
        init: Option<PathBuf>,
    },
    /// Build the OCI images of the tests and the demo into target/images
    OciImages,
    /// Benchmarks
    Bench {
        #[command(subcommand)]
        command: bench::Bench,
    },
    /// Formatting, lints, file sizes and the direction of dependencies
    Check,
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<ExitCode> {
    let ws = Workspace::locate()?;
    match args.command {
        Command::Test(args) => test::run(&ws, &args),
        Command::Demo(args) => demo::run(&ws, &args),
        Command::Lab { command } => lab::command(&ws, command),
        Command::Image { init } => {
            setup::ensure()?;
            if init.is_none() {
                build::programs(&ws, &["agent"])?;
            }
            let image = guest::build(&ws, init.as_deref())?;
            println!("{}\n{}", image.kernel.display(), image.initramfs.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::OciImages => {
            setup::ensure()?;
            for image in images::build(&ws)? {
                println!("{}", image.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench { command } => bench::run(&ws, &command),
        Command::Check => check::run(&ws),
    }
}
