//! Generates the gRPC code of containerd's snapshots service. Needs `protoc` (Debian: protobuf-compiler).

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto");
    tonic_prost_build::configure()
        .btree_map(".")
        .emit_rerun_if_changed(false)
        .include_file("containerd.rs")
        .compile_protos(
            &["proto/github.com/containerd/containerd/api/services/snapshots/v1/snapshots.proto"],
            &["proto"],
        )
}
