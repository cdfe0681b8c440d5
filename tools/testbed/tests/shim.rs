//! The shim runs in any image, and is small enough to be copied into every pod.
#![expect(clippy::unwrap_used, reason = "a program that cannot be read is a failed test")]

use std::fs;

use testbed::{Paths, programs::static_shim};

const BYTES_MAX: usize = 2_000_000;

/// The program header that names a dynamic loader.
const PT_INTERP: u32 = 3;

#[test]
fn the_shim_is_small_and_needs_no_library() {
    let program = fs::read(static_shim(&Paths::find().unwrap()).unwrap()).unwrap();
    assert!(program.len() < BYTES_MAX, "{} bytes", program.len());
    assert!(!header_types(&program).contains(&PT_INTERP), "it needs a dynamic loader");
    let test = fs::read(std::env::current_exe().unwrap()).unwrap();
    assert!(header_types(&test).contains(&PT_INTERP), "a dynamically linked program needs one");
}

/// The types of the program headers of a 64-bit ELF file in this machine's byte order.
fn header_types(elf: &[u8]) -> Vec<u32> {
    assert_eq!(&elf[..5], b"\x7fELF\x02");
    let short = |at: usize| usize::from(u16::from_ne_bytes(elf[at..at + 2].try_into().unwrap()));
    let first = usize::try_from(u64::from_ne_bytes(elf[0x20..0x28].try_into().unwrap())).unwrap();
    let (size, count) = (short(0x36), short(0x38));
    let at = |index: usize| first + index * size;
    (0..count).map(|index| u32::from_ne_bytes(elf[at(index)..at(index) + 4].try_into().unwrap())).collect()
}
