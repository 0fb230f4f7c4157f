//! The archives of test images, made by `cargo xtask oci-images`.

use std::path::PathBuf;

use anyhow::{Result, bail};

/// Busybox on its own.
pub const BUSYBOX: &str = "localhost/busybox:1";
/// Busybox and two layers that replace, remove and hide.
pub const LAYERS: &str = "localhost/layers:1";
/// Debian, Python 3, numpy.
pub const PYTHON: &str = "localhost/python:1";

/// An archive of images.
#[derive(Clone, Copy, Debug)]
pub enum Archive {
    /// [`BUSYBOX`] and [`LAYERS`].
    Busybox,
    /// [`PYTHON`].
    Python,
}

impl Archive {
    /// The images in it.
    #[must_use]
    pub fn names(&self) -> &'static [&'static str] {
        match self {
            Self::Busybox => &[BUSYBOX, LAYERS],
            Self::Python => &[PYTHON],
        }
    }

    fn file_name(self) -> &'static str {
        match self {
            Self::Busybox => "busybox.tar",
            Self::Python => "python.tar",
        }
    }
}

/// Where the archive is: in `RAMET_IMAGES_DIR`, else in `target/images`.
pub fn find(archive: &Archive) -> Result<PathBuf> {
    let directory = std::env::var_os("RAMET_IMAGES_DIR").map_or_else(|| PathBuf::from("target/images"), PathBuf::from);
    let file = directory.join(archive.file_name());
    if !file.exists() {
        bail!(
            "{} does not exist; `cargo xtask oci-images` makes it, RAMET_IMAGES_DIR says where it is",
            file.display()
        );
    }
    Ok(file)
}
