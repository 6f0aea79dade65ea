//! What the process uses, under the names that every client library of Prometheus has.
//!
//! In: `/proc/self`, at the moment of a scrape. Out: gauges and one counter. What cannot be read keeps its last value.

use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Ticks a second in `/proc/self/stat`: USER_HZ, which the kernel has promised to programs for all our processors.
const USER_HZ: f64 = 100.0;

/// What the process uses.
#[derive(Debug, Default)]
pub(super) struct ProcessMetrics {
    cpu: Counter<f64, AtomicU64>,
    resident: Gauge,
    virtual_memory: Gauge,
    start: Gauge<f64, AtomicU64>,
    open_files: Gauge,
    most_files: Gauge,
}

impl ProcessMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let to = registry.sub_registry_with_prefix("process");
        to.register("cpu_seconds", "Processor time", self.cpu.clone());
        to.register("resident_memory_bytes", "Memory in use", self.resident.clone());
        to.register("virtual_memory_bytes", "Address space in use", self.virtual_memory.clone());
        to.register("start_time_seconds", "When the process started", self.start.clone());
        to.register("open_fds", "Open file descriptors", self.open_files.clone());
        to.register("max_fds", "File descriptors that may be open", self.most_files.clone());
    }

    /// Reads them.
    #[allow(clippy::cast_precision_loss, reason = "milliseconds since 1970 need 41 of the 52 bits")]
    pub(super) fn read(&self, started: Timestamp) {
        self.start.set(started.as_millisecond() as f64 / 1000.0);
        let read = |file: &str| std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        if let Some(ticks) = ticks(&read("stat")) {
            self.cpu.inner().store((ticks as f64 / USER_HZ).to_bits(), Ordering::Relaxed);
        }
        let status = read("status");
        for (gauge, key) in [(&self.resident, "VmRSS:"), (&self.virtual_memory, "VmSize:")] {
            if let Some(kibibytes) = number(&status, key) {
                gauge.set(kibibytes * 1024);
            }
        }
        if let Some(most) = number(&read("limits"), "Max open files") {
            self.most_files.set(most);
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            self.open_files.set(i64::try_from(open.count()).unwrap_or(i64::MAX));
        }
    }
}

/// Time in user and kernel mode. The name of the program comes before it in brackets, and may hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let (user, kernel): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + kernel)
}

/// The first number of the line that begins with `key`.
fn number(text: &str, key: &str) -> Option<i64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read_and_nonsense_is_not() {
        let stat = "7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 4 0 100 1000 20";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(number("VmSize:\t  12 kB\nVmRSS:\t  34 kB\n", "VmRSS:"), Some(34));
        assert_eq!(number("Max open files            1024    4096    files", "Max open files"), Some(1024));
        assert_eq!((ticks(""), ticks("7 (a) S 1"), number("", "VmRSS:")), (None, None, None));
        let process = ProcessMetrics::default();
        process.read(Timestamp::UNIX_EPOCH);
        assert!(process.resident.get() > 1 << 20 && process.virtual_memory.get() > process.resident.get());
        assert!(process.open_files.get() > 2 && process.most_files.get() >= process.open_files.get());
    }
}
