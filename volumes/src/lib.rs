//! Host files and directories for the containers of one virtual machine.
//!
//! The guest's kernel speaks FUSE; its agent carries whole messages over a stream, and a process of ours on the host answers them.
//! That process sees the shared trees and nothing else of the host: see [`jail`]. There is one for each machine that has volumes, and it
//! ends when the other end of its control socket is closed.
//!
//! | module | what it does |
//! |---|---|
//! | [`control`] | what the process is asked to do, and the client that starts it |
//! | [`server`] | the process |
//! | [`jail`] | its root directory and privileges |
//! | [`session`], [`frame`], [`handler`] | one stream: cut it into messages, answer each |
//! | `check`, `listing` | what of a message the file operations may not see, and what they leave out of listings |

mod check;
pub mod control;
pub mod frame;
pub mod handler;
pub mod jail;
mod listing;
mod seccomp;
pub mod server;
pub mod session;
#[expect(
    unsafe_code,
    reason = "securebits and descriptors that were received or inherited have no safe wrapper"
)]
mod sys;
#[cfg(test)]
mod testing;
