//! What the operating system says about memory.

/// Bytes that programs can still take, as far as the system tells (Linux only).
pub fn available_memory() -> Option<u64> {
    kib_field("/proc/meminfo", "MemAvailable:")
}

/// The most bytes this process has held in memory so far, as far as the system tells (Linux only).
pub fn peak_memory() -> Option<u64> {
    kib_field("/proc/self/status", "VmHWM:")
}

/// A line such as `VmHWM:    12345 kB`.
fn kib_field(path: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace()
        .next()?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// `1.5 GB`, `320 MB`: decimal units, as memory is sold and reported.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    match UNITS.into_iter().find(|(scale, _)| value >= *scale) {
        Some((scale, unit)) if value / scale < 10.0 => format!("{:.2} {unit}", value / scale),
        Some((scale, unit)) if value / scale < 100.0 => format!("{:.1} {unit}", value / scale),
        Some((scale, unit)) => format!("{:.0} {unit}", value / scale),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_with_three_digits() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (9_710_920, "9.71 MB"),
            (147_456, "147 kB"),
            (8_040_000_000, "8.04 GB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn linux_tells_available_and_peak_memory() {
        assert!(available_memory().is_some_and(|bytes| bytes > 1 << 20));
        assert!(peak_memory().is_some_and(|bytes| bytes > 1 << 20));
    }
}
