//! What the entry points of a cubin use, read from its ELF sections and from the assembler's report.
//!
//! The register count, stack frame and parameter size stand in the cubin; spills only in what `ptxas -v` prints.
//! Both are read, so that a kernel that spills is seen, and so that a parameter struct of the wrong size is refused
//! at the launch.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// What one kernel uses.
///
/// ```
/// use cuda_graphs::{Limits, ResourceUsage};
///
/// let usage = ResourceUsage { registers: 32, spill_store_bytes: 8, ..ResourceUsage::default() };
/// assert_eq!(Limits::registers(32).violations(&usage).len(), 1, "nothing may spill");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ResourceUsage {
    /// The entry point's name.
    pub kernel: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes per thread written to local memory for want of registers.
    pub spill_store_bytes: u32,
    /// Bytes per thread read back.
    pub spill_load_bytes: u32,
    /// Local memory per thread, spills included.
    pub stack_bytes: u32,
    /// Shared memory per block that the kernel declares with a fixed size.
    pub static_shared_bytes: u32,
    /// Number of parameters.
    pub parameters: u32,
    /// Bytes of all parameters together, without gaps between them.
    pub parameter_bytes: u32,
}

/// One per parameter. Its size stands above 18 bits of flags in the third word. The attribute that tells the size of all
/// parameters (0x19) counts the gap before an aligned first one, too.
const ATTRIBUTE_PARAMETER: u8 = 0x17;
const PARAMETER_SIZE_SHIFT: u32 = 18;
/// The same for parameters too large for the bits above the shift: the size has a word of its own.
const ATTRIBUTE_LARGE_PARAMETER: u8 = 0x45;
const ATTRIBUTE_FRAME_BYTES: u8 = 0x11;
const ATTRIBUTE_REGISTERS: u8 = 0x2f;
/// `.nv.info` entries that carry their value in the header instead of after it.
const FORMAT_SIZED: u8 = 4;
/// Flag of a symbol that is an entry point.
const OTHER_ENTRY: u8 = 0x10;

/// Reads the usage of every entry point, sorted by name.
///
/// `log` is the compiler's, with `ptxas -v` on; without it spills and static shared memory stay 0.
///
/// # Errors
/// [`Error::Cubin`] if the bytes are no 64-bit little-endian ELF file or contradict themselves.
pub fn resource_usage(cubin: &[u8], log: &str) -> Result<Vec<ResourceUsage>> {
    let elf = Elf::parse(cubin)?;
    let symbols = elf.symbols()?;
    let mut usage: BTreeMap<String, ResourceUsage> = symbols
        .iter()
        .filter(|symbol| symbol.other & OTHER_ENTRY != 0 && !symbol.name.is_empty())
        .map(|symbol| {
            (
                symbol.name.clone(),
                ResourceUsage {
                    kernel: symbol.name.clone(),
                    ..Default::default()
                },
            )
        })
        .collect();
    for section in &elf.sections {
        if section.name == ".nv.info" {
            for (attribute, value) in attributes(elf.data(section)?) {
                let (Some(index), Some(value)) = (word(value, 0), word(value, 4)) else {
                    continue;
                };
                let Some(of) = symbols.get(index as usize).and_then(|s| usage.get_mut(&s.name)) else {
                    continue;
                };
                match attribute {
                    ATTRIBUTE_REGISTERS => of.registers = value,
                    ATTRIBUTE_FRAME_BYTES => of.stack_bytes = value,
                    _ => {}
                }
            }
        } else if let Some(of) = section
            .name
            .strip_prefix(".nv.info.")
            .and_then(|name| usage.get_mut(name))
        {
            for (attribute, value) in attributes(elf.data(section)?) {
                let shift = match attribute {
                    ATTRIBUTE_PARAMETER => PARAMETER_SIZE_SHIFT,
                    ATTRIBUTE_LARGE_PARAMETER => 0,
                    _ => continue,
                };
                if let Some(description) = word(value, 8) {
                    of.parameters = of.parameters.saturating_add(1);
                    of.parameter_bytes = of.parameter_bytes.saturating_add(description >> shift);
                }
            }
        }
    }
    let mut usage: Vec<_> = usage.into_values().collect();
    read_log(log, &mut usage);
    Ok(usage)
}

/// Adds what `ptxas -v` printed.
fn read_log(log: &str, usage: &mut [ResourceUsage]) {
    let mut entry: Option<String> = None;
    let mut function: Option<String> = None;
    let number_before = |line: &str, what: &str| -> Option<u32> {
        let end = line.find(what)?;
        line[..end]
            .trim_end()
            .rsplit(|c: char| !c.is_ascii_digit())
            .next()?
            .parse()
            .ok()
    };
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            entry = rest.split('\'').next().map(str::to_string);
        } else if let Some(rest) = line.split("Function properties for ").nth(1) {
            function = Some(rest.trim().to_string());
        } else if line.contains("bytes stack frame") {
            if let Some(of) = usage.iter_mut().find(|u| Some(&u.kernel) == function.as_ref()) {
                of.spill_store_bytes = number_before(line, " bytes spill stores").unwrap_or(0);
                of.spill_load_bytes = number_before(line, " bytes spill loads").unwrap_or(0);
            }
        } else if line.contains("Used ")
            && line.contains(" registers")
            && let Some(of) = usage.iter_mut().find(|u| Some(&u.kernel) == entry.as_ref())
        {
            of.static_shared_bytes = number_before(line, " bytes smem").unwrap_or(0);
        }
    }
}

