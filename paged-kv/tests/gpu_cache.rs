//! The cache and the page table's mirror on a device, against the same on the CPU.
#![cfg(feature = "cuda")]

use cuda_graphs::{Compiler, Device, Stream};
use half::bf16;
use paged_kv::cuda::{CudaKvCache, PageTableMirror, kernel_specs};
use paged_kv::{KvCache, KvDtype, KvLayout, KvSlice, PageCopy, PageId, PageTable, PageTableConfig};

#[test]
fn kernels_compile_for_every_architecture() {
    cuda_graphs::assert_kernels_compile(&kernel_specs());
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    fn values(&mut self, n: usize) -> Vec<bf16> {
        (0..n)
            .map(|_| bf16::from_f32(self.below(2000) as f32 / 100.0 - 10.0))
            .collect()
    }
}

fn layout(page_size: usize) -> KvLayout {
    KvLayout {
        n_layers: 3,
        kv_heads: 2,
        head_dim: 64,
        n_pages: 9,
        page_size,
        dtype: KvDtype::Bf16,
    }
}

fn open() -> (Device, Stream, Compiler) {
    let device = Device::open(0).expect("a CUDA device");
    let stream = Stream::new(&device).expect("a stream");
    (device, stream, Compiler::new().expect("NVRTC"))
}

/// The same random contents on both sides.
fn twins(random: &mut Random, page_size: usize) -> (Stream, CudaKvCache, KvCache) {
    let (device, stream, compiler) = open();
    let layout = layout(page_size);
    let on_device = CudaKvCache::new(&device, &compiler, layout).unwrap();
    let mut on_host = KvCache::new(layout).unwrap();
    let positions = layout.n_pages * page_size;
    let per_layer = layout.elements_per_layer().unwrap() as usize;
    for layer in 0..layout.n_layers {
        let (k, v) = (random.values(per_layer), random.values(per_layer));
        on_device.upload_layer(&stream, layer, &k, &v).unwrap();
        // From [kv_heads, positions, head_dim] to [positions, kv_heads, head_dim].
        let tokens = |x: &[bf16]| -> Vec<f32> {
            let mut out = Vec::with_capacity(x.len());
            for position in 0..positions {
                for head in 0..layout.kv_heads {
                    let start = (head * positions + position) * layout.head_dim;
                    out.extend(x[start..start + layout.head_dim].iter().map(|x| x.to_f32()));
                }
            }
            out
        };
        let all: Vec<usize> = (0..positions).collect();
        on_host.write(layer, &all, &tokens(&k), &tokens(&v)).unwrap();
    }
    (stream, on_device, on_host)
}

