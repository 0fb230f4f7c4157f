//! `ramet ls`, `ramet inspect` and `ramet rm`.

use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use checkpoint::compat::{self, HostFacts};
use checkpoint::manifest::CheckpointManifest;
use containerd_client::services::v1::DeleteImageRequest;
use serde::Serialize;

use crate::client::{Answer, Client};
use crate::image::{self, CheckpointImage};
use crate::output::{bytes, command_line, print_error, table};
use crate::{Connection, OutputFlag};

/// Longest command line in a table.
const ARGS_WIDTH: usize = 40;

/// Arguments of `ramet inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArguments {
    #[command(flatten)]
    output: OutputFlag,
    /// Name of the image
    image: String,
}

/// Arguments of `ramet rm`.
#[derive(Debug, clap::Args)]
pub(crate) struct RemoveArguments {
    #[command(flatten)]
    output: OutputFlag,
    /// Names of the images
    #[arg(required = true)]
    images: Vec<String>,
}

/// Lists checkpoint images.
pub(crate) async fn list(connection: &Connection, output: OutputFlag) -> anyhow::Result<ExitCode> {
    let client = Client::connect(connection).await?;
    let mut found = Vec::new();
    for record in image::list(&client).await? {
        // Images that are not complete here, or are something else, are not ours to complain about.
        if let Ok(resolved) = image::resolve(&client, &record).await {
            found.extend(resolved.checkpoint());
        }
    }
    found.sort_by(|a, b| a.reference.cmp(&b.reference));
    if output.json {
        println!("{}", serde_json::to_string_pretty(&found)?);
    } else {
        print!("{}", list_table(&found));
    }
    Ok(ExitCode::SUCCESS)
}

fn list_table(images: &[CheckpointImage]) -> String {
    let row = |image: &CheckpointImage| {
        [
            image.reference.clone(),
            short(image.checkpoint.as_str()),
            image.depth.to_string(),
            to_the_second(&image.created),
            bytes(image.memory_bytes),
            bytes(image.layer_bytes),
            command_line(&image.args, ARGS_WIDTH),
        ]
    };
    let rows: Vec<_> = images.iter().map(row).collect();
    table(
        ["IMAGE", "CHECKPOINT", "DEPTH", "CREATED", "MEMORY", "SIZE", "COMMAND"],
        &rows,
    )
}

fn short(id: &str) -> String {
    id.chars().take(12).collect()
}

/// RFC 3339 without fractions of a second.
fn to_the_second(time: &str) -> String {
    match time.split_once('.') {
        Some((whole, fraction)) => format!("{whole}{}", fraction.trim_start_matches(|c: char| c.is_ascii_digit())),
        None => time.to_owned(),
    }
}

/// Everything about one checkpoint image.
#[derive(Debug, Serialize)]
struct Details {
    #[serde(flatten)]
    image: CheckpointImage,
    manifest: CheckpointManifest,
    /// Why this host cannot restore it.
    incompatible: Option<String>,
}

/// Shows everything about one image.
pub(crate) async fn inspect(connection: &Connection, arguments: InspectArguments) -> anyhow::Result<ExitCode> {
    let client = Client::connect(connection).await?;
    let record = image::get(&client, &arguments.image).await?;
    let resolved = image::resolve(&client, &record).await?;
    let image = resolved
        .checkpoint()
        .with_context(|| not_a_checkpoint(&arguments.image))?;
    let manifest = image::read_checkpoint_manifest(&client, &resolved).await?;
    let incompatible = compat::check(&manifest, &HostFacts::detect())
        .err()
        .map(|reason| reason.to_string());
    let details = Details {
        image,
        manifest,
        incompatible,
    };
    if arguments.output.json {
        println!("{}", serde_json::to_string_pretty(&details)?);
    } else {
        print!("{}", describe(&details));
    }
    Ok(ExitCode::SUCCESS)
}

fn not_a_checkpoint(name: &str) -> String {
    format!("image {name} is not a checkpoint image (ramet ls lists those)")
}

fn describe(details: &Details) -> String {
    let Details {
        image,
        manifest,
        incompatible,
    } = details;
    let vm = &manifest.vm;
    let machine = format!(
        "{} vCPUs, {} of memory, kernel {}",
        vm.vcpus,
        bytes(vm.memory_bytes),
        vm.guest_kernel
    );
    let host = &manifest.host;
    let cpu = format!(
        "{} {} family {} model {}",
        host.arch, host.cpu_vendor, host.cpu_family, host.cpu_model
    );
    let kind = if manifest.save.incremental {
        "incremental"
    } else {
        "full"
    };
    let base = image.base.as_ref().map_or("none".to_owned(), ToString::to_string);
    let restorable = incompatible.clone().unwrap_or_else(|| "yes".to_owned());
    let mut rows = [
        ("image", image.reference.clone()),
        ("digest", image.digest.clone()),
        (
            "checkpoint",
            format!("{} ({kind}, format {})", image.checkpoint, manifest.format),
        ),
        ("base", format!("{base} (depth {})", image.depth)),
        ("created", image.created.clone()),
        ("command", command_line(&image.args, 400)),
        ("machine", machine),
        ("host", format!("{cpu}, kernel {}", host.host_kernel)),
        ("memory saved", bytes(manifest.save.memory_bytes)),
        ("layer", bytes(image.layer_bytes)),
        ("restorable here", restorable),
    ]
    .map(|(name, value)| [name.to_owned(), value])
    .to_vec();
    rows.extend(disk_and_file_rows(manifest));
    // The table's head is not wanted here.
    table(["", ""], &rows)
        .lines()
        .skip(1)
        .fold(String::new(), |out, line| out + line + "\n")
}

