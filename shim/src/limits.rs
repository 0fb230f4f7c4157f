//! What a container's CPU and memory limits mean for its machine: they size it at the start, and what is asked later must fit into
//! it, for a running machine does not grow.

use oci_spec::runtime::{LinuxCpu, LinuxResources, Spec};
use protocol::containerd::protobuf::well_known_types::any::Any;
use vmm::control::limits;

use crate::boot::{MEMORY_MIB, MEMORY_OVERHEAD, Shape, VCPUS};
use crate::error::{Error, Result};
use crate::spec::rewrite_resources;

/// Length of a CPU period where none is given, in microseconds, as the kernel has it.
const PERIOD: u64 = 100_000;
/// Largest request for new limits, in bytes.
const MAX_RESOURCES: usize = 1 << 20;

/// CPUs that a quota lasts for, in thousandths; `None` without a quota.
fn milli_cpus(cpu: Option<&LinuxCpu>) -> Option<u64> {
    let cpu = cpu?;
    let quota = u64::try_from(cpu.quota()?).ok().filter(|quota| *quota > 0)?;
    let period = cpu.period().filter(|period| *period > 0).unwrap_or(PERIOD);
    Some(quota.saturating_mul(1000) / period)
}

/// How many vCPUs a container needs that may use so much: whole ones, and no more than this host has.
#[must_use]
pub fn vcpus(host: &Spec) -> u8 {
    let linux = host.linux().as_ref();
    let resources = linux.and_then(|linux| linux.resources().as_ref());
    let asked = milli_cpus(resources.and_then(|resources| resources.cpu().as_ref())).unwrap_or(0);
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    let least = u64::from(*limits::VCPUS.start());
    let most = u64::from(*limits::VCPUS.end())
        .min(u64::try_from(here).unwrap_or(1))
        .max(least);
    u8::try_from(asked.div_ceil(1000).clamp(least, most)).unwrap_or(*limits::VCPUS.start())
}

/// New limits as the guest gets them, if a machine of this shape can hold them.
///
/// # Errors
/// The request is no `LinuxResources`, or asks for more than the machine has: then it says how a bigger one is had.
pub fn update(shape: Shape, asked: Option<Any>) -> Result<Any> {
    let mut any = asked.unwrap_or_default();
    if any.value.len() > MAX_RESOURCES {
        return Err(Error::InvalidArgument("the new limits are too long".into()));
    }
    let resources: LinuxResources =
        serde_json::from_slice(&any.value).map_err(|e| Error::InvalidArgument(format!("new limits: {e}")))?;
    fits(shape, &resources)?;
    let resources = rewrite_resources(resources);
    any.value = serde_json::to_vec(&resources).map_err(|e| Error::Internal(e.to_string()))?;
    Ok(any)
}

fn fits(shape: Shape, resources: &LinuxResources) -> Result<()> {
    let limit = resources
        .memory()
        .as_ref()
        .and_then(oci_spec::runtime::LinuxMemory::limit);
    let room = shape.memory_bytes.saturating_sub(MEMORY_OVERHEAD);
    if let Some(limit) = limit.and_then(|limit| u64::try_from(limit).ok())
        && limit > room
    {
        return Err(Error::InvalidArgument(format!(
            "a memory limit of {} MiB: the container's virtual machine has room for {} MiB, and does not grow while it runs; \
             annotation {MEMORY_MIB} sizes it at the start",
            limit.div_ceil(1 << 20),
            room >> 20
        )));
    }
    if let Some(milli) = milli_cpus(resources.cpu().as_ref())
        && milli > u64::from(shape.vcpus) * 1000
    {
        return Err(Error::InvalidArgument(format!(
            "a limit of {}.{:03} CPUs: the container's virtual machine has {}, and gets no more while it runs; annotation {VCPUS} \
             sets their number at the start",
            milli / 1000,
            milli % 1000,
            shape.vcpus
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape {
        vcpus: 2,
        memory_bytes: 512 << 20,
    };

    fn any(json: &str) -> Option<Any> {
        Some(Any {
            value: json.as_bytes().to_vec(),
            ..Default::default()
        })
    }

    fn spec(cpu: &str) -> Spec {
        let json = format!(
            r#"{{"ociVersion":"1.0.2","process":{{"args":["a"],"cwd":"/","user":{{"uid":0,"gid":0}}}},
            "linux":{{"resources":{{"cpu":{cpu}}}}}}}"#
        );
        crate::spec::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn a_quota_gives_whole_cpus_within_those_of_the_host() {
        let here = u8::try_from(std::thread::available_parallelism().unwrap().get()).unwrap_or(u8::MAX);
        assert_eq!(vcpus(&spec("{}")), 1);
        assert_eq!(vcpus(&spec(r#"{"quota":-1,"period":100000}"#)), 1);
        assert_eq!(vcpus(&spec(r#"{"quota":50000,"period":100000}"#)), 1);
        assert_eq!(vcpus(&spec(r#"{"quota":150000}"#)), 2.min(here));
        assert!(vcpus(&spec(r#"{"quota":9223372036854775807,"period":1}"#)) <= here);
    }

    #[test]
    fn what_fits_goes_through_without_the_hosts_cpu_numbers() {
        let json = r#"{"memory":{"limit":268435456},"cpu":{"quota":200000,"period":100000,"cpus":"0-3"}}"#;
        let passed = update(SHAPE, any(json)).unwrap();
        let resources: LinuxResources = serde_json::from_slice(&passed.value).unwrap();
        assert_eq!(resources.memory().as_ref().unwrap().limit(), Some(268_435_456));
        assert_eq!(resources.cpu().as_ref().unwrap().cpus(), &None);
        assert!(update(SHAPE, any(r#"{"memory":{"limit":-1},"cpu":{"quota":-1}}"#)).is_ok());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_remedy() {
        let text = update(SHAPE, any(r#"{"memory":{"limit":1073741824}}"#))
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("1024 MiB") && text.contains("384 MiB") && text.contains(MEMORY_MIB),
            "{text}"
        );
        let text = update(SHAPE, any(r#"{"cpu":{"quota":250000,"period":100000}}"#))
            .unwrap_err()
            .to_string();
        assert!(text.contains("2.500 CPUs") && text.contains(VCPUS), "{text}");
        assert!(update(SHAPE, None).is_err());
    }

    proptest! {
        #[test]
        fn no_request_can_hurt(json in ".{0,200}") { let _ = update(SHAPE, any(&json)); }
    }
}
