use cuda_graphs::{Device, DeviceBuffer, Error, Event, PinnedBuffer, Stream};
use half::bf16;

use crate::support::stream;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_device_tells_what_it_is() {
    let device = Device::open(0).unwrap();
    let info = device.info();
    eprintln!("{info:?} {:?}", device.memory().unwrap());
    assert!(!info.name.is_empty() && info.multiprocessors > 0 && info.memory_bytes > 1 << 30);
    assert!(info.shared_bytes_per_block >= 96 << 10 && info.l2_bytes > 1 << 20);
    let memory = device.memory().unwrap();
    assert!(memory.free > 0 && memory.free <= memory.total);
    assert_eq!(device, Device::open(0).unwrap());
    assert!(matches!(
        Device::open(1000),
        Err(Error::NoDevice { ordinal: 1000, .. })
    ));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn buffers_keep_their_address_and_copy_both_ways() {
    let stream = stream();
    let values: Vec<u32> = (0..1000).collect();
    let buffer = DeviceBuffer::from_slice(&stream, &values).unwrap();
    let address = buffer.ptr();
    assert_eq!(stream.download(&buffer).unwrap(), values);
    stream.upload(buffer.slice(10..13).unwrap(), &[7, 8, 9]).unwrap();
    assert_eq!(
        stream.download(buffer.slice(9..14).unwrap()).unwrap(),
        [9, 7, 8, 9, 13]
    );
    assert_eq!(buffer.ptr(), address);
    let other = DeviceBuffer::<u32>::zeroed(stream.device(), 1000).unwrap();
    assert_eq!(stream.download(&other).unwrap(), [0; 1000]);
    stream
        .copy(other.slice(..3).unwrap(), buffer.slice(10..13).unwrap())
        .unwrap();
    assert_eq!(stream.download(other.slice(..4).unwrap()).unwrap(), [7, 8, 9, 0]);
    let poisoned = DeviceBuffer::<f32>::filled_with_bytes(stream.device(), 5, 0xff).unwrap();
    assert!(stream.download(&poisoned).unwrap().iter().all(|x| x.is_nan()));
    let empty = DeviceBuffer::<u8>::zeroed(stream.device(), 0).unwrap();
    assert!(empty.ptr() != 0 && stream.download(&empty).unwrap().is_empty());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn wrong_ranges_lengths_and_overlaps_are_refused() {
    let stream = stream();
    let buffer = DeviceBuffer::<u32>::zeroed(stream.device(), 10).unwrap();
    assert!(matches!(
        buffer.slice(5..11),
        Err(Error::OutOfBounds {
            start: 5,
            end: 11,
            len: 10
        })
    ));
    assert!(buffer.slice(2..8).unwrap().slice(..7).is_err());
    assert!(matches!(
        stream.upload(&buffer, &[1, 2]),
        Err(Error::LengthMismatch { .. })
    ));
    let overlapping = stream.copy(buffer.slice(..6).unwrap(), buffer.slice(4..).unwrap());
    assert!(matches!(overlapping, Err(Error::InvalidArgument { .. })));
    stream
        .copy(buffer.slice(..5).unwrap(), buffer.slice(5..).unwrap())
        .unwrap();
    assert!(buffer.slice(1..2).unwrap().cast::<u64>().is_err());
    assert_eq!(buffer.as_slice().cast::<u16>().unwrap().len(), 20);
    assert!(matches!(
        DeviceBuffer::<u64>::zeroed(stream.device(), usize::MAX),
        Err(Error::InvalidArgument { .. })
    ));
    let Err(Error::Driver { call, name, .. }) = DeviceBuffer::<u8>::zeroed(stream.device(), 1 << 46) else {
        panic!("64 TiB were allocated");
    };
    assert_eq!(
        (call, name.as_str()),
        ("cuMemAlloc_v2", "CUDA_ERROR_OUT_OF_MEMORY")
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn fills_write_every_element_size() {
    fn check<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(stream: &Stream, value: T) {
        let buffer = DeviceBuffer::<T>::zeroed(stream.device(), 9).unwrap();
        stream.fill(buffer.slice(1..8).unwrap(), value).unwrap();
        let mut expected = [value; 9];
        (expected[0], expected[8]) = (T::zeroed(), T::zeroed());
        assert_eq!(stream.download(&buffer).unwrap(), expected);
    }
    let stream = stream();
    check(&stream, 0x12u8);
    check(&stream, bf16::from_f32(1.5));
    check(&stream, -7i32);
    check(&stream, 0x0123_4567_89ab_cdefu64);
    check(&stream, -1i64);
    let triple = DeviceBuffer::<[u8; 3]>::zeroed(stream.device(), 2).unwrap();
    assert!(matches!(
        stream.fill(&triple, [1, 2, 3]),
        Err(Error::InvalidArgument { .. })
    ));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn pinned_memory_copies_while_the_host_goes_on() {
    let stream = stream();
    let device = stream.device();
    let (up, down) = (
        PinnedBuffer::<u64>::zeroed(device, 64).unwrap(),
        PinnedBuffer::<u64>::zeroed(device, 64).unwrap(),
    );
    let values: Vec<u64> = (100..164).collect();
    up.write(0, &values).unwrap();
    let buffer = DeviceBuffer::<u64>::zeroed(device, 64).unwrap();
    stream.upload_async(&buffer, &up).unwrap();
    stream
        .download_async(down.slice(8..).unwrap(), buffer.slice(..56).unwrap())
        .unwrap();
    let done = Event::without_timing(device).unwrap();
    stream.record(&done).unwrap();
    done.synchronize().unwrap();
    assert!(done.is_reached().unwrap());
    assert_eq!(down.to_vec()[..8], [0; 8]);
    assert_eq!(down.to_vec()[8..], values[..56]);
    assert!(matches!(up.write(63, &[1, 2]), Err(Error::OutOfBounds { .. })));
    // Dropped while a copy may be under way: the drop waits.
    let big = PinnedBuffer::<u8>::zeroed(device, 64 << 20).unwrap();
    let target = DeviceBuffer::<u8>::filled_with_bytes(device, 64 << 20, 1).unwrap();
    stream.upload_async(&target, &big).unwrap();
    drop(big);
    assert!(stream.download(&target).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn events_order_streams_and_tell_time() {
    let first = stream();
    let second = Stream::new(first.device()).unwrap();
    let buffer = DeviceBuffer::<u32>::zeroed(first.device(), 16 << 20).unwrap();
    let (start, end) = (
        Event::new(first.device()).unwrap(),
        Event::new(first.device()).unwrap(),
    );
    first.record(&start).unwrap();
    for value in 1..=50 {
        first.fill(&buffer, value * 0x0101).unwrap();
    }
    first.record(&end).unwrap();
    second.wait(&end).unwrap();
    let copy = DeviceBuffer::<u32>::zeroed(first.device(), 16 << 20).unwrap();
    second.copy(&copy, &buffer).unwrap();
    assert!(
        second
            .download(&copy)
            .unwrap()
            .iter()
            .all(|&value| value == 50 * 0x0101)
    );
    let ms = start.elapsed_ms(&end).unwrap();
    assert!(ms > 0.0 && ms < 10_000.0, "{ms}");
    first.synchronize().unwrap();
    assert!(first.is_idle().unwrap());
}
