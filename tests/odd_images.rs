//! Images of every odd kind run as they do with runc.

use anyhow::{Result, ensure};
use e2e::container::fresh_id;
use e2e::elf::attribute_printer;
use e2e::oci::{Compression, Image, Layer};
use e2e::{Node, Runtime};
use tar::EntryType;

/// An image on the shared node, removed when this is dropped.
struct Imported {
    name: String,
}

impl Imported {
    fn new(image: Image, runtime: Runtime) -> Result<Self> {
        let directory = tempfile::tempdir_in("/var/lib")?;
        let archive = directory.path().join("image.tar");
        let name = format!("localhost/{}:1", fresh_id("odd"));
        image.write(&archive, &name)?;
        let imported = Self { name };
        Node::shared()
            .ctr(["images", "import", "--snapshotter", runtime.snapshotter()])
            .arg(archive)
            .succeed()?;
        Ok(imported)
    }

    fn run(&self, runtime: Runtime, script: &str) -> e2e::container::Run {
        Node::shared().run(runtime, &self.name, &["/bin/sh", "-c", script])
    }

    /// Runs a script; what it prints must be these lines.
    fn prints(&self, runtime: Runtime, script: &str, expected: &[&str]) -> Result<()> {
        let lines = self.run(runtime, script).succeed()?.lines();
        ensure!(lines == expected, "{script}\nprinted  {lines:?}\nexpected {expected:?}");
        Ok(())
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let _ = Node::shared().remove_image(&self.name);
    }
}

