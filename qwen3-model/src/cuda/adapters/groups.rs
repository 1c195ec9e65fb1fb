//! Modules that are merged together.

use cuda_graphs::Stream;
use lora_merge::MergeOutcome;
use lora_merge::cuda::MergePlan;

use crate::{PristineCopy, Projection, Result};

/// Elements of the modules that are merged together, about: enough to fill the device for some hundred microseconds. The
/// first groups are smaller, a quarter of it, two quarters and three, so that the device begins soon.
const GROUP_ELEMENTS: usize = 400_000_000;
const RISE: usize = 4;

/// Modules that are packed, uploaded and merged together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) modules: Vec<usize>,
    pub(super) plan: MergePlan,
}

/// What happened to modules.
pub(super) type Outcomes = Vec<(usize, MergeOutcome)>;

/// How modules are cut into groups: by size or, where they go through the transit buffer, layer by layer.
pub(super) fn cut(
    place: PristineCopy,
    members: &[usize],
    elements: impl Fn(usize) -> usize,
) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let (mut size, mut layer) = (0, usize::MAX);
    for &module in members {
        let next = module / Projection::ALL.len();
        let begins = match place {
            PristineCopy::Device => size >= GROUP_ELEMENTS / RISE * groups.len().min(RISE) && next != layer,
            PristineCopy::Pinned | PristineCopy::File => next != layer,
        };
        match groups.last_mut() {
            Some(group) if !begins => group.push(module),
            _ => {
                groups.push(vec![module]);
                size = 0;
            }
        }
        size += elements(module);
        layer = next;
    }
    groups
}

/// Waits for all groups; what happened to each module.
pub(super) fn outcomes(stream: &Stream, groups: &[Group]) -> Result<Outcomes> {
    let mut all = Vec::new();
    for group in groups {
        all.extend(group.modules.iter().copied().zip(group.plan.outcomes(stream)?));
    }
    stream.synchronize()?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_hold_whole_layers_in_order() {
        let members: Vec<usize> = (0..36 * 7).chain([36 * 7]).collect();
        let elements = |_: usize| 15_000_000;
        for (place, first, most) in [
            // 27 modules reach the size, in the fourth layer, and 7 a quarter of it.
            (PristineCopy::Device, [7, 14, 21, 28, 28], 28),
            (PristineCopy::Pinned, [7; 5], 7),
            (PristineCopy::File, [7; 5], 7),
        ] {
            let groups = cut(place, &members, elements);
            assert_eq!(groups.concat(), members);
            assert!(groups.iter().all(|g| g.len() <= most), "{place:?}");
            assert!(groups.iter().map(Vec::len).take(5).eq(first), "{place:?}");
            assert!(groups.iter().all(|g| g[0] % 7 == 0));
        }
        assert!(cut(PristineCopy::Device, &[], elements).is_empty());
        // Adapters on one projection of each layer are as good.
        let some: Vec<usize> = (0..36).map(|layer| 7 * layer).collect();
        assert_eq!(cut(PristineCopy::Device, &some, elements).len(), 3);
        assert_eq!(cut(PristineCopy::File, &some, elements).len(), 36);
    }
}
