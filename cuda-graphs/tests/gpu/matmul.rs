use cuda_graphs::{
    CacheLocation, Capture, DeviceBuffer, DeviceSlice, Error, Matmul, MatmulDims, MatmulElement,
    MatmulOptions, Stream, cases, few_cases,
};
use half::bf16;

use crate::support::{numbers, stream};

fn matmul(stream: &Stream, folder: &std::path::Path) -> Matmul {
    let options = MatmulOptions {
        cache: CacheLocation::Folder(folder.to_path_buf()),
        ..MatmulOptions::default()
    };
    Matmul::with_options(stream, &options).unwrap()
}

pub(crate) fn random(seed: u64, count: usize) -> Vec<bf16> {
    numbers(seed, count).map(bf16::from_f32).collect()
}

/// Checks some elements of `y` against sums in f64: within what f32 sums in any order and one rounding to the output's
/// type may lose.
pub(crate) fn check(
    dims: MatmulDims,
    x: &[bf16],
    w: &[bf16],
    residual: Option<&[f32]>,
    y: &[f32],
    rounding: f64,
) {
    let MatmulDims { m, n, k } = dims;
    let stride = (m * n / 3000).max(1);
    for index in (0..m * n).step_by(stride).chain([m * n - 1]) {
        let (row, column) = (index / n, index % n);
        let (mut sum, mut size) =
            residual.map_or((0.0, 0.0), |r| (f64::from(r[index]), f64::from(r[index].abs())));
        for (a, b) in x[row * k..][..k].iter().zip(&w[column * k..][..k]) {
            let product = f64::from(a.to_f32()) * f64::from(b.to_f32());
            sum += product;
            size += product.abs();
        }
        let allowed = size * 2f64.powi(-20) + sum.abs() * rounding + 1e-30;
        let error = (f64::from(y[index]) - sum).abs();
        assert!(
            error <= allowed,
            "{dims:?} at {row}, {column}: {} is {error:e} off {sum}",
            y[index]
        );
    }
}

