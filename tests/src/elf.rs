//! A program of a few instructions, for images in which no tool shows an extended attribute.

/// Where it is loaded.
const BASE: u32 = 0x40_0000;
/// Size of the ELF header and of the one program header.
const HEADERS: u32 = 64 + 56;
/// Longest value that is printed.
const ROOM: u8 = 64;

/// A static x86-64 program that prints the extended attribute `name` of `path`, and nothing if there is none.
#[must_use]
pub fn attribute_printer(path: &str, name: &str) -> Vec<u8> {
    let length = |text: &str| u32::try_from(text.len() + 1).unwrap_or(u32::MAX / 4);
    let begin = BASE + HEADERS;
    let code_length = u32::try_from(code(0, 0, 0).len()).unwrap_or_default();
    let path_at = begin + code_length;
    let name_at = path_at + length(path);
    let buffer_at = name_at + length(name);
    let mut program = header(begin, buffer_at - BASE);
    program.extend(code(path_at, name_at, buffer_at));
    for text in [path, name] {
        program.extend(text.as_bytes());
        program.push(0);
    }
    program
}

fn code(path: u32, name: u32, buffer: u32) -> Vec<u8> {
    let [path, name, buffer] = [path, name, buffer].map(u32::to_le_bytes);
    let syscall = [0x0f, 0x05];
    let parts: [&[u8]; 14] = [
        &[0xb8, 191, 0, 0, 0],            // mov eax, getxattr
        &[&[0xbf][..], &path].concat(),   // mov edi, path
        &[&[0xbe][..], &name].concat(),   // mov esi, name
        &[&[0xba][..], &buffer].concat(), // mov edx, buffer
        &[0x41, 0xba, ROOM, 0, 0, 0],     // mov r10d, ROOM
        &syscall,
        &[0x85, 0xc0, 0x78, 0x13],        // test eax, eax; js exit
        &[0x89, 0xc2],                    // mov edx, eax
        &[0xb8, 1, 0, 0, 0],              // mov eax, write
        &[0xbf, 1, 0, 0, 0],              // mov edi, stdout
        &[&[0xbe][..], &buffer].concat(), // mov esi, buffer
        &syscall,
        &[0xb8, 60, 0, 0, 0, 0x31, 0xff], // exit: mov eax, exit; xor edi, edi
        &syscall,
    ];
    parts.concat()
}

/// One segment with everything in it, and room for the buffer behind.
fn header(begin: u32, size: u32) -> Vec<u8> {
    let wide = |number: u32| u64::from(number).to_le_bytes();
    let parts: [&[u8]; 13] = [
        &[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        // An executable for x86-64.
        &[2, 0, 62, 0, 1, 0, 0, 0],
        &wide(begin),
        &wide(64),
        &wide(0),
        // No flags; sizes and numbers of headers.
        &[0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        // Loaded with all permissions.
        &[1, 0, 0, 0, 7, 0, 0, 0],
        &wide(0),
        &wide(BASE),
        &wide(BASE),
        &wide(size),
        &wide(size + u32::from(ROOM)),
        &wide(4096),
    ];
    parts.concat()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn it_runs_and_prints_nothing_of_what_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        std::fs::write(&program, attribute_printer(program.to_str().unwrap(), "user.none")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let done = Command::new(&program).output().unwrap();
        assert!(done.status.success() && done.stdout.is_empty(), "{done:?}");
    }
}
