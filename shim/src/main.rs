//! `containerd-shim-ramet-v2`; see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    shim::bootstrap::main()
}