pub(crate) fn case<T: MatmulElement + Into<f32>>(
    stream: &Stream,
    matmul: &Matmul,
    dims: MatmulDims,
    with_residual: bool,
    convert: fn(f32) -> T,
    rounding: f64,
) {
    let MatmulDims { m, n, k } = dims;
    let (x, w) = (
        random((m * 31 + n) as u64, m * k),
        random((k * 7 + n) as u64, n * k),
    );
    let residual: Vec<T> = numbers(5, m * n).map(convert).collect();
    let x_device = DeviceBuffer::from_slice(stream, &x).unwrap();
    let w_device = DeviceBuffer::from_slice(stream, &w).unwrap();
    let residual_device = DeviceBuffer::from_slice(stream, &residual).unwrap();
    let y = DeviceBuffer::<T>::filled_with_bytes(stream.device(), m * n, 0xff).unwrap();
    let add = with_residual.then(|| residual_device.as_slice());
    matmul.multiply(dims, &x_device, &w_device, &y, add).unwrap();
    let got: Vec<f32> = stream.download(&y).unwrap().into_iter().map(Into::into).collect();
    let residual: Vec<f32> = residual.into_iter().map(Into::into).collect();
    check(dims, &x, &w, with_residual.then_some(&residual), &got, rounding);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_are_right_for_many_shapes() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    let mut shapes = vec![(64, 64), (1024, 256), (640, 256), (256, 640)];
    if !few_cases() {
        shapes.extend([(2560, 4096), (6144, 2560)]);
    }
    for (n, k) in cases(shapes) {
        for m in cases([1, 2, 3, 7, 8, 16, 17, 33, 64, 100, 200, 300, 777]) {
            let dims = MatmulDims { m, n, k };
            let residual = m % 2 == 1;
            case::<f32>(&stream, &matmul, dims, residual, |x| x, 0.0);
            case::<bf16>(&stream, &matmul, dims, residual, bf16::from_f32, 2f64.powi(-8));
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_vocabulary_that_is_no_multiple_of_anything_works() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    for m in [1, 5, 64] {
        case::<f32>(
            &stream,
            &matmul,
            MatmulDims { m, n: 571, k: 256 },
            false,
            |x| x,
            0.0,
        );
    }
}

/// A wide product piece by piece: every column once, and nothing beside a piece.
pub(crate) fn pieces<T: MatmulElement + Into<f32>>(
    stream: &Stream,
    matmul: &Matmul,
    m: usize,
    rounding: f64,
) {
    let (stride, k, most) = (2560, 192, 1024);
    let (x, w) = (random(1, m * k), random(2, stride * k));
    let x_device = DeviceBuffer::from_slice(stream, &x).unwrap();
    let w_device = DeviceBuffer::from_slice(stream, &w).unwrap();
    let y = DeviceBuffer::<T>::filled_with_bytes(stream.device(), m * stride, 0xff).unwrap();
    let get = || -> Vec<f32> { stream.download(&y).unwrap().into_iter().map(Into::into).collect() };
    for first in (0..stride).step_by(most) {
        let n = most.min(stride - first);
        let w = w_device.slice(first * k..(first + n) * k).unwrap();
        let dims = MatmulDims { m, n, k };
        matmul
            .multiply_columns(dims, &x_device, w, &y, first, stride)
            .unwrap();
        let untouched = |(i, y): (usize, &f32)| (i % stride < first + n) != y.is_nan();
        assert!(
            get().iter().enumerate().all(untouched),
            "{m} rows up to column {}",
            first + n
        );
    }
    let dims = MatmulDims { m, n: stride, k };
    check(dims, &x, &w, None, &get(), rounding);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn columns_of_a_wider_output_are_written_alone() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    for m in [1, 8, 65, 300] {
        pieces::<f32>(&stream, &matmul, m, 0.0);
        pieces::<bf16>(&stream, &matmul, m, 2f64.powi(-8));
    }
    let buffer = |len| DeviceBuffer::<bf16>::zeroed(stream.device(), len).unwrap();
    let dims = MatmulDims { m: 2, n: 16, k: 32 };
    let (x, w, y) = (buffer(2 * 32), buffer(16 * 32), buffer(2 * 64));
    for (first, stride, fits) in [
        (0, 64, true),
        (48, 64, true),
        (49, 64, false),
        (usize::MAX, 64, false),
        (0, 60, false),
    ] {
        let result = matmul.multiply_columns(dims, &x, &w, &y, first, stride);
        assert_eq!(result.is_ok(), fits, "{first} of {stride}: {result:?}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_residual_may_be_the_output_itself() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    let dims = MatmulDims { m: 5, n: 256, k: 128 };
    let (x, w) = (random(1, 5 * 128), random(2, 256 * 128));
    let start: Vec<f32> = numbers(3, 5 * 256).collect();
    let (x_device, w_device) = (
        DeviceBuffer::from_slice(&stream, &x).unwrap(),
        DeviceBuffer::from_slice(&stream, &w).unwrap(),
    );
    // The first call of a shape times algorithms; the operands must not feel it.
    for _ in 0..2 {
        let y = DeviceBuffer::from_slice(&stream, &start).unwrap();
        matmul
            .multiply(dims, &x_device, &w_device, &y, Some(y.as_slice()))
            .unwrap();
        check(dims, &x, &w, Some(&start), &stream.download(&y).unwrap(), 0.0);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn products_are_captured_after_they_ran_once_and_replay_bit_for_bit() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    let dims = MatmulDims {
        m: 48,
        n: 1024,
        k: 512,
    };
    let x = DeviceBuffer::from_slice(&stream, &random(1, 48 * 512)).unwrap();
    let w = DeviceBuffer::from_slice(&stream, &random(2, 1024 * 512)).unwrap();
    let y = DeviceBuffer::<bf16>::zeroed(stream.device(), 48 * 1024).unwrap();
    let run = |_: &Stream| matmul.multiply(dims, &x, &w, &y, None);
    let unprepared = Capture::record::<Error>(&stream, run);
    assert!(
        matches!(unprepared, Err(Error::NotPrepared { .. })),
        "{unprepared:?}"
    );
    let report = matmul.prepare::<bf16>(dims, &w, false).unwrap();
    eprintln!("{report:?}");
    assert!(report.tried >= 1);
    let graph = Capture::record::<Error>(&stream, run).unwrap();
    let compared = cuda_graphs::verify::<Error>(&stream, &graph, &[], &[&y], run).unwrap();
    assert!(compared.changed > 0);
    let first = stream.download(&y).unwrap();
    for _ in 0..20 {
        graph.launch(&stream).unwrap();
        assert!(
            stream.download(&y).unwrap() == first,
            "the same product gave other bits"
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_choice_is_made_once_per_device_and_library() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let dims = MatmulDims {
        m: 16,
        n: 2048,
        k: 1024,
    };
    let w = DeviceBuffer::from_slice(&stream, &random(2, 2048 * 1024)).unwrap();
    let first = matmul(&stream, folder.path())
        .prepare::<bf16>(dims, &w, false)
        .unwrap();
    let second = matmul(&stream, folder.path())
        .prepare::<bf16>(dims, &w, false)
        .unwrap();
    assert!(first.tried > 1 && first.microseconds > 0.0, "{first:?}");
    assert_eq!(first, second, "not timed again");
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 1);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn operands_that_do_not_fit_are_refused() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let matmul = matmul(&stream, folder.path());
    let dims = MatmulDims { m: 4, n: 64, k: 32 };
    let x = DeviceBuffer::<bf16>::zeroed(stream.device(), 4 * 32 + 8).unwrap();
    let w = DeviceBuffer::<bf16>::zeroed(stream.device(), 64 * 32).unwrap();
    let y = DeviceBuffer::<bf16>::zeroed(stream.device(), 4 * 64).unwrap();
    let exact = x.slice(..128).unwrap();
    let none: Option<DeviceSlice<'_, bf16>> = None;
    assert!(matches!(
        matmul.multiply(dims, &x, &w, &y, none),
        Err(Error::LengthMismatch { .. })
    ));
    assert!(matches!(
        matmul.multiply(dims, exact, &y, &y, none),
        Err(Error::LengthMismatch { .. })
    ));
    let empty = MatmulDims { m: 0, ..dims };
    assert!(matches!(
        matmul.multiply(empty, exact, &w, &y, none),
        Err(Error::InvalidArgument { .. })
    ));
    let odd = x.slice(1..129).unwrap();
    assert!(matches!(
        matmul.multiply(dims, odd, &w, &y, none),
        Err(Error::InvalidArgument { .. })
    ));
    let inside = w.slice(..4 * 64).unwrap();
    assert!(matches!(
        matmul.multiply(dims, exact, &w, inside, none),
        Err(Error::InvalidArgument { .. })
    ));
    matmul
        .multiply(dims, x.slice(8..136).unwrap(), &w, &y, none)
        .unwrap();
    stream.synchronize().unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn invariant_rows_have_the_same_bits_in_products_of_any_size() {
    let stream = stream();
    let folder = tempfile::tempdir().unwrap();
    let options = MatmulOptions {
        cache: CacheLocation::Folder(folder.path().to_path_buf()),
        row_invariant: true,
        ..MatmulOptions::default()
    };
    let matmul = Matmul::with_options(&stream, &options).unwrap();
    assert_eq!(
        [1, 64, 65, 1000].map(|m| matmul.padded_rows(m)),
        [64, 64, 128, 1024]
    );
    // The second narrow and long: what algorithms like to split.
    let mut shapes = vec![(1000, 192)];
    if !few_cases() {
        shapes.extend([(640, 512), (256, 4096)]);
    }
    for (n, k) in shapes {
        let w = DeviceBuffer::from_slice(&stream, &random(1, n * k)).unwrap();
        let rows = random(2, 2048 * k);
        let product = |first: usize, m: usize| -> Vec<u32> {
            let x = DeviceBuffer::from_slice(&stream, &rows[first * k..(first + m) * k]).unwrap();
            let y = DeviceBuffer::<f32>::filled_with_bytes(stream.device(), m * n, 0xff).unwrap();
            matmul.multiply(MatmulDims { m, n, k }, &x, &w, &y, None).unwrap();
            stream
                .download(&y)
                .unwrap()
                .into_iter()
                .map(f32::to_bits)
                .collect()
        };
        let all = product(0, 2048);
        for (first, m) in [(0, 64), (700, 64), (1, 128), (64, 256), (300, 576), (1000, 1024)] {
            assert!(
                product(first, m) == all[first * n..(first + m) * n],
                "n {n}, k {k}: rows {first}.. of {m}"
            );
        }
        let dims = MatmulDims { m: 2048, n, k };
        let values: Vec<f32> = all.iter().map(|&bits| f32::from_bits(bits)).collect();
        let (x, w) = (rows, stream.download(&w).unwrap());
        check(dims, &x, &w, None, &values, 0.0);
        // A new instance takes what the first one chose.
        let again = Matmul::with_options(&stream, &options).unwrap();
        let x = DeviceBuffer::from_slice(&stream, &x[..64 * k]).unwrap();
        let (w, y) = (
            DeviceBuffer::from_slice(&stream, &w).unwrap(),
            DeviceBuffer::<f32>::zeroed(stream.device(), 64 * n).unwrap(),
        );
        let dims = MatmulDims { m: 64, n, k };
        again.multiply(dims, &x, &w, &y, None).unwrap();
        let bits: Vec<u32> = stream
            .download(&y)
            .unwrap()
            .into_iter()
            .map(f32::to_bits)
            .collect();
        assert!(bits == all[..64 * n]);
        let refused = matmul.multiply(
            MatmulDims { m: 8, n, k },
            x.slice(..8 * k).unwrap(),
            &w,
            y.slice(..8 * n).unwrap(),
            None,
        );
        assert!(
            matches!(refused, Err(Error::InvalidArgument { what: "product", .. })),
            "{refused:?}"
        );
    }
}
