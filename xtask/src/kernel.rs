//! Takes Debian's kernel package apart: the ELF kernel inside the bzImage, and modules with what they depend on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{capture, list, read, read_text};

/// Extracts the ELF `vmlinux` from a bzImage whose payload is compressed with zstd.
pub(crate) fn extract_vmlinux(bzimage: &[u8]) -> Result<Vec<u8>> {
    const SECTOR: usize = 512;
    ensure!(bzimage.get(0x202..0x206) == Some(b"HdrS"), "not a Linux bzImage");
    let setup_sectors = match bzimage[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = read_u32(bzimage, 0x248)?;
    let length = read_u32(bzimage, 0x24c)?;
    let start = (setup_sectors + 1) * SECTOR + offset;
    let payload = bzimage
        .get(start..start + length)
        .context("the payload lies outside of the bzImage")?;
    ensure!(
        payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]),
        "the kernel is not compressed with zstd"
    );
    let mut vmlinux = Vec::new();
    // The payload ends with its uncompressed size, which is no part of the frame.
    let mut decoder = zstd::stream::read::Decoder::new(payload)
        .context("reading the kernel's zstd frame")?
        .single_frame();
    std::io::copy(&mut decoder, &mut vmlinux).context("decompressing the kernel")?;
    let end = elf_end(&vmlinux)?;
    vmlinux.truncate(end);
    Ok(vmlinux)
}

/// Where an ELF file ends by its own headers; relocation data is appended to the kernel's.
fn elf_end(elf: &[u8]) -> Result<usize> {
    ensure!(
        elf.starts_with(b"\x7fELF\x02\x01"),
        "the kernel's payload is not a 64-bit ELF file"
    );
    let program_headers = (read_u64(elf, 32)?, read_u16(elf, 54)?, read_u16(elf, 56)?);
    let section_headers = (read_u64(elf, 40)?, read_u16(elf, 58)?, read_u16(elf, 60)?);
    let mut end = 0;
    for (offset, size, count) in [program_headers, section_headers] {
        end = end.max(offset + size * count);
    }
    for index in 0..program_headers.2 {
        let header = program_headers.0 + index * program_headers.1;
        end = end.max(read_u64(elf, header + 8)? + read_u64(elf, header + 32)?);
    }
    for index in 0..section_headers.2 {
        const SHT_NOBITS: usize = 8;
        let header = section_headers.0 + index * section_headers.1;
        if read_u32(elf, header + 4)? != SHT_NOBITS {
            end = end.max(read_u64(elf, header + 24)? + read_u64(elf, header + 32)?);
        }
    }
    ensure!(end <= elf.len(), "the kernel's ELF file is cut off");
    Ok(end)
}

fn read_u16(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(u16::from_le_bytes(field(bytes, at)?).into())
}

fn read_u32(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(usize::try_from(u32::from_le_bytes(field(bytes, at)?))?)
}

fn read_u64(bytes: &[u8], at: usize) -> Result<usize> {
    Ok(usize::try_from(u64::from_le_bytes(field(bytes, at)?))?)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let slice = bytes.get(at..at + N).context("the file is cut off")?;
    Ok(slice.try_into()?)
}

/// The modules directory of the one kernel in a root filesystem.
pub(crate) fn modules_dir(root: &Path) -> Result<PathBuf> {
    let versions = list(&root.join("usr/lib/modules"))?;
    match versions.as_slice() {
        [only] => Ok(only.clone()),
        _ => bail!("expected one kernel in {}, found {}", root.display(), versions.len()),
    }
}

/// What `modules.dep` says: each module by name, with its path and its dependencies' paths.
struct Dependencies {
    by_name: BTreeMap<String, (String, Vec<String>)>,
}

impl Dependencies {
    fn parse(text: &str) -> Self {
        let mut by_name = BTreeMap::new();
        for line in text.lines() {
            let Some((path, dependencies)) = line.split_once(':') else {
                continue;
            };
            let dependencies = dependencies.split_whitespace().map(str::to_owned).collect();
            by_name.insert(module_name(path), (path.to_owned(), dependencies));
        }
        Self { by_name }
    }

    /// The paths of the wanted modules and all that they need, in an order in which they can be loaded.
    fn load_order(&self, wanted: &[&str]) -> Result<Vec<String>> {
        let mut order = Vec::new();
        for name in wanted {
            let (path, dependencies) = self
                .by_name
                .get(&name.replace('-', "_"))
                .with_context(|| format!("this kernel has no module {name}"))?;
            // modules.dep lists all dependencies, direct or not; each must come after its own.
            for dependency in dependencies.iter().rev().chain([path]) {
                if !order.contains(dependency) {
                    order.push(dependency.clone());
                }
            }
        }
        Ok(order)
    }
}

/// `kernel/fs/erofs/erofs.ko.xz` is the module `erofs`; a dash and an underscore are the same in module names.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

/// A kernel module ready to be loaded.
pub(crate) struct Module {
    /// `NN-name.ko`: sorting by this name gives the load order.
    pub(crate) file_name: String,
    /// The uncompressed ELF object.
    pub(crate) content: Vec<u8>,
}

/// Reads the wanted modules and their dependencies, decompressed, in load order.
pub(crate) fn load_modules(modules_dir: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let dependencies = Dependencies::parse(&read_text(&modules_dir.join("modules.dep"))?);
    let mut modules = Vec::new();
    for (index, path) in dependencies.load_order(wanted)?.iter().enumerate() {
        let file = modules_dir.join(path);
        let content = match file.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => capture(Command::new("xz").arg("--decompress").arg("--stdout").arg(&file))?,
            _ => read(&file)?,
        };
        modules.push(Module {
            file_name: format!("{index:02}-{}.ko", module_name(path)),
            content,
        });
    }
    Ok(modules)
}

/// Writes modules into a new directory.
pub(crate) fn save_modules(dir: &Path, modules: &[Module]) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("creating {}", dir.display()))?;
    for module in modules {
        let path = dir.join(&module.file_name);
        fs::write(&path, &module.content).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/a/top.ko.xz: kernel/b/mid-dle.ko.xz kernel/c/low.ko.xz\n\
                       kernel/b/mid-dle.ko.xz: kernel/c/low.ko.xz\nkernel/c/low.ko.xz:\n";

    #[test]
    fn dependencies_come_first_and_once() {
        let order = Dependencies::parse(DEP).load_order(&["mid_dle", "top"]).unwrap();
        assert_eq!(
            order,
            ["kernel/c/low.ko.xz", "kernel/b/mid-dle.ko.xz", "kernel/a/top.ko.xz"]
        );
    }

    #[test]
    fn an_unknown_module_is_named() {
        let error = Dependencies::parse(DEP).load_order(&["nothing"]).unwrap_err();
        assert!(error.to_string().contains("nothing"));
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        assert!(extract_vmlinux(b"MZ").is_err());
        let mut image = vec![0; 0x400];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c] = 0xff;
        image[0x249] = 0xff;
        assert!(extract_vmlinux(&image).is_err());
    }

    #[test]
    fn an_elf_file_ends_after_its_last_table() {
        let mut elf = vec![0; 64 + 100];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[40] = 64; // section headers at 64
        elf[58] = 64; // of 64 bytes
        elf[60] = 1; // one of them
        elf[64 + 4] = 8; // without data in the file
        assert_eq!(elf_end(&elf).unwrap(), 128);
        elf[60] = 9;
        assert!(elf_end(&elf).is_err());
    }
}
