//! SHA-256 of weights, in two forms.
//!
//! The *sequential* digest runs over all tensors in the order of their names, each as its name's bytes and then its
//! raw bytes: the form in which other tools report a model's state, and one stream, so one core. The *fingerprint*
//! hashes every tensor on its own, in parallel, and then the list of names and hashes: the library's own identity
//! check, at the speed of all cores.

use half::bf16;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// SHA-256 over (name, raw bytes) of all tensors, sorted by name. Names are hashed without their length, raw bytes
/// as stored (little-endian). Panics: none.
pub fn sequential_digest<'a>(tensors: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> [u8; 32] {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    let mut sha = Sha256::new();
    for (name, bytes) in tensors {
        sha.update(name.as_bytes());
        sha.update(bytes);
    }
    sha.finalize().into()
}

/// SHA-256 over the name-sorted list of (name, SHA-256 of the tensor's raw bytes), the tensors hashed in parallel.
/// Independent of the number of threads and of the order in which tensors are given. Panics: none.
pub fn parallel_digest(tensors: &[(&str, &[u8])]) -> [u8; 32] {
    let hash = |(name, bytes): &(&str, &[u8])| (name.to_string(), <[u8; 32]>::from(Sha256::digest(bytes)));
    let mut hashes: Vec<(String, [u8; 32])> = tensors.par_iter().map(hash).collect();
    hashes.sort();
    let mut sha = Sha256::new();
    for (name, hash) in hashes {
        sha.update((name.len() as u64).to_le_bytes());
        sha.update(name.as_bytes());
        sha.update(hash);
    }
    sha.finalize().into()
}

/// The lower-case hexadecimal form of a digest. Panics: none.
pub fn hex(digest: &[u8]) -> String {
    use std::fmt::Write;
    digest
        .iter()
        .fold(String::with_capacity(2 * digest.len()), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// SHA-256 of one tensor with its type and shape.
pub(crate) fn tensor_digest(dtype: &str, shape: &[usize], bytes: &[u8]) -> [u8; 32] {
    let mut sha = Sha256::new();
    sha.update(dtype.as_bytes());
    sha.update((shape.len() as u64).to_le_bytes());
    for dim in shape {
        sha.update((*dim as u64).to_le_bytes());
    }
    sha.update(bytes);
    sha.finalize().into()
}

/// The raw little-endian bytes of bf16 values.
pub(crate) fn bf16_bytes(values: &[bf16]) -> std::borrow::Cow<'_, [u8]> {
    crate::tensors::little_endian(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequential_form_is_the_stream_of_sorted_names_and_bytes() {
        let expected: [u8; 32] = Sha256::digest(b"a\x01\x02b\x03").into();
        assert_eq!(sequential_digest([("b", &[3u8][..]), ("a", &[1, 2])]), expected);
        assert_eq!(hex(&[0, 0xab]), "00ab");
    }

    #[test]
    fn the_parallel_form_sees_names_values_and_boundaries() {
        let digest = |t: &[(&str, &[u8])]| parallel_digest(t);
        let base = digest(&[("a", &[1, 2]), ("b", &[3])]);
        assert_eq!(base, digest(&[("b", &[3]), ("a", &[1, 2])]));
        assert_ne!(base, digest(&[("a", &[1]), ("b", &[2, 3])]));
        assert_ne!(base, digest(&[("a", &[1, 2]), ("c", &[3])]));
        assert_ne!(base, digest(&[("a", &[1, 2]), ("b", &[4])]));
    }
}