with_each_runtime! {
    fn what_a_layer_removes_replaces_and_hides_is_gone(runtime) {
        let mut lower = Layer::new();
        lower.file("gone", b"1", 0o644)?.file("was-file", b"1", 0o644)?.file("comes-back", b"old", 0o644)?;
        lower.directory("was-directory", 0o755)?.file("was-directory/inside", b"1", 0o644)?;
        lower.directory("opaque", 0o750)?.file("opaque/hidden", b"1", 0o644)?.directory("real", 0o755)?;
        lower.file("real/old", b"1", 0o644)?.link(EntryType::Symlink, "alias", "real")?;
        let mut middle = Layer::new();
        middle.whiteout("gone")?.whiteout("comes-back")?;
        middle.directory("was-file", 0o755)?.file("was-file/now", b"2", 0o644)?;
        middle.file("was-directory", b"2", 0o600)?;
        middle.directory("opaque", 0o750)?.opaque("opaque")?.file("opaque/shown", b"2", 0o644)?;
        middle.file("alias/through-link", b"2", 0o644)?;
        let mut upper = Layer::new();
        upper.file("comes-back", b"new", 0o644)?;
        let image = Image::with_busybox()?.layer(lower)?.layer(middle)?.layer(upper)?;
        let script = "test ! -e gone; echo $?; cat comes-back; echo; ls was-file; stat -c '%F %a' was-directory; \
                      ls opaque; stat -c %a opaque; ls real; stat -c %F alias; ls alias";
        let expected = ["0", "new", "now", "regular file 600", "shown", "750", "old", "directory", "through-link"];
        Imported::new(image, runtime)?.prints(runtime, script, &expected)
    }

    /// A link to a file of a layer below is not among them: containerd's own unpacking refuses it on overlayfs.
    fn hard_links_hold_in_a_layer_and_to_replaced_names(runtime) {
        let mut lower = Layer::new();
        lower.file("a", b"first", 0o644)?.link(EntryType::Link, "b", "a")?;
        let mut upper = Layer::new();
        upper.file("a", b"second", 0o644)?.link(EntryType::Link, "c", "a")?;
        let image = Image::with_busybox()?.layer(lower)?.layer(upper)?;
        let script = "cat a b c; echo; stat -c %h a c; test a -ef c && echo same; test a -ef b || echo other";
        let expected = ["secondfirstsecond", "2", "2", "same", "other"];
        Imported::new(image, runtime)?.prints(runtime, script, &expected)
    }

    fn modes_owners_devices_and_pipes_are_kept(runtime) {
        let mut layer = Layer::new();
        layer.file("setuid", b"", 0o4755)?.file("setgid", b"", 0o2755)?.directory("sticky", 0o1777)?;
        layer.owned("rich", 70_000, 3_000_000_000)?.owned("poor", 65_534, 65_535)?;
        layer.device("null", 1, 3)?.entry("pipe", EntryType::Fifo, 0o620, b"")?;
        let image = Image::with_busybox()?.layer(layer)?;
        let script = "stat -c '%a %n' setuid setgid sticky; stat -c '%u %g' rich poor; stat -c '%F %t %T' null; stat -c '%F %a' pipe";
        let expected = [
            "4755 setuid", "2755 setgid", "1777 sticky", "70000 3000000000", "65534 65535",
            "character special file 1 3", "fifo 620",
        ];
        Imported::new(image, runtime)?.prints(runtime, script, &expected)
    }

    fn file_capabilities_work_and_other_attributes_are_kept(runtime) {
        // VFS_CAP_REVISION_2 with the effective bit; cap_net_bind_service (10) permitted.
        let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let busybox = std::fs::read("/usr/bin/busybox")?;
        let mut layer = Layer::new();
        layer.directory("capable", 0o755)?;
        layer.file_with_xattr("capable/busybox", &busybox, "security.capability", &capability)?;
        layer.file_with_xattr("coloured", b"", "user.colour", b"green")?;
        layer.file("show", &attribute_printer("/coloured", "user.colour"), 0o755)?;
        let imported = Imported::new(Image::with_busybox()?.layer(layer)?, runtime)?;
        let script = "/capable/busybox grep CapEff /proc/self/status; /show; echo";
        let run = imported.run(runtime, script).flag("--user=1000:1000").flag("--allow-new-privs");
        let lines = run.succeed()?.lines();
        ensure!(lines == ["CapEff:\t0000000000000400", "green"], "{lines:?}");
        Ok(())
    }

    fn long_and_foreign_names_are_kept(runtime) {
        let long = "n".repeat(255);
        let deep = ["d".repeat(200), "e".repeat(200), "f".repeat(100)];
        let mut layer = Layer::new();
        layer.directory("names", 0o755)?.file(&format!("names/{long}"), b"", 0o644)?.file("names/Grüße 名前", b"hello", 0o644)?;
        let mut path = "deep".to_owned();
        layer.directory(&path, 0o755)?;
        for part in &deep {
            path = format!("{path}/{part}");
            layer.directory(&path, 0o755)?;
        }
        layer.file(&format!("{path}/end"), b"found", 0o644)?;
        let image = Image::with_busybox()?.layer(layer)?;
        let script = "cd names; for n in n*; do echo ${#n}; done; cat Gr*; echo; cat /deep/*/*/*/end; find /deep -name end | wc -c";
        let length = (path.len() + "//end\n".len()).to_string();
        Imported::new(image, runtime)?.prints(runtime, script, &["255", "hello", &format!("found{length}")])
    }

    fn empty_repeated_and_compressed_layers_are_fine(runtime) {
        let file = |name: &str| -> Result<Layer> {
            let mut layer = Layer::new();
            layer.file(name, name.as_bytes(), 0o644)?;
            Ok(layer)
        };
        let image = Image::with_busybox()?
            .layer(Layer::new())?
            .compressed(file("twice")?, Compression::Gzip)?
            .compressed(file("zstd")?, Compression::Zstd)?
            .compressed(file("twice")?, Compression::Gzip)?
            .layer(Layer::new())?;
        Imported::new(image, runtime)?.prints(runtime, "cat twice zstd; echo", &["twicezstd"])
    }

    fn a_hundred_and_thirty_layers_are_merged(runtime) {
        let mut image = Image::with_busybox()?;
        for number in 0..129 {
            let mut layer = Layer::new();
            layer.file(&format!("layer-{number}"), b"", 0o644)?.file("last", number.to_string().as_bytes(), 0o644)?;
            image = image.layer(layer)?;
        }
        Imported::new(image, runtime)?.prints(runtime, "ls -d layer-* | wc -l; cat last; echo", &["129", "128"])
    }

    fn the_images_user_and_directory_are_taken(runtime) {
        let mut layer = Layer::new();
        layer.file("etc/passwd", b"root:x:0:0::/:/bin/sh\nann:x:1234:55::/:/bin/sh\n", 0o644)?;
        layer.file("etc/group", b"root:x:0:\nstaff:x:55:\naudio:x:29:ann\n", 0o644)?;
        let image = Image::with_busybox()?.layer(layer)?.config("User", "ann").config("WorkingDir", "/not/there/yet");
        Imported::new(image, runtime)?.prints(runtime, "id -u; id -g; id -G; pwd", &["1234", "55", "55 29", "/not/there/yet"])
    }

    fn without_passwd_root_runs_and_an_unknown_user_is_refused(runtime) {
        let without = Imported::new(Image::with_busybox()?, runtime)?;
        without.prints(runtime, "test ! -e /etc/passwd; id -u; id -g", &["0", "0"])?;
        let mut layer = Layer::new();
        layer.file("etc/passwd", b"root:x:0:0::/:/bin/sh\n", 0o644)?;
        let unknown = Imported::new(Image::with_busybox()?.layer(layer)?.config("User", "ann"), runtime)?;
        let refused = unknown.run(runtime, "true").finish()?.expect_code(1)?;
        ensure!(refused.err().contains("no users found"), "{}", refused.err());
        Ok(())
    }

    fn the_images_stop_signal_is_taken(runtime) {
        let image = Imported::new(Image::with_busybox()?.config("StopSignal", "SIGUSR1"), runtime)?;
        let container = image.run(runtime, "trap 'exit 41' USR1; while :; do sleep 1 & wait $!; done").detach()?;
        Node::shared().ctr(["tasks", "kill", container.id()]).succeed()?;
        container.wait_for("STOPPED")?;
        let code = container.delete_task()?;
        ensure!(code == 41, "{code}");
        container.remove()
    }
}
