//! The architectures kernels are compiled for.

use crate::error::{Error, Result};

/// An architecture that NVRTC makes a cubin for, such as `sm_90a`.
///
/// A cubin runs on devices of the same major compute capability and an equal or higher minor one; with the suffix
/// `a` on exactly one, where it may use what only that one has (wgmma on 9.0, tcgen05 on 10.0).
///
/// ```
/// use cuda_graphs::Arch;
///
/// let hopper = Arch::of_device(9, 0);
/// assert_eq!((hopper, hopper.to_string().as_str()), (Arch::SM_90A, "sm_90a"));
/// assert!(hopper.is_specific(), "its code runs on 9.0 alone");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Arch {
    major: u32,
    minor: u32,
    specific: bool,
}

impl Arch {
    /// A100.
    pub const SM_80: Self = Self::new(8, 0, false);
    /// RTX 30, A10, A40.
    pub const SM_86: Self = Self::new(8, 6, false);
    /// RTX 40, L4, L40.
    pub const SM_89: Self = Self::new(8, 9, false);
    /// H100, H200, GH200, with what only they have.
    pub const SM_90A: Self = Self::new(9, 0, true);
    /// B200, GB200, with what only they have.
    pub const SM_100A: Self = Self::new(10, 0, true);
    /// RTX 50, RTX PRO Blackwell.
    pub const SM_120: Self = Self::new(12, 0, false);

    /// The architectures that every kernel is compiled for in tests, without a GPU.
    pub const TESTED: [Self; 6] = [
        Self::SM_80,
        Self::SM_86,
        Self::SM_89,
        Self::SM_90A,
        Self::SM_100A,
        Self::SM_120,
    ];

    /// The architecture of a compute capability; `specific` adds the suffix `a`.
    pub const fn new(major: u32, minor: u32, specific: bool) -> Self {
        Self {
            major,
            minor,
            specific,
        }
    }

    /// What to compile for on a device of this compute capability: with the suffix `a` on 9.0 and 10.x, plain
    /// otherwise.
    pub const fn of_device(major: u32, minor: u32) -> Self {
        Self::new(major, minor, (major == 9 && minor == 0) || major == 10)
    }

    /// Compute capability, major and minor.
    pub const fn compute_capability(self) -> (u32, u32) {
        (self.major, self.minor)
    }

    /// Whether the cubin runs on exactly one compute capability.
    pub const fn is_specific(self) -> bool {
        self.specific
    }

    /// The number NVRTC lists it under: 90 for `sm_90a`.
    pub(crate) const fn number(self) -> u32 {
        self.major * 10 + self.minor
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "sm_{}{}{}",
            self.major,
            self.minor,
            if self.specific { "a" } else { "" }
        )
    }
}

impl std::str::FromStr for Arch {
    type Err = Error;

    /// Reads `sm_90a`.
    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let number = text.strip_prefix("sm_")?;
            let (number, specific) = match number.strip_suffix('a') {
                Some(number) => (number, true),
                None => (number, false),
            };
            // `parse` would take a sign.
            let digits = number.bytes().all(|byte| byte.is_ascii_digit());
            let number: u32 = number.parse().ok().filter(|_| digits)?;
            (number >= 10).then(|| Self::new(number / 10, number % 10, specific))
        };
        parse().ok_or_else(|| Error::InvalidArgument {
            what: "architecture",
            why: format!("{text:?} is not of the form sm_90a"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for arch in Arch::TESTED {
            assert_eq!(arch.to_string().parse::<Arch>().unwrap(), arch);
        }
        assert_eq!(Arch::SM_100A.to_string(), "sm_100a");
        for wrong in ["90", "sm_", "sm_x", "sm_9", "compute_90", "sm_90f", "sm_+90"] {
            assert!(wrong.parse::<Arch>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn devices_get_the_architecture_with_their_own_instructions() {
        assert_eq!(Arch::of_device(8, 0), Arch::SM_80);
        assert_eq!(Arch::of_device(8, 9), Arch::SM_89);
        assert_eq!(Arch::of_device(9, 0), Arch::SM_90A);
        assert_eq!(Arch::of_device(10, 0), Arch::SM_100A);
        assert_eq!(Arch::of_device(12, 0), Arch::SM_120);
        assert_eq!(
            Arch::of_device(13, 1).to_string(),
            "sm_131",
            "a device newer than this crate"
        );
    }
}
