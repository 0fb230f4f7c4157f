//! Generates the ttrpc code of our own services; pure Rust, no protoc.
use std::path::Path;

use ttrpc_codegen::{Codegen, Customize};

fn main() {
    println!("cargo:rerun-if-changed=proto");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    Codegen::new()
        .out_dir(&out)
        .inputs(["proto/ramet/guest/v1/guest.proto"])
        .include("proto")
        .rust_protobuf()
        .customize(Customize { async_all: true, ..Default::default() })
        .run()
        .expect("the protos in proto/ compile");
    for file in ["guest.rs", "guest_ttrpc.rs"] {
        strip_inner_attributes(&Path::new(&out).join(file));
    }
}

/// `include!` takes no inner attributes or inner docs, which the generators write.
fn strip_inner_attributes(path: &Path) {
    let text = std::fs::read_to_string(path).expect("generated file is readable");
    let kept: Vec<&str> = text.lines().filter(|l| !l.starts_with("#![") && !l.starts_with("//!")).collect();
    std::fs::write(path, kept.join("\n")).expect("generated file is writable");
}
