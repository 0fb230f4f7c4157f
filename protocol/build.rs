//! Generates the ttrpc code of our own services; pure Rust, no protoc.
use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

fn main() {
    println!("cargo:rerun-if-changed=proto");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    Codegen::new()
        .out_dir(&out)
        .inputs(["proto/ramet/guest/v1/guest.proto"])
        .include("proto")
        .rust_protobuf()
        .customize(Customize { async_all: true, gen_mod: true, ..Default::default() })
        .rust_protobuf_customize(ProtobufCustomize::default().gen_mod_rs(true))
        .run()
        .expect("the protos in proto/ compile");
}
