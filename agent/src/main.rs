//! `ramet-agent`: PID 1 of the guest. See the library for what it does.

use std::process::ExitCode;

use agent::init::{self, Doors};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let result = match args.split_first() {
        Some((command, rest)) if command == "container" => agent::container_command::main(rest),
        Some((command, [directory])) if command == "serve" => {
            init::log_to_console(tracing::Level::DEBUG);
            init::enable_controllers()
                .map_err(Into::into)
                .and_then(|()| init::serve(&Doors::Unix(directory.into())))
        }
        _ if std::process::id() == 1 => {
            init::main();
            Ok(())
        }
        _ => Err(anyhow::anyhow!(
            "usage: ramet-agent serve DIRECTORY; or as PID 1 of a guest"
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ramet-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}