fn assert_same(stream: &Stream, on_device: &CudaKvCache, on_host: &KvCache) {
    for layer in 0..on_host.layout().n_layers {
        let (k, v) = on_device.download_layer(stream, layer).unwrap();
        let view = on_host.layer(layer).unwrap();
        let (KvSlice::Bf16(want_k), KvSlice::Bf16(want_v)) = (view.k, view.v) else {
            panic!("bf16 was asked for")
        };
        let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&k) == bits(want_k), "K of layer {layer} differs");
        assert!(bits(&v) == bits(want_v), "V of layer {layer} differs");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn copies_in_any_number_and_order_equal_those_on_the_cpu() {
    let mut random = Random::new(1);
    for page_size in [16, 256] {
        let (stream, on_device, mut on_host) = twins(&mut random, page_size);
        // More than one launch holds, with chains: a copy reads what an earlier one wrote.
        for n in [1, 3, 200] {
            let copies: Vec<PageCopy> = (0..n)
                .map(|_| PageCopy {
                    src: PageId::new(random.below(9) as u32),
                    dst: PageId::new(random.below(9) as u32),
                    tokens: random.below(page_size + 1),
                })
                .collect();
            on_device.copy_pages(&stream, &copies).unwrap();
            on_host.copy_pages(&copies).unwrap();
            assert_same(&stream, &on_device, &on_host);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_refused_copy_changes_nothing() {
    let mut random = Random::new(2);
    let (stream, on_device, on_host) = twins(&mut random, 16);
    let copy = |src, dst, tokens| PageCopy {
        src: PageId::new(src),
        dst: PageId::new(dst),
        tokens,
    };
    assert!(
        on_device
            .copy_pages(&stream, &[copy(1, 2, 16), copy(1, 9, 1)])
            .is_err()
    );
    assert!(
        on_device
            .copy_pages(&stream, &[copy(1, 2, 16), copy(1, 3, 17)])
            .is_err()
    );
    assert_same(&stream, &on_device, &on_host);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_checksum_sees_every_element_of_the_pages_asked_for_and_no_other() {
    let mut random = Random::new(3);
    let (stream, cache, _) = twins(&mut random, 16);
    let before = cache.checksum(&stream, 1..9).unwrap();
    assert_eq!(cache.checksum(&stream, 1..9).unwrap(), before, "the same twice");
    cache.fill_page_bytes(&stream, PageId::RESERVED, 0xff).unwrap();
    assert_eq!(
        cache.checksum(&stream, 1..9).unwrap(),
        before,
        "page 0 is not counted"
    );
    let per_layer = cache.layout().elements_per_layer().unwrap() as usize;
    for _ in 0..20 {
        let (layer, at, in_k) = (random.below(3), random.below(per_layer), random.below(2) == 0);
        let (k, v) = cache.download_layer(&stream, layer).unwrap();
        let (mut changed_k, mut changed_v) = (k.clone(), v.clone());
        let side = if in_k { &mut changed_k } else { &mut changed_v };
        side[at] = bf16::from_bits(side[at].to_bits() ^ 1);
        cache
            .upload_layer(&stream, layer, &changed_k, &changed_v)
            .unwrap();
        let differs = cache.checksum(&stream, 1..9).unwrap() != before;
        let position = at / 64 % (9 * 16);
        assert_eq!(differs, position >= 16, "element {at} of layer {layer}");
        cache.upload_layer(&stream, layer, &k, &v).unwrap();
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_mirror_follows_the_table_through_random_operations() {
    let (device, stream, _) = open();
    let mut random = Random::new(4);
    let config = PageTableConfig {
        n_pages: 40,
        page_size: 16,
        n_slots: 9,
        max_pages_per_slot: 7,
    };
    let mut table = PageTable::new(config).unwrap();
    let mut mirror = PageTableMirror::new(&device, &config).unwrap();
    let address = mirror.rows().ptr();
    assert_eq!(
        mirror.update(&stream, &mut table).unwrap(),
        9,
        "at first every row is sent"
    );
    let mut live = Vec::new();
    for step in 0..if cuda_graphs::few_cases() { 60 } else { 300 } {
        match random.below(4) {
            0 => live.extend(table.allocate_slot()),
            1 | 2 if !live.is_empty() => {
                let slot = live[random.below(live.len())];
                let _ = table.reserve(slot, random.below(7 * 16 + 1));
            }
            _ if !live.is_empty() => table.erase(live.swap_remove(random.below(live.len()))).unwrap(),
            _ => {}
        }
        mirror.update(&stream, &mut table).unwrap();
        if step % 7 == 0 {
            assert_eq!(
                stream.download(mirror.rows()).unwrap(),
                table.rows(),
                "step {step}"
            );
        }
    }
    assert_eq!(stream.download(mirror.rows()).unwrap(), table.rows());
    assert_eq!(
        mirror.update(&stream, &mut table).unwrap(),
        0,
        "nothing changed, nothing sent"
    );
    assert_eq!(mirror.rows().ptr(), address);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn layouts_that_kernels_cannot_serve_are_refused() {
    let (device, _, compiler) = open();
    let f32_cache = KvLayout {
        dtype: KvDtype::F32,
        ..layout(16)
    };
    assert!(CudaKvCache::new(&device, &compiler, f32_cache).is_err());
    let odd = KvLayout {
        head_dim: 60,
        ..layout(16)
    };
    assert!(CudaKvCache::new(&device, &compiler, odd).is_err());
}
