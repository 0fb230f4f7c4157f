//! Generates the ttrpc code of our own services; pure Rust, no protoc.
use std::path::Path;

use ttrpc_codegen::{Codegen, Customize};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = std::env::var("OUT_DIR")?;
    Codegen::new()
        .out_dir(&out)
        .inputs(["proto/ramet/guest/v1/guest.proto"])
        .include("proto")
        .rust_protobuf()
        .customize(Customize {
            async_all: true,
            ..Default::default()
        })
        .run()?;
    for file in ["guest.rs", "guest_ttrpc.rs"] {
        strip_inner_attributes(&Path::new(&out).join(file))?;
    }
    Ok(())
}

/// `include!` takes no inner attributes or inner docs, which the generators write.
fn strip_inner_attributes(path: &Path) -> std::io::Result<()> {
    let text = std::fs::read_to_string(path)?;
    let kept: Vec<&str> = text
        .lines()
        .filter(|l| !l.starts_with("#![") && !l.starts_with("//!"))
        .collect();
    std::fs::write(path, kept.join("\n"))
}
