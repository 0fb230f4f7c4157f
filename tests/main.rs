//! The end-to-end tests: real containerd, real KVM. `cargo xtask lab test [filter]` runs them; each name is the sentence that it proves.
//!
//! | file | subject |
//! |---|---|
//! | `pod.rs` | what any runtime does; each test runs with runc's shim and with ours |
//! | `contract.rs` | the contract between containerd and a shim, without containerd |
//! | `exec.rs`, `stdio.rs` | further processes; streams |
//! | `volumes.rs` | host files and directories in containers |
//! | `checkpoint.rs`, `fork.rs` | a running container becomes an image; the image runs as forks |
//! | `image.rs` | checkpoint images travel, and damaged ones are refused |
//! | `odd_images.rs` | whiteouts, links, owners, names, many layers, users: as with runc |
//! | `net.rs`, `hooks.rs` | networks; OCI hooks |
//! | `snapshotter.rs` | layers, usage, removal, restarts |
//! | `limits.rs`, `memory.rs`, `spec.rs` | limits and statistics; freed memory; what the OCI spec asks for |
//! | `nerdctl.rs` | what nerdctl's users do |
//! | `errors.rs`, `crash.rs` | bad input; kill -9 of every process |
//! | `examples.rs`, `using.rs` | the examples and the transcripts in docs/using/ are what happens |
//! | `zz_leftovers.rs` | after all of it, nothing is left |

#[macro_use]
mod support;

mod checkpoint;
mod contract;
mod crash;
mod errors;
mod examples;
mod exec;
mod fork;
mod hooks;
mod image;
mod limits;
mod memory;
mod nerdctl;
mod net;
mod odd_images;
mod pod;
mod snapshotter;
mod spec;
mod stdio;
mod using;
mod volumes;
mod zz_leftovers;