struct Section<'a> {
    name: &'a str,
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

struct Symbol {
    name: String,
    other: u8,
}

struct Elf<'a> {
    bytes: &'a [u8],
    sections: Vec<Section<'a>>,
}

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const KIND_SYMBOLS: u32 = 2;
const KIND_NO_BITS: u32 = 8;

impl<'a> Elf<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self> {
        // Identification: magic, 64 bits, little-endian.
        if !bytes.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) {
            return Err(Error::Cubin("not a 64-bit little-endian ELF file".to_string()));
        }
        let cut = || Error::Cubin("the section table is cut off".to_string());
        let start = long(bytes, 0x28)
            .and_then(|at| usize::try_from(at).ok())
            .ok_or_else(cut)?;
        let count = half(bytes, 0x3c).ok_or_else(cut)?;
        let names = half(bytes, 0x3e).ok_or_else(cut)?;
        let header = |index: u16| -> Option<[u64; 5]> {
            let at = start.checked_add(usize::from(index) * SECTION_HEADER)?;
            let name = word(bytes, at)?;
            let kind = word(bytes, at + 4)?;
            Some([
                name.into(),
                kind.into(),
                long(bytes, at + 24)?,
                long(bytes, at + 32)?,
                word(bytes, at + 40)?.into(),
            ])
        };
        let [_, _, names_at, names_size, _] = header(names).ok_or_else(cut)?;
        let names = range(bytes, names_at, names_size).ok_or_else(cut)?;
        let mut sections = Vec::with_capacity(count.into());
        for index in 0..count {
            let [name, kind, offset, size, link] = header(index).ok_or_else(cut)?;
            let name = text(names, name as usize).ok_or_else(cut)?;
            sections.push(Section {
                name,
                kind: kind as u32,
                offset,
                size,
                link: link as u32,
            });
        }
        Ok(Self { bytes, sections })
    }

    fn data(&self, section: &Section<'_>) -> Result<&'a [u8]> {
        if section.kind == KIND_NO_BITS {
            return Ok(&[]);
        }
        range(self.bytes, section.offset, section.size)
            .ok_or_else(|| Error::Cubin(format!("section {} lies outside the file", section.name)))
    }

    fn symbols(&self) -> Result<Vec<Symbol>> {
        let Some(table) = self.sections.iter().find(|section| section.kind == KIND_SYMBOLS) else {
            return Ok(Vec::new());
        };
        let names = self
            .sections
            .get(table.link as usize)
            .ok_or_else(|| Error::Cubin("the symbol table names no string table".to_string()))?;
        let names = self.data(names)?;
        let symbols = self.data(table)?.chunks_exact(SYMBOL);
        Ok(symbols
            .map(|symbol| Symbol {
                name: word(symbol, 0)
                    .and_then(|at| text(names, at as usize))
                    .unwrap_or_default()
                    .to_string(),
                other: symbol[5],
            })
            .collect())
    }
}

/// The entries of a `.nv.info` section: attribute and value.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let [format, attribute, low, high, rest @ ..] = bytes else {
            return None;
        };
        if *format == FORMAT_SIZED {
            let size = usize::from(u16::from_le_bytes([*low, *high]));
            let (value, after) = rest.split_at_checked(size)?;
            bytes = after;
            Some((*attribute, value))
        } else {
            let value = bytes.get(2..4)?;
            bytes = rest;
            Some((*attribute, value))
        }
    })
}

fn range(bytes: &[u8], offset: u64, size: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    bytes.get(start..end)
}

fn text(bytes: &[u8], at: usize) -> Option<&str> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..at.checked_add(2)?)?
        .try_into()
        .ok()
        .map(u16::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..at.checked_add(4)?)?
        .try_into()
        .ok()
        .map(u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..at.checked_add(8)?)?
        .try_into()
        .ok()
        .map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOG: &str = "ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k2' for 'sm_90a'
ptxas info    : Function properties for k2
ptxas         .     896 bytes stack frame, 1188 bytes spill stores, 1868 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 896 bytes cumulative stack size
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     800 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 39 registers, used 1 barriers, 800 bytes cumulative stack size, 1024 bytes smem";

    #[test]
    fn spills_and_shared_memory_are_read_from_the_log() {
        let named = |kernel: &str| ResourceUsage {
            kernel: kernel.to_string(),
            ..Default::default()
        };
        let mut usage = [named("k"), named("k2")];
        read_log(LOG, &mut usage);
        assert_eq!((usage[0].spill_store_bytes, usage[0].spill_load_bytes), (0, 0));
        assert_eq!(usage[0].static_shared_bytes, 1024);
        assert_eq!(
            (usage[1].spill_store_bytes, usage[1].spill_load_bytes),
            (1188, 1868)
        );
        assert_eq!(usage[1].static_shared_bytes, 0);
    }

    #[test]
    fn what_is_no_cubin_is_an_error() {
        for bytes in [&b""[..], b"//\n.version 8.0", &[0x7f, b'E', b'L', b'F', 2, 1]] {
            assert!(matches!(resource_usage(bytes, ""), Err(Error::Cubin(_))));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = resource_usage(&bytes, "");
            for (at, byte) in [0x7f, b'E', b'L', b'F', 2, 1].into_iter().enumerate() {
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            let _ = resource_usage(&bytes, LOG);
        }

        #[test]
        fn no_log_makes_the_reader_panic(log in "\\PC*|(ptxas|Used 3 registers|bytes stack frame| bytes smem|\n)*") {
            read_log(&log, &mut [ResourceUsage::default()]);
        }
    }
}
