//! Writes cpio archives in the "newc" format, the one that Linux unpacks as its initramfs.

/// An archive being written in memory. The output depends on the calls alone: no times, no owners.
pub(crate) struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
}

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFCHR: u32 = 0o020_000;

struct Entry<'a> {
    mode: u32,
    links: u32,
    device: (u32, u32),
    data: &'a [u8],
}

impl Archive {
    pub(crate) fn new() -> Self {
        Self {
            bytes: Vec::new(),
            next_inode: 1,
        }
    }

    /// Adds a directory.
    pub(crate) fn dir(&mut self, path: &str) {
        self.entry(
            path,
            &Entry {
                mode: S_IFDIR | 0o755,
                links: 2,
                device: (0, 0),
                data: &[],
            },
        );
    }

    /// Adds a regular file.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, data: &[u8]) {
        self.entry(
            path,
            &Entry {
                mode: S_IFREG | permissions,
                links: 1,
                device: (0, 0),
                data,
            },
        );
    }

    /// Adds a character device.
    pub(crate) fn character_device(&mut self, path: &str, permissions: u32, major: u32, minor: u32) {
        self.entry(
            path,
            &Entry {
                mode: S_IFCHR | permissions,
                links: 1,
                device: (major, minor),
                data: &[],
            },
        );
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.next_inode = 0;
        self.entry(
            "TRAILER!!!",
            &Entry {
                mode: 0,
                links: 1,
                device: (0, 0),
                data: &[],
            },
        );
        self.bytes
    }

    fn entry(&mut self, path: &str, entry: &Entry<'_>) {
        let name_len = path.len() + 1;
        self.bytes.extend_from_slice(b"070701");
        // inode, mode, uid, gid, links, mtime, size, device major and minor, special major and minor, name size, checksum
        self.number(self.next_inode);
        self.number(entry.mode);
        self.number(0);
        self.number(0);
        self.number(entry.links);
        self.number(0);
        self.number(entry.data.len());
        self.number(0);
        self.number(0);
        self.number(entry.device.0);
        self.number(entry.device.1);
        self.number(name_len);
        self.number(0);
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(entry.data);
        self.align();
        self.next_inode += 1;
    }

    fn number(&mut self, value: impl std::fmt::UpperHex) {
        self.bytes.extend_from_slice(format!("{value:08X}").as_bytes());
    }

    fn align(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_and_data_are_aligned() {
        let mut archive = Archive::new();
        archive.dir("a");
        archive.file("a/b", 0o644, b"hello");
        archive.character_device("a/c", 0o600, 5, 1);
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, w)| *w == b"070701")
            .map(|(at, _)| at)
            .collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|at| at % 4 == 0));
        // The size field of the file, and its content after the padded name.
        let file = &bytes[starts[1]..];
        assert_eq!(&file[6 + 8 * 6..6 + 8 * 7], b"00000005");
        assert_eq!(&file[116..121], b"hello");
    }
}
