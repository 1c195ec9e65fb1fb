//! What the benchmarks share.

/// Flags of criterion and libtest that take the next argument.
const WITH_VALUE: [&str; 13] = [
    "--baseline",
    "--color",
    "--confidence-level",
    "--format",
    "--load-baseline",
    "--measurement-time",
    "--noise-threshold",
    "--nresamples",
    "--output-format",
    "--profile-time",
    "--sample-size",
    "--save-baseline",
    "--warm-up-time",
];

/// Whether the command line selects any benchmark of `group`, or names none: `cargo bench -p benches -- page_table`
/// leaves out also the preparation of all others. A filter that is a pattern selects everything here; criterion itself
/// looks closer.
pub fn selected(group: &str) -> bool {
    selects(std::env::args().skip(1), group)
}

fn selects(arguments: impl Iterator<Item = String>, group: &str) -> bool {
    let (mut any, mut value) = (false, false);
    for argument in arguments {
        if std::mem::take(&mut value) {
            continue;
        }
        if argument.starts_with('-') {
            value = WITH_VALUE.contains(&argument.as_str());
            continue;
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '/' | '-');
        if !argument.chars().all(plain) || group.contains(&argument) || argument.contains(group) {
            return true;
        }
        any = true;
    }
    !any
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_selects_its_groups_and_flags_select_nothing() {
        for (line, selected) in [
            ("--bench", true),
            ("--bench page_table", true),
            ("--bench page_table/4096_tokens/fork", true),
            ("--bench table/4096", true),
            ("--bench attention", false),
            ("--bench --sample-size 10", true),
            ("--bench --sample-size 10 attention", false),
            ("--bench ^attention$", true),
            ("--bench attention page_table", true),
        ] {
            let arguments = line.split(' ').map(str::to_string);
            assert_eq!(selects(arguments, "page_table/4096_tokens"), selected, "{line}");
        }
    }
}