fn disk_and_file_rows(manifest: &CheckpointManifest) -> Vec<[String; 2]> {
    let mut rows = Vec::new();
    for disk in &manifest.writable_disks {
        rows.push([
            "disk".to_owned(),
            format!("{}, {}, {} layers", disk.id, bytes(disk.size_bytes), disk.layers.len()),
        ]);
    }
    for file in &manifest.packed {
        rows.push([
            "file".to_owned(),
            format!(
                "{}, {}, packed {}",
                file.name,
                bytes(file.bytes),
                bytes(file.packed_bytes)
            ),
        ]);
    }
    rows
}

/// Removes images; what only they needed, containerd's garbage collector removes before this returns.
pub(crate) async fn remove(connection: &Connection, arguments: RemoveArguments) -> anyhow::Result<ExitCode> {
    let client = Client::connect(connection).await?;
    let mut removed = Vec::new();
    let mut failed = Vec::new();
    for name in arguments.images {
        match remove_one(&client, &name).await {
            Ok(()) => removed.push(name),
            Err(error) => {
                print_error(&error);
                failed.push(name);
            }
        }
    }
    if arguments.output.json {
        println!("{}", serde_json::json!({"removed": removed, "failed": failed}));
    } else {
        removed.iter().for_each(|name| println!("{name}"));
    }
    Ok(if failed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn remove_one(client: &Client, name: &str) -> anyhow::Result<()> {
    let record = image::get(client, name).await?;
    match image::resolve(client, &record).await {
        Ok(resolved) => ensure!(
            resolved.checkpoint().is_some(),
            "{}; remove it with: ctr images rm {name}",
            not_a_checkpoint(name)
        ),
        Err(error) => bail!("{error:#}; remove it with: ctr images rm {name}"),
    }
    let request = client.request(DeleteImageRequest {
        name: name.to_owned(),
        sync: true,
        target: None,
    });
    client
        .images()
        .delete(request)
        .await
        .to(|| format!("remove image {name}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use checkpoint::manifest::CheckpointId;

    use super::*;

    fn image(reference: &str, depth: usize) -> CheckpointImage {
        CheckpointImage {
            reference: reference.to_owned(),
            digest: "sha256:0".to_owned(),
            checkpoint: CheckpointId::try_from("0123456789abcdef".repeat(2)).unwrap(),
            base: None,
            depth,
            created: "2026-11-30T14:30:05.123456Z".to_owned(),
            memory_bytes: 512 << 20,
            layer_bytes: 45 << 20,
            args: vec!["python3".to_owned(), "worker.py".to_owned()],
        }
    }

    #[test]
    fn the_list_is_a_table() {
        let text = list_table(&[image("warm:1", 0), image("registry/warm:22", 3)]);
        let expected = "\
IMAGE             CHECKPOINT    DEPTH  CREATED               MEMORY      SIZE       COMMAND
warm:1            0123456789ab  0      2026-11-30T14:30:05Z  512.00 MiB  45.00 MiB  python3 worker.py
registry/warm:22  0123456789ab  3      2026-11-30T14:30:05Z  512.00 MiB  45.00 MiB  python3 worker.py
";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_list_as_json_has_plain_numbers() {
        let json = serde_json::to_value([image("warm:1", 2)]).unwrap();
        assert_eq!(json[0]["reference"], "warm:1");
        assert_eq!(json[0]["depth"], 2);
        assert_eq!(json[0]["memory_bytes"], 512 << 20);
        assert_eq!(json[0]["args"], serde_json::json!(["python3", "worker.py"]));
    }

    #[test]
    fn inspect_names_machine_host_disks_and_files() {
        let json = serde_json::json!({
            "format": 1, "id": "a".repeat(32), "base": null, "created": "2026-11-30T14:00:00Z",
            "host": {"arch": "x86_64", "cpu_vendor": "AuthenticAMD", "cpu_family": 25, "cpu_model": 1, "host_kernel": "6.12"},
            "vm": {"vcpus": 2, "memory_bytes": 512 << 20, "guest_kernel": "6.12.9", "agent_generation": 1, "nets": 0},
            "read_only_disks": [{"id": "ro0", "files_sha256": ["0".repeat(64)]}],
            "writable_disks": [{"id": "rw0", "size_bytes": 1 << 30, "layers": []}],
            "containers": [{"guest_id": "c", "container_id": "c", "args": ["sh"], "terminal": false,
                "read_only_disk": "ro0", "writable_disk": "rw0"}],
            "save": {"pause_us": 1, "frozen_us": 1, "memory_bytes": 1024, "memory_write_us": 1, "incremental": true},
        });
        let manifest = CheckpointManifest::from_json(json.to_string().as_bytes()).unwrap();
        let details = Details {
            image: image("warm:1", 1),
            manifest,
            incompatible: Some("CPU vendor differs".to_owned()),
        };
        let text = describe(&details);
        for part in [
            "2 vCPUs, 512.00 MiB of memory",
            "AuthenticAMD family 25",
            "rw0, 1.00 GiB, 0 layers",
            "(incremental, format 1)",
            "CPU vendor differs",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.starts_with("image "), "{text}");
        let json = serde_json::to_value(&details).unwrap();
        assert_eq!(json["reference"], "warm:1");
        assert_eq!(json["manifest"]["vm"]["vcpus"], 2);
    }

    #[test]
    fn times_are_cut_to_seconds() {
        assert_eq!(
            to_the_second("2026-11-30T14:30:05.123+01:00"),
            "2026-11-30T14:30:05+01:00"
        );
        assert_eq!(to_the_second("2026-11-30T14:30:05Z"), "2026-11-30T14:30:05Z");
    }
}
