//! Task.Stats: the numbers of a control group as containerd's cgroup v2 `Metrics`.

use protobuf::MessageField;
use protocol::containerd::cgroups_v2::metrics::{
    CPUStat, IOEntry, IOStat, MemoryEvents, MemoryStat, Metrics, PidsStat,
};

use crate::cgroup::{Cgroup, value};

/// Name of the message in an `Any`, as containerd's clients know it.
pub const TYPE_URL: &str = "io.containerd.cgroups.v2.Metrics";

/// Reads the numbers of a group. What the kernel does not offer is 0.
pub fn metrics(group: &Cgroup) -> Metrics {
    let mut metrics = Metrics::new();
    metrics.pids = MessageField::some(pids(&group.read("pids.current"), &group.read("pids.max")));
    metrics.cpu = MessageField::some(cpu(&group.read("cpu.stat")));
    metrics.memory = MessageField::some(memory(group));
    metrics.memory_events = MessageField::some(memory_events(&group.read("memory.events")));
    metrics.io = MessageField::some(io(&group.read("io.stat")));
    metrics
}

/// A single number; `max` means no limit.
fn number(text: &str) -> u64 {
    match text.trim() {
        "max" => u64::MAX,
        text => text.parse().unwrap_or(0),
    }
}

fn pids(current: &str, max: &str) -> PidsStat {
    let mut stat = PidsStat::new();
    stat.current = number(current);
    // containerd's own reader says 0 for no limit.
    stat.limit = if max.trim() == "max" { 0 } else { number(max) };
    stat
}

fn cpu(text: &str) -> CPUStat {
    let of = |key| value(text, key).unwrap_or(0);
    let mut stat = CPUStat::new();
    stat.usage_usec = of("usage_usec");
    stat.user_usec = of("user_usec");
    stat.system_usec = of("system_usec");
    stat.nr_periods = of("nr_periods");
    stat.nr_throttled = of("nr_throttled");
    stat.throttled_usec = of("throttled_usec");
    stat
}

fn memory(group: &Cgroup) -> MemoryStat {
    let text = group.read("memory.stat");
    let of = |key| value(&text, key).unwrap_or(0);
    let mut stat = MemoryStat::new();
    stat.anon = of("anon");
    stat.file = of("file");
    stat.kernel_stack = of("kernel_stack");
    stat.slab = of("slab");
    stat.sock = of("sock");
    stat.shmem = of("shmem");
    stat.file_mapped = of("file_mapped");
    stat.file_dirty = of("file_dirty");
    stat.file_writeback = of("file_writeback");
    stat.anon_thp = of("anon_thp");
    stat.inactive_anon = of("inactive_anon");
    stat.active_anon = of("active_anon");
    stat.inactive_file = of("inactive_file");
    stat.active_file = of("active_file");
    stat.unevictable = of("unevictable");
    stat.slab_reclaimable = of("slab_reclaimable");
    stat.slab_unreclaimable = of("slab_unreclaimable");
    stat.pgfault = of("pgfault");
    stat.pgmajfault = of("pgmajfault");
    stat.usage = number(&group.read("memory.current"));
    stat.usage_limit = number(&group.read("memory.max"));
    stat.swap_usage = number(&group.read("memory.swap.current"));
    stat.swap_limit = number(&group.read("memory.swap.max"));
    stat.max_usage = number(&group.read("memory.peak"));
    stat
}

fn memory_events(text: &str) -> MemoryEvents {
    let of = |key| value(text, key).unwrap_or(0);
    let mut events = MemoryEvents::new();
    events.low = of("low");
    events.high = of("high");
    events.max = of("max");
    events.oom = of("oom");
    events.oom_kill = of("oom_kill");
    events
}

fn io(text: &str) -> IOStat {
    let mut stat = IOStat::new();
    stat.usage = text.lines().filter_map(io_entry).collect();
    stat
}

/// `254:0 rbytes=1 wbytes=2 rios=3 wios=4 …`
fn io_entry(line: &str) -> Option<IOEntry> {
    let (device, counters) = line.split_once(' ')?;
    let (major, minor) = device.split_once(':')?;
    let mut entry = IOEntry::new();
    entry.major = major.parse().ok()?;
    entry.minor = minor.parse().ok()?;
    for counter in counters.split(' ') {
        match counter.split_once('=') {
            Some(("rbytes", count)) => entry.rbytes = number(count),
            Some(("wbytes", count)) => entry.wbytes = number(count),
            Some(("rios", count)) => entry.rios = number(count),
            Some(("wios", count)) => entry.wios = number(count),
            _ => {}
        }
    }
    Some(entry)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        assert_eq!(pids("3\n", "max\n").limit, 0);
        assert_eq!(pids("3\n", "12\n").limit, 12);
        let cpu = cpu("usage_usec 10\nuser_usec 7\nsystem_usec 3\nnr_periods 0\n");
        assert_eq!((cpu.usage_usec, cpu.user_usec, cpu.system_usec), (10, 7, 3));
        let io = io("254:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n7:1\n");
        assert_eq!(io.usage.len(), 1);
        assert_eq!((io.usage[0].major, io.usage[0].rbytes, io.usage[0].wios), (254, 1, 4));
        assert_eq!(memory_events("low 1\noom_kill 2\n").oom_kill, 2);
    }

    proptest! {
        #[test]
        fn no_file_can_hurt(text in ".{0,200}") {
            let _ = (pids(&text, &text), cpu(&text), io(&text), memory_events(&text));
        }
    }
}
