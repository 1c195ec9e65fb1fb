//! Which policy is in force.

use crate::digest::hex;
use std::fmt;

/// A number that rises with every successful refresh, and the SHA-256 of what was merged.
///
/// The number tells two refreshes apart even if they merged the same adapters; the digest tells whether two engines
/// (or two runs) hold the same policy.
///
/// ```
/// use lora_merge::PolicyVersion;
///
/// let version = PolicyVersion { number: 3, sha256: [0x9f; 32] };
/// assert_eq!(version.to_string(), "3:9f9f9f9f9f9f9f9f");
/// assert_eq!(version.sha256_hex().len(), 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PolicyVersion {
    /// 0 for the base model before any refresh, then 1, 2, 3, …
    pub number: u64,
    /// SHA-256 over the sorted digests (tensors and configuration) and weights of the active adapters.
    pub sha256: [u8; 32],
}

impl PolicyVersion {
    /// The digest in lower-case hexadecimal. Panics: none.
    pub fn sha256_hex(&self) -> String {
        hex(&self.sha256)
    }
}

impl fmt::Display for PolicyVersion {
    /// `3:9f86d081884c7d65`: the number and the first eight bytes of the digest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.number, hex(&self.sha256[..8]))
    }
}
